"""Convolution of every image with a kernel of its own.

    y[n] = conv(x[n], w[n]),  w[n] = make_kernels(weight, parameters[n])

Global deformable kernels (parameters: offsets) and conditional convolution (parameters: routing)
share it.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dkcls.ops.checks import check_input, check_same, memory_format
from dkcls.ops.deform_kernel import library
from dkcls.ops.geometry import Geometry

KERNEL_BYTES = 64 * 2**20  # kernels that exist at one time, where they outweigh the images

MakeKernels = Callable[[Tensor, Tensor], Tensor]


def per_image_conv2d(
    input: Tensor,
    weight: Tensor,
    parameters: Tensor,
    make_kernels: MakeKernels,
    geometry: Geometry,
    groups: int,
) -> Tensor:
    """Convolve each image with its kernel, in bounded memory.

    The kernels are `make_kernels(weight, parameters)`, [N, Cout, Cin/groups, Kh, Kw]. Kernels that
    are no larger than their images are made all at once and kept for the backward pass, as the
    images are. Larger ones ([256, 2048, 1024] is 2 GiB in float32) are made for a few images at a
    time, and made again in the backward pass.

    Args:
        input: [N, Cin, H, W]; the output has the same memory format.
        weight: [..., Cout, Cin/groups, ., .], as `make_kernels` takes it.
        parameters: [N, ...], one row per image.
    """
    per_image = math.prod(weight.shape[-4:-2]) * geometry.taps
    if per_image <= math.prod(input.shape[1:]):
        return _convolve(input, make_kernels(weight, parameters), geometry, groups)

    def convolve(images: Tensor, weight: Tensor, parameters: Tensor) -> Tensor:
        return _convolve(images, make_kernels(weight, parameters), geometry, groups)

    images = max(1, KERNEL_BYTES // (per_image * input.element_size()))
    chunks = []
    for x, p in zip(input.split(images), parameters.split(images), strict=True):
        if torch.is_grad_enabled():
            chunks.append(
                checkpoint(convolve, x, weight, p, use_reentrant=False, preserve_rng_state=False)
            )
        else:
            chunks.append(convolve(x, weight, p))
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def per_image_depthwise_conv2d(input: Tensor, kernels: Tensor, geometry: Geometry) -> Tensor:
    """Convolve depthwise with kernels [N, C, 1, Kh, Kw].

    They are small, and the registered operator takes them as they are.
    """
    return library.call(input, kernels, None, None, *geometry, "")


def _convolve(x: Tensor, kernels: Tensor, geometry: Geometry, groups: int) -> Tensor:
    if groups == 1 and geometry.taps == 1 and tuple(geometry.padding) == (0, 0):
        return _pointwise(
            x[:, :, :: geometry.stride[0], :: geometry.stride[1]],
            kernels.flatten(2),
            memory_format(x),
        )
    n = x.shape[0]
    options = geometry.stride, geometry.padding, geometry.dilation
    if n <= 1:  # one kernel; or, for n = 0, zeros in a graph that still reaches the parameters
        return F.conv2d(x, kernels.sum(0), None, *options, groups)
    out = F.conv2d(
        x.reshape(1, -1, *x.shape[2:]), kernels.flatten(0, 1), None, *options, n * groups
    )
    return out.view(n, -1, *out.shape[2:]).contiguous(memory_format=memory_format(x))


def _pointwise(x: Tensor, kernels: Tensor, layout: torch.memory_format) -> Tensor:
    """Multiply [n, Cout, Cin] by [n, Cin, H, W] per image, in the images' memory format."""
    if layout == torch.channels_last:
        rows = x.permute(0, 2, 3, 1).flatten(1, 2) @ kernels.transpose(1, 2)
        return rows.unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
    return (kernels @ x.flatten(2)).unflatten(2, x.shape[2:])


def check_convolution(
    input: Tensor, weight: Tensor, layout: str, geometry: Geometry, groups: int
) -> None:
    """Check that input [N, Cin, H, W] and weight [..., Cout, Cin/groups, ., .] fit each other.

    `layout` is the weight's layout in words.
    """
    check_input(input, geometry)
    channels, (cout, per_group) = input.shape[1], weight.shape[-4:-2]
    if not isinstance(groups, int) or groups < 1 or channels % groups or cout % groups:
        raise ValueError(f"groups must divide Cin = {channels} and Cout = {cout}, got {groups!r}")
    if per_group != channels // groups:
        raise ValueError(
            f"weight must be {layout} with Cin/groups = {channels // groups}, "
            f"got {list(weight.shape)}"
        )
    check_same("weight", weight, input)
