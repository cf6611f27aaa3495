"""Host side of the gather kernels: tiles, tables of weights, partial sums, and what ships."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkcls.ops.deform_kernel.backend import Call
from dkcls.ops.deform_kernel.triton import gather_kernels as kernels
from dkcls.ops.geometry import Geometry, Pair, make_geometry
from dkcls.ops.triton_launch import (
    TYPES,
    KernelSpec,
    architecture,
    channels_last,
    dense,
    interpreting,
)

# Limit for the weight gradients: it bounds their memory, since each program has a partial sum.
WARPS = 4096
# For kernels where ptxas, left alone, may aim at one warp more and spill a few bytes for it.
ALL_REGISTERS = 255


@dataclass(frozen=True)
class Problem:
    """Properties of a call that are fixed when its kernels are compiled.

    `scope` is None where `weight` holds the taps.
    """

    arch: str
    dtype: torch.dtype
    channels: int
    geometry: Geometry
    scope: Pair | None
    image_offset: bool
    per_image: bool = False

    @property
    def pointers(self) -> dict[str, str | None]:
        data, offset = f"*{TYPES[self.dtype]}", "*fp32"
        names = dict.fromkeys(("src", "dst", "grad", "x", "weight"), data) | {
            "grad_x": "*fp32",
            "partial": "*fp32",
        }
        kernel, image = (offset if self.scope else None), (offset if self.image_offset else None)
        return names | {"kernel_offset": kernel, "image_offset": image}

    @property
    def constants(self) -> dict[str, Any]:
        scope = self.scope or (1, 1)
        return {
            "geometry": self.geometry,
            "SCOPE": scope,
            "PER_IMAGE": self.per_image,
            "C": self.channels,
        }

    @property
    def chunk(self) -> int:
        """Return the number of channels that four threads read, 16 bytes each."""
        return 64 // self.dtype.itemsize

    @property
    def positions(self) -> int:
        """Return the number of positions of a tile, with four threads each.

        More threads share a position where channels are not in whole vectors and come one by one.
        """
        return 32 if self.channels * self.dtype.itemsize % 16 == 0 else 8

    def describe(self, what: str) -> str:
        name = {
            (True, False): "DK",
            (True, True): "DCN + DK",
            (False, True): "DCN",
            (False, False): "global DK",
        }
        kind = name[self.scope is not None, self.image_offset]
        scope = f", scope {self.scope[0]}" if self.scope else ""
        stride = f", stride {self.geometry.stride[0]}" if max(self.geometry.stride) > 1 else ""
        return f"{kind} {what}{scope}, {TYPES[self.dtype]}, C = {self.channels}{stride}"


def _spec(
    problem: Problem,
    what: str,
    fn: Any,
    constants: dict[str, Any],
    warps: int,
    elements: int,
    **rest: Any,
) -> KernelSpec:
    constants = {k: v for k, v in (problem.constants | constants).items() if k in fn.arg_names}
    pointers = {
        k: v for k, v in (problem.pointers | rest.pop("pointers", {})).items() if k in fn.arg_names
    }
    constants |= {k: None for k, v in pointers.items() if v is None}
    present = {k: v for k, v in pointers.items() if v is not None}
    if not problem.arch.startswith("sm_") or interpreting():
        rest.pop("maxnreg", None)
    return KernelSpec(problem.describe(what), fn, present, constants, warps, elements, **rest)


def _chunks(channels: int, chunk: int, limit: int) -> tuple[int, int]:
    """Return (chunks per program, blocks): at most `limit` chunks, and equally many per program."""
    chunks = triton.cdiv(channels, chunk)
    blocks = triton.cdiv(chunks, limit)
    return triton.cdiv(chunks, blocks), blocks


@cache
def map_spec(problem: Problem, flip: bool) -> KernelSpec:
    chunk, positions = problem.chunk, problem.positions
    chunks, blocks = _chunks(problem.channels, chunk, 4 if problem.image_offset else 8)
    tiles = {"FLIP": flip, "POSITIONS": positions, "CHUNK": chunk, "CHUNKS": chunks}
    light = problem.dtype == torch.float32 and not problem.image_offset
    what = "input gradient, gather" if flip else "forward, gather"
    return _spec(
        problem,
        what,
        kernels.map_kernel,
        tiles,
        4,
        positions * problem.channels // blocks,
        trips=(problem.geometry.taps,),
        maxnreg=None if light else ALL_REGISTERS,
    )


@cache
def scatter_spec(problem: Problem, ordered: bool) -> KernelSpec:
    positions, chunk, warps = (1, 128, 1) if ordered else (problem.positions, 16, 4)
    chunks, blocks = _chunks(problem.channels, chunk, 2 if ordered else 8)
    tiles = {"ORDERED": ordered, "POSITIONS": positions, "CHUNK": chunk, "CHUNKS": chunks}
    name = "input gradient, ordered scatter" if ordered else "input gradient, scatter"
    trips = (1, problem.geometry.taps) if ordered else (problem.geometry.taps,)
    return _spec(
        problem,
        name,
        kernels.scatter_kernel,
        tiles,
        warps,
        positions * problem.channels // blocks,
        trips=trips,
    )


@cache
def offset_grad_spec(problem: Problem, to_kernel: bool, to_image: bool) -> KernelSpec:
    chunk, positions, both = (
        problem.chunk,
        problem.positions,
        problem.scope is not None and problem.image_offset,
    )
    chunks, blocks = _chunks(problem.channels, chunk, 2 if both else 4)
    tiles = {"POSITIONS": positions, "CHUNK": chunk, "CHUNKS": chunks}
    names = {
        "grad_kernel": "*fp32" if to_kernel else None,
        "grad_image": "*fp32" if to_image else None,
    }
    return _spec(
        problem,
        "offset gradient, gather",
        kernels.offset_grad_kernel,
        tiles,
        4,
        positions * problem.channels,
        pointers=names,
        trips=(problem.geometry.taps, blocks) if blocks > 1 else (problem.geometry.taps,),
        maxnreg=ALL_REGISTERS,
    )


@cache
def scope_grad_spec(problem: Problem) -> KernelSpec:
    assert problem.scope is not None
    stored, full = problem.scope[0] * problem.scope[1], problem.dtype == torch.float32
    block = min((128, 64), key=lambda size: triton.cdiv(problem.channels, size) * size)
    # More entries at once would spill in float32. On sm_100 they would use tensor memory,
    # which takes a tile of its own.
    entries = min(
        max(16, triton.next_power_of_2(stored)), 32 if full or problem.arch == "sm_100" else 128
    )
    positions = max(16, problem.positions)
    elements = (
        8
        * positions
        * problem.channels
        // (triton.cdiv(problem.channels, block) * triton.cdiv(stored, entries))
    )
    tiles = {"POSITIONS": positions, "BLOCK": block, "ENTRIES": entries} | _dot_constants(problem)
    warps = 8 if entries > 32 or (full and problem.image_offset and block == 128) else 4
    return _spec(
        problem,
        "weight gradient, gather",
        kernels.scope_grad_kernel,
        tiles,
        warps,
        elements,
        trips=(8, problem.geometry.taps),
        maxnreg=ALL_REGISTERS if full else None,
    )


def _dot_constants(problem: Problem) -> dict[str, Any]:
    """Return the dot's constants: its operands' dtype and its precision.

    float32 takes three products of tf32 where there is tf32. Half precision takes bfloat16, whose
    range the products of gradients need.
    """
    # The interpreter's dot of bfloat16 is wrong.
    if problem.dtype != torch.float32 and not interpreting():
        return {"OPERAND": tl.bfloat16, "PRECISION": None}
    return {
        "OPERAND": tl.float32,
        "PRECISION": "tf32x3" if problem.arch.startswith("sm_") else "ieee",
    }


@cache
def tap_grad_spec(problem: Problem) -> KernelSpec:
    chunk, positions = problem.chunk, problem.positions
    chunks, blocks = _chunks(problem.channels, chunk, 4 if problem.image_offset else 8)
    tiles = {"POSITIONS": positions, "CHUNK": chunk, "CHUNKS": chunks}
    return _spec(
        problem,
        "weight gradient, gather",
        kernels.tap_grad_kernel,
        tiles,
        4,
        8 * positions * problem.channels // blocks,
        trips=(problem.geometry.taps, 8),
        maxnreg=ALL_REGISTERS,
    )


def _prepare(call: Call) -> tuple[Problem, dict[str, Any]]:
    """Return the problem that the kernels are compiled for, and the arguments that they share.

    x and the table of weights have their channels last.
    """
    x, weight, kernel_offset, image_offset, geometry = call
    static = geometry.static()
    scope = None if kernel_offset is None else (weight.shape[2], weight.shape[3])
    per_image = scope is None and weight.shape[0] > 1
    problem = Problem(
        architecture(x), x.dtype, x.shape[1], static, scope, image_offset is not None, per_image
    )
    ho, wo = geometry.output_size(x.shape[2], x.shape[3])
    arguments: dict[str, Any] = {
        "x": channels_last(x),
        "weight": (
            weight.flatten(1).t() if scope else weight.flatten(2).transpose(1, 2)
        ).contiguous(),
        "taps": geometry.taps,
        "h": x.shape[2],
        "w": x.shape[3],
        "ho": ho,
        "wo": wo,
    }
    for name, offset in (("kernel_offset", kernel_offset), ("image_offset", image_offset)):
        arguments[name] = offset if offset is None else dense(offset)
        strides = (0, 0, 0, 0) if offset is None else arguments[name].stride()
        arguments |= dict(zip((f"{name[0]}_{axis}" for axis in "ncyx"), strides, strict=True))
    largest = max(x.shape[1] * max(x.shape[2] * x.shape[3], ho * wo), 2 * geometry.taps * ho * wo)
    if largest >= 2**31:
        raise ValueError(
            "one image, of the input, output or offsets, must have fewer than 2**31 elements, "
            f"got {largest}"
        )
    return problem, arguments


def _blocks(spec: KernelSpec) -> int:
    """Return the number of blocks of channels."""
    return triton.cdiv(spec.constants["C"], spec.constants["CHUNK"] * spec.constants["CHUNKS"])


def _map(
    problem: Problem, arguments: dict[str, Any], src: Tensor, dst: Tensor, flip: bool
) -> Tensor:
    spec = map_spec(problem, flip)
    stride = problem.geometry.stride if flip else (1, 1)
    n, _, ho, wo = dst.shape
    tiles = triton.cdiv(
        triton.cdiv(ho, stride[0]) * triton.cdiv(wo, stride[1]), spec.constants["POSITIONS"]
    )
    sizes = {"h": src.shape[2], "w": src.shape[3], "ho": ho, "wo": wo, "tiles": tiles}
    spec.launch(
        (n * stride[0] * stride[1] * tiles, _blocks(spec)),
        arguments | sizes | {"src": src, "dst": dst},
    )
    return dst


def forward(call: Call) -> Tensor:
    problem, arguments = _prepare(call)
    x = call.x
    shape = (*x.shape[:2], arguments["ho"], arguments["wo"])
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return _map(problem, arguments, arguments["x"], out, flip=False)


def backward(grad: Tensor, call: Call, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    problem, arguments = _prepare(call)
    arguments["grad"] = channels_last(grad)
    input_grad = weight_grad = kernel_grad = image_grad = None
    if needs[0] and call.image_offset is None:
        input_grad = _map(
            problem, arguments, arguments["grad"], torch.empty_like(arguments["x"]), flip=True
        )
    elif needs[0]:
        input_grad = _scatter(problem, arguments)
    if needs[1]:
        weight_grad = (_tap_grad if problem.scope is None else _scope_grad)(
            problem, arguments
        ).view(call.weight.shape)
    if needs[2] or needs[3]:
        kernel_grad, image_grad = _offset_grad(problem, arguments, needs[2], needs[3])
    return input_grad, weight_grad, kernel_grad, image_grad


def _scatter(problem: Problem, arguments: dict[str, Any]) -> Tensor:
    ordered = torch.are_deterministic_algorithms_enabled()
    spec = scatter_spec(problem, ordered)
    grad_x = torch.zeros_like(arguments["x"], dtype=torch.float32)
    tiles = triton.cdiv(arguments["ho"] * arguments["wo"], spec.constants["POSITIONS"])
    programs = grad_x.shape[0] * (1 if ordered else tiles)
    spec.launch((programs, _blocks(spec)), arguments | {"grad_x": grad_x, "tiles": tiles})
    return grad_x


def _offset_grad(
    problem: Problem, arguments: dict[str, Any], to_kernel: bool, to_image: bool
) -> tuple[Tensor | None, Tensor | None]:
    spec = offset_grad_spec(problem, to_kernel, to_image)
    kernel_grad = torch.empty_like(arguments["kernel_offset"]) if to_kernel else None
    image_grad = torch.empty_like(arguments["image_offset"]) if to_image else None
    tiles = triton.cdiv(arguments["ho"] * arguments["wo"], spec.constants["POSITIONS"])
    grads = {"grad_kernel": kernel_grad, "grad_image": image_grad}
    spec.launch((arguments["x"].shape[0] * tiles,), arguments | grads | {"tiles": tiles})
    return kernel_grad, image_grad


def _scope_grad(problem: Problem, arguments: dict[str, Any]) -> Tensor:
    """Return the scope's gradient [C, Sh*Sw], with partial sums added in a fixed order."""
    spec, (entries, channels) = scope_grad_spec(problem), arguments["weight"].shape
    blocks = (
        triton.cdiv(channels, spec.constants["BLOCK"]),
        triton.cdiv(entries, spec.constants["ENTRIES"]),
    )
    tiles = triton.cdiv(arguments["ho"] * arguments["wo"], spec.constants["POSITIONS"])
    all_tiles = arguments["x"].shape[0] * tiles
    tiles_each = triton.cdiv(all_tiles, max(1, WARPS // (spec.num_warps * blocks[0] * blocks[1])))
    programs = triton.cdiv(all_tiles, tiles_each)
    partial = torch.empty(
        programs, entries, channels, dtype=torch.float32, device=arguments["x"].device
    )
    counts = {"tiles": tiles, "all_tiles": all_tiles, "tiles_each": tiles_each}
    spec.launch((programs, *blocks), arguments | counts | {"partial": partial})
    return partial.sum(0).t().contiguous()


def _tap_grad(problem: Problem, arguments: dict[str, Any]) -> Tensor:
    """Return the taps' gradient [1 or N, C, Kh*Kw], with partial sums added in a fixed order."""
    spec, (_, taps, channels) = tap_grad_spec(problem), arguments["weight"].shape
    n = arguments["x"].shape[0]
    tiles = triton.cdiv(arguments["ho"] * arguments["wo"], spec.constants["POSITIONS"])
    tiles_each = triton.cdiv(tiles, max(1, WARPS // (spec.num_warps * n * _blocks(spec))))
    splits = triton.cdiv(tiles, tiles_each)
    partial = torch.empty(
        n, splits, taps, channels, dtype=torch.float32, device=arguments["x"].device
    )
    spec.launch(
        (n, splits, _blocks(spec)),
        arguments | {"tiles": tiles, "tiles_each": tiles_each, "partial": partial},
    )
    grad = partial.sum(1) if problem.per_image else partial.sum((0, 1)).unsqueeze(0)
    return grad.transpose(1, 2).contiguous()


def step_specs(problem: Problem) -> Iterator[KernelSpec]:
    """Yield what a training step launches, forward and backward, with both forms of the scatter."""
    yield map_spec(problem, flip=False)
    if problem.image_offset:
        yield scatter_spec(problem, ordered=False)
        yield scatter_spec(problem, ordered=True)
    else:
        yield map_spec(problem, flip=True)
    yield tap_grad_spec(problem) if problem.scope is None else scope_grad_spec(problem)
    if problem.scope or problem.image_offset:
        yield offset_grad_spec(problem, problem.scope is not None, problem.image_offset)


def shipped(arch: str) -> Iterator[KernelSpec]:
    """Yield the configurations that 3x3 layers get on an architecture.

    One of each kind comes first, then what strains registers most.
    """

    def problem(dtype, scope, image_offset, channels=256, stride=1, clip="hard"):
        geometry = make_geometry((scope or 3,) * 2, 3, stride, 1, clip=clip)
        per_image = scope is None and not image_offset
        return Problem(
            arch, dtype, channels, geometry, scope and (scope, scope), image_offset, per_image
        )

    for dtype, scope in ((torch.float32, 4), (torch.float16, 9)):
        for kind in product((scope, None), (False, True)):
            yield from step_specs(problem(dtype, *kind))
    for scope in (5, 9):
        yield scope_grad_spec(problem(torch.float32, scope, False))
    yield map_spec(problem(torch.bfloat16, 9, False), flip=False)
    yield scope_grad_spec(problem(torch.bfloat16, 9, True))
    yield map_spec(problem(torch.float32, 4, False, stride=2), flip=True)
    yield map_spec(problem(torch.float32, 4, False, channels=64), flip=False)
    for channels in (33, 72):
        yield map_spec(problem(torch.float32, 4, True, channels), flip=False)
        yield offset_grad_spec(
            problem(torch.float32, 4, True, channels, clip="projected"), True, True
        )
