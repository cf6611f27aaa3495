"""Machines that give less than usual: read-only code, no home, no temporary files."""

import ctypes
import shutil
from pathlib import Path

from .lab import ROOT, SHORT, Lab, Row, differences, sentence, start

CAP_DAC_OVERRIDE, PR_CAPBSET_DROP = 1, 24


def obey_permissions() -> None:
    """Make root obey permissions too, before an exec."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def copy_of_the_code(folder: Path) -> Path:
    """Copy the code, without the caches of Python and numba, and make it read-only."""
    for name in ("dkcls", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o555)
    return folder


def poor_places(lab: Lab) -> Row:
    row = Row(
        "read-only code and configs, no HOME, no write permission in TMPDIR or in the run directory"
    )
    closed = lab.folder / "closed"
    closed.mkdir(mode=0o555)
    code = ROOT if lab.short else copy_of_the_code(lab.folder / "code")
    places: dict[str, dict[str, str | None]] = {
        "all at once": {
            "HOME": str(closed),
            "XDG_CACHE_HOME": str(closed),
            "TMPDIR": str(closed),
            "MPLCONFIGDIR": None,
        },
        "read-only code": {},
        "no HOME": {"HOME": None, "XDG_CACHE_HOME": None, "MPLCONFIGDIR": None},
        "a closed TMPDIR": {"TMPDIR": str(closed)},
    }
    for number, (what, environment) in enumerate(list(places.items())[: lab.many(len(places), 1)]):
        folder = lab.folder / f"place{number}"
        process = start(
            folder,
            *SHORT,
            "data.workers=1",
            environment=environment,
            root=code,
            preexec_fn=obey_permissions,
        )
        row.check(sentence(process, 0) or differences(folder, lab.expected(*SHORT)), what)
    process = start(lab.folder / "out", *SHORT, f"out={closed}", preexec_fn=obey_permissions)
    row.check(
        sentence(
            process, 1, f"the run directory {closed}/run cannot be written: Permission denied"
        ),
        "a closed run directory",
    )
    if not lab.short:
        open_again(code)
    return row


def open_again(code: Path) -> None:
    """Make the folders writable again, so that they can be removed."""
    for path in (code, *code.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
