"""Processes that run train.py for drills, and checks of how their runs end."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from dkcls.config import free_keys
from dkcls.engine.log import CLOCK

from . import faults

ROOT = faults.ROOT
# The embedded set on a tiny canvas: 2 epochs of 25 steps, with a line of metrics for each step and
# a checkpoint after every second one.
SMALL = (
    "name=run",
    "experiment=quickstart",
    "data.image_size=8",
    "train.batch_size=1000",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0.2",
    "train.ema_decay=0.9",
    "train.checkpoint_every=2",
    "log.every=1",
    "model.drop_path_rate=0.2",
    "model.scope=4",
)
STEPS_PER_EPOCH = 25
BOARD = (
    "schedule.epochs=1",
    "train.batch_size=100",
    "data.options.length=2500",
)  # an epoch of 25 steps
SHORT = (*BOARD, "log.to=[]")
_one_at_a_time = Lock()  # of the runs that several drills compare with
PATIENCE = 600.0  # seconds for anything to happen, on a machine that is busy with other work


@dataclass
class Row:
    """The result of a drill. `lost` is empty when every try ended as it should."""

    fault: str
    tried: int = 0
    recovered: int = 0
    lost: list[str] = field(default_factory=list)
    outcome: str = "recovered"
    told: float = field(default_factory=time.monotonic)  # when somebody last heard of it

    def check(self, problems: Sequence[str], what: str = "") -> None:
        """Count a try, with the problems after it."""
        self.tried += 1
        self.recovered += not problems
        if time.monotonic() > self.told + 30:
            self.told = time.monotonic()
            print(
                f"  {self.fault}: {self.recovered} of {self.tried} so far",
                file=sys.stderr,
                flush=True,
            )
        self.lost += [f"{what}: {problem}" if what else problem for problem in problems]

    def fail(self, problems: Sequence[str]) -> None:
        """Add problems found at the end of a run: one of its tries counts as lost after all."""
        self.recovered -= bool(problems)
        self.lost += problems


class Process:
    """A process of train.py, or of torchrun with several ranks. `said` returns its whole output."""

    def __init__(self, pid: int, wait: Callable[[float], int | None], output: Path):
        self.pid, self._wait, self._output = pid, wait, output
        self.code: int | None = None

    def alive(self) -> bool:
        if self.code is None:
            self.code = self._wait(0)
        return self.code is None

    def wait(self, seconds: float = PATIENCE) -> int:
        self.code = self._wait(seconds) if self.code is None else self.code
        if self.code is None:
            self.kill()
            raise TimeoutError(
                f"a process did not end within {seconds:.0f} s; it said: {self.said()[-2000:]}"
            )
        return self.code

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended already."""
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            self.code = self._wait(PATIENCE)

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def ranks(self) -> list[int]:
        """Return the pids of the processes that torchrun started."""
        return children(self.pid)


def children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


def start(
    folder: Path,
    *overrides: str,
    ranks: int = 1,
    restarts: int = 0,
    fault: str = "",
    environment: dict[str, str | None] | None = None,
    wrap: Sequence[str] = (),
    root: Path = ROOT,
    **options: Any,
) -> Process:
    """Start train.py, or torchrun, in its own session, so that a signal reaches all children."""
    folder.mkdir(parents=True, exist_ok=True)
    script = [str(ROOT / "scripts/drill/faults.py"), fault] if fault else [str(root / "train.py")]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={ranks}",
        f"--max-restarts={restarts}",
    ]
    command = [*wrap, sys.executable, *(torchrun if ranks > 1 else []), *script, *SMALL, *overrides]
    variables = {**os.environ, "PYTHONPATH": str(root), **(environment or {})}
    path = output(folder)
    with path.open("wb") as file:
        popen = subprocess.Popen(
            command,
            cwd=folder,
            env={k: v for k, v in variables.items() if v is not None},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )

    def wait(seconds: float) -> int | None:
        try:
            return popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    return Process(popen.pid, wait, path)


@cache
def fork_server() -> Any:
    """Return a context whose processes are forked from one with train.py's imports done."""
    context = multiprocessing.get_context("forkserver")
    modules = [
        "dkcls.engine.run",
        "dkcls.tasks.classification",
        "dkcls.data.sets.deformed_fashion",
        "dkcls.data.sets.folder",
        "dkcls.report.plots",
        "dkcls.ops.deform_kernel.cpu.kernels",
        "hydra",
    ]
    context.set_forkserver_preload(modules)
    return context


