"""Shared parts of the tests with a kernel per image: shapes, and the loop over images as oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor

# (Cin, Cout, groups, size, kernel_size, stride, padding, dilation)
SHAPES = [
    (6, 4, 1, (5, 4), 1, 1, 0, 1),
    (6, 4, 1, (5, 4), 1, (2, 3), 0, 1),
    (6, 40, 1, (2, 2), 1, 1, 0, 1),  # kernels larger than the images
    (6, 40, 1, (1, 1), 1, 1, 0, 1),
    (6, 4, 1, (5, 4), 1, 1, 1, 1),
    (6, 4, 2, (5, 4), 1, 2, 0, 1),
    (6, 4, 1, (5, 6), 3, 1, 1, 1),
    (6, 9, 3, (7, 8), (3, 2), (2, 1), (2, 0), (1, 2)),
    (6, 12, 6, (5, 4), 3, 1, 1, 1),
    (6, 6, 6, (7, 5), 3, 2, 1, 1),
    (1, 1, 1, (5, 5), 3, 1, 1, 1),
]


def options_of(shape: tuple) -> dict:
    return dict(
        zip(("groups", "stride", "padding", "dilation"), (shape[2], *shape[5:]), strict=True)
    )


def loop(x: Tensor, kernels: Tensor, options: dict) -> Tensor:
    """Convolve each image by itself."""
    return torch.cat([F.conv2d(x[n : n + 1], kernels[n], **options) for n in range(len(x))])


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output, and the gradients for an output gradient that depends on shape only."""
    grad = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(out)
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def leaf(
    *shape: int, dtype: torch.dtype = torch.float64, channels_last: bool = False, seed: int = 0
) -> Tensor:
    t = torch.randn(
        shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    ).to(dtype)
    return (
        t.contiguous(memory_format=torch.channels_last) if channels_last else t
    ).requires_grad_()
