"""Every script starts, says what it is for, and says plainly when it has nothing to do.

They run in this process: a new one would import torch again, five seconds for each script.
"""

import os
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
# The other files are what scripts share.
SCRIPTS = [
    path
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and path.parent.name != "drill"
]


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that calls a script and returns its exit code, output and errors."""
    environment = dict(os.environ)

    def call(script, *arguments):
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        if isinstance(code, str):  # what Python prints at the end of a program
            return SimpleNamespace(code=1, out=captured.out, err=captured.err + code)
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    yield call
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_help(script, run):
    result = run(script, "--help")
    assert result.code == 0, result.err
    assert script.name in result.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_gpu_check_without_a_gpu_says_so_in_one_sentence(tmp_path, run):
    result = run(ROOT / "scripts/bench/gpu.py", "--output", str(tmp_path / "record.txt"))
    assert result.code == 1
    assert (
        result.err.strip()
        == "gpu-check: there is no CUDA or ROCm device on this machine, and nothing to check."
    )
    assert list(tmp_path.iterdir()) == []


def test_draw_operator(tmp_path, run):
    picture = tmp_path / "operator.png"
    assert run(ROOT / "scripts/figures/sampling.py", "--output", str(picture)).code == 0
    assert picture.stat().st_size > 10_000
