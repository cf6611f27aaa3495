"""Backend "taps": the operator one tap at a time, with a backward that recomputes.

It runs where no kernel of ours does, on any device and floating dtype. It takes a few activations
of extra memory, instead of the K*K that autograd would keep.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dkcls.ops.checks import widen
from dkcls.ops.deform_kernel.backend import Call
from dkcls.ops.deform_kernel.reference import (
    forward,
    image_corners,
    of_tap,
    read_corner,
    tap_coordinates,
    tap_slice,
    tap_value,
    tap_weight,
)
from dkcls.ops.geometry import Geometry
from dkcls.ops.interpolation import (
    interpolation_weights,
    project,
    sampling_matrix,
    scope_coordinates,
)

__all__ = ["backward", "forward"]


def backward(grad: Tensor, call: Call, needs: Sequence[bool]) -> list[Tensor]:
    geometry = call.geometry
    grad, x, weight, kernel_offset, image_offset = widen(call.x.dtype, grad, *call[:4])
    pad_y, pad_x = geometry.padding if image_offset is None else (0, 0)
    n, c, h, w = x.shape
    # Contiguous whatever the layout of x and weight: they are added to through views.
    gx = x.new_zeros(n, c, h + 2 * pad_y, w + 2 * pad_x)
    gw = weight.new_zeros(weight.shape)
    gk, gi = [], []
    for tap in range(geometry.taps):
        k, i = of_tap(kernel_offset, tap), of_tap(image_offset, tap)
        if needs[0] or needs[3]:
            grad_value = grad * tap_weight(weight, k, tap, geometry)
            if needs[0]:
                _add_input_grad(gx, grad_value, x, i, tap, geometry)
            if needs[3]:
                gi.append(_image_offset_grad(grad_value, x, i, tap, geometry))
        if needs[1] or needs[2]:
            grad_weight = grad * tap_value(x, i, tap, geometry)
            if needs[1]:
                _add_weight_grad(gw, grad_weight, k, tap, geometry)
            if needs[2]:
                gk.append(_kernel_offset_grad(grad_weight, weight, k, tap, geometry))
    gx = gx[:, :, pad_y : pad_y + h, pad_x : pad_x + w]
    return [
        gx,
        gw,
        torch.cat(gk, 1) if gk else gw.new_empty(0),
        torch.cat(gi, 1) if gi else gw.new_empty(0),
    ]


def _add_input_grad(
    total: Tensor,
    grad_value: Tensor,
    x: Tensor,
    offset: Tensor | None,
    tap: int,
    geometry: Geometry,
) -> None:
    if offset is None:
        total[:, :, *tap_slice(x, tap, geometry)] += grad_value
        return
    fy, fx, corners = image_corners(tap_coordinates(offset, tap, geometry), *x.shape[2:])
    shares = ((1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx)
    for share, (index, inside) in zip(shares, corners, strict=True):
        share = (share * inside)[:, None]
        rows = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        total.view(*x.shape[:2], -1).scatter_add_(2, rows, (share * grad_value).flatten(2))


def _image_offset_grad(
    grad_value: Tensor, x: Tensor, offset: Tensor | None, tap: int, geometry: Geometry
) -> Tensor:
    assert offset is not None
    fy, fx, corners = image_corners(tap_coordinates(offset, tap, geometry), *x.shape[2:])
    g00, g01, g10, g11 = ((grad_value * read_corner(x, *corner)).sum(1) for corner in corners)
    return torch.stack(
        [(1 - fx) * (g10 - g00) + fx * (g11 - g01), (1 - fy) * (g01 - g00) + fy * (g11 - g10)], 1
    )


def _add_weight_grad(
    total: Tensor, grad_weight: Tensor, offset: Tensor | None, tap: int, geometry: Geometry
) -> None:
    if offset is None:
        per_image = grad_weight.sum((2, 3))
        taps = total.view(*total.shape[:2], -1)
        taps[:, :, tap] += per_image if total.shape[0] > 1 else per_image.sum(0)
        return
    scope = total.shape[2:]
    matrix = sampling_matrix(
        offset[:, 0], offset[:, 1], geometry.tap_origin(tap, scope), scope, geometry.clip
    )
    total += torch.einsum("nhws,nchw->cs", matrix, grad_weight).view_as(total)


def _kernel_offset_grad(
    grad_weight: Tensor, weight: Tensor, offset: Tensor | None, tap: int, geometry: Geometry
) -> Tensor:
    assert offset is not None
    scope = weight.shape[2:]
    # [N, Ho, Wo, Sh, Sw]
    per_entry = (grad_weight.permute(0, 2, 3, 1) @ weight.flatten(1)).unflatten(-1, scope)
    grads = []
    axes = scope_coordinates(
        offset[:, 0], offset[:, 1], geometry.tap_origin(tap, scope), scope, geometry.clip
    )
    for a, (u, c) in enumerate(axes):
        other = interpolation_weights(axes[1 - a][1], scope[1 - a])
        along = (per_entry * other.unsqueeze(-2 + a)).sum(-1 - a)
        if scope[a] == 1:
            grads.append(torch.zeros_like(u))
            continue
        cell = c.floor().clamp(0, scope[a] - 2).nan_to_num().long().unsqueeze(-1)
        slope = (along.gather(-1, cell + 1) - along.gather(-1, cell)).squeeze(-1)
        last = scope[a] - 1
        grads.append(
            project(slope, u, last)
            if geometry.clip == "projected"
            else slope.masked_fill((u < 0) | (u > last), 0)
        )
    return torch.stack(grads, 1)
