"""Report the cost of every Triton kernel, from the compiled code: no GPU is needed.

    python scripts/bench/kernels.py                 # both tables, as in docs/performance.md
    python scripts/bench/kernels.py --targets sm_80 --kernels-only

Instructions are those that a thread issues, per output element, with loops weighted by their trip
counts. The memory roof is what a device could do if it only moved each activation and offset once;
the share is how much of the roof the issue slots allow.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import triton
from tqdm import tqdm

from dkcls.ops.deform_kernel.triton import dot, gather
from dkcls.ops.inspect import TARGETS, WORKLOADS, compile_spec, count_instructions, resources
from dkcls.ops.sample_kernel.triton import shipped as shipped_samplers
from dkcls.ops.triton_launch import KernelSpec

MMA = ("HMMA", "HGMMA", "UTCHMMA", "QGMMA")


@dataclass(frozen=True)
class Device:
    """The numbers of a device that the memory roof needs."""

    name: str
    multiprocessors: int
    gigahertz: float
    bytes_per_second: float

    def instructions_per_byte(self) -> float:
        """Return how many thread instructions the schedulers issue while one byte moves.

        There are four schedulers per multiprocessor, of 32 lanes each.
        """
        return self.multiprocessors * 4 * 32 * self.gigahertz * 1e9 / self.bytes_per_second


DEVICES = {
    "sm_80": Device("A100 40 GB", 108, 1.41, 1.555e12),
    "sm_90": Device("H100 SXM", 132, 1.83, 3.35e12),
}


def kernel_rows(arch: str) -> Iterator[str]:
    specs = [
        *dot.shipped(arch),
        *gather.shipped(arch),
        *shipped_samplers(),
    ]
    for spec in tqdm(specs, desc=arch, unit="kernel"):
        yield kernel_row(arch, spec)


def kernel_row(arch: str, spec: KernelSpec) -> str:
    compiled = compile_spec(spec, arch)
    used = resources(compiled)
    row = (
        f"| {spec.name} | {arch} | {spec.num_warps} "
        f"| {used.registers} | {used.spilled} | {used.shared} "
    )
    if not arch.startswith("sm_"):
        return row + "| - | - | - |"
    counts = count_instructions(compiled, spec)
    return row + (
        f"| {counts.per_element:.1f} | {counts.per_element_of(*MMA):.2f} "
        f"| {counts.per_element_of('ATOM', 'RED'):.2f} |"
    )


def layer_instructions(
    arch: str, channels: int, height: int, width: int, stride: int
) -> tuple[float, float, float]:
    """Return instructions per output element: forward, input gradient, other gradients.

    They are those of local DK with scope 4 and batch 64. Positions of a tile that lie outside the
    output count: they issue instructions and give nothing.
    """
    batch = 64
    out_h, out_w = -(-height // stride), -(-width // stride)
    elements = batch * channels * out_h * out_w
    problem = dot.layer(arch, channels=channels, stride=stride)
    config = problem.config

    def total(spec: KernelSpec, programs: int) -> float:
        counts = count_instructions(compile_spec(spec, arch), spec)
        return counts.per_element * spec.elements * programs

    def map_total(h: int, w: int, **options) -> float:
        tiles = dot.map_tiles(config, batch, h, w)
        return total(dot.map_spec(problem, flat=tiles.flat, **options), tiles.total)

    forward = map_total(out_h, out_w)
    residues = [(y, x) for y in range(stride) for x in range(stride)]
    backward = sum(
        map_total(-(-(height - y) // stride), -(-(width - x) // stride), flip=True, residue=(y, x))
        for y, x in residues
    )
    tiles = batch * math.ceil(out_h / 8) * math.ceil(out_w / (config.grad_positions // 8))
    programs = math.ceil(tiles / dot.TILES_PER_PROGRAM) * problem.parts
    gradients = total(dot.grad_spec(problem), programs)
    return forward / elements, backward / elements, gradients / elements


def workload_rows(arch: str) -> Iterator[str]:
    device = DEVICES[arch]
    layers = [(network, *layer) for network, table in WORKLOADS.items() for layer in table]
    for network, channels, height, width, stride, count in tqdm(
        layers, desc=f"{arch} layers", unit="layer"
    ):
        forward, backward, gradients = layer_instructions(arch, channels, height, width, stride)
        offsets = 18 * 4 / channels
        # Bytes per output element: half-precision input and output, float32 offsets.
        moved = 2 * stride**2 + 2 + offsets
        moved_backward = 2 * (2 * stride**2 + 2 + offsets) + 2 * stride**2 + offsets
        both = forward + backward + gradients
        share = min(1.0, device.instructions_per_byte() * moved / forward)
        share_both = min(1.0, device.instructions_per_byte() * (moved + moved_backward) / both)
        yield (
            f"| {network} | {channels}x{height}x{width} / {stride} | {count} | {device.name} "
            f"| {forward:.1f} | {both:.1f} | {share:.0%} | {share_both:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets", nargs="+", choices=TARGETS, default=list(TARGETS), help="architectures"
    )
    parser.add_argument(
        "--kernels-only", action="store_true", help="leave out the table over the networks' layers"
    )
    arguments = parser.parse_args()
    print(f"triton {triton.__version__}\n")
    print(
        "| kernel (3x3, float32 offsets) | target | warps | registers "
        "| spilled bytes | shared bytes | instructions / element ",
        end="",
    )
    print("| MMA / element | atomics / element |\n|---|---|---|---|---|---|---|---|---|")
    for arch in arguments.targets:
        for row in kernel_rows(arch):
            tqdm.write(row)
    if arguments.kernels_only:
        return
    print("\nLocal DK, scope 4, fp16, batch 64; every tap's tile and every gradient counted.\n")
    print(
        "| network | C x H x W / stride | layers | device "
        "| forward | forward + backward | of the memory roof, forward | both |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for arch in (a for a in arguments.targets if a in DEVICES):
        for row in workload_rows(arch):
            tqdm.write(row)


if __name__ == "__main__":
    main()
