"""What a compiled kernel will issue: instructions counted in its SASS, loops weighed by the trip counts that it declares."""

import re
from collections import Counter
from dataclasses import dataclass

from dkcls.ops.triton_support import KernelSpec, cuobjdump

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
    """(address, operation, branch target) of every instruction."""
    instructions = []
    for line in sass.splitlines():
        if match := _INSTRUCTION.match(line):
            target = _TARGET.search(match[3]) if match[2].startswith("BRA") else None
            instructions.append(
                (int(match[1], 16), match[2], int(target[1], 16) if target else None)
            )
    return instructions


def count_instructions(compiled, spec: KernelSpec) -> Instructions:
    """Count a kernel compiled for NVIDIA. Loops are backward branches; `spec.trips` says how often each one runs."""
    instructions = _parse(cuobjdump(compiled, "-sass"))
    loops = sorted(
        (target, at) for at, _, target in instructions if target is not None and target < at
    )
    trips_of_loops = spec.trips if loops else ()  # without any, the compiler has unrolled them all
    if len(loops) != len(trips_of_loops):
        raise ValueError(
            f"{spec.name}: expected {len(spec.trips)} loops, as declared, got {len(loops)} in the SASS"
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
