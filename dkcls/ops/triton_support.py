"""What the Triton kernels share: reading the scope, launches, and compiling for a GPU that need not be there."""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@triton.jit
def clamp_coordinate(u, last):
    """u clamped to [0, last]; a NaN stays a NaN."""
    u = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(u, last * 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clip_grad(grad, u, last, PROJECTED: tl.constexpr):
    """Zero where u is strictly outside [0, last]; projected: unless descending the gradient brings it back."""
    below = u < 0.0
    above = u > last * 1.0
    if PROJECTED:
        below = below & (grad >= 0.0)
        above = above & (grad <= 0.0)
    return tl.where(below | above, 0.0, grad)


@triton.jit
def scope_axis(offset, k, K: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr):
    """One axis of tap k in the scope: the coordinate before clipping and after."""
    u = offset + tl.clamp((S - 1) * 0.5 + (k - (K - 1) * 0.5) * STEP, 0.0, S - 1.0)
    return u, clamp_coordinate(u, S - 1)


@triton.jit
def scope_cell(c, S: tl.constexpr):
    """A clipped coordinate as the entry below it and how far beyond that it is; a NaN is that far beyond entry 0."""
    cell = tl.minimum(tl.maximum(c, 0.0).to(tl.int32), S - 2 if S > 1 else 0)
    return cell, c - cell.to(tl.float32)


@triton.jit
def hat(distance):
    """What an entry contributes at a distance from it; a NaN stays a NaN."""
    return tl.maximum(1.0 - tl.abs(distance), 0.0, propagate_nan=tl.PropagateNan.ALL)


@dataclass(frozen=True)
class KernelSpec:
    """One configuration in which a kernel is launched: all that compiling it takes, and what weighs its loops.

    `signature` and `constants` together name every argument of `fn`; a pointer that is not there is a constant None.
    """

    name: str
    fn: Any  # triton.JITFunction
    signature: Mapping[str, str]  # run-time argument -> Triton type, "*fp16", "i32"
    constants: Mapping[str, Any]
    num_warps: int
    elements: int  # output elements per program
    num_stages: int = 1
    maxnreg: int | None = None
    trips: tuple[int, ...] = ()  # of each loop, in the order of their start addresses
    divisible: frozenset[str] = (
        frozenset()
    )  # integers that the launcher would see as multiples of 16

    @property
    def options(self) -> dict[str, Any]:
        return launch_options(self.num_warps, self.num_stages, self.maxnreg)

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Run with those of the arguments that the kernel takes."""
        given = {name: arguments[name] for name in self.fn.arg_names if name in arguments}
        self.fn[grid](**(dict(self.constants) | given), **self.options)


def launch_options(
    num_warps: int, num_stages: int = 1, maxnreg: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of a launch, and options of an ahead-of-time compilation."""
    options: dict[str, Any] = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": True,
    }
    return options | ({} if maxnreg is None else {"maxnreg": maxnreg})


def compile_spec(spec: KernelSpec, target: GPUTarget):
    """Compile for a target that need not be there. Not in a process that interprets kernels."""
    signature, attributes = {}, {}
    for i, name in enumerate(spec.fn.arg_names):
        signature[name] = "constexpr" if name in spec.constants else spec.signature[name]
        if signature[name].startswith("*") or name in spec.divisible:
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = spec.options
    if target.backend != "cuda":
        options.pop("maxnreg", None)
    source = ASTSource(spec.fn, signature, dict(spec.constants), attributes)
    return triton.compile(source, target=target, options=options)


@dataclass(frozen=True)
class Resources:
    """What ptxas gave a kernel. Anything on the stack is a spill: our kernels have no local arrays."""

    registers: int
    stack: int
    shared: int


def cuobjdump(compiled, option: str) -> str:
    """The output of the disassembler in Triton's wheel for a kernel compiled for NVIDIA."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout


def resources(compiled) -> Resources:
    usage = re.search(r"REG:(\d+) STACK:(\d+)", cuobjdump(compiled, "-res-usage"))
    assert usage is not None
    return Resources(int(usage[1]), int(usage[2]), compiled.metadata.shared)
