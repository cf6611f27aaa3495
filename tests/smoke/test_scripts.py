"""Every script starts, says what it is for, and says plainly when it has nothing to do."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda p: p.name)
def test_help(script):
    result = run(str(script), "--help")
    assert result.returncode == 0, result.stderr
    assert script.name in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check")
def test_gpu_check_without_a_gpu_says_so_in_one_sentence(tmp_path):
    result = run("scripts/gpu_check.py", "--output", str(tmp_path / "record.txt"))
    assert result.returncode == 1
    assert result.stderr.strip() == "gpu-check: there is no CUDA or ROCm device on this machine, and nothing to check."
    assert list(tmp_path.iterdir()) == []


def test_the_readmes_lines_run():
    operators, networks = (block.split("```")[0] for block in (ROOT / "README.md").read_text().split("```python\n")[1:])
    check = "assert y.shape == x.shape and layer.kernel_generator.weight.grad.any()"
    result = run("-c", "\n".join([operators, check, networks, "assert len(model.feature_info) == 5"]))
    assert result.returncode == 0, result.stderr


def test_draw_operator(tmp_path):
    picture = tmp_path / "operator.png"
    assert run("scripts/draw_operator.py", "--output", str(picture)).returncode == 0
    assert picture.stat().st_size > 10_000
