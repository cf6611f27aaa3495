"""Inject faults of real machines into runs, and report what was lost.

    python -m scripts.drill                   # every drill, three at a time: 15 minutes on 2 cores
    python -m scripts.drill short=true        # the short form: minutes
    python -m scripts.drill only=[hang,kill]  # some drills, by name

The exit code is 1 if anything was lost. Runs are of the real train.py on the embedded data, made
small. `seed` chooses what is killed and when.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read when Python and torch start, here and in child processes. Runs are compared bit by bit, hence
# one thread; some are killed, hence no warnings about leaks.
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:resource_tracker"}

from dkcls import cli
from dkcls.errors import UserError

from . import bombs, data, files, fuzz, fuzz_images, identity, kills, places, security
from .lab import Lab, Row

DRILLS: dict[str, Callable[[Lab], Row]] = {
    "kill": kills.kill,
    "kill_rank": kills.kill_rank,
    "signals": kills.signals,
    "hang": kills.hang,
    "damage": files.damage,
    "disk_full": files.disk_full,
    "malice": files.malice,
    "not_finite": data.not_finite,
    "workers_and_files": data.workers_and_files,
    "identity": identity.identity,
    "list_caches": identity.list_caches,
    "two_at_once": kills.two_at_once,
    "poor_places": places.poor_places,
    "fuzz": fuzz.fuzz,
    "security": security.security,
    "contents": security.contents,
    "bombs": bombs.bombs,
    "fuzz_images": fuzz_images.fuzz_images,
}


# Lanes run at the same time, each in its own thread.
LANES = (
    ("kill", "two_at_once", "signals", "fuzz_images"),
    ("kill_rank", "hang", "not_finite", "poor_places"),
    ("damage", "disk_full", "malice", "workers_and_files", "fuzz"),
    ("identity", "list_caches", "security", "contents", "bombs"),
)


@dataclass
class Arguments:
    only: list[str] = field(default_factory=list)  # names of drills
    short: bool = False  # fewer tries
    seed: int = 0
    folder: Path | None = None  # for the runs, kept; else one for temporary files


def main(arguments: Arguments) -> int:
    if unknown := set(arguments.only) - DRILLS.keys():
        raise UserError(f"only must be of {', '.join(DRILLS)}, got {', '.join(unknown)}")
    chosen = arguments.only or list(DRILLS)
    with (
        tempfile.TemporaryDirectory(prefix="drill-") as temporary,
        ThreadPoolExecutor(len(LANES)) as pool,
    ):
        folder = Path(arguments.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        expected: dict[tuple[Any, ...], Path] = {}

        def run_lane(lane: tuple[str, ...]) -> dict[str, Row]:
            labs = {
                name: Lab(folder / name, arguments.seed, arguments.short, expected)
                for name in lane
                if name in chosen
            }
            return {name: run(name, lab) for name, lab in labs.items()}

        rows = {name: row for lane in pool.map(run_lane, LANES) for name, row in lane.items()}
    print(table([rows[name] for name in chosen]))
    return 1 if any(row.lost for row in rows.values()) else 0


def run(name: str, lab: Lab) -> Row:
    started = time.monotonic()
    try:
        row = DRILLS[name](lab)
    except (OSError, RuntimeError, AssertionError) as error:
        # A run hangs, or fails where nothing was done to it.
        row = Row(name, 1, lost=[str(error)])
    seconds = time.monotonic() - started
    print(
        f"{name}: {row.recovered} of {row.tried} {row.outcome}, {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    for problem in row.lost:
        print(f"  {problem}", file=sys.stderr, flush=True)
    return row


def table(rows: list[Row]) -> str:
    lines = ["| fault | tried | came out well | lost |", "|---|---|---|---|"]
    lines += [
        f"| {row.fault} | {row.tried} | {row.recovered} {row.outcome} "
        f"| {len(row.lost) or 'nothing'} |"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