def start_imported(
    folder: Path,
    *overrides: str,
    fault: str = "",
    environment: dict[str, str] | None = None,
    path: Path | None = None,
) -> Process:
    """Start train.py on one rank, forked from a process that has imported everything.

    It starts in a second, not in ten.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path or output(folder)
    path.touch()
    process = fork_server().Process(
        target=_become_train, args=(folder, path, [*SMALL, *overrides], fault, environment or {})
    )
    process.start()

    def wait(seconds: float) -> int | None:
        process.join(seconds)
        return process.exitcode

    return Process(process.pid, wait, path)


def start_ranks(
    folder: Path,
    *overrides: str,
    ranks: int,
    fault: str = "",
    environment: dict[str, str] | None = None,
) -> Process:
    """Start train.py on several ranks, forked likewise, with the environment of torchrun.

    The process that is returned has the pid of the first rank and ends when all ranks have ended.
    """
    if ranks == 1:
        return start_imported(folder, *overrides, fault=fault, environment=environment)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **(environment or {}),
    }
    path = output(folder)
    started = [
        start_imported(
            folder,
            *overrides,
            fault=fault,
            path=path,
            environment=common | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in map(str, range(ranks))
    ]

    def wait(seconds: float) -> int | None:
        codes = [code for process in started if (code := process._wait(seconds)) is not None]
        return max(codes, key=abs) if len(codes) == ranks else None

    return Process(started[0].pid, wait, path)


def _become_train(
    folder: Path, path: Path, arguments: list[str], fault: str, environment: dict[str, str]
) -> None:
    os.setsid()
    os.environ |= environment
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    faults.run(arguments, fault)


def output(folder: Path) -> Path:
    """Return the path of a new file beside the folder, for the output of a process."""
    return folder.with_name(
        f"{folder.name}.{sum(1 for _ in folder.parent.glob(f'{folder.name}.*.txt'))}.txt"
    )


class Lab:
    """The folder of a drill, and its random choices.

    `many(full, short)` returns the count of the long or the short form.
    """

    def __init__(self, folder: Path, seed: int, short: bool, expected: dict[tuple[Any, ...], Path]):
        self.folder, self.short, self.random, self._expected = (
            folder,
            short,
            random.Random(seed),
            expected,
        )
        folder.mkdir(parents=True)

    def many(self, full: int, short: int) -> int:
        return short if self.short else full

    def expected(self, *overrides: str, ranks: int = 1, **options: Any) -> Path:
        """Return the folder of a run without faults, made once for all drills."""
        key = (ranks, *overrides)
        with _one_at_a_time:
            if key not in self._expected:
                folder = self.folder.parent / f"expected{len(self._expected)}"
                process = start_ranks(folder, *overrides, ranks=ranks, **options)
                if process.wait() != 0:
                    raise RuntimeError(f"a run to which nothing happened failed: {process.said()}")
                self._expected[key] = folder
            return self._expected[key]


def until(
    condition: Callable[[], Any], process: Process | None = None, seconds: float = PATIENCE
) -> Any:
    """Wait for a condition. None if the process ended before; TimeoutError if nothing happens."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if result := condition():
            return result
        if process is not None and not process.alive():
            return None
        time.sleep(0.003)
    raise TimeoutError(
        f"nothing happened for {seconds:.0f} s"
        + (f"; it said: {process.said()[-2000:]}" if process else "")
    )


def wait_for_step(folder: Path, process: Process, step: int) -> None:
    until(lambda: step_of(folder) >= step, process)


def run_of(folder: Path) -> Path:
    return folder / "runs/run"


def step_of(folder: Path) -> int:
    """Return the last step that has its line of metrics."""
    lines = metrics(folder)
    return lines[-1]["step"] if lines else 0


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the complete lines, without what depends on the clock."""
    try:
        text = (run_of(folder) / "metrics.jsonl").read_bytes()
    except OSError:
        return []
    lines = [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def state_of(folder: Path, name: str = "last.pt") -> dict[str, Any]:
    """Load a checkpoint without the keys that may differ within a run."""
    state = torch.load(run_of(folder) / name, weights_only=True)
    for key in free_keys():
        group, _, last = key.rpartition(".")
        (state["config"][group] if group else state["config"]).pop(last, None)
    return state


def differences(folder: Path, expected: Path) -> list[str]:
    """Return what is not, to the bit, as in the run without faults."""
    found = []
    for name in ("last.pt", "best.pt"):
        try:
            ours, theirs = state_of(folder, name), state_of(expected, name)
        except OSError as error:
            return [f"{name}: {error}"]
        found += [
            f"{name}: {key} differs" for key in theirs if not same_bits(ours.get(key), theirs[key])
        ]
    if metrics(folder) != metrics(expected):
        made, due = (
            [(line["kind"], line["step"]) for line in metrics(place)]
            for place in (folder, expected)
        )
        found.append(
            "metrics differ"
            if made == due
            else f"lines of metrics: {len(made)} instead of {len(due)}"
        )
    results = [
        json.loads((run_of(place) / "result.json").read_text()) for place in (folder, expected)
    ]
    if any(results[0].get(key) != value for key, value in results[1].items() if key != "seconds"):
        found.append("result.json differs")
    found += [f"{path.name} is left" for path in run_of(folder).rglob("*.tmp")]
    return found


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return type(a) is type(b) and a == b


def finish(
    folder: Path, expected: Path, *overrides: str, ranks: int = 1, **options: Any
) -> list[str]:
    """Run the same command again: it must resume, reach the end, and end as expected."""
    process = start_ranks(folder, *overrides, ranks=ranks, **options)
    if process.wait() != 0:
        return [f"does not go on: {process.said()[-1000:]}"]
    return differences(folder, expected)


def sentence(process: Process, code: int, *words: str) -> list[str]:
    """Return what is wrong unless the process ended with `code` and one sentence with `words`."""
    ended = process.wait()
    problems = [f"exit code {ended} instead of {code}"] if ended != code else []
    said = process.said()
    if "Traceback" in said:
        problems.append(f"a traceback: {said[-1500:]}")
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 1 and len(lines) != 1:
        problems.append(f"{len(lines)} sentences instead of one: {said[-500:]}")
    return problems + [
        f"does not say {word!r}: {said[-500:]}" for word in words if word not in said
    ]


@contextmanager
def copied(source: Path, target: Path) -> Iterator[Path]:
    """Copy a folder, to be damaged, and remove the copy afterwards."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True)
    try:
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)
