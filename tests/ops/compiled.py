"""Kernels compiled for absent GPUs: which `make test` compiles, and what they must not do."""

import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

from dkcls.ops.inspect import TARGETS, resources
from dkcls.ops.triton_launch import KernelSpec


def shipped(specs: Callable[[str], Iterable[KernelSpec]]) -> list:
    """Return parameters (arch, spec), with each kernel for one target in turn.

    The other targets are marked `long`.
    """
    by_name: dict[str, list[tuple[str, KernelSpec]]] = {}
    for arch in TARGETS:
        for spec in specs(arch):
            by_name.setdefault(spec.name, []).append((arch, spec))
    parameters = []
    for number, (name, pairs) in enumerate(by_name.items()):
        for place, (arch, spec) in enumerate(pairs):
            marks = [] if place == number % len(pairs) else [pytest.mark.long]
            parameters.append(pytest.param(arch, spec, id=f"{arch}: {name}", marks=marks))
    return parameters


def spills(compiled) -> bool:
    """Return whether a kernel spills. Other Tritons may, and nothing goes wrong with it."""
    return tests_triton() and resources(compiled).spilled != 0


def tests_triton() -> bool:
    """Return whether Triton has the version of requirements.txt."""
    lines = (Path(__file__).parents[2] / "requirements.txt").read_text().splitlines()
    (pin,) = (line for line in lines if line.startswith("triton=="))
    return pin.split(";")[0] == f"triton=={version('triton')}"


def has_atomics(arch: str, compiled) -> bool:
    if arch.startswith("sm_"):
        return bool(re.search(r"\b(atom|red)\.", compiled.asm["ptx"]))
    return "atomic" in compiled.asm["amdgcn"]
