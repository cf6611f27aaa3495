"""Does to runs what machines do to them, and says what was lost: nothing, or the exit code is 1.

    python scripts/drill.py                   # every drill, three at a time: a quarter of an hour on two cores
    python scripts/drill.py short=true        # the short form, minutes
    python scripts/drill.py only=[hang,kill]  # some of them, by their names

Runs are of the real train.py on the embedded data, made small. `seed` chooses what is killed and when.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Read when Python and torch start, here and in all that we start: runs are compared to the bit, and some are killed.
os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:resource_tracker"}

from drills import data, files, fuzz, kills, places
from drills.lab import Lab, Row

from dkcls.engine import cli

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
    "two_at_once": kills.two_at_once,
    "poor_places": places.poor_places,
    "fuzz": fuzz.fuzz,
}


# What runs at the same time, each in a process of its own.
LANES = (
    ("kill", "two_at_once", "signals"),
    ("kill_rank", "hang", "not_finite", "poor_places"),
    ("damage", "disk_full", "malice", "workers_and_files", "fuzz"),
)


@dataclass
class Arguments:
    only: list[str] = field(default_factory=list)  # names of drills
    short: bool = False  # fewer tries
    seed: int = 0
    folder: Path | None = None  # for the runs, kept; else one for temporary files
    rows: Path | None = None  # a file to write what came of it to, instead of the table


def main(arguments: Arguments) -> int:
    if unknown := set(arguments.only) - DRILLS.keys():
        raise cli.UserError(f"only must be of {', '.join(DRILLS)}, got {', '.join(unknown)}")
    chosen = arguments.only or list(DRILLS)
    with tempfile.TemporaryDirectory(prefix="drill-") as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        lanes = [lane for lane in ([name for name in lane if name in chosen] for lane in LANES) if lane]
        if arguments.rows or len(lanes) == 1:
            expected: dict[tuple[Any, ...], Path] = {}
            rows = {name: run(name, Lab(folder / name, arguments.seed, arguments.short, expected)) for name in chosen}
        else:
            rows = run_lanes(lanes, folder, arguments.seed, arguments.short)
    if arguments.rows:
        arguments.rows.write_text(json.dumps({name: asdict(row) for name, row in rows.items()}))
    else:
        print(table([rows[name] for name in chosen]))
    return 1 if any(row.lost for row in rows.values()) else 0


def run_lanes(lanes: list[list[str]], folder: Path, seed: int, short: bool) -> dict[str, Row]:
    """Each in a process of its own; the lanes do not wait for each other."""
    processes = []
    files = [folder / f"lane{number}.json" for number in range(len(lanes))]
    for lane, file in zip(lanes, files, strict=True):
        words = [f"only=[{','.join(lane)}]", f"short={short}", f"seed={seed}", f"folder={file.with_suffix('')}", f"rows={file}"]
        processes.append(subprocess.Popen([sys.executable, __file__, *words]))
    rows: dict[str, Row] = {}
    for lane, file, process in zip(lanes, files, processes, strict=True):
        code = process.wait()
        found = json.loads(file.read_text()) if file.exists() else {}
        rows |= {name: Row(**found[name]) if name in found else Row(name, 1, lost=[f"exit code {code}"]) for name in lane}
    return rows


def run(name: str, lab: Lab) -> Row:
    started = time.monotonic()
    try:
        row = DRILLS[name](lab)
    except (OSError, RuntimeError, AssertionError) as error:  # a run that hangs, or fails where nothing was done to it
        row = Row(name, 1, lost=[str(error)])
    seconds = time.monotonic() - started
    print(f"{name}: {row.recovered} of {row.tried} {row.outcome}, {seconds:.0f} s", file=sys.stderr, flush=True)
    for problem in row.lost:
        print(f"  {problem}", file=sys.stderr, flush=True)
    return row


def table(rows: list[Row]) -> str:
    lines = ["| fault | tried | came out well | lost |", "|---|---|---|---|"]
    lines += [f"| {row.fault} | {row.tried} | {row.recovered} {row.outcome} | {len(row.lost) or 'nothing'} |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
