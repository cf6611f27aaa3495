"""Print the test folders for uncommitted changes, or for the last commit if there are none.

A change below dkcls/ROOM/, or of dkcls/ROOM.py, is tested in tests/ROOM/ if there is such a
folder; anything else by the tests of imports and configs.
"""

import argparse
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = ("tests/test_imports.py", "tests/config")


def changed_files() -> list[str]:
    def git(*words: str) -> list[str]:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()

    changed = git("diff", "--name-only", "HEAD")
    changed += git("ls-files", "--others", "--exclude-standard")
    return changed or git("diff", "--name-only", "HEAD~1", "HEAD")


def rooms(files: list[str]) -> list[str]:
    """Return paths below the project's root."""
    found = []
    for file in map(Path, files):
        if file.parts[0] == "tests" and file.name.startswith("test_") and (ROOT / file).exists():
            found.append(str(file))
        elif file.parts[0] in ("dkcls", "tests"):
            room = file.parts[1].removesuffix(".py")
            if any((ROOT / "tests" / room).rglob("test_*.py")):
                found.append(f"tests/{room}")
    return sorted({*ALWAYS, *found})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(*rooms(changed_files()))
