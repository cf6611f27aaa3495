"""Runs of the real train.py, small enough for a test."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch

from dkcls.engine.log import CLOCK

ROOT = Path(__file__).parents[2]
# 2 epochs of 6 steps on 52 made-up images, with a line of metrics every second step; 4 images do not fill a batch.
SMALL = (
    "name=small", "data=synthetic", "data.image_size=32", "data.length=52", "data.num_classes=10", "train.batch_size=8",
    "schedule.epochs=2", "schedule.warmup_epochs=0.5", "log.every=2", "log.tensorboard=false", "optim.generator_lr=1",
)  # fmt: skip


def run_train(folder: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """In `folder`, by torchrun if there are several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Into files: helpers of a killed process may outlive it, and a pipe would stay open for as long.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        arguments = [sys.executable, *launcher, str(ROOT / "train.py"), *SMALL, *overrides]
        done = subprocess.run(arguments, cwd=folder, env=environment, stdout=out, stderr=err, timeout=300)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, done.returncode, out.read(), err.read())


def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, script: str = "train.py") -> int:
    """The same in this process, which need not import everything again; or another script. Returns the exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *(SMALL if script == "train.py" else ()), *overrides])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return exit.value.code or 0  # type: ignore[return-value]


def last_state(folder: Path, name: str = "small") -> dict[str, Any]:
    return torch.load(folder / "runs" / name / "last.pt", weights_only=True)


def metric_lines(folder: Path, name: str = "small") -> list[dict[str, Any]]:
    """Without what depends on the clock and the machine."""
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b
