"""Measure how long train.py takes to answer and to begin, over `python -c "import torch"`.

    python scripts/bench/start.py           # a minute
    python scripts/bench/start.py rounds=9

A round times everything once, one after the other, each in a process of its own; a ratio is the
median of the rounds' ratios. An answer is timed to the end of its process, the first step from the
start of its process to the line that log.every=1 writes after it into metrics.jsonl. A round that
does not count comes first: it leaves bytecode and compiled kernels in their caches. The exit code
is 1 if a limit is missed. Run it on an idle machine.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from dkcls import cli
from dkcls.errors import UserError
from dkcls.report.tables import markdown_table

ROOT = Path(__file__).resolve().parents[2]
POLL = 0.002  # seconds between two looks for the first step


@dataclass
class Arguments:
    rounds: int = 5  # that count


class Case(NamedTuple):
    """What is timed; `limit` is the largest ratio of its seconds to those of `import torch`."""

    name: str
    limit: float | None
    seconds: Callable[[], float]


def main(arguments: Arguments) -> int:
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        cases = make_cases(Path(folder))
        times = [[case.seconds() for case in cases] for _ in range(arguments.rounds + 1)][1:]
    rows, missed = [], []
    for i, (name, limit, _) in enumerate(cases):
        ratio = median(seconds[i] / seconds[0] for seconds in times)
        seconds = median(seconds[i] for seconds in times)
        rows.append({"what": name, "seconds": seconds, "ratio": ratio, "limit": limit})
        if limit is not None and ratio > limit:
            missed.append(name)
    print(markdown_table(rows), end="")
    print(f"missed: {', '.join(missed) or 'none'}; medians of {arguments.rounds} rounds")
    return 1 if missed else 0


def make_cases(folder: Path) -> list[Case]:
    """Return what is timed, `import torch` first. A short run is finished for it in the folder."""
    short = (f"out={folder}", "name=short", "schedule.epochs=1", "data.options.length=640")
    answer("train.py", *short)
    return [
        Case('python -c "import torch"', None, lambda: answer("-c", "import torch")),
        Case("train.py --help", 0.35, lambda: answer("train.py", "--help")),
        Case("a misspelt key", 0.5, lambda: answer("train.py", "model.scop=3", code=1)),
        Case("a finished run's table", 1.0, lambda: answer("train.py", *short)),
        Case("quickstart's first step", 2.5, lambda: first_step(folder / "first")),
    ]


def start(*words: str) -> subprocess.Popen:
    """Start Python in the project's folder, with leave to keep bytecode."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    pipe, command = subprocess.PIPE, [sys.executable, *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def answer(*words: str, code: int = 0) -> float:
    """Return the seconds that Python takes with these words; `code` is the expected exit code."""
    started = time.perf_counter()
    process = start(*words)
    _, errors = process.communicate()
    seconds = time.perf_counter() - started
    if process.returncode != code:
        raise UserError(f"{' '.join(words)} ended with {process.returncode}: {errors}")
    return seconds


def first_step(run: Path) -> float:
    """Return the seconds to the end of the quickstart's first step; the run ends there."""
    shutil.rmtree(run, ignore_errors=True)
    metrics = run / "metrics.jsonl"
    started = time.perf_counter()
    process = start("train.py", f"out={run.parent}", f"name={run.name}", "log.every=1")
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise UserError(f"train.py ended before a step: {process.communicate()[1]}")
            time.sleep(POLL)
        return time.perf_counter() - started
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
