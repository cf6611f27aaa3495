"""Sampling whole kernels from a scope: w[n,o,i,k] = W_oi(g_k + kernel_offset[n,k]), one kernel per image."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dkcls.ops.checks import check_backend, check_offset
from dkcls.ops.geometry import Geometry, Grid, make_geometry, tap_grid
from dkcls.ops.interpolation import sampling_matrix


def sample_kernel2d(
    weight: Tensor,
    kernel_offset: Tensor | None,
    *,
    kernel_size: int | Sequence[int],
    grid: Grid = "centered",
    clip: str = "hard",
    backend: str | None = None,
) -> Tensor:
    """The kernels that `kernel_offset` reads from the scope `weight`.

    Args:
        weight: [Cout, Cin/groups, Sh, Sw], the scope.
        kernel_offset: [N, 2*Kh*Kw], (y, x) interleaved, taps in row-major order; None reads the grid itself, once.

    Returns:
        [N, Cout, Cin/groups, Kh, Kw]
    """
    if weight.dim() != 4 or 0 in weight.shape[2:]:
        raise ValueError(f"weight must be [Cout, Cin/groups, Sh, Sw], got {list(weight.shape)}")
    geometry = make_geometry(weight.shape[2:], kernel_size, grid=grid, clip=clip)
    check_backend(backend, weight)
    if kernel_offset is None:
        if _grid_is_scope(weight.shape[2:], geometry):
            return weight[None]
        kernel_offset = weight.new_zeros(1, 2 * geometry.taps)
    if kernel_offset.dim() != 2 or kernel_offset.shape[1] != 2 * geometry.taps:
        raise ValueError(f"kernel_offset must be [N, 2*Kh*Kw] = [N, {2 * geometry.taps}], got {list(kernel_offset.shape)}")
    check_offset("kernel_offset", kernel_offset, weight, "weight")
    return _sample(weight, kernel_offset, geometry)


def _grid_is_scope(scope: Sequence[int], geometry: Geometry) -> bool:
    return all(
        tap_grid(k, s, step) == [float(i) for i in range(s)]
        for k, s, step in zip(geometry.kernel_size, scope, geometry.step, strict=True)
    )


def _sample(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    matrices = torch.stack(
        [
            sampling_matrix(kernel_offset[:, 2 * k], kernel_offset[:, 2 * k + 1], k, weight.shape[2:], geometry)
            for k in range(geometry.taps)
        ],
        1,
    )  # [N, taps, Sh*Sw]
    kernels = torch.einsum("nks,ois->noik", matrices.to(weight.dtype), weight.flatten(2))
    return kernels.unflatten(-1, tuple(geometry.kernel_size))
