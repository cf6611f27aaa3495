"""Costs of Triton kernels, read from compiled code: no GPU is needed.

Triton is imported where it is used, because WORKLOADS is also for machines without it.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dkcls.ops.triton_launch import KernelSpec

# Architecture -> Triton's backend, its name there, and threads per warp.
TARGETS: dict[str, tuple[str, Any, int]] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

# Depthwise layers of the paper's networks at 224 x 224 pixels:
# (channels, input height, input width, stride, how many such layers).
WORKLOADS = {
    "ResNet-50-DW": [
        (128, 56, 56, 1, 3),
        (256, 56, 56, 2, 1),
        (256, 28, 28, 1, 3),
        (512, 28, 28, 2, 1),
        (512, 14, 14, 1, 5),
        (1024, 14, 14, 2, 1),
        (1024, 7, 7, 1, 2),
    ],
    "MobileNet-V2": [
        (32, 112, 112, 1, 1),
        (96, 112, 112, 2, 1),
        (144, 56, 56, 1, 1),
        (144, 56, 56, 2, 1),
        (192, 28, 28, 1, 2),
        (192, 28, 28, 2, 1),
        (384, 14, 14, 1, 4),
        (576, 14, 14, 1, 2),
        (576, 14, 14, 2, 1),
        (960, 7, 7, 1, 3),
    ],
}


def compile_spec(spec: KernelSpec, arch: str) -> Any:
    """Compile a kernel for an architecture of TARGETS, whose device need not be there.

    A process that interprets kernels must not call it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, name in enumerate(spec.fn.arg_names):
        if name in spec.constants:
            signature[name] = "constexpr"
        else:
            signature[name] = spec.pointers.get(name, "i32")
        if name in spec.pointers:
            attributes[(i,)] = [["tt.divisibility", 16]]
    target, options = GPUTarget(*TARGETS[arch]), spec.options
    if target.backend != "cuda":
        options.pop("maxnreg", None)
    source = ASTSource(spec.fn, signature, dict(spec.constants), attributes)
    return triton.compile(source, target=target, options=options)


@dataclass(frozen=True)
class Resources:
    """Registers per thread, spills, and bytes of shared memory that the compiler gave a kernel.

    NVIDIA's spills are bytes of stack, since our kernels have no local arrays; AMD's are registers.
    """

    registers: int
    spilled: int
    shared: int


def resources(compiled: Any) -> Resources:
    """Return the resources of a kernel compiled for NVIDIA or AMD."""
    if "amdgcn" in compiled.asm:
        text, keys = compiled.asm["amdgcn"], (r"\.vgpr_count:\s+", r"\.vgpr_spill_count:\s+")
    else:
        text, keys = _cuobjdump(compiled, "-res-usage"), ("REG:", "STACK:")
    registers, spilled = (int(re.findall(rf"{key}(\d+)", text)[0]) for key in keys)
    return Resources(registers, spilled, compiled.metadata.shared)


def _cuobjdump(compiled: Any, option: str) -> str:
    """Return what the disassembler in Triton's wheel prints of a kernel compiled for NVIDIA."""
    import triton

    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run(
            [tool, option, file.name], capture_output=True, text=True, check=True
        ).stdout


_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class Instructions:
    """Thread instructions of one program, by operation; `elements` output elements share them."""

    by_operation: Counter[str]
    threads: int
    elements: int

    @property
    def per_element(self) -> float:
        return sum(self.by_operation.values()) * self.threads / self.elements

    def per_element_of(self, *prefixes: str) -> float:
        count = sum(
            n for operation, n in self.by_operation.items() if operation.startswith(prefixes)
        )
        return count * self.threads / self.elements


def _parse(sass: str) -> list[tuple[int, str, int | None]]:
    """Return (address, operation, branch target) of every instruction."""
    instructions = []
    for line in sass.splitlines():
        if match := _INSTRUCTION.match(line):
            target = _TARGET.search(match[3]) if match[2].startswith("BRA") else None
            instructions.append(
                (int(match[1], 16), match[2], int(target[1], 16) if target else None)
            )
    return instructions


def count_instructions(compiled: Any, spec: KernelSpec) -> Instructions:
    """Count the instructions of a kernel compiled for NVIDIA.

    Loops are backward branches; `spec.trips` says how often each of them runs.
    """
    instructions = _parse(_cuobjdump(compiled, "-sass"))
    loops = sorted(
        (target, at) for at, _, target in instructions if target is not None and target < at
    )
    trips_of_loops = spec.trips if loops else ()  # without any, the compiler has unrolled them all
    if len(loops) != len(trips_of_loops):
        raise ValueError(
            f"{spec.name}: expected {len(spec.trips)} loops, as declared, "
            f"got {len(loops)} in the SASS"
        )
    counts: Counter[str] = Counter()
    for at, operation, target in instructions:
        if operation == "NOP" or target == at:  # padding behind the end
            continue
        weight = 1
        for (start, end), trips in zip(loops, trips_of_loops, strict=True):
            weight *= trips if start <= at <= end else 1
        counts[operation] += weight
    return Instructions(counts, 32 * spec.num_warps, spec.elements)
