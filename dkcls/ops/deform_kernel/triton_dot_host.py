"""Launching the tensor-core kernels: tiles, packed weights, partial sums; and the list of what ships."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkcls.ops.deform_kernel.triton_dot import (
    dot_grad_kernel,
    dot_map_kernel,
    pack_weight_kernel,
    sum_parts_kernel,
)
from dkcls.ops.geometry import Geometry, make_geometry
from dkcls.ops.triton_host import architecture, channels_last, dense, interpreting
from dkcls.ops.triton_support import KernelSpec, launch_options

MAX_SCOPE = 5
MAX_TAPS = 9  # a table per tap is held in registers
TILES_PER_PROGRAM = 8
WIDE_FROM = 2**31  # elements, from which on 32-bit indices do not reach


@dataclass(frozen=True)
class DotConfig:
    """Tiles of both kernels. A map program has 16 * warps * repeat positions, a grad program 32 * warps."""

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


# By architecture and table side. None of them spills: tests/ops/test_triton_dot.py reads it off the compiled kernels.
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


def supports(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """Half precision, small scopes, few taps, and channels that fall into equal blocks of whole chunks."""
    scope = weight.shape[2:]
    if x.dtype == torch.float32 or max(scope) > MAX_SCOPE or geometry.taps > MAX_TAPS:
        return False
    config = CONFIGS[architecture(x), table_side(scope)]
    return channel_block(x.shape[1], config, _is_wide(x, geometry)) is not None


def _is_wide(x: Tensor, geometry: Geometry) -> bool:
    height, width = geometry.output_size(*x.shape[2:])
    return (
        max(x.numel(), x.shape[0] * x.shape[1] * height * width) >= WIDE_FROM
    )  # offsets have fewer channels


def table_side(scope: Sequence[int]) -> int:
    return 4 if max(scope) <= 4 else 5


def padded(channels: int) -> int:
    return triton.cdiv(channels, 32) * 32


def channel_block(channels: int, config: DotConfig, wide: bool) -> int | None:
    """Channels per block of the gradient kernel, a multiple of 32; None where blocks would be uneven, or far too many.

    A single block may end in a partial chunk, where the configuration has registers for it.
    """
    limit = (
        config.grad_block // 2 if wide else config.grad_block
    )  # 64-bit indices take the registers of half a block
    if channels <= limit and config.partial and channels >= 32 and channels % 8 == 0:
        return padded(channels)
    blocks = triton.cdiv(channels, limit)
    even = (n for n in range(blocks, 2 * blocks) if channels and channels % (32 * n) == 0)
    return next((channels // n for n in even), None)


def tile_shape(height: int, width: int, positions: int) -> tuple[int, int]:
    """8 rows by what fits; (0, 0), consecutive positions across images, where a fifth of such tiles would be empty."""
    rows, columns = 8, positions // 8
    covered = triton.cdiv(height, rows) * triton.cdiv(width, columns) * positions
    return (rows, columns) if height * width >= 0.8 * covered else (0, 0)


def _geometry_constants(scope: Sequence[int], geometry: Geometry) -> dict[str, Any]:
    sides = {"K": geometry.kernel_size, "S": scope}
    axes = {
        "STRIDE": geometry.stride,
        "PAD": geometry.padding,
        "DIL": geometry.dilation,
        "STEP": geometry.step,
    }
    constants: dict[str, Any] = {
        f"{name}{axis}": v
        for name, pair in sides.items()
        for axis, v in zip("HW", pair, strict=True)
    }
    constants |= {
        f"{name}_{axis}": v
        for name, pair in axes.items()
        for axis, v in zip("YX", pair, strict=True)
    }
    return constants | {"TS": table_side(scope)}


def _pack_mode(dtype: torch.dtype, arch: str) -> int:
    """Which inline assembly the kernels may use: 0 none, 1 for pairs of float16, 2 for pairs of bfloat16."""
    if interpreting() or not arch.startswith("sm_"):
        return 0
    return 2 if dtype == torch.bfloat16 else 1


def _map_constants(
    arch: str,
    dtype: torch.dtype,
    channels: int,
    scope: Sequence[int],
    geometry: Geometry,
    tile: tuple[int, int],
    flip: bool,
    residue: Sequence[int],
) -> dict[str, Any]:
    config = CONFIGS[arch, table_side(scope)]
    return _geometry_constants(scope, geometry) | {
        "C": channels, "CP": padded(channels), "FLIP": flip, "RES_Y": residue[0],
        "RES_X": residue[1], "TH": tile[0], "TW": tile[1], "NW": config.map_warps, "R": config.map_repeat,
        "PACK": _pack_mode(dtype, arch), "FENCE": config.map_fence,
    }  # fmt: skip


def _grad_constants(
    arch: str,
    dtype: torch.dtype,
    channels: int,
    scope: Sequence[int],
    geometry: Geometry,
    tiles: int,
    wide: bool,
) -> dict[str, Any]:
    config = CONFIGS[arch, table_side(scope)]
    # the gradients' products need bfloat16's range; the interpreter's product of bfloat16 is wrong
    wide_dtype = tl.float32 if interpreting() else getattr(tl, str(dtype).removeprefix("torch."))
    return _geometry_constants(scope, geometry) | {
        "C": channels, "CP": padded(channels), "CB": channel_block(channels, config, wide),
        "PROJECTED": geometry.clip == "projected", "TH": 8, "TW": config.grad_positions // 8, "BP": config.grad_positions,
        "TILES": tiles, "DT": wide_dtype, "PACK": _pack_mode(dtype, arch), "WIDE": wide,
    }  # fmt: skip


def _pack_weight(weight: Tensor, dtype: torch.dtype, once: bool) -> Tensor:
    c, _, sh, sw = weight.shape
    side = table_side((sh, sw))
    entries = 16 if side == 4 else 32
    packed = torch.empty(entries, padded(c), dtype=dtype, device=weight.device)
    pack_weight_kernel[(padded(c) // 32,)](
        weight.contiguous(),
        packed,
        C=c,
        CP=padded(c),
        SH=sh,
        SW=sw,
        TS=side,
        SS=entries,
        ONCE=once,
        **launch_options(4),
    )
    return packed


def _map(
    src: Tensor, dst: Tensor, weight: Tensor, offset: Tensor, geometry: Geometry, flip: bool
) -> None:
    """dst = the forward of src or, with flip, the input gradient for the output gradient src."""
    arch, scope = architecture(src), weight.shape[2:]
    config = CONFIGS[arch, table_side(scope)]
    packed = _pack_weight(weight, torch.float16, once=False)
    n, c, dst_h, dst_w = dst.shape
    strides = geometry.stride if flip else (1, 1)
    for residue in product(range(strides[0]), range(strides[1])):
        height, width = (
            triton.cdiv(size - r, s)
            for size, r, s in zip((dst_h, dst_w), residue, strides, strict=True)
        )
        if height <= 0 or width <= 0:
            continue
        tile = tile_shape(height, width, config.map_positions)
        if tile == (0, 0):
            down, across, tiles = 1, 1, triton.cdiv(n * height * width, config.map_positions)
        else:
            down, across = triton.cdiv(height, tile[0]), triton.cdiv(width, tile[1])
            tiles = n * down * across
        dot_map_kernel[(tiles,)](
            src, offset, packed, dst, n, *src.shape[2:], dst_h, dst_w, down, across, *offset.stride(),
            **_map_constants(arch, src.dtype, c, scope, geometry, tile, flip, residue),
            **launch_options(config.map_warps),
        )  # fmt: skip


def forward(
    x: Tensor, weight: Tensor, kernel_offset: Tensor, image_offset: None, geometry: Geometry
) -> Tensor:
    x, offset = channels_last(x), dense(kernel_offset)
    out = torch.empty(
        (*x.shape[:2], *geometry.output_size(*x.shape[2:])),
        dtype=x.dtype,
        device=x.device,
        memory_format=torch.channels_last,
    )
    for t in (x, out):
        if 2 * t[0].numel() >= 2**31:
            raise ValueError(f"one image may have at most 2**30 elements, got {list(t.shape[1:])}")
    _map(x, out, weight, offset, geometry, flip=False)
    return out


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor,
    image_offset: None,
    geometry: Geometry,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    grad, x, offset = channels_last(grad), channels_last(x), dense(kernel_offset)
    input_grad = weight_grad = offset_grad = None
    if needs[0]:
        input_grad = torch.empty_like(x)
        _map(grad, input_grad, weight, offset, geometry, flip=True)
    if needs[1] or needs[2]:
        offset_grad, weight_grad = _offset_weight_grad(grad, x, weight, offset, geometry)
    return input_grad, weight_grad, offset_grad, None


def _offset_weight_grad(
    grad: Tensor, x: Tensor, weight: Tensor, offset: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    arch, scope = architecture(x), weight.shape[2:]
    config = CONFIGS[arch, table_side(scope)]
    n, c, out_h, out_w = grad.shape
    down, across = triton.cdiv(out_h, 8), triton.cdiv(out_w, config.grad_positions // 8)
    tiles_each = min(TILES_PER_PROGRAM, n * down * across)
    constants = _grad_constants(
        arch, x.dtype, c, scope, geometry, tiles_each, _is_wide(x, geometry)
    )
    parts = constants["CP"] // constants["CB"]
    packed = _pack_weight(weight, torch.float32 if interpreting() else x.dtype, once=True)
    programs = triton.cdiv(n * down * across, tiles_each)
    offset_grad = torch.empty_like(offset)
    part_grads = (
        offset_grad
        if parts == 1
        else torch.empty(parts * offset.numel(), dtype=torch.float32, device=x.device)
    )
    partial = torch.empty(programs, *packed.shape, dtype=torch.float32, device=x.device)
    dot_grad_kernel[(programs, parts)](
        grad, x, offset, packed, part_grads, partial, n, *x.shape[2:], out_h, out_w, down, across, offset.numel(),
        *offset.stride(), **constants, **launch_options(config.grad_warps, maxnreg=_max_registers(config, arch)),
    )  # fmt: skip
    if parts > 1:
        names = ("KH", "KW", "SH", "SW", "STEP_Y", "STEP_X", "PROJECTED")
        sum_parts_kernel[(triton.cdiv(offset.numel(), 1024),)](
            part_grads, offset, offset_grad, offset.numel(), offset.stride(1), COUNT=parts,
            **{name: constants[name] for name in names}, BLOCK=1024, **launch_options(4),
        )  # fmt: skip
    side = table_side(scope)
    table = partial.sum(0)[: side * side].view(side, side, -1)[: scope[0], : scope[1]]
    whole, rest = c // 32 * 32, c % 32
    if rest:  # they are at the end of their chunk, after the channels that it repeats
        table = torch.cat([table[..., :whole], table[..., whole + 32 - rest : whole + 32]], -1)
    return offset_grad, table[..., :c].permute(2, 0, 1).unsqueeze(1)


def _max_registers(config: DotConfig, arch: str) -> int | None:
    return None if interpreting() or not arch.startswith("sm_") else config.grad_registers


_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def map_spec(
    arch: str,
    dtype: torch.dtype = torch.float16,
    channels: int = 256,
    scope: int = 4,
    *,
    flip: bool = False,
    flat: bool = False,
    stride: int = 1,
    residue: tuple[int, int] = (0, 0),
    offset: torch.dtype = torch.float32,
) -> KernelSpec:
    """The forward or input-gradient launch of a 3x3 layer, for compiling without a GPU."""
    config = CONFIGS[arch, table_side((scope, scope))]
    geometry = make_geometry((scope, scope), 3, stride, 1)
    tile = (0, 0) if flat else (8, config.map_positions // 8)
    constants = _map_constants(arch, dtype, channels, (scope, scope), geometry, tile, flip, residue)
    signature = {name: "i32" for name in dot_map_kernel.arg_names if name not in constants}
    signature |= {
        "SRC": f"*{_TYPES[dtype]}",
        "DST": f"*{_TYPES[dtype]}",
        "OFFSET": f"*{_TYPES[offset]}",
        "WEIGHT": "*fp16",
    }
    kind = "input gradient" if flip else "forward"
    shape = f"{', flat' if flat else ''}{f', stride {stride}' if stride > 1 else ''}"
    shape += f", residue {residue}" if flip and stride > 1 else ""
    trips = triton.cdiv(channels, 32)
    return KernelSpec(
        f"DK {kind}, dot, scope {scope}, {_TYPES[dtype]}, C = {channels}{shape}", dot_map_kernel, signature, constants,
        config.map_warps, config.map_positions * channels, trips=(trips,) if trips > 1 else (),
    )  # fmt: skip


def grad_spec(
    arch: str,
    dtype: torch.dtype = torch.float16,
    channels: int = 256,
    scope: int = 4,
    *,
    clip: str = "hard",
    wide: bool = False,
    stride: int = 1,
    offset: torch.dtype = torch.float32,
) -> KernelSpec:
    """The offset and weight gradient launch of a 3x3 layer, for compiling without a GPU."""
    config = CONFIGS[arch, table_side((scope, scope))]
    geometry = make_geometry((scope, scope), 3, stride, 1, clip=clip)
    constants = _grad_constants(
        arch, dtype, channels, (scope, scope), geometry, TILES_PER_PROGRAM, wide
    )
    data, parts = f"*{_TYPES[dtype]}", constants["CP"] // constants["CB"]
    signature = {name: "i32" for name in dot_grad_kernel.arg_names if name not in constants}
    signature |= {
        "GRAD": data,
        "X": data,
        "OFFSET": f"*{_TYPES[offset]}",
        "WEIGHT": data,
        "WEIGHT_GRAD": "*fp32",
    }
    signature |= {"OFFSET_GRAD": "*fp32" if parts > 1 else f"*{_TYPES[offset]}"}
    details = f"{', projected' if clip == 'projected' else ''}{', 64-bit' if wide else ''}"
    return KernelSpec(
        f"DK offset + weight gradient, dot, scope {scope}, {_TYPES[dtype]}, C = {channels}{details}", dot_grad_kernel,
        signature, constants, config.grad_warps, config.grad_positions * channels * TILES_PER_PROGRAM // parts,
        maxnreg=_max_registers(config, arch), trips=(TILES_PER_PROGRAM, 9),
    )  # fmt: skip


def _helper_specs() -> Iterator[KernelSpec]:
    """Packing the scope, and adding up the parts of an offset gradient."""
    constants: dict[str, Any] = {
        "C": 144,
        "CP": 160,
        "SH": 4,
        "SW": 4,
        "TS": 4,
        "SS": 16,
        "ONCE": True,
    }
    signature = {"WEIGHT": "*fp32", "PACKED": "*fp16"}
    yield KernelSpec(
        "DK packing of the scope, scope 4, fp16",
        pack_weight_kernel,
        signature,
        constants,
        4,
        16 * 32,
    )
    constants = {
        "COUNT": 4,
        "KH": 3,
        "KW": 3,
        "SH": 4,
        "SW": 4,
        "STEP_Y": 1.0,
        "STEP_X": 1.0,
        "PROJECTED": True,
        "BLOCK": 1024,
    }
    signature = {
        "PARTS": "*fp32",
        "OFFSET": "*fp32",
        "OUT": "*fp32",
        "total": "i32",
        "inner": "i32",
    }
    yield KernelSpec(
        "DK sum of 4 parts of an offset gradient", sum_parts_kernel, signature, constants, 4, 1024
    )


def shipped(arch: str) -> Iterator[KernelSpec]:
    """The configurations that 3x3 layers of the paper's networks get on an architecture, one of each kind."""
    yield from _helper_specs()
    for scope, dtype in product((4, 5), (torch.float16, torch.bfloat16)):
        yield map_spec(arch, dtype, scope=scope)
        yield grad_spec(arch, dtype, scope=scope)
    for scope in (4, 5):
        yield map_spec(arch, scope=scope, flip=True)
        yield map_spec(arch, scope=scope, flip=True, flat=True, stride=2, residue=(1, 1))
        yield map_spec(arch, scope=scope, channels=64)
        yield grad_spec(arch, scope=scope, channels=64)
        yield grad_spec(arch, scope=scope, channels=960)
    yield map_spec(arch, channels=32, stride=2)
    yield grad_spec(arch, channels=32)
    yield grad_spec(arch, wide=True)
    yield grad_spec(arch, clip="projected", stride=2, offset=torch.float16)
    if CONFIGS[arch, 4].partial:
        yield map_spec(arch, channels=144, flat=True)
        yield grad_spec(arch, channels=144)
