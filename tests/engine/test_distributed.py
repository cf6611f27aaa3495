"""Two ranks do what one does at the same global batch."""

import pytest

from tests.engine.common import last_state, metric_lines, run_train

# BN uses its own batch, of half the images: frozen, it is out of the way. Without it a small rate keeps the losses tame.
SAME = (
    "train.freeze_bn=true", "optim.lr=0.002", "optim.generator_lr=0.1", "data.workers=0", "log.every=1", "data.length=100",
    "train.batch_size=8", "schedule.epochs=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folders = {}
    for name, ranks, overrides in (("one", 1, ()), ("two", 2, ()), ("accumulated", 1, ("train.accumulation=4",))):
        folders[name] = tmp_path_factory.mktemp(name)
        done = run_train(folders[name], *SAME, *overrides, ranks=ranks)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize("other", ["two", "accumulated"])
def test_losses_and_evaluations_are_those_of_one_rank(runs, other):
    ones, others = (metric_lines(runs[name]) for name in ("one", other))
    assert len(ones) == len(others) == 24 + 2
    for one, two in zip(ones, others, strict=True):
        assert (one["kind"], one["step"]) == (two["kind"], two["step"])
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-5 if one["kind"] == "train" else 1e-6)
        if one["kind"] == "val":
            assert (one["top1"], one["top5"], one["images"]) == (two["top1"], two["top5"], two["images"])


def test_weights_are_those_of_one_rank(runs):
    one, two = (last_state(runs[name])["model"] for name in ("one", "two"))
    for name, value in one.items():
        assert (value.double() - two[name].double()).abs().max() < 1e-4, name
