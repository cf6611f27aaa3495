"""Imports point one way: ops <- layers <- models <- {engine, analysis, detection} <- tasks <- entry points."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each part of dkcls may import besides itself; "" is dkcls/__init__.py.
ALLOWED = {
    "config": set(),
    "data": set(),
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "classification": {"data"},
    "engine": {"ops", "layers", "models", "data", "config"},
    "analysis": {"ops", "layers", "models", "data"},
    "detection": {"ops", "layers", "models", "data"},
    "tasks": {"models", "data", "config", "classification", "detection", "engine", "analysis"},
    "": {"ops", "layers", "models"},
}


def imported_modules(source: str, module: str, is_package: bool) -> set[str]:
    """Full names of what a module imports, at any depth of its code; `from a import b` counts as a.b."""
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
    """dkcls.ops.geometry.pair -> ops; dkcls and dkcls.__version__ -> nothing."""
    name = module.split(".")[1] if "." in module else ""
    return "" if name.startswith("__") else name


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    own = part(module)
    assert own in ALLOWED, f"{module}: say in {Path(__file__).name} what dkcls.{own} may import"
    targets = {
        name
        for name in imported_modules(source, module, is_package)
        if name.split(".")[0] == "dkcls"
    }
    allowed = ALLOWED[own] | {own, ""} if own else ALLOWED[own] | {""}
    return [f"{module} imports {name}" for name in sorted(targets) if part(name) not in allowed]


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
        ("dkcls.ops.deform_kernel.cpu", "from ...models import resnet_dw"),
        ("dkcls.layers.base", "def f():\n    from dkcls.models.resnet_dw import ResNetDW"),
        ("dkcls.layers.base", "from dkcls.config import Config"),
        ("dkcls.models.resnet_dw", "from dkcls.engine import trainer"),
        ("dkcls.detection.task", "from dkcls.engine.trainer import Trainer"),
        ("dkcls.engine.build", "from dkcls.classification import Classification"),
        ("dkcls.engine.run", "from dkcls.tasks import train"),
        ("dkcls.analysis.erf", "import torch, dkcls.config"),
        ("dkcls.data.loaders", "from dkcls.ops import deform_kernel2d"),
        ("dkcls.config", "from dkcls.data import loaders"),
    ],
)
def test_a_violation_is_caught(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "dkcls.ops.cond_conv",
            "import torch\nfrom dkcls.ops.checks import autocast\nfrom . import geometry",
        ),
        (
            "dkcls.layers.base",
            "from dkcls.ops import deform_kernel2d\nfrom ..ops.geometry import pair",
        ),
        (
            "dkcls.engine.trainer",
            "from dkcls import __version__\nfrom dkcls.config import Config\nimport dkcls.models",
        ),
    ],
)
def test_what_points_down_is_let_through(module, source):
    assert violations(source, module) == []


def test_a_new_part_must_be_declared():
    with pytest.raises(AssertionError, match=r"what dkcls\.utils may import"):
        violations("", "dkcls.utils.misc")


def test_entry_points_are_imported_by_nobody():
    entry_points = [
        path
        for path in (ROOT / "train.py", ROOT / "eval.py", *(ROOT / "scripts").rglob("*.py"))
        if path.exists()
    ]
    names = {"scripts", *(path.stem for path in entry_points if path.parent == ROOT)}
    for path in (ROOT / "dkcls").rglob("*.py"):
        imported = imported_modules(path.read_text(), module_name(path), path.name == "__init__.py")
        assert not {name.split(".")[0] for name in imported} & names, path
