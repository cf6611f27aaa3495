"""Initial values: the rule of nn.Conv2d, and scopes that read as a given kernel on their grid."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dkcls.ops.geometry import Grid, grid_step, pair, tap_grid
from dkcls.ops.interpolation import interpolation_weights


def draw_kernel(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a kernel [Cout, Cin/groups, Kh, Kw] as nn.Conv2d draws it.

    The dtype and device are those of `like`.
    """
    kernel = torch.empty(*shape, dtype=like.dtype, device=like.device)
    return nn.init.kaiming_uniform_(kernel, a=math.sqrt(5))


def draw_bias_(bias: Tensor | None, fan_in: int) -> None:
    """Draw a bias as nn.Conv2d does."""
    if bias is not None:
        bound = 1 / math.sqrt(fan_in)
        nn.init.uniform_(bias, -bound, bound)


def scope_from_kernel(
    kernel: Tensor, scope: int | Sequence[int], grid: Grid = "centered"
) -> Tensor:
    """Return the scope of least norm that reads as `kernel` on its grid, without offsets.

    Where the grid cannot read every kernel (a scope smaller than the kernel, taps that coincide),
    the scope comes closest in least squares. Mind flat scopes: see `fill_scope_`.

    Args:
        kernel: [..., Kh, Kw]
        scope: Sh, Sw or both as an int.

    Returns:
        [..., Sh, Sw], with the kernel's dtype.
    """
    inverses = [
        torch.linalg.pinv(a) for a in _axes(kernel.shape[-2:], pair(scope, "scope", 1), grid)
    ]
    return _along_axes(inverses, kernel)


def draw_noise(like: Tensor, kernel: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return uniform noise as large as `kernel` in the mean square.

    Shape, dtype and device are those of `like`.
    """
    device = like.device if generator is None else generator.device
    noise = torch.empty(like.shape, dtype=like.dtype, device=device).uniform_(
        -1, 1, generator=generator
    )
    return noise.to(like.device) * (3 * kernel.square().mean()).sqrt()


@torch.no_grad()
def fill_scope_(
    scope: Tensor, kernel: Tensor, grid: Grid = "centered", generator: torch.Generator | None = None
) -> None:
    """Write `scope_from_kernel` into a scope [..., Sh, Sw] so that the scope can learn.

    Under one tap between two entries (1x1 with scope 2) the least-norm scope is flat: the offsets
    get no gradient, the entries get equal gradients, and the scope stays flat for ever. Such a
    scope also gets noise of the kernel's own size, less the part of the noise that the taps read.
    """
    size = scope.shape[-2:]
    scope.copy_(scope_from_kernel(kernel, size, grid))
    if _is_flat(kernel.shape[-2:], size, grid):
        axes = _axes(kernel.shape[-2:], size, grid)
        noise = draw_noise(scope, kernel, generator)
        scope.add_(noise - scope_from_kernel(_along_axes(axes, noise), size, grid))


def reads_every_kernel(kernel_size: Sequence[int], scope: Sequence[int], grid: Grid) -> bool:
    """Check whether every kernel of this size can be read exactly from some scope.

    If so, `scope_from_kernel` loses nothing.
    """
    return all(
        torch.linalg.matrix_rank(a) == k
        for a, k in zip(_axes(kernel_size, scope, grid), kernel_size, strict=True)
    )


def _is_flat(kernel_size: Sequence[int], scope: Sequence[int], grid: Grid) -> bool:
    """Check whether along some axis the least-norm scope has no slope at any tap.

    Which kernel the scope reads as does not matter.
    """
    for matrix, k, s in zip(_axes(kernel_size, scope, grid), kernel_size, scope, strict=True):
        if s > 1:
            left = _coordinates(k, s, grid).floor().clamp(0, s - 2).long()
            inverse = torch.linalg.pinv(matrix)
            if torch.allclose(inverse[left + 1], inverse[left]):
                return True
    return False


def _coordinates(kernel_size: int, scope: int, grid: Grid) -> Tensor:
    return torch.tensor(
        tap_grid(kernel_size, scope, grid_step(grid, kernel_size, scope)),
        dtype=torch.float64,
        device="cpu",
    )


def _axes(kernel_size: Sequence[int], scope: Sequence[int], grid: Grid) -> list[Tensor]:
    """Return a matrix [K, S] each for y and x: what an entry of the scope gives to a tap."""
    return [
        interpolation_weights(_coordinates(k, s, grid), s)
        for k, s in zip(kernel_size, scope, strict=True)
    ]


def _along_axes(matrices: Sequence[Tensor], values: Tensor) -> Tensor:
    """Return y @ values @ x^T.

    One product serves all kernels, as one product each is slow for millions of kernels.
    """
    y, x = (m.to(values.device) for m in matrices)
    flat = values.double().flatten(-2) @ torch.kron(y, x).t()
    return flat.to(values.dtype).unflatten(-1, (y.shape[0], x.shape[0]))
