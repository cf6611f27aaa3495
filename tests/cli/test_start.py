"""What a command imports before it answers."""

import gc
import subprocess
import sys
from pathlib import Path

import dkcls
from dkcls import cli
from dkcls.engine.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]

# Prints, at the end, which of the slow packages were imported.
COMMAND = """
import sys
from pathlib import Path
from dkcls.cli.train import main
try:
    main()
finally:
    print(*sorted({"hydra", "torch"} & sys.modules.keys()))
"""


def python(code, *words):
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_table_of_a_finished_run_imports_no_torch(tmp_path):
    words = (f"out={tmp_path}", "name=done", "experiment=quickstart")
    run = RunDirectory(tmp_path / "done")
    run.path.mkdir()
    run.write_config(dkcls.compose(*words))
    run.finish({"name": "done", "top1": 12.5, "seconds": 75.2})
    (run.path / "curves.png").touch()
    lines = python(COMMAND, *words).stdout.splitlines()
    assert lines[1].split() == ["top-1", "12.50", "%"]
    assert lines[2].split() == ["wall", "time", "1", "min", "15", "s"]
    assert lines[-1] == "hydra"


def test_torch_is_imported_without_garbage_collections_which_then_leave_it_out():
    done = python(
        "import gc\n"
        "from dkcls import cli\n"
        "with cli.importing_torch():\n"
        "    print(gc.isenabled())\n"
        "    import triton._C.libtriton, torch\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )
    assert done.stdout.split() == ["False", "True", "True"]
    assert done.stderr == ""  # no reports of leaks


def test_where_torch_is_there_already_collections_stay_as_they_are():
    frozen = gc.get_freeze_count()
    with cli.importing_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
