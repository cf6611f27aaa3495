"""Each way to train, on the CPU: it runs, it is written down, and what is not finite does no harm."""

from functools import partial

import pytest
import torch

from dkcls.classification import Classification
from tests.engine.common import last_state, metric_lines, run_here


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.precision=bf16", "train.ema_decay=0.9"),
        ("train.precision=fp16",),
        ("train.accumulation=2", "optim.clip_grad=0.1", "optim.nesterov=true"),
        ("data.mixup=0.2", "data.cutmix=1.0", "train.label_smoothing=0.1", "model.drop_path_rate=0.1", "model.drop_rate=0.1"),
        ("train.channels_last=false", "train.deterministic=true", "train.eval_batch_size=50"),
        ("train.compile=true", "schedule.epochs=1"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_options(overrides, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # a minute faster than inductor
    assert run_here(monkeypatch, tmp_path, *overrides) == 0
    torch.use_deterministic_algorithms(False)
    lines = metric_lines(tmp_path)
    assert all(line["loss"] < 20 for line in lines)
    assert lines[-1]["images"] == 52
    assert all(value.isfinite().all() for value in last_state(tmp_path)["model"].values())
    assert not [name for name in last_state(tmp_path)["model"] if "_orig_mod" in name or name.startswith("module.")]


def spoil(monkeypatch, steps):
    """The loss of these steps is NaN, and so is all that the network saw."""
    loss, count = Classification.loss, 0

    def spoilt(self, model, batch):
        nonlocal count
        normalize = self.normalize
        if count in steps:
            self.normalize = lambda images: normalize(images) * float("nan")
        result = loss(self, model, batch)
        self.normalize = normalize
        count += 1
        return result

    monkeypatch.setattr(Classification, "loss", spoilt)


def test_a_step_that_is_not_finite_is_skipped(monkeypatch, tmp_path, caplog):
    spoil(monkeypatch, {3, 4, 9})
    assert run_here(monkeypatch, tmp_path, "train.max_bad_steps=2") == 0
    state = last_state(tmp_path)
    assert state["skipped"] == 3
    assert state["bad_steps"] == 0
    assert all(value.isfinite().all() for value in state["model"].values())
    assert "step 4: loss or gradient is not finite, step skipped (2 in a row, 2 allowed)" in caplog.text
    assert all(line["loss"] == line["loss"] for line in metric_lines(tmp_path))


def test_too_many_of_them_stop_the_run(monkeypatch, tmp_path, capsys):
    spoil(monkeypatch, set(range(8, 100)))
    assert run_here(monkeypatch, tmp_path, "train.max_bad_steps=2") == 1
    said = capsys.readouterr().err
    assert "not finite in 3 steps in a row, up to step 10" in said
    assert "step-00000006.pt" in said


@pytest.mark.parametrize("reaction", ["stop", "continue"])
def test_a_checkpoint_that_cannot_be_written(monkeypatch, tmp_path, capsys, caplog, reaction):
    from dkcls.engine import checkpoint

    write = checkpoint.write

    def full(path, state):
        if state["step"] == 6:
            raise OSError(28, "No space left on device")
        write(path, state)

    monkeypatch.setattr(checkpoint, "write", full)
    code = run_here(monkeypatch, tmp_path, "train.checkpoint_every=5", f"train.on_save_error={reaction}")
    if reaction == "stop":
        assert code == 1
        assert "step 6 could not be written (the disk is full)" in capsys.readouterr().err
        assert last_state(tmp_path)["step"] == 5
    else:
        assert code == 0
        assert "training goes on" in caplog.text
        assert last_state(tmp_path)["step"] == 12


def test_pretrained_weights(monkeypatch, tmp_path, capsys):
    """A run's own checkpoint into the same network, the rigid one into DK, and another network's into neither."""
    assert run_here(monkeypatch, tmp_path, "name=rigid", "model.spatial=rigid", "schedule.epochs=1") == 0
    weights = "model.pretrained=runs/rigid/last.pt"
    assert run_here(monkeypatch, tmp_path, "name=dk", weights, "schedule.epochs=1", "optim.lr=1e-9") == 0
    rigid, dk = (metric_lines(tmp_path, name)[-1] for name in ("rigid", "dk"))
    assert dk["loss"] != rigid["loss"]  # BN's running averages have moved on
    assert run_here(monkeypatch, tmp_path, "name=again", "model.pretrained=runs/dk/best.pt", "data.num_classes=5") == 0
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, "name=other", "model.name=mobilenetv2_dw", weights) == 1
    assert "model.pretrained=runs/rigid/last.pt: " in capsys.readouterr().err
