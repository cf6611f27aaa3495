"""A run that was killed and started again ends with the same bits as one that was not."""

import pytest

from tests.engine.common import last_state, metric_lines, run_train, same_bits

pytestmark = pytest.mark.xdist_group("test_resume")  # its runs are made once

EVERYTHING = ("model.drop_path_rate=0.2", "train.ema_decay=0.9", "data.mixup=0.2", "train.checkpoint_every=1")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A function: the folder of a run with that many ranks."""
    folders = {}

    def run(ranks: int):
        if ranks not in folders:
            folders[ranks] = tmp_path_factory.mktemp(f"ranks{ranks}")
            done = run_train(folders[ranks], *EVERYTHING, "data.workers=0", ranks=ranks)
            assert done.returncode == 0, done.stderr
        return folders[ranks]

    return run


@pytest.mark.parametrize(
    ("ranks", "workers", "kill"), [(1, 0, ("after", 3)), (1, 2, ("during", 9)), (2, 0, ("during", 4)), (2, 2, ("after", 10))]
)
def test_killed_run_ends_as_an_uninterrupted_one(uninterrupted, tmp_path, ranks, workers, kill):
    expected = uninterrupted(ranks)
    died = run_train(tmp_path, *EVERYTHING, f"data.workers={workers}", ranks=ranks, kill=kill)
    assert died.returncode != 0
    assert not (tmp_path / "runs/small/result.json").exists()
    again = run_train(tmp_path, *EVERYTHING, f"data.workers={workers}", ranks=ranks)
    assert again.returncode == 0, again.stderr
    assert "going on from step-" in again.stderr
    ours, theirs = last_state(tmp_path), last_state(expected)
    for state in (ours, theirs):
        state["config"]["data"].pop("workers")
    assert same_bits(ours, theirs)
    assert metric_lines(tmp_path) == metric_lines(expected)
