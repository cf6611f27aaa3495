"""Imports point one way: a module imports lower rungs of the ladder, and its own.

Packages that need not be installed have one home each.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LADDER = (
    {"base"},
    {"ops"},
    {"layers"},
    {"models"},
    {"engine"},
    {"tasks"},
    {"export", "analysis"},
    {"report"},
    {"cli"},
)
RUNG = {part: i for i, parts in enumerate(LADDER) for part in parts}
DATA_FROM = RUNG["engine"]  # data stands beside the rungs below, and imports only base
HOMES = {  # optional package -> the modules that import it, by the beginnings of their names
    "hydra": {"cli"},
    "omegaconf": {"cli", "config"},
    "matplotlib": {"report"},
    "sklearn": {"analysis", "report"},
    "scipy": {"analysis", "report"},
    "pycocotools": {"tasks.detection"},
    "onnx": {"engine.onnx", "export"},
    "onnxruntime": {"engine.onnx", "export"},
    "onnxscript": {"engine.onnx", "export"},
}
BELOW_ENGINE = {"torch", "timm", "numpy", "numba", "llvmlite", "triton", *sys.stdlib_module_names}


def imported_modules(source: str, module: str, is_package: bool) -> set[str]:
    """Full names of what a module imports, at any depth of its code; `from a import b` is a.b."""
    names: set[str] = set()
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
    return names


def part(module: str) -> str:
    """dkcls.ops.geometry.pair -> ops; a file directly in dkcls, and dkcls.config -> base."""
    name = (module.split(".") + [""])[1]
    is_file = (ROOT / "dkcls" / f"{name}.py").is_file() and name not in RUNG
    return "base" if is_file or name in ("", "config") or name.startswith("__") else name


def may_import(own: str, other: str) -> bool:
    if own == other or other == "base":
        return True
    if own == "data":
        return False
    return RUNG[own] >= DATA_FROM if other == "data" else RUNG[own] > RUNG[other]


def at_home(module: str, package: str) -> bool:
    name = module.removeprefix("dkcls.")
    if name.startswith("config"):
        return package == "omegaconf" or package in sys.stdlib_module_names
    if package in HOMES:
        return any(f"{name}.".startswith(f"{home}.") for home in HOMES[package])
    return RUNG.get(part(module), DATA_FROM) >= DATA_FROM or package in BELOW_ENGINE


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    if module in ("dkcls", "dkcls.__main__"):  # they import what is asked of them, then
        return []
    own = part(module)
    assert own in RUNG or own == "data", f"{module}: {own} has no rung in {Path(__file__).name}"
    wrong = []
    for name in sorted(imported_modules(source, module, is_package)):
        if name.split(".")[0] == "dkcls":
            good = may_import(own, part(name))
        else:
            good = at_home(module, name.split(".")[0])
        if not good:
            wrong.append(f"{module} imports {name}")
    return wrong


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "dkcls").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_point_one_way(path):
    assert violations(path.read_text(), module_name(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dkcls.ops.geometry", "import dkcls.layers.base"),
        ("dkcls.ops.geometry", "from dkcls import layers"),
        ("dkcls.ops.geometry", "from ..layers.base import DynamicConv2d"),
        ("dkcls.ops.geometry", "from .. import layers"),
        ("dkcls.ops.geometry", "import torchvision"),
        ("dkcls.ops.deform_kernel.cpu", "from ...models import resnet_dw"),
        ("dkcls.layers.base", "def f():\n    from dkcls.models.resnet_dw import ResNetDW"),
        ("dkcls.layers.base", "from dkcls.data import Batch"),
        ("dkcls.models.resnet_dw", "from dkcls.engine import trainer"),
        ("dkcls.models.weights", "import safetensors"),
        ("dkcls.data.loader", "from dkcls.ops import deform_kernel2d"),
        ("dkcls.data.sets.tar", "from dkcls.engine.run import train"),
        ("dkcls.engine.run", "from dkcls.tasks.classification import Classification"),
        ("dkcls.engine.log", "import matplotlib.figure"),
        ("dkcls.engine.network", "import onnx"),
        ("dkcls.tasks.detection.task", "import dkcls.export"),
        ("dkcls.tasks.classification.task", "from pycocotools.coco import COCO"),
        ("dkcls.analysis.erf", "import dkcls.export"),
        ("dkcls.analysis.erf", "import dkcls.report.style"),
        ("dkcls.report.page", "from dkcls.cli import eval"),
        ("dkcls.registry", "from dkcls.engine import task"),
        ("dkcls.files", "import hydra"),
        ("dkcls.config.run", "import hydra"),
        ("dkcls.config.data", "import torch"),
        ("dkcls.config.keys", "from dkcls.engine import task"),
    ],
)
def test_a_violation_is_caught(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dkcls.ops.cond_conv", "import torch\nfrom dkcls.ops.checks import a\nfrom . import b"),
        ("dkcls.layers.base", "from dkcls.ops import deform_kernel2d\nfrom ..ops import geometry"),
        ("dkcls.data.loader", "from dkcls.errors import DataError\nimport torchvision"),
        ("dkcls.engine.trainer", "from dkcls import __version__\nimport dkcls.models, dkcls.data"),
        ("dkcls.report.sections", "import dkcls.analysis.erf, matplotlib, scipy"),
        ("dkcls.cli.compose", "import hydra, dkcls.report.page, dkcls.export"),
    ],
)
def test_what_points_down_is_let_through(module, source):
    assert violations(source, module) == []


def test_a_new_part_must_have_a_rung():
    with pytest.raises(AssertionError, match="utils has no rung"):
        violations("", "dkcls.utils.misc")


def test_entry_points_are_imported_by_nobody():
    entry_points = [ROOT / "train.py", ROOT / "eval.py", *(ROOT / "scripts").rglob("*.py")]
    names = {"scripts", *(path.stem for path in entry_points if path.parent == ROOT)}
    for path in (ROOT / "dkcls").rglob("*.py"):
        is_package = path.name == "__init__.py"
        imported = imported_modules(path.read_text(), module_name(path), is_package)
        assert not {name.split(".")[0] for name in imported} & names, path
