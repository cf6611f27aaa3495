"""Sampling kernels from a scope on a GPU: one launch forward, two and a sum backward, none of them with atomics.

weight [rows, Sh*Sw] with rows = Cout * Cin/groups, kernel_offset [N, 2*Kh*Kw], kernels [N, rows, Kh*Kw], all contiguous.
`geometry` is a Geometry of tuples, SCOPE is (Sh, Sw), `taps` is Kh*Kw. Sums are in float32.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dkcls.ops.geometry import Geometry, make_geometry
from dkcls.ops.triton_host import device_guard
from dkcls.ops.triton_support import (
    KernelSpec,
    clip_grad,
    hat,
    launch_options,
    scope_axis,
    scope_cell,
)

PROGRAMS = (
    256  # of the weight's gradient, if rows alone do not give as many: the batch is then split
)
_SIZES = ["images", "rows", "taps", "images_each"]


@triton.jit
def _place(kernel_offset, n, tap, live, geometry: tl.constexpr, SCOPE: tl.constexpr):
    """Where taps of image n read the scope: (uy, ux) before clipping, (cy, cx) after."""
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
    """The entry at p and those right of it, below it and both; a scope of one entry has it on both sides."""
    RIGHT: tl.constexpr = 1 if SCOPE[1] > 1 else 0
    DOWN: tl.constexpr = SCOPE[1] if SCOPE[0] > 1 else 0
    return (
        tl.load(p, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + RIGHT, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + DOWN, mask=mask, other=0.0).to(tl.float32),
        tl.load(p + (DOWN + RIGHT), mask=mask, other=0.0).to(tl.float32),
    )


@triton.jit(do_not_specialize=_SIZES)
def sample_kernel(weight, kernel_offset, out, rows, geometry: tl.constexpr, SCOPE: tl.constexpr, ROWS: tl.constexpr,
                  TAPS: tl.constexpr):  # fmt: skip
    """out [N, rows, Kh*Kw]. Grid (blocks of ROWS rows, N); TAPS is Kh*Kw padded to a power of two."""
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
def sample_weight_grad_kernel(grad, kernel_offset, partial, images, rows, taps, images_each, geometry: tl.constexpr,
                              SCOPE: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr):  # fmt: skip
    """The weight's gradient over images_each images, in their order. Grid (blocks of ROWS rows, splits of the batch).

    grad [N, rows, Kh*Kw], partial [splits, rows, Sh*Sw] fp32; ENTRIES is Sh*Sw padded to a power of two.
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
def sample_offset_grad_kernel(grad, weight, kernel_offset, grad_offset, rows, taps, geometry: tl.constexpr,
                              SCOPE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """grad_offset [N, 2*Kh*Kw] from grad [N, rows, Kh*Kw]. Grid (N, Kh*Kw): a program sums over all rows, ROWS at a time."""
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


def _constants(scope: Sequence[int], geometry: Geometry) -> dict[str, Any]:
    kernel_size, stride, padding, dilation, step, clip = geometry
    static = Geometry(
        tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), tuple(step), clip
    )
    return {"geometry": static, "SCOPE": tuple(scope)}


def _rows_at_once(rows: int, limit: int) -> int:
    return min(limit, max(16, triton.next_power_of_2(rows)))


def forward(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    rows, n = weight.shape[0] * weight.shape[1], kernel_offset.shape[0]
    out = torch.empty(
        n, *weight.shape[:2], *geometry.kernel_size, dtype=weight.dtype, device=weight.device
    )
    at_once = _rows_at_once(rows, 64)
    with device_guard(weight):
        sample_kernel[(triton.cdiv(rows, at_once), n)](
            weight.contiguous(), kernel_offset.contiguous(), out, rows, **_constants(weight.shape[2:], geometry),
            ROWS=at_once, TAPS=triton.next_power_of_2(geometry.taps), **launch_options(4),
        )  # fmt: skip
    return out


def backward(
    grad: Tensor, weight: Tensor, kernel_offset: Tensor, geometry: Geometry, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    grad, weight, kernel_offset = grad.contiguous(), weight.contiguous(), kernel_offset.contiguous()
    weight_grad = offset_grad = None
    with device_guard(weight):
        if needs[0]:
            weight_grad = _weight_grad(grad, weight, kernel_offset, geometry)
        if needs[1]:
            offset_grad = torch.empty_like(kernel_offset)
            rows = weight.shape[0] * weight.shape[1]
            sample_offset_grad_kernel[(kernel_offset.shape[0], geometry.taps)](
                grad, weight, kernel_offset, offset_grad, rows, geometry.taps, **_constants(weight.shape[2:], geometry),
                ROWS=_rows_at_once(rows, 512), **launch_options(4),
            )  # fmt: skip
    return weight_grad, offset_grad


def _weight_grad_rows(entries: int) -> int:
    return max(1, min(32, 1024 // entries))  # more of them spill


def _weight_grad(grad: Tensor, weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    rows, stored, n = (
        weight.shape[0] * weight.shape[1],
        weight.shape[2] * weight.shape[3],
        kernel_offset.shape[0],
    )
    entries = max(16, triton.next_power_of_2(stored))
    at_once = _rows_at_once(rows, _weight_grad_rows(entries))
    blocks = triton.cdiv(rows, at_once)
    images_each = triton.cdiv(n, triton.cdiv(PROGRAMS, blocks))
    splits = triton.cdiv(n, images_each)
    partial = torch.empty(splits, rows, stored, dtype=torch.float32, device=weight.device)
    sample_weight_grad_kernel[(blocks, splits)](
        grad, kernel_offset, partial, n, rows, geometry.taps, images_each, **_constants(weight.shape[2:], geometry),
        ROWS=at_once, ENTRIES=entries, **launch_options(4),
    )  # fmt: skip
    return partial.sum(0).view(weight.shape)


def shipped() -> Iterator[KernelSpec]:
    """The configurations that 3x3 kernels get on every architecture."""
    for scope, dtype in ((4, "*fp32"), (4, "*fp16"), (9, "*bf16")):
        constants = _constants((scope, scope), make_geometry((scope, scope), 3, clip="projected"))
        pointers = {
            "weight": dtype,
            "grad": dtype,
            "out": dtype,
            "kernel_offset": "*fp32",
            "grad_offset": "*fp32",
        }
        pointers |= {"partial": "*fp32"}
        entries = triton.next_power_of_2(scope * scope)
        rows = _weight_grad_rows(entries)
        for what, fn, tile, elements, trips in (
            ("kernels", sample_kernel, {"ROWS": 64, "TAPS": 16}, 64 * 9, ()),
            (
                "weight gradient",
                sample_weight_grad_kernel,
                {"ROWS": rows, "ENTRIES": entries},
                rows * scope**2,
                (1, 9),
            ),
            ("offset gradient", sample_offset_grad_kernel, {"ROWS": 512}, 2, (1,)),
        ):
            fixed = constants | tile
            signature = {
                name: pointers.get(name, "i32") for name in fn.arg_names if name not in fixed
            }
            yield KernelSpec(
                f"sampled {what}, scope {scope}, {dtype[1:]}",
                fn,
                signature,
                fixed,
                4,
                elements,
                trips=trips,
            )
