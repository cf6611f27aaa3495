"""Runs of the real train.py, and trainers, small enough for a test."""

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dkcls import cli
from dkcls.config import Config
from dkcls.config.convert import to_config
from dkcls.engine.distributed import World
from dkcls.engine.log import CLOCK
from dkcls.engine.run import build_trainer
from dkcls.engine.trainer import Trainer

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
# 2 epochs of 6 steps on 52 made-up images, with a line of metrics every second step. 4 images of
# an epoch do not fill a batch.
SMALL = (
    "name=small",
    "experiment=quickstart",
    "data=synthetic",
    "data.image_size=32",
    "data.options.length=52",
    "data.options.num_classes=10",
    "train.batch_size=8",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0.5",
    "log.every=2",
    "log.to=[]",
    "optim.generator_lr=1",
)
RANK_TIMEOUT = 120  # seconds; for ranks that hang


def run_train(folder: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """In `folder`, by torchrun if there are several ranks."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks > 1
        else []
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Output goes to files: helpers of a killed process may outlive it and would keep a pipe open.
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        arguments = [sys.executable, *launcher, str(ROOT / "train.py"), *SMALL, *overrides]
        done = subprocess.run(
            arguments, cwd=folder, env=environment, stdout=out, stderr=err, timeout=300
        )
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(arguments, done.returncode, out.read(), err.read())


def run_here(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str, script: str = "train.py"
) -> int:
    """Run train.py, another script or a command in this process, and return the exit code.

    Nothing has to be imported again.
    """
    monkeypatch.chdir(folder)
    return call(monkeypatch, script, *(SMALL if script == "train.py" else ()), *overrides)


def call(monkeypatch: pytest.MonkeyPatch, script: str, *words: str) -> int:
    """Run what a command line names, and return the exit code.

    `script` is a file of the project (train.py), a module (scripts.drill), or a command of dkcls.
    """
    if script.endswith(".py"):
        monkeypatch.setattr(sys, "argv", [str(ROOT / script), *words])
    else:
        monkeypatch.setattr(sys, "argv", ["dkcls", *script.split(), *words])
    try:
        if script.endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
            return 0
        elif script.startswith("scripts."):
            del sys.argv[1]
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            return cli.main()
    except SystemExit as exit:
        return exit.code or 0  # type: ignore[return-value]
    raise AssertionError(f"{script} ended without an exit code")


def on_ranks(folder: Path, work: Callable[[], Any], ranks: int = 2) -> list[Any]:
    """Return what `work` returns in each of `ranks` forks of this process.

    The forks have the environment that torchrun would give them.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(folder, work, rank, ranks, port))
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(RANK_TIMEOUT)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = "\n".join((folder / f"rank{rank}.txt").read_text() for rank in range(ranks))
    assert codes == [0] * ranks, said
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def _rank(folder: Path, work: Callable[[], Any], rank: int, ranks: int, port: int) -> None:
    with (folder / f"rank{rank}.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.save(work(), folder / f"rank{rank}.pt")


def run_ranks(folder: Path, *overrides: str, ranks: int = 2) -> None:
    """Run train.py on several ranks like torchrun, but without importing everything again."""

    def work() -> int:
        return run_here(pytest.MonkeyPatch(), folder, *overrides)

    codes = on_ranks(folder, work, ranks)
    assert codes == [0] * ranks, "\n".join(
        (folder / f"rank{rank}.txt").read_text() for rank in range(ranks)
    )


def small_config(*overrides: str) -> Config:
    """As train.py has it with SMALL, but for a rigid network and without worker processes."""
    plain = (
        "model.name=mobilenetv2_nano",
        "model.spatial=rigid",
        "data.workers=0",
        "data.name=synthetic",
        "optim.lr=0.1",
    )
    words = [
        *(word for word in SMALL if word not in ("experiment=quickstart", "data=synthetic")),
        *plain,
        *overrides,
    ]
    return to_config(
        OmegaConf.merge(  # type: ignore[arg-type]
            OmegaConf.structured(Config),
            OmegaConf.from_dotlist(words),
        )
    )


def small_trainer(*overrides: str, world: World | None = None) -> Trainer:
    return build_trainer(small_config(*overrides), world or World(CPU))


def last_state(folder: Path, name: str = "small") -> dict[str, Any]:
    return torch.load(folder / "runs" / name / "last.pt", weights_only=True)


def metric_lines(folder: Path, name: str = "small") -> list[dict[str, Any]]:
    """Without what depends on the clock and the machine."""
    lines = [
        json.loads(line)
        for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return a == b
