"""Run the tests of operators, layers, networks and trainer under other versions of PyTorch.

    python scripts/torch_versions.py                            # docs/install.md; 6 GB a version
    python scripts/torch_versions.py versions=[2.9.1] packages=['numpy<2.4']

Each version gets a virtual environment of its own, with the packages of requirements.txt but for
torch, torchvision and Triton, which are those that belong to the version, and for `packages`. The
exit code is 1 if a test fails; the names of those that do are printed.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from dkcls import cli
from dkcls.errors import UserError
from dkcls.report.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
OWN = ("torch", "torchvision", "triton")  # what comes with a version
SUITES = {  # column -> marks of the tests
    "on the CPU": "not interpreter and not compile and not long",
    "in Triton's interpreter": "interpreter and not long",
    "compiled for GPUs": "compile and not long",
}


@dataclass
class Arguments:
    versions: list[str] = field(default_factory=lambda: ["2.9.1", "2.12.1", "2.15.0"])
    rooms: list[str] = field(  # folders of tests/
        default_factory=lambda: ["ops", "layers", "models", "engine"]
    )
    packages: list[str] = field(default_factory=list)  # in place of those of requirements.txt
    folder: str = ".venvs"  # where the environments go
    keep: bool = False  # keep them; else each is deleted once its tests have run


def main(arguments: Arguments) -> int:
    rows, failed = [], []
    for version in arguments.versions:
        venv = Path(arguments.folder).resolve() / version
        python = make_environment(venv, version, arguments.packages)
        row = {name: installed(python, name) for name in (*OWN, "numpy")}
        for column, marks in SUITES.items():
            row[column], names = run_tests(python, marks, arguments.rooms)
            failed += [f"torch {version}, {column}: {name}" for name in names]
        rows.append(row)
        if not arguments.keep:
            shutil.rmtree(venv)
    print(markdown_table(rows), end="")
    print("\n".join(failed))
    return 1 if failed else 0


def make_environment(venv: Path, version: str, packages: list[str]) -> Path:
    """Return the Python of a virtual environment with this version of torch."""
    python = venv / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    replaced = {*OWN, *(package_of(word) for word in packages)}
    others = [
        line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if not line.startswith("#") and package_of(line) not in replaced
    ]
    wanted = [f"torch=={version}", "torchvision", *packages, *others]
    wanted += ["pytest", "pytest-xdist", "-e", "."]
    said = subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], cwd=ROOT)
    if said.returncode:
        raise UserError(f"pip could not install torch {version}; what it said is above")
    return python


def package_of(requirement: str) -> str:
    return re.split("[=<>;]", requirement)[0]


def installed(python: Path, package: str) -> str:
    program = f"from importlib.metadata import version; print(version({package!r}))"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def run_tests(python: Path, marks: str, rooms: list[str]) -> tuple[str, list[str]]:
    """Return a cell of the table, and the names of the tests that failed.

    A room's tests have processes of their own: the engine's fork, which older versions of PyTorch
    do not survive once others have run.
    """
    report = python.parent / "tests.xml"
    interpret = "1" if marks.startswith("interpreter") else "0"
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    passed, failed, skipped = 0, [], 0
    for room in rooms:
        report.unlink(missing_ok=True)
        words = ["-q", "-n", "auto", "--dist", "loadgroup", "-m", marks, f"--junitxml={report}"]
        words.append(f"tests/{room}")
        subprocess.run([python, "-m", "pytest", *words], cwd=ROOT, env=environment)
        if not report.exists():
            raise UserError(f"{python} ran no tests of {room}; what pytest said is above")
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}::{case.get('name')}")
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
    return f"{passed} passed, {len(failed)} failed, {skipped} skipped", failed


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
