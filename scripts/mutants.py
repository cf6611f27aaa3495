"""Plant the faults of tests/faults/*.toml in copies of the tree; print those that no test sees.

    python scripts/mutants.py                    # every room
    python scripts/mutants.py data layers        # two rooms
    python scripts/mutants.py engine_train --only seed

A fault is seen when a test fails, or does not end, with it and passes without it. The tests that a
fault names run first, then all tests of its room. Results are kept in .mutants/, so that a second
call runs only what is left, and what survived before the tests changed. `--fresh` forgets the
results.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0  # seconds for the tests of one fault


@dataclass(frozen=True)
class Fault:
    """A change of `old` into `new` in a file, and what a user would get from it.

    `file` is below dkcls/, or begins with scripts/.
    """

    room: str
    file: str
    old: str
    new: str
    gives: str
    tests: list[str] = field(default_factory=list, hash=False)
    listed: bool = False
    equivalent: str = ""

    @property
    def key(self) -> str:
        return sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:16]

    @property
    def path(self) -> Path:
        """Return the file's path below the project's root."""
        return Path(self.file) if self.file.startswith("scripts/") else Path("dkcls") / self.file

    def plant(self, tree: Path) -> str:
        """Change the file in `tree`; return its old content."""
        path = tree / self.path
        content = path.read_text()
        if content.count(self.old) != 1:
            sys.exit(
                f"{self.file} must have this text once, "
                f"has it {content.count(self.old)} times: {self.old!r}"
            )
        path.write_text(content.replace(self.old, self.new))
        return content

    def restore(self, tree: Path, content: str) -> None:
        (tree / self.path).write_text(content)

    def test_sets(self, tree: Path, hinted_only: bool) -> Iterator[list[str]]:
        """Yield the named tests that exist in `tree`, then the tests of the fault's room."""
        named = [
            f"tests/{name}"
            for name in self.tests
            if (tree / "tests" / name.split("::")[0]).exists()
        ]
        if named:
            yield named
        folder = self.file.split("/")[0].removesuffix(".py")
        if (tree / "tests" / folder).is_dir() and not (hinted_only and named):
            yield [f"tests/{folder}"]


def read_faults(rooms: list[str], only: str) -> list[Fault]:
    files = sorted((PROJECT / "tests" / "faults").glob("*.toml"))
    names = [file.stem for file in files]
    for room in rooms:
        if room not in names:
            sys.exit(f"there is no room {room!r} in tests/faults; there are {', '.join(names)}")
    faults = [
        Fault(file.stem, **row)
        for file in files
        if not rooms or file.stem in rooms
        for row in tomllib.loads(file.read_text())["fault"]
    ]
    return [
        fault for fault in faults if only in f"{fault.file} {fault.old} {fault.new} {fault.gives}"
    ]


def copy_tree(root: Path, target: Path) -> Path:
    """Copy what git tracks or would track."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=root, text=True).splitlines():
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target / name)
    return target


def run_tests(tree: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Return pytest's exit code, -1 if it did not end in time, and its output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        *options,
        *tests,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return -1, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def try_fault(fault: Fault, tree: Path, hinted_only: bool) -> dict[str, object]:
    """Return who saw the fault: a test's id, "no end", or "" for nobody."""
    started = time.time()
    content = fault.plant(tree)
    try:
        by = ""
        for tests in fault.test_sets(tree, hinted_only):
            code, output = run_tests(
                tree, tests, "-x", "-m", "not gpu and not interpreter and not compile"
            )
            if code not in (-1, 0, 1, 2, 3):
                sys.exit(f"pytest could not run {tests}: {output[-2000:]}")
            if code != 0:
                lines = [
                    line.split()[1]
                    for line in output.splitlines()
                    if line.startswith(("FAILED ", "ERROR "))
                ]
                by = lines[0] if lines else "no end"
                break
    finally:
        fault.restore(tree, content)
    return {"by": by, "seconds": round(time.time() - started), "at": started}


class Results:
    """The results of the faults, a line of JSON each."""

    def __init__(self, path: Path, fresh: bool):
        self.path, self.lock = path, threading.Lock()
        path.parent.mkdir(exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {row["key"]: row for row in map(json.loads, lines)}

    def is_due(self, fault: Fault, tests_changed: float) -> bool:
        row = self.known.get(fault.key)
        return row is None or (not row["by"] and row["at"] < tests_changed)

    def add(self, fault: Fault, result: dict[str, object]) -> None:
        with self.lock:
            self.known[fault.key] = {"key": fault.key, **result}
            with self.path.open("a") as file:
                file.write(json.dumps(self.known[fault.key]) + "\n")


def unfair(results: Results, faults: list[Fault], tree: Path) -> set[str]:
    """Return the tests that fail without any fault: they have seen nothing."""
    ids = {str(results.known[fault.key]["by"]) for fault in faults if fault.key in results.known}
    tests = sorted(name for name in ids if "/" in name and (tree / name.split("::")[0]).exists())
    if not tests:
        return set()
    _, output = run_tests(tree, tests)
    return {
        line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rooms", nargs="*", help="files of tests/faults; all of them if none is named"
    )
    parser.add_argument("--only", default="", help="faults whose file or text contains this")
    parser.add_argument("--root", type=Path, default=PROJECT, help="the tree to plant them in")
    parser.add_argument(
        "--hinted",
        action="store_true",
        help="run only the tests that a fault names, not its whole room",
    )
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at the same time")
    arguments = parser.parse_args()
    faults = [
        fault for fault in read_faults(arguments.rooms, arguments.only) if not fault.equivalent
    ]
    label = sha256(str(arguments.root.resolve()).encode()).hexdigest()[:8]
    results = Results(PROJECT / ".mutants" / f"{label}.jsonl", arguments.fresh)
    changed = max(path.stat().st_mtime for path in (arguments.root / "tests").rglob("*.py"))
    due = [fault for fault in faults if results.is_due(fault, changed)]
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        trees = [copy_tree(arguments.root, Path(folder) / str(i)) for i in range(arguments.jobs)]
        free = list(trees)

        def attempt(fault: Fault) -> None:
            tree = free.pop()
            try:
                result = try_fault(fault, tree, arguments.hinted)
                results.add(fault, result)
                print(
                    f"{result['by'] or 'SURVIVED'}  {fault.file}: "
                    f"{fault.gives} ({result['seconds']} s)",
                    flush=True,
                )
            finally:
                free.append(tree)

        list(pool.map(attempt, due))
        failing = unfair(results, faults, trees[0])
    for name in sorted(failing):
        print(f"{name} fails without a fault: what it saw is not counted")
    survived = [fault for fault in faults if results.known[fault.key]["by"] in {"", *failing}]
    planted, missed = (
        Counter(fault.room for fault in faults),
        Counter(fault.room for fault in survived),
    )
    print("\n| room | planted | seen |\n|---|---|---|")
    for room in [*sorted(planted), "all"]:
        count, left = (
            (len(faults), len(survived)) if room == "all" else (planted[room], missed[room])
        )
        print(f"| {room} | {count} | {count - left} |")
    for fault in survived:
        print(f"SURVIVED  {fault.file}: {fault.gives}: {fault.old!r} -> {fault.new!r}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
