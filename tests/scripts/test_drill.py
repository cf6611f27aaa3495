"""The drills in their short form: `make drill` does the same at length."""

import os
import subprocess
import sys

import pytest

from tests.engine.common import ROOT, run_here


@pytest.mark.slow
@pytest.mark.xdist_group("test_drill")
def test_nothing_is_lost():
    done = subprocess.run(
        [sys.executable, "-m", "scripts.drill", "short=true"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 18
    assert all(row.endswith("| nothing |") for row in rows)


def test_a_drill_that_there_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the script changes it
    assert run_here(monkeypatch, tmp_path, "only=[earthquake]", script="scripts.drill") == 1
    assert capsys.readouterr().err.startswith("error: only must be of kill, kill_rank, ")
