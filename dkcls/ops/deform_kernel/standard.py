"""The operator in PyTorch operators that every runtime has, for exported programs.

A tap that reads its scope at the coordinate c gives the entry at s the weight max(0, 1 - |c - s|);
grid_sample reads the input.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dkcls.ops.geometry import Geometry


def deform_kernel2d(
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    *options: Any,
) -> Tensor:
    """Compute `dkcls::deform_kernel2d`; the arguments are the registered operator's."""
    geometry = Geometry(*options[:-1])
    if image_offset is None:
        values = _rigid_values(x, geometry)
    else:
        values = _moved_values(x, image_offset, geometry)
    if kernel_offset is None:
        weights = weight.flatten(2)[..., None, None]  # [1 or N, C, taps, 1, 1]
    else:
        weights = _read_scope(weight, kernel_offset, geometry)
    return (values * weights).sum(2)


def _rigid_values(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the input at each tap, [N, C, taps, Ho, Wo], by a convolution with one-hot kernels."""
    channels = x.shape[1]
    height, width = geometry.kernel_size
    one_hot = torch.eye(geometry.taps, dtype=x.dtype).view(-1, 1, height, width)
    kernels = one_hot.repeat(channels, 1, 1, 1)
    options = geometry.stride, geometry.padding, geometry.dilation
    values = F.conv2d(x, kernels, None, *options, channels)
    return values.unflatten(1, (channels, geometry.taps))


def _moved_values(x: Tensor, image_offset: Tensor, geometry: Geometry) -> Tensor:
    """Return the input at each moved tap, by one grid_sample with all taps below each other."""
    out_size = geometry.output_size(x.shape[2], x.shape[3])
    moves = image_offset.unflatten(1, (*geometry.kernel_size, 2))  # [N, Kh, Kw, 2, Ho, Wo]
    grid = []
    for axis, size in enumerate(x.shape[2:]):
        taps = torch.arange(geometry.kernel_size[axis], dtype=x.dtype)
        taps = taps * geometry.dilation[axis] - geometry.padding[axis]
        positions = torch.arange(out_size[axis], dtype=x.dtype) * geometry.stride[axis]
        rigid = taps.view(-1, *[1] * (3 - axis)) + positions.view(-1, *[1] * (1 - axis))
        grid.append((2 * (moves[:, :, :, axis] + rigid).flatten(1, 3) + 1) / size - 1)
    coordinates = torch.stack(grid[::-1], dim=-1)
    values = F.grid_sample(
        x, coordinates, mode="bilinear", padding_mode="zeros", align_corners=False
    )
    return values.unflatten(2, (geometry.taps, out_size[0]))


def _read_scope(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    """Return the weights of the taps, [N, C, taps, Ho, Wo]."""
    scope = weight.shape[2:]
    origins = [
        torch.full((), u, dtype=weight.dtype)
        for tap in range(geometry.taps)
        for u in geometry.tap_origin(tap, scope)
    ]
    moved = kernel_offset + torch.stack(origins)[:, None, None]
    coordinates = moved.unflatten(1, (geometry.taps, 2))
    hats = []
    for axis, size in enumerate(scope):
        entries = torch.arange(size, dtype=weight.dtype)
        distance = coordinates[:, :, axis].clamp(0, size - 1).unsqueeze(-1) - entries
        hats.append(F.relu(1 - distance.abs()))
    # [N, taps, Ho, Wo, Sh*Sw]
    matrix = (hats[0].unsqueeze(-1) * hats[1].unsqueeze(-2)).flatten(-2)
    return (matrix @ weight.flatten(1).t()).permute(0, 4, 1, 2, 3)
