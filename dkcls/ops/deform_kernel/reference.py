"""Definition of the operator in plain PyTorch, as backend "reference".

    y[n,c,p] = sum_k x[n,c,p + k + image_offset] * W_c(g_k + kernel_offset)

It takes any device and any floating dtype, and is twice differentiable.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dkcls.ops.checks import memory_format, widen
from dkcls.ops.deform_kernel.backend import Call
from dkcls.ops.geometry import Geometry
from dkcls.ops.interpolation import sampling_matrix


def image_corners(
    coordinates: Sequence[Tensor], height: int, width: int
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the fractions (fy, fx) of image coordinates, and the four corners around them.

    The corners 00, 01, 10, 11 are each (flat index, whether inside).
    """
    y, x = coordinates[0].clamp(-2, height + 1), coordinates[1].clamp(-2, width + 1)
    y0, x0 = y.detach().floor(), x.detach().floor()
    corners = []
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        iy, ix = (y0 + dy).nan_to_num().long(), (x0 + dx).nan_to_num().long()
        inside = (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
        corners.append((iy.clamp(0, height - 1) * width + ix.clamp(0, width - 1), inside))
    return y - y0, x - x0, corners


def read_corner(x: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    """Return x [N, C, H, W] at flat indices [N, Ho, Wo], zero outside the image."""
    rows = index.flatten(1)[:, None].expand(-1, x.shape[1], -1)
    return (
        x.flatten(2).gather(2, rows).unflatten(2, index.shape[1:]).masked_fill(~inside[:, None], 0)
    )


def tap_coordinates(image_offset: Tensor, tap: int, geometry: Geometry) -> list[Tensor]:
    """Return the image coordinates of this tap, [N, Ho, Wo] for y and for x."""
    coordinates = []
    for a, k in enumerate(divmod(tap, geometry.kernel_size[1])):
        place = torch.arange(image_offset.shape[2 + a], device=image_offset.device)
        place = place * geometry.stride[a] - geometry.padding[a] + k * geometry.dilation[a]
        coordinates.append(image_offset[:, a] + (place[:, None] if a == 0 else place))
    return coordinates


def tap_slice(x: Tensor, tap: int, geometry: Geometry) -> tuple[slice, slice]:
    """Return the rows and columns of the padded input that this tap reads without deformation."""
    slices = []
    for a, (k, out) in enumerate(
        zip(divmod(tap, geometry.kernel_size[1]), geometry.output_size(*x.shape[2:]), strict=True)
    ):
        start = k * geometry.dilation[a]
        slices.append(slice(start, start + (out - 1) * geometry.stride[a] + 1, geometry.stride[a]))
    return slices[0], slices[1]


def tap_value(x: Tensor, image_offset: Tensor | None, tap: int, geometry: Geometry) -> Tensor:
    """Return what this tap reads from the input, [N, C, Ho, Wo].

    image_offset holds the two channels of the tap, [N, 2, Ho, Wo].
    """
    if image_offset is None:
        pad_y, pad_x = geometry.padding
        return F.pad(x, (pad_x, pad_x, pad_y, pad_y))[:, :, *tap_slice(x, tap, geometry)]
    fy, fx, corners = image_corners(tap_coordinates(image_offset, tap, geometry), *x.shape[2:])
    shares = ((1 - fy) * (1 - fx), (1 - fy) * fx, fy * (1 - fx), fy * fx)
    terms = [
        share[:, None] * read_corner(x, *corner)
        for share, corner in zip(shares, corners, strict=True)
    ]
    return terms[0] + terms[1] + terms[2] + terms[3]


def tap_weight(
    weight: Tensor, kernel_offset: Tensor | None, tap: int, geometry: Geometry
) -> Tensor:
    """Return the weight of this tap, [N, C, Ho, Wo] or broadcastable to it.

    `weight` is the scope [C, 1, Sh, Sw] with a kernel_offset [N, 2, Ho, Wo], else the taps' weights
    [1 or N, C, 1, Kh, Kw].
    """
    if kernel_offset is None:
        return weight.flatten(2)[:, :, tap, None, None]
    scope = weight.shape[2:]
    matrix = sampling_matrix(
        kernel_offset[:, 0],
        kernel_offset[:, 1],
        geometry.tap_origin(tap, scope),
        scope,
        geometry.clip,
    )
    return (matrix @ weight.flatten(1).t()).permute(0, 3, 1, 2)


def forward(call: Call) -> Tensor:
    """Return the sum over taps of value times weight; half precision is summed in float32."""
    x, weight, kernel_offset, image_offset, geometry = call
    dtype, layout = x.dtype, memory_format(x)
    x, weight, kernel_offset, image_offset = widen(dtype, x, weight, kernel_offset, image_offset)
    out: Tensor | int = 0
    for tap in range(geometry.taps):
        value = tap_value(x, of_tap(image_offset, tap), tap, geometry)
        out = out + value * tap_weight(weight, of_tap(kernel_offset, tap), tap, geometry)
    assert isinstance(out, Tensor)
    return out.to(dtype).contiguous(memory_format=layout)


def of_tap(offset: Tensor | None, tap: int) -> Tensor | None:
    return None if offset is None else offset[:, 2 * tap : 2 * tap + 2]
