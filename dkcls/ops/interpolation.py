"""Interpolation in a scope: clipping, linear weights, and the derivatives chosen for both."""

from collections.abc import Sequence

import torch
from torch import Tensor


class _ProjectedClip(torch.autograd.Function):
    """Clamp to [0, last] whose gradient also passes outside, where descent leads back inside."""

    @staticmethod
    def forward(ctx, u: Tensor, last: int) -> Tensor:
        ctx.save_for_backward(u)
        ctx.last = last
        return u.clamp(0, last)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return project(grad, ctx.saved_tensors[0], ctx.last), None


def project(grad: Tensor, u: Tensor, last: int) -> Tensor:
    """Return `grad`, zeroed where u is outside [0, last] and descent would not bring u back."""
    return grad.masked_fill(((u < 0) & (grad >= 0)) | ((u > last) & (grad <= 0)), 0)


def clip_coordinate(u: Tensor, scope: int, clip: str) -> Tensor:
    """Return scope coordinates clamped to [0, scope - 1].

    The gradient passes at equality, unlike that of `torch.clamp`.
    """
    if clip == "projected":
        return _ProjectedClip.apply(u, scope - 1)
    outside = (u < 0) | (u > scope - 1)
    return torch.where(outside, u.detach().clamp(0, scope - 1), u)


def interpolation_weights(c: Tensor, scope: int) -> Tensor:
    """Return linear weights [..., scope] for coordinates [...].

    The derivative at an integer is the one to its right, at the last entry the one to its left.
    """
    if scope == 1:
        return (c * 0 + 1).unsqueeze(-1)  # constant, and yet a NaN stays a NaN
    cell = c.detach().floor().clamp(0, scope - 2)
    f = (c - cell).unsqueeze(-1)
    index = torch.arange(scope, device=c.device)
    left, right = (index == cell.unsqueeze(-1)), (index == cell.unsqueeze(-1) + 1)
    return (1 - f) * left + f * right


def scope_coordinates(
    oy: Tensor, ox: Tensor, origin: Sequence[float | Tensor], scope: Sequence[int], clip: str
) -> list[tuple[Tensor, Tensor]]:
    """Return, for y and for x, the coordinates in the scope before clipping and after it.

    `origin` is the coordinate (y, x) of the taps before any offset.
    """
    before = (oy + origin[0], ox + origin[1])
    return [(u, clip_coordinate(u, s, clip)) for u, s in zip(before, scope, strict=True)]


def sampling_matrix(
    oy: Tensor, ox: Tensor, origin: Sequence[float | Tensor], scope: Sequence[int], clip: str
) -> Tensor:
    """Return [..., Sh*Sw]: the share of each stored weight in a tap's weight, for offsets [...].

    `origin` is the coordinate (y, x) of the taps before any offset.
    """
    (_, y), (_, x) = scope_coordinates(oy, ox, origin, scope, clip)
    return (
        interpolation_weights(y, scope[0]).unsqueeze(-1)
        * interpolation_weights(x, scope[1]).unsqueeze(-2)
    ).flatten(-2)
