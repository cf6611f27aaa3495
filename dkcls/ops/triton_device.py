"""Device functions that several Triton kernels share: how a tap reads its scope."""

import triton
import triton.language as tl


@triton.jit
def clamp_coordinate(u, last):
    """Return u clamped to [0, last]; a NaN stays a NaN."""
    u = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(u, last * 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clip_grad(grad, u, last, PROJECTED: tl.constexpr):
    """Return `grad`, zeroed where u is strictly outside [0, last].

    With PROJECTED it is kept there if descending the gradient brings u back inside.
    """
    below = u < 0.0
    above = u > last * 1.0
    if PROJECTED:
        below = below & (grad >= 0.0)
        above = above & (grad <= 0.0)
    return tl.where(below | above, 0.0, grad)


@triton.jit
def scope_axis(offset, k, K: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr):
    """Return the coordinate of tap k along one axis of the scope, before clipping and after it."""
    u = offset + tl.clamp((S - 1) * 0.5 + (k - (K - 1) * 0.5) * STEP, 0.0, S - 1.0)
    return u, clamp_coordinate(u, S - 1)


@triton.jit
def scope_cell(c, S: tl.constexpr):
    """Split a clipped coordinate into the entry below it and the distance beyond that entry.

    A NaN gives entry 0 and a NaN distance.
    """
    cell = tl.minimum(tl.maximum(c, 0.0).to(tl.int32), S - 2 if S > 1 else 0)
    return cell, c - cell.to(tl.float32)


@triton.jit
def hat(distance):
    """Return the linear weight of an entry at a distance; a NaN stays a NaN."""
    return tl.maximum(1.0 - tl.abs(distance), 0.0, propagate_nan=tl.PropagateNan.ALL)
