"""A run besides its steps: precision, dry runs, versions, and lines in a terminal."""

import logging
import os
import pty
import sys
import time
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from dkcls.engine import dry_run, run, run_directory
from dkcls.engine.distributed import World, choose_precision
from dkcls.engine.dry_run import measure_step
from dkcls.engine.log import Log
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.tasks.classification import Classification
from tests.engine.common import CPU, run_here, small_config, small_trainer

GPU = torch.device("cuda", 0)


class Ranks(World):
    """Of two ranks, the one whose device has bfloat16 beside one that has not."""

    def any(self, *flags):
        return [True for _ in flags]


@pytest.mark.parametrize(
    ("asked", "world", "capable", "chosen"),
    [
        ("auto", World(CPU), True, "fp32"),
        ("auto", World(GPU), True, "bf16"),
        ("auto", World(GPU), False, "fp32"),
        ("auto", Ranks(GPU), True, "fp32"),
        ("fp16", World(GPU), True, "fp16"),
        ("fp32", World(GPU), True, "fp32"),
    ],
)
def test_the_precision_that_auto_chooses(asked, world, capable, chosen, monkeypatch):
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: capable and not including_emulation,
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert choose_precision(asked, world) == chosen


def test_a_resumed_run_keeps_what_auto_chose():
    """A run that began in bf16 goes on in it, here where auto would choose float32."""
    trainer = small_trainer("train.precision=auto")
    assert trainer.state()["precision"] == "fp32"
    trainer.load_state(trainer.state() | {"precision": "bf16"})
    given = []
    trainer.model.register_forward_hook(lambda module, args, out: given.append(out.dtype))
    trainer.set_train_mode()
    trainer.train_step(iter(trainer.train_loader))
    assert given == [torch.bfloat16]
    assert trainer.state()["precision"] == "bf16"


def test_the_first_lines_say_the_precision(tmp_path, monkeypatch, caplog):
    words = (
        "train.precision=auto",
        "schedule.epochs=1",
        "schedule.warmup_epochs=0",
        "data.options.length=16",
        "data.workers=0",
    )
    assert run_here(monkeypatch, tmp_path, *words) == 0
    assert "precision fp32 (train.precision=auto)" in caplog.text


@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_a_network_without_buffers_trains(name):
    trainer = small_trainer(
        f"model.name={name}",
        "model.spatial=null",
        "data.image_size=160",
        "schedule.warmup_epochs=0",
    )
    assert not list(trainer.model.buffers())
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step(iter(trainer.train_loader))
    assert any(
        not torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True)
    )


def test_versions_of_what_is_installed(tmp_path, monkeypatch):
    def without_triton(package):
        if package == "triton":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(run_directory, "version", without_triton)
    RunDirectory(tmp_path).write_config(small_config())
    written = (tmp_path / "versions.json").read_text()
    assert "triton" not in written
    assert f'"torch": "{torch.__version__.split("+")[0]}' in written


def test_deterministic_runs_tell_cublas_before_cuda_starts(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        UserError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before CUDA starts"
    ):
        run.fix_cublas()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    run.fix_cublas()
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    run.fix_cublas()
    assert os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_a_run_fixes_cublas_when_it_is_to_be_deterministic(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(run, "fix_cublas", lambda: order.append("cublas"))
    monkeypatch.setattr(run.distributed, "start", lambda *_: order.append("start") or 1 / 0)
    for word in ("train.deterministic=false", "train.deterministic=true"):
        with pytest.raises(ZeroDivisionError):
            run.train(small_config(word))
    assert order == ["start", "cublas", "start"]


@pytest.mark.parametrize(("accumulation", "whole"), [(1, 16), (2, 8)])
def test_a_dry_run_goes_on_in_a_straight_line(accumulation, whole, monkeypatch):
    """Extrapolate the cost of a step linearly from small batches.

    A step takes 3 s and 0.5 s per image, the process 1 GiB and 0.25 GiB per image, loading 0.01 s
    per image.
    """
    trainer = small_trainer("train.batch_size=16", f"train.accumulation={accumulation}")
    clock, seen = [100.0], []
    load = trainer.train_loader.dataset.load

    def slow_load(indices):
        clock[0] += 0.01 * len(indices)
        return load(indices)

    def slow_step(batches):
        seen.append(len(next(batches).targets))
        clock[0] += 3 + 0.5 * seen[-1]

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(trainer.train_loader.dataset, "load", slow_load)
    monkeypatch.setattr(trainer, "train_step", slow_step)
    monkeypatch.setattr(dry_run, "peak_memory", lambda device: 1024 + 256 * seen[-1])
    cost = measure_step(trainer, whole)
    assert set(seen) == {2, 4}
    assert cost.seconds == pytest.approx(3 + 0.5 * whole)
    assert cost.memory == pytest.approx((1 + 0.25 * whole) * 2**30)
    assert cost.loading == pytest.approx(0.16)


def test_a_dry_run_says_what_does_not_fit(monkeypatch):
    trainer = small_trainer()
    monkeypatch.setattr(dry_run, "machine_memory", lambda device: 8 * 2**30)
    for gib, fits in ((7.5, True), (8.5, False)):
        rows = dict(dry_run.StepCost(2.0, 3.0, gib * 2**30).rows(trainer))
        assert rows["peak memory"].startswith(f"{gib} GiB of the 8.0 GiB of cpu")
        assert ("too much" in rows["peak memory"]) != fits
        assert rows["loading"].endswith("with data.workers=1 it is slower than the network")
        assert rows["time"].startswith("2.000 s per step, 0.01 h for 12 steps")


def test_a_dry_run_speaks_before_it_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "measure_step", lambda *_: 1 / 0)
    assert run_here(monkeypatch, tmp_path, "train.dry_run=true", "data.workers=0") == 1
    said = capsys.readouterr()
    assert "end of warm-up" in said.out
    assert "peak memory" not in said.out


def test_a_dry_run_whose_loss_is_not_finite(tmp_path, monkeypatch, capsys):
    loss = Classification.loss
    monkeypatch.setattr(
        Classification, "loss", lambda *args: tuple(x * float("nan") for x in loss(*args))
    )
    words = ("train.dry_run=true", "data.workers=0", "train.max_bad_steps=0")
    assert run_here(monkeypatch, tmp_path, *words) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "loss or gradient was not finite" in error[0]
    assert list(tmp_path.iterdir()) == []


def test_a_line_is_printed_once_in_a_terminal(tmp_path, monkeypatch):
    """As cli.run sets logging up: one handler of the root logger, which writes to the terminal."""
    ours, theirs = pty.openpty()
    logger, root = logging.getLogger("dkcls.engine.run"), logging.getLogger()
    with os.fdopen(theirs, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(root, "handlers", [logging.StreamHandler(terminal)])
        monkeypatch.setattr(logging.getLogger("dkcls"), "level", logging.INFO)
        with Log(tmp_path, 0, 10, to=[]) as log:
            assert not log.bar.disable
            logger.info("before the first step")
            log.step()
            logger.info("after it")
        time.sleep(0.1)
        said = os.read(ours, 65536).decode()
    os.close(ours)
    assert said.count("before the first step") == said.count("after it") == 1
