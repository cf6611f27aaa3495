"""Whole kernels sampled from a scope, one kernel per image.

    w[n,o,i,k] = W_oi(g_k + kernel_offset[n,k])

N batch, Cin/Cout channels, K kernel side (K*K taps), S scope side (S*S stored weights).
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from dkcls.ops.checks import (
    autocast,
    check_backend,
    check_offset,
    check_same,
    check_shape,
    widen,
)
from dkcls.ops.geometry import Geometry, Grid, check_geometry, make_geometry, tap_grid
from dkcls.ops.interpolation import sampling_matrix
from dkcls.ops.triton_launch import has_kernels


def sample_kernel2d(
    weight: Tensor,
    kernel_offset: Tensor | None,
    *,
    kernel_size: int | Sequence[int],
    grid: Grid = "centered",
    clip: str = "hard",
    backend: str | None = None,
) -> Tensor:
    """Return the kernels that `kernel_offset` reads from the scope `weight`.

    Args:
        weight: [Cout, Cin/groups, Sh, Sw], the scope.
        kernel_offset: [N, 2*Kh*Kw], (y, x) interleaved, taps in row-major order. None reads the
            grid itself, for N = 1.

    Returns:
        [N, Cout, Cin/groups, Kh, Kw]
    """
    _check_weight(weight)
    geometry = make_geometry(weight.shape[2:], kernel_size, grid=grid, clip=clip)
    check_backend(backend, weight)
    if kernel_offset is None:
        if _grid_is_scope(weight.shape[2:], geometry):
            return weight[None]
        kernel_offset = weight.new_zeros(1, 2 * geometry.taps)
    (kernel_offset,) = autocast((), (kernel_offset,))
    _check_offset(kernel_offset, weight, geometry)
    if backend == "triton" or (backend is None and has_kernels(weight)):
        return _sample_op(weight, kernel_offset, geometry.kernel_size, geometry.step, clip)
    return _sample(weight, kernel_offset, geometry)


def _check_weight(weight: Tensor) -> None:
    if weight.dim() != 4 or 0 in weight.shape[2:]:
        raise ValueError(f"weight must be [Cout, Cin/groups, Sh, Sw], got {list(weight.shape)}")


def _check_offset(kernel_offset: Tensor, weight: Tensor, geometry: Geometry) -> None:
    channels = 2 * geometry.taps
    if kernel_offset.dim() != 2 or kernel_offset.shape[1] != channels:
        raise ValueError(
            f"kernel_offset must be [N, 2*Kh*Kw] = [N, {channels}], got {list(kernel_offset.shape)}"
        )
    check_offset("kernel_offset", kernel_offset, weight, "weight")


def _check_op(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> None:
    """Refuse what the Triton kernels would misread."""
    check_geometry(geometry)
    _check_weight(weight)
    _check_offset(kernel_offset, weight, geometry)
    check_backend("triton", weight)


def _grid_is_scope(scope: Sequence[int], geometry: Geometry) -> bool:
    return all(
        tap_grid(k, s, step) == [float(i) for i in range(s)]
        for k, s, step in zip(geometry.kernel_size, scope, geometry.step, strict=True)
    )


def _sample(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    scope = weight.shape[2:]
    (kernel_offset,) = widen(weight.dtype, kernel_offset)
    origins = [geometry.tap_origin(tap, scope) for tap in range(geometry.taps)]
    origin = torch.tensor(origins, dtype=kernel_offset.dtype, device=kernel_offset.device).unbind(1)
    # [N, taps, Sh*Sw]
    matrices = sampling_matrix(
        kernel_offset[:, ::2], kernel_offset[:, 1::2], origin, scope, geometry.clip
    )
    kernels = torch.einsum("nks,ois->noik", matrices.to(weight.dtype), weight.flatten(2))
    return kernels.unflatten(-1, tuple(geometry.kernel_size))


@torch.library.custom_op("dkcls::sample_kernel2d", mutates_args=())
def _sample_op(
    weight: Tensor,
    kernel_offset: Tensor,
    kernel_size: Sequence[int],
    step: Sequence[float],
    clip: str,
) -> Tensor:
    """Sample the kernels with Triton, in one launch instead of dozens.

    The op is registered as deform_kernel2d is.
    """
    geometry = _geometry(kernel_size, step, clip)
    _check_op(weight, kernel_offset, geometry)
    if weight.numel() * kernel_offset.shape[0] == 0:
        return _empty_kernels(weight, kernel_offset, kernel_size)
    return _kernels().forward(weight, kernel_offset, geometry)


@_sample_op.register_fake
def _(weight, kernel_offset, kernel_size, step, clip):
    return _empty_kernels(weight, kernel_offset, kernel_size)


@torch.library.custom_op("dkcls::sample_kernel2d_backward", mutates_args=())
def _sample_backward_op(
    grad: Tensor,
    weight: Tensor,
    kernel_offset: Tensor,
    kernel_size: Sequence[int],
    step: Sequence[float],
    clip: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    tensors, geometry = (weight, kernel_offset), _geometry(kernel_size, step, clip)
    _check_op(*tensors, geometry)
    kernels = [kernel_offset.shape[0], *weight.shape[:2], *kernel_size]
    check_shape("grad", grad, "[N, Cout, Cin/groups, Kh, Kw]", kernels)
    check_same("grad", grad, weight, "weight")
    if len(needs) != 2:
        raise ValueError(f"needs must be two booleans, got {list(needs)}")
    if grad.numel() == 0:
        grads = [torch.zeros_like(t) for t in tensors]
    else:
        grads = _kernels().backward(grad, *tensors, geometry, needs)
    dense = [
        g.to(t.dtype).contiguous() if need else t.new_empty(0)
        for t, g, need in zip(tensors, grads, needs, strict=True)
    ]
    return dense[0], dense[1]


@_sample_backward_op.register_fake
def _(grad, weight, kernel_offset, kernel_size, step, clip, needs):
    tensors = (weight, kernel_offset)
    return tuple(
        t.new_empty(t.shape if need else (0,)) for t, need in zip(tensors, needs, strict=True)
    )


def _empty_kernels(weight: Tensor, kernel_offset: Tensor, kernel_size: Sequence[int]) -> Tensor:
    return weight.new_empty(kernel_offset.shape[0], *weight.shape[:2], *kernel_size)


def _geometry(kernel_size: Sequence[int], step: Sequence[float], clip: str) -> Geometry:
    return Geometry(kernel_size, (1, 1), (0, 0), (1, 1), step, clip)


def _kernels() -> ModuleType:
    # Imported late, because Triton may not be installed.
    return import_module("dkcls.ops.sample_kernel.triton")


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _backward(ctx, grad):
    needs = list(ctx.needs_input_grad[:2])
    grads = _sample_backward_op(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(
        None for _ in ctx.options
    )


def _double_backward(ctx, *grads):
    raise RuntimeError(
        'sample_kernel2d has no double backward on this backend: backend="reference" has one'
    )


_sample_op.register_autograd(_backward, setup_context=_setup_context)
_sample_backward_op.register_autograd(
    _double_backward, setup_context=lambda ctx, inputs, output: None
)
