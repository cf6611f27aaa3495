"""Reading a scope between its entries: clipping, linear interpolation, and the derivatives that both are given."""

from collections.abc import Sequence

import torch
from torch import Tensor


class _ProjectedClip(torch.autograd.Function):
    """clamp(u, 0, last) whose gradient also passes outside the scope, when descending it leads back inside."""

    @staticmethod
    def forward(ctx, u: Tensor, last: int) -> Tensor:
        ctx.save_for_backward(u)
        ctx.last = last
        return u.clamp(0, last)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return project(grad, ctx.saved_tensors[0], ctx.last), None


def project(grad: Tensor, u: Tensor, last: int) -> Tensor:
    """Zero where u is outside [0, last] and descending the gradient would not bring it back."""
    return grad.masked_fill(((u < 0) & (grad >= 0)) | ((u > last) & (grad <= 0)), 0)


def clip_coordinate(u: Tensor, scope: int, clip: str) -> Tensor:
    """Scope coordinates clamped to [0, scope - 1]; at equality the gradient passes, unlike torch.clamp's."""
    if clip == "projected":
        return _ProjectedClip.apply(u, scope - 1)
    outside = (u < 0) | (u > scope - 1)
    return torch.where(outside, u.detach().clamp(0, scope - 1), u)


def interpolation_weights(c: Tensor, scope: int) -> Tensor:
    """[...] coordinates -> [..., scope] linear weights; their derivative at an integer is the right one."""
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
    """Offsets of taps at rest at `origin` (y, x) -> for y and x: the coordinate in the scope before clipping, and after."""
    before = (oy + origin[0], ox + origin[1])
    return [(u, clip_coordinate(u, s, clip)) for u, s in zip(before, scope, strict=True)]


def sampling_matrix(
    oy: Tensor, ox: Tensor, origin: Sequence[float | Tensor], scope: Sequence[int], clip: str
) -> Tensor:
    """Offsets [...] of taps at rest at `origin` -> [..., Sh*Sw]: what each stored weight contributes to a tap's weight."""
    (_, y), (_, x) = scope_coordinates(oy, ox, origin, scope, clip)
    return (
        interpolation_weights(y, scope[0]).unsqueeze(-1)
        * interpolation_weights(x, scope[1]).unsqueeze(-2)
    ).flatten(-2)
