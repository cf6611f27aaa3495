"""Triton kernels that sample kernels from a scope: one launch forward, two and a sum backward.

No atomics; sums are in float32. All tensors are contiguous: weight [rows, Sh*Sw] with
rows = Cout * Cin/groups, kernel_offset [N, 2*Kh*Kw], kernels [N, rows, Kh*Kw]. `geometry` is a
Geometry of tuples, SCOPE is (Sh, Sw), `taps` is Kh*Kw.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkcls.ops.geometry import Geometry, Pair, make_geometry
from dkcls.ops.triton_device import clip_grad, hat, scope_axis, scope_cell
from dkcls.ops.triton_launch import TYPES, KernelSpec, device_guard

# Where rows give the weight's gradient fewer programs, the batch is split to reach this number.
PROGRAMS = 256
_SIZES = ["images", "rows", "taps", "images_each"]


@triton.jit
def _place(kernel_offset, n, tap, live, geometry: tl.constexpr, SCOPE: tl.constexpr):
    """Return the coordinates (uy, ux) of image n's taps before clipping, (cy, cx) after it."""
    KH: tl.constexpr = geometry.kernel_size[0]
    KW: tl.constexpr = geometry.kernel_size[1]
    p = kernel_offset + n * (2 * KH * KW) + 2 * tap
    oy = tl.load(p, mask=live, other=0.0).to(tl.float32)
    ox = tl.load(p + 1, mask=live, other=0.0).to(tl.float32)
    uy, cy = scope_axis(oy, tap // KW, KH, SCOPE[0], geometry.step[0])
    ux, cx = scope_axis(ox, tap % KW, KW, SCOPE[1], geometry.step[1])
    return uy, ux, cy, cx


@triton.jit
def _corners(p, mask, SCOPE: tl.constexpr):
    """Return the entry at p and those right of it, below it, and both.

    Along an axis with one entry, its neighbour is the entry itself.
    """
    RIGHT: tl.constexpr = 1 if SCOPE[1] > 1 else 0
    DOWN: tl.constexpr = SCOPE[1] if SCOPE[0] > 1 else 0
    return (
        tl.load(p, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + RIGHT, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + DOWN, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + (DOWN + RIGHT), mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit(do_not_specialize=_SIZES)
def sample_kernel(
    weight,
    kernel_offset,
    out,
    rows,
    geometry: tl.constexpr,
    SCOPE: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """Sample the kernels, out [N, rows, Kh*Kw].

    Grid (blocks of ROWS rows, N); TAPS is Kh*Kw padded to a power of two.
    """
    COUNT: tl.constexpr = geometry.kernel_size[0] * geometry.kernel_size[1]
    n = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TAPS)
    _, _, cy, cx = _place(kernel_offset, n, t, t < COUNT, geometry, SCOPE)
    iy, fy = scope_cell(cy, SCOPE[0])
    ix, fx = scope_cell(cx, SCOPE[1])
    mask = (r < rows)[:, None] & (t < COUNT)[None, :]
    p = weight + (r * (SCOPE[0] * SCOPE[1]))[:, None] + (iy * SCOPE[1] + ix)[None, :]
    w00, w01, w10, w11 = _corners(p, mask, SCOPE)
    fy, fx = fy[None, :], fx[None, :]
    value = (1.0 - fy) * ((1.0 - fx) * w00 + fx * w01) + fy * ((1.0 - fx) * w10 + fx * w11)
    at = out + n * rows * COUNT + (r * COUNT)[:, None] + t[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def sample_weight_grad_kernel(
    grad,
    kernel_offset,
    partial,
    images,
    rows,
    taps,
    images_each,
    geometry: tl.constexpr,
    SCOPE: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Sum the weight's gradient over images_each images, in their order.

    grad [N, rows, Kh*Kw], partial [splits, rows, Sh*Sw] in float32. Grid (blocks of ROWS rows,
    splits of the batch); ENTRIES is Sh*Sw padded to a power of two.
    """
    STORED: tl.constexpr = SCOPE[0] * SCOPE[1]
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.arange(0, ENTRIES)
    row, column = (s // SCOPE[1]).to(tl.float32), (s % SCOPE[1]).to(tl.float32)
    total = tl.zeros((ROWS, ENTRIES), tl.float32)
    first = tl.program_id(1) * images_each
    for i in tl.range(tl.minimum(images_each, images - first)):
        n = (first + i).to(tl.int64)
        for tap in tl.range(taps):
            _, _, cy, cx = _place(kernel_offset, n, tap, True, geometry, SCOPE)
            g = tl.load(grad + n * rows * taps + r * taps + tap, mask=r < rows, other=0.0).to(
                tl.float32
            )
            total += g[:, None] * (hat(cy - row) * hat(cx - column))[None, :]
    at = (
        partial + tl.program_id(1).to(tl.int64) * rows * STORED + (r * STORED)[:, None] + s[None, :]
    )
    tl.store(at, total, mask=(r < rows)[:, None] & (s < STORED)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def sample_offset_grad_kernel(
    grad,
    weight,
    kernel_offset,
    grad_offset,
    rows,
    taps,
    geometry: tl.constexpr,
    SCOPE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute grad_offset [N, 2*Kh*Kw] from grad [N, rows, Kh*Kw].

    Grid (N, Kh*Kw): a program sums over all rows, ROWS at a time.
    """
    n = tl.program_id(0).to(tl.int64)
    tap = tl.program_id(1)
    uy, ux, cy, cx = _place(kernel_offset, n, tap, True, geometry, SCOPE)
    iy, fy = scope_cell(cy, SCOPE[0])
    ix, fx = scope_cell(cx, SCOPE[1])
    down = tl.zeros((ROWS,), tl.float32)
    right = tl.zeros((ROWS,), tl.float32)
    for r0 in tl.range(0, rows, ROWS):
        r = r0 + tl.arange(0, ROWS)
        g = tl.load(grad + n * rows * taps + r * taps + tap, mask=r < rows, other=0.0).to(
            tl.float32
        )
        w00, w01, w10, w11 = _corners(
            weight + r * (SCOPE[0] * SCOPE[1]) + (iy * SCOPE[1] + ix), r < rows, SCOPE
        )
        down += g * ((1.0 - fx) * (w10 - w00) + fx * (w11 - w01))
        right += g * ((1.0 - fy) * (w01 - w00) + fy * (w11 - w10))
    at = grad_offset + n * 2 * taps + 2 * tap
    tl.store(at, clip_grad(tl.sum(down), uy, SCOPE[0] - 1, geometry.clip == "projected"))
    tl.store(at + 1, clip_grad(tl.sum(right), ux, SCOPE[1] - 1, geometry.clip == "projected"))


@dataclass(frozen=True)
class Problem:
    """Properties of a call that are fixed when its kernels are compiled."""

    dtype: torch.dtype
    rows: int
    scope: Pair
    geometry: Geometry
    offset: torch.dtype = torch.float32

    def spec(
        self, what: str, fn: Any, tiles: dict[str, int], elements: int, *trips: int
    ) -> KernelSpec:
        data, offset = f"*{TYPES[self.dtype]}", f"*{TYPES[self.offset]}"
        pointers = dict.fromkeys(("weight", "grad", "out"), data) | {"partial": "*fp32"}
        pointers |= dict.fromkeys(("kernel_offset", "grad_offset"), offset)
        pointers = {name: pointers[name] for name in fn.arg_names if name in pointers}
        constants = {"geometry": self.geometry, "SCOPE": self.scope} | tiles
        name = f"sampled {what}, scope {self.scope[0]}, {TYPES[self.dtype]}"
        return KernelSpec(name, fn, pointers, constants, 4, elements, trips=trips)

    def rows_at_once(self, limit: int) -> int:
        return min(limit, max(16, triton.next_power_of_2(self.rows)))


def _problem(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Problem:
    rows, scope = weight.shape[0] * weight.shape[1], (weight.shape[2], weight.shape[3])
    return Problem(weight.dtype, rows, scope, geometry.static(), kernel_offset.dtype)


@cache
def kernels_spec(problem: Problem) -> KernelSpec:
    rows, taps = problem.rows_at_once(64), problem.geometry.taps
    tiles = {"ROWS": rows, "TAPS": triton.next_power_of_2(taps)}
    return problem.spec("kernels", sample_kernel, tiles, rows * taps)


@cache
def weight_grad_spec(problem: Problem) -> KernelSpec:
    stored = problem.scope[0] * problem.scope[1]
    entries = max(16, triton.next_power_of_2(stored))
    rows = problem.rows_at_once(max(1, min(32, 1024 // entries)))  # more of them spill
    tiles = {"ROWS": rows, "ENTRIES": entries}
    trips = 1, problem.geometry.taps  # for one image
    return problem.spec("weight gradient", sample_weight_grad_kernel, tiles, rows * stored, *trips)


@cache
def offset_grad_spec(problem: Problem) -> KernelSpec:
    rows = problem.rows_at_once(512)
    trips = triton.cdiv(problem.rows, rows)
    return problem.spec("offset gradient", sample_offset_grad_kernel, {"ROWS": rows}, 2, trips)


def forward(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    problem, n = _problem(weight, kernel_offset, geometry), kernel_offset.shape[0]
    shape = n, *weight.shape[:2], *geometry.kernel_size
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    arguments = _arguments(weight, kernel_offset, problem) | {"out": out}
    spec = kernels_spec(problem)
    with device_guard(weight):
        spec.launch((triton.cdiv(problem.rows, spec.constants["ROWS"]), n), arguments)
    return out


def _arguments(weight: Tensor, kernel_offset: Tensor, problem: Problem) -> dict[str, Any]:
    """Return the arguments that the kernels share."""
    return {
        "weight": weight.contiguous(),
        "kernel_offset": kernel_offset.contiguous(),
        "rows": problem.rows,
        "taps": problem.geometry.taps,
    }


def backward(
    grad: Tensor, weight: Tensor, kernel_offset: Tensor, geometry: Geometry, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    problem, n = _problem(weight, kernel_offset, geometry), kernel_offset.shape[0]
    arguments = _arguments(weight, kernel_offset, problem) | {"grad": grad.contiguous()}
    weight_grad = offset_grad = None
    with device_guard(weight):
        if needs[0]:
            weight_grad = _weight_grad(problem, n, arguments).view(weight.shape)
        if needs[1]:
            offset_grad = torch.empty_like(arguments["kernel_offset"])
            grid = n, geometry.taps
            offset_grad_spec(problem).launch(grid, arguments | {"grad_offset": offset_grad})
    return weight_grad, offset_grad


def _weight_grad(problem: Problem, n: int, arguments: dict[str, Any]) -> Tensor:
    """Return the weight's gradient [rows, Sh*Sw], with partial sums added in a fixed order."""
    spec = weight_grad_spec(problem)
    blocks = triton.cdiv(problem.rows, spec.constants["ROWS"])
    images_each = triton.cdiv(n, triton.cdiv(PROGRAMS, blocks))
    splits = triton.cdiv(n, images_each)
    shape = splits, problem.rows, problem.scope[0] * problem.scope[1]
    partial = torch.empty(shape, dtype=torch.float32, device=arguments["weight"].device)
    sizes = {"images": n, "images_each": images_each}
    spec.launch((blocks, splits), arguments | sizes | {"partial": partial})
    return partial.sum(0)


def shipped() -> Iterator[KernelSpec]:
    """Yield the configurations that 3x3 kernels get on every architecture."""
    for scope, dtype in ((4, torch.float32), (4, torch.float16), (9, torch.bfloat16)):
        geometry = make_geometry((scope, scope), 3, clip="projected")
        problem = Problem(dtype, 512, (scope, scope), geometry)
        yield kernels_spec(problem)
        yield weight_grad_spec(problem)
        yield offset_grad_spec(problem)
