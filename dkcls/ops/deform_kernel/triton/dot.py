"""Host side of the tensor-core kernels: tiles, packed weights, partial sums, and what ships."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkcls.ops.deform_kernel.backend import Call
from dkcls.ops.deform_kernel.triton.dot_kernels import (
    dot_grad_kernel,
    dot_map_kernel,
    pack_weight_kernel,
    sum_parts_kernel,
)
from dkcls.ops.geometry import Geometry, Pair, make_geometry
from dkcls.ops.triton_launch import (
    TYPES,
    KernelSpec,
    architecture,
    channels_last,
    dense,
    interpreting,
)

MAX_SCOPE = 5
MAX_TAPS = 9  # a table per tap is held in registers
TILES_PER_PROGRAM = 8
WIDE_FROM = 2**31  # elements, from which on 32-bit indices do not reach


@dataclass(frozen=True)
class DotConfig:
    """Tiles of both kernels.

    A map program has 16 * warps * repeat positions, a grad program 32 * warps.
    """

    map_warps: int
    map_repeat: int
    map_fence: int
    grad_block: int  # channels, at most
    partial: bool  # whether there are registers for channels that are no multiple of 32
    grad_warps: int = 2
    grad_registers: int | None = None

    @property
    def map_positions(self) -> int:
        return 16 * self.map_warps * self.map_repeat

    @property
    def grad_positions(self) -> int:
        return 32 * self.grad_warps


# By architecture and table side. tests/ops/test_triton_dot.py checks that none of them spills.
CONFIGS = {
    ("sm_80", 4): DotConfig(4, 2, 0, 256, True, grad_registers=200),
    ("sm_90", 4): DotConfig(2, 2, 2, 256, True),
    ("sm_100", 4): DotConfig(2, 2, 2, 256, False),
    ("gfx942", 4): DotConfig(4, 1, 0, 256, True),
    ("sm_80", 5): DotConfig(4, 2, 0, 128, False),
    ("sm_90", 5): DotConfig(2, 1, 2, 64, False),
    ("sm_100", 5): DotConfig(2, 1, 2, 64, False),
    ("gfx942", 5): DotConfig(4, 1, 0, 128, False),
}


@dataclass(frozen=True)
class Problem:
    """Properties of a call that are fixed when its kernels are compiled."""

    arch: str
    dtype: torch.dtype
    channels: int
    scope: Pair
    geometry: Geometry
    offset: torch.dtype = torch.float32
    wide: bool = False  # whether indices need 64 bits

    @property
    def config(self) -> DotConfig:
        return CONFIGS[self.arch, table_side(self.scope)]

    @property
    def block(self) -> int | None:
        return channel_block(self.channels, self.config, self.wide)

    @property
    def parts(self) -> int:
        """Return the number of blocks of channels, each with a part of the offset gradient."""
        assert self.block is not None, "who launches has asked supports"
        return padded(self.channels) // self.block

    @property
    def constants(self) -> dict[str, Any]:
        geometry = self.geometry
        height, width = geometry.kernel_size
        constants: dict[str, Any] = {"KH": height, "KW": width}
        constants |= {"SH": self.scope[0], "SW": self.scope[1], "TS": table_side(self.scope)}
        axes = {
            "STRIDE": geometry.stride,
            "PAD": geometry.padding,
            "DIL": geometry.dilation,
            "STEP": geometry.step,
        }
        for name, (y, x) in axes.items():
            constants |= {f"{name}_Y": y, f"{name}_X": x}
        return constants | {"C": self.channels, "CP": padded(self.channels)}

    @property
    def assembly(self) -> int:
        """Return the inline assembly that is allowed: 0 none, 1 float16 pairs, 2 bfloat16 pairs."""
        if interpreting() or not self.arch.startswith("sm_"):
            return 0
        return 2 if self.dtype == torch.bfloat16 else 1

    def describe(self, what: str) -> str:
        return f"DK {what}, dot, scope {self.scope[0]}, {TYPES[self.dtype]}, C = {self.channels}"


def _problem(call: Call) -> Problem:
    x, weight, _, _, geometry = call
    height, width = geometry.output_size(*x.shape[2:])
    # Offsets do not matter, because they have fewer channels.
    wide = max(x.numel(), x.shape[0] * x.shape[1] * height * width) >= WIDE_FROM
    scope = weight.shape[2], weight.shape[3]
    offset = _kernel_offset(call).dtype
    return Problem(architecture(x), x.dtype, x.shape[1], scope, geometry.static(), offset, wide)


def _kernel_offset(call: Call) -> Tensor:
    assert call.kernel_offset is not None
    return call.kernel_offset


def supports(call: Call) -> bool:
    """Return whether the kernels take a call with kernel offsets alone.

    They take half precision, small scopes, few taps, and channels that fall into equal blocks of
    whole chunks.
    """
    scope = call.weight.shape[2:]
    if call.x.dtype == torch.float32 or max(scope) > MAX_SCOPE or call.geometry.taps > MAX_TAPS:
        return False
    return _problem(call).block is not None


def table_side(scope: Sequence[int]) -> int:
    return 4 if max(scope) <= 4 else 5


def padded(channels: int) -> int:
    return triton.cdiv(channels, 32) * 32


def channel_block(channels: int, config: DotConfig, wide: bool) -> int | None:
    """Return the channels per block of the gradient kernel, a multiple of 32.

    None means that blocks would be uneven, or far too many. A single block may end in a partial
    chunk, where the configuration has registers for it.
    """
    # 64-bit indices take the registers of half a block.
    limit = config.grad_block // 2 if wide else config.grad_block
    if channels <= limit and config.partial and channels >= 32 and channels % 8 == 0:
        return padded(channels)
    blocks = triton.cdiv(channels, limit)
    even = (n for n in range(blocks, 2 * blocks) if channels and channels % (32 * n) == 0)
    return next((channels // n for n in even), None)


class MapTiles(NamedTuple):
    """Tiles of 8 rows that cover an output, or consecutive positions across images where `flat`."""

    flat: bool
    down: int
    across: int
    total: int  # in all images


def map_tiles(config: DotConfig, images: int, height: int, width: int) -> MapTiles:
    """Return the tiles of a map kernel: flat if over a fifth of the rectangles would be empty."""
    positions = config.map_positions
    down, across = triton.cdiv(height, 8), triton.cdiv(width, positions // 8)
    if height * width < 0.8 * (down * across * positions):
        return MapTiles(True, 1, 1, triton.cdiv(images * height * width, positions))
    return MapTiles(False, down, across, images * down * across)


@cache
def map_spec(
    problem: Problem, flip: bool = False, flat: bool = False, residue: Pair = (0, 0)
) -> KernelSpec:
    """Return the launch of the forward or, with `flip`, of the input gradient.

    The input gradient has a launch for each residue of an input position by the stride.
    """
    config = problem.config
    constants = problem.constants | {
        "FLIP": flip,
        "RES_Y": residue[0],
        "RES_X": residue[1],
        "TH": 0 if flat else 8,
        "TW": 0 if flat else config.map_positions // 8,
        "NW": config.map_warps,
        "R": config.map_repeat,
        "PACK": problem.assembly,
        "FENCE": config.map_fence,
    }
    data = f"*{TYPES[problem.dtype]}"
    pointers = {"SRC": data, "DST": data, "OFFSET": f"*{TYPES[problem.offset]}", "WEIGHT": "*fp16"}
    name = problem.describe("input gradient" if flip else "forward")
    name += ", flat" if flat else ""
    stride = problem.geometry.stride
    if max(stride) > 1:
        name += f", stride {stride[0]}" + (f", residue {residue}" if flip else "")
    chunks = triton.cdiv(problem.channels, 32)
    return KernelSpec(
        name,
        dot_map_kernel,
        pointers,
        constants,
        config.map_warps,
        config.map_positions * problem.channels,
        trips=(chunks,) if chunks > 1 else (),
    )


@cache
def grad_spec(problem: Problem, tiles: int = TILES_PER_PROGRAM) -> KernelSpec:
    """Return the launch of the offset and weight gradients, with the tiles that a program takes."""
    config, parts = problem.config, problem.parts
    projected = problem.geometry.clip == "projected"
    # The gradients' products need bfloat16's range; the interpreter's product of bfloat16 is wrong.
    operand = torch.float32 if interpreting() else problem.dtype
    constants = problem.constants | {
        "CB": problem.block,
        "PROJECTED": projected,
        "TH": 8,
        "TW": config.grad_positions // 8,
        "BP": config.grad_positions,
        "TILES": tiles,
        "DT": getattr(tl, str(operand).removeprefix("torch.")),
        "PACK": problem.assembly,
        "WIDE": problem.wide,
    }
    data, offset = f"*{TYPES[problem.dtype]}", f"*{TYPES[problem.offset]}"
    pointers = dict.fromkeys(("GRAD", "X", "WEIGHT"), data)
    pointers |= {"OFFSET": offset, "OFFSET_GRAD": "*fp32" if parts > 1 else offset}
    pointers |= {"WEIGHT_GRAD": "*fp32"}
    name = problem.describe("offset + weight gradient")
    name += (", projected" if projected else "") + (", 64-bit" if problem.wide else "")
    registers_count = problem.arch.startswith("sm_") and not interpreting()
    return KernelSpec(
        name,
        dot_grad_kernel,
        pointers,
        constants,
        config.grad_warps,
        config.grad_positions * problem.channels * tiles // parts,
        maxnreg=config.grad_registers if registers_count else None,
        trips=(tiles, problem.geometry.taps),
    )


@cache
def pack_spec(
    dtype: torch.dtype, packed: torch.dtype, channels: int, scope: Pair, once: bool
) -> KernelSpec:
    """Return the launch that packs a scope of `dtype`."""
    side = table_side(scope)
    entries = 16 if side == 4 else 32
    constants = {
        "C": channels,
        "CP": padded(channels),
        "SH": scope[0],
        "SW": scope[1],
        "TS": side,
        "SS": entries,
        "ONCE": once,
    }
    pointers = {"WEIGHT": f"*{TYPES[dtype]}", "PACKED": f"*{TYPES[packed]}"}
    name = f"DK packing of the scope, scope {scope[0]}, {TYPES[packed]}"
    return KernelSpec(name, pack_weight_kernel, pointers, constants, 4, entries * 32)


@cache
def sum_spec(problem: Problem) -> KernelSpec:
    """Return the launch that adds up the parts of an offset gradient and clips the sum."""
    names = ("KH", "KW", "SH", "SW", "STEP_Y", "STEP_X")
    constants = {name: problem.constants[name] for name in names}
    constants["PROJECTED"] = problem.geometry.clip == "projected"
    constants |= {"COUNT": problem.parts, "BLOCK": 1024}
    offset = f"*{TYPES[problem.offset]}"
    pointers = {"PARTS": "*fp32", "OFFSET": offset, "OUT": offset}
    name = f"DK sum of {problem.parts} parts of an offset gradient"
    return KernelSpec(name, sum_parts_kernel, pointers, constants, 4, 1024)


def _pack_weight(weight: Tensor, dtype: torch.dtype, once: bool) -> Tensor:
    c, _, sh, sw = weight.shape
    spec = pack_spec(weight.dtype, dtype, c, (sh, sw), once)
    packed = torch.empty(spec.constants["SS"], padded(c), dtype=dtype, device=weight.device)
    spec.launch((padded(c) // 32,), {"WEIGHT": weight.contiguous(), "PACKED": packed})
    return packed


def _strides(offset: Tensor) -> dict[str, int]:
    return dict(zip(("o_image", "o_channel", "o_row", "o_column"), offset.stride(), strict=True))


def _map(
    problem: Problem, src: Tensor, dst: Tensor, weight: Tensor, offset: Tensor, flip: bool
) -> None:
    """Compute dst: the forward of src or, with flip, the input gradient for output gradient src."""
    n, _, dst_h, dst_w = dst.shape
    packed = _pack_weight(weight, torch.float16, once=False)
    arguments = {"SRC": src, "OFFSET": offset, "WEIGHT": packed, "DST": dst}
    sizes = {"images": n, "src_h": src.shape[2], "src_w": src.shape[3]}
    sizes |= {"dst_h": dst_h, "dst_w": dst_w} | _strides(offset)
    strides = problem.geometry.stride if flip else (1, 1)
    for residue in product(range(strides[0]), range(strides[1])):
        height, width = (
            triton.cdiv(size - r, s)
            for size, r, s in zip((dst_h, dst_w), residue, strides, strict=True)
        )
        if height <= 0 or width <= 0:
            continue
        tiles = map_tiles(problem.config, n, height, width)
        sizes |= {"tiles_y": tiles.down, "tiles_x": tiles.across}
        map_spec(problem, flip, tiles.flat, residue).launch((tiles.total,), arguments | sizes)


def forward(call: Call) -> Tensor:
    problem, offset = _problem(call), dense(_kernel_offset(call))
    x = channels_last(call.x)
    out = torch.empty(
        (*x.shape[:2], *call.geometry.output_size(*x.shape[2:])),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    for t in (x, out):
        if 2 * t[0].numel() >= 2**31:
            raise ValueError(f"one image may have at most 2**30 elements, got {list(t.shape[1:])}")
    _map(problem, x, out, call.weight, offset, flip=False)
    return out


def backward(grad: Tensor, call: Call, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    problem, offset = _problem(call), dense(_kernel_offset(call))
    grad, x = channels_last(grad), channels_last(call.x)
    input_grad = weight_grad = offset_grad = None
    if needs[0]:
        input_grad = torch.empty_like(x)
        _map(problem, grad, input_grad, call.weight, offset, flip=True)
    if needs[1] or needs[2]:
        offset_grad, weight_grad = _offset_weight_grad(problem, grad, x, call.weight, offset)
    return input_grad, weight_grad, offset_grad, None


def _offset_weight_grad(
    problem: Problem, grad: Tensor, x: Tensor, weight: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor]:
    n, c, out_h, out_w = grad.shape
    down, across = triton.cdiv(out_h, 8), triton.cdiv(out_w, problem.config.grad_positions // 8)
    tiles = n * down * across
    tiles_each = min(TILES_PER_PROGRAM, tiles)
    programs, parts = triton.cdiv(tiles, tiles_each), problem.parts
    packed = _pack_weight(weight, torch.float32 if interpreting() else x.dtype, once=True)
    offset_grad = torch.empty_like(offset)
    if parts == 1:
        part_grads = offset_grad
    else:
        part_grads = torch.empty(parts * offset.numel(), dtype=torch.float32, device=x.device)
    partial = torch.empty(programs, *packed.shape, dtype=torch.float32, device=x.device)
    arguments = {"GRAD": grad, "X": x, "OFFSET": offset, "WEIGHT": packed}
    arguments |= {"OFFSET_GRAD": part_grads, "WEIGHT_GRAD": partial}
    sizes = {"images": n, "height": x.shape[2], "width": x.shape[3], "out_h": out_h, "out_w": out_w}
    sizes |= {"tiles_y": down, "tiles_x": across, "part": offset.numel()} | _strides(offset)
    grad_spec(problem, tiles_each).launch((programs, parts), arguments | sizes)
    if parts > 1:
        sum_spec(problem).launch(
            (triton.cdiv(offset.numel(), 1024),),
            {
                "PARTS": part_grads,
                "OFFSET": offset,
                "OUT": offset_grad,
                "total": offset.numel(),
                "inner": offset.stride(1),
            },
        )
    side, scope = table_side(problem.scope), problem.scope
    table = partial.sum(0)[: side * side].view(side, side, -1)[: scope[0], : scope[1]]
    whole, rest = c // 32 * 32, c % 32
    if rest:
        # The last chunk overlaps the one before; its new channels are its last `rest` columns.
        table = torch.cat([table[..., :whole], table[..., whole + 32 - rest : whole + 32]], -1)
    return offset_grad, table[..., :c].permute(2, 0, 1).unsqueeze(1)


def layer(
    arch: str,
    dtype: torch.dtype = torch.float16,
    channels: int = 256,
    scope: int = 4,
    *,
    stride: int = 1,
    clip: str = "hard",
    offset: torch.dtype = torch.float32,
    wide: bool = False,
) -> Problem:
    """Return the problem of a 3x3 layer, for compiling its kernels without a GPU."""
    geometry = make_geometry((scope, scope), 3, stride, 1, clip=clip)
    return Problem(arch, dtype, channels, (scope, scope), geometry, offset, wide)


def shipped(arch: str) -> Iterator[KernelSpec]:
    """Yield the configurations of 3x3 layers of the paper's networks, one of each kind."""
    yield pack_spec(torch.float32, torch.float16, 144, (4, 4), once=True)
    yield sum_spec(layer(arch, channels=1024, clip="projected"))
    for scope, dtype in product((4, 5), (torch.float16, torch.bfloat16)):
        yield map_spec(layer(arch, dtype, scope=scope))
        yield grad_spec(layer(arch, dtype, scope=scope))
    for scope in (4, 5):
        yield map_spec(layer(arch, scope=scope), flip=True)
        yield map_spec(layer(arch, scope=scope, stride=2), flip=True, flat=True, residue=(1, 1))
        yield map_spec(layer(arch, channels=64, scope=scope))
        yield grad_spec(layer(arch, channels=64, scope=scope))
        yield grad_spec(layer(arch, channels=960, scope=scope))
    yield map_spec(layer(arch, channels=32, stride=2))
    yield grad_spec(layer(arch, channels=32))
    yield grad_spec(layer(arch, wide=True))
    yield grad_spec(layer(arch, stride=2, clip="projected", offset=torch.float16))
    if CONFIGS[arch, 4].partial:
        yield map_spec(layer(arch, channels=144), flat=True)
        yield grad_spec(layer(arch, channels=144))
