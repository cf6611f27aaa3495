"""Deformable kernels in operators that every runtime has: no custom operator is left in an exported program.

A stored weight at s counts max(0, 1 - |c - s|) where a tap reads its scope at c; the input is read by grid_sample.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, default_decompositions, export

from dkcls.ops import per_image_conv
from dkcls.ops.deform_kernel import library
from dkcls.ops.geometry import Geometry

LARGEST_BATCH = 2**16


def lower(model: nn.Module, images: Tensor) -> ExportedProgram:
    """The program of a network in evaluation mode for any number of images of that size, of PyTorch's own operators."""
    batch = Dim("batch", min=1, max=LARGEST_BATCH)
    with torch.no_grad(), _all_kernels_at_once():
        program = export(model, (images,), dynamic_shapes=({0: batch},))
    program = program.run_decompositions(
        default_decompositions()
        | {library.deform_kernel2d: deform_kernel2d, torch.ops.aten.split.Tensor: _whole}
    )
    for node in program.graph.nodes:
        node.meta.pop(
            "stack_trace", None
        )  # it names this machine's folders, and goes into files for others
    return program


def deform_kernel2d(
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    *options: Any,
) -> Tensor:
    """What `dkcls::deform_kernel2d` computes; arguments as the op takes them."""
    geometry = Geometry(*options[:-1])
    out_size = geometry.output_size(x.shape[2], x.shape[3])
    values = (
        _rigid_values(x, geometry)
        if image_offset is None
        else _moved_values(x, image_offset, geometry, out_size)
    )
    if kernel_offset is None:
        weights = weight.flatten(2)[..., None, None]  # [1 or N, C, taps, 1, 1]
    else:
        weights = _read_scope(weight, kernel_offset, geometry)
    return (values * weights).sum(2)


def _rigid_values(x: Tensor, geometry: Geometry) -> Tensor:
    """What the taps read, [N, C, taps, Ho, Wo]: a convolution with kernels of a single one each."""
    channels, (height, width) = x.shape[1], geometry.kernel_size
    ones = (
        torch.eye(geometry.taps, dtype=x.dtype).view(-1, 1, height, width).repeat(channels, 1, 1, 1)
    )
    values = F.conv2d(x, ones, None, geometry.stride, geometry.padding, geometry.dilation, channels)
    return values.unflatten(1, (channels, geometry.taps))


def _moved_values(
    x: Tensor, image_offset: Tensor, geometry: Geometry, out_size: tuple[int, int]
) -> Tensor:
    """The same, moved by image offsets: all taps in one grid_sample, below each other."""
    moves = image_offset.unflatten(1, (*geometry.kernel_size, 2))  # [N, Kh, Kw, 2, Ho, Wo]
    grid = []
    for axis, size in enumerate(x.shape[2:]):
        taps = (
            torch.arange(geometry.kernel_size[axis], dtype=x.dtype) * geometry.dilation[axis]
            - geometry.padding[axis]
        )
        places = torch.arange(out_size[axis], dtype=x.dtype) * geometry.stride[axis]
        rigid = taps.view(-1, *[1] * (3 - axis)) + places.view(-1, *[1] * (1 - axis))
        grid.append((2 * (moves[:, :, :, axis] + rigid).flatten(1, 3) + 1) / size - 1)
    values = F.grid_sample(
        x,
        torch.stack(grid[::-1], dim=-1),
        mode="bilinear",
        padding_mode="zeros",
        align_corners=False,
    )
    return values.unflatten(2, (geometry.taps, out_size[0]))


def _read_scope(weight: Tensor, kernel_offset: Tensor, geometry: Geometry) -> Tensor:
    """The weights of the taps, [N, C, taps, Ho, Wo]."""
    scope = weight.shape[2:]
    origins = [
        torch.full((), u, dtype=weight.dtype)
        for tap in range(geometry.taps)
        for u in geometry.tap_origin(tap, scope)
    ]
    places = (kernel_offset + torch.stack(origins)[:, None, None]).unflatten(1, (geometry.taps, 2))
    shares = []
    for axis, size in enumerate(scope):
        distance = places[:, :, axis].clamp(0, size - 1).unsqueeze(-1) - torch.arange(
            size, dtype=weight.dtype
        )
        shares.append(F.relu(1 - distance.abs()))
    matrix = (shares[0].unsqueeze(-1) * shares[1].unsqueeze(-2)).flatten(
        -2
    )  # [N, taps, Ho, Wo, Sh*Sw]
    return (matrix @ weight.flatten(1).t()).permute(0, 4, 1, 2, 3)


def _whole(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    return [x] if size >= LARGEST_BATCH else NotImplemented


@contextmanager
def _all_kernels_at_once() -> Iterator[None]:
    """A program for any batch cannot make the kernels of a few images at a time."""
    before, per_image_conv.KERNEL_BYTES = per_image_conv.KERNEL_BYTES, 2**62
    try:
        yield
    finally:
        per_image_conv.KERNEL_BYTES = before
