"""Deformable kernels, depthwise.

    y[n,c,p] = sum_k x[n,c,p + k + image_offset[n,k,p]] * W_c(g_k + kernel_offset[n,k,p])

N batch, C channels, H/W input, Ho/Wo output, K kernel side (K*K taps), S scope side (S*S stored
weights). Rigid convolution, global and local deformable kernels, deformable convolution, and
deformable convolution with deformable kernels are cases of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dkcls.ops.checks import autocast, check_backend, check_input, check_offsets, check_same
from dkcls.ops.deform_kernel import library
from dkcls.ops.geometry import Grid, make_geometry
from dkcls.ops.sample_kernel import sample_kernel2d


def deform_kernel2d(
    input: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None = None,
    image_offset: Tensor | None = None,
    *,
    kernel_size: int | Sequence[int] = 3,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    grid: Grid = "centered",
    clip: str = "hard",
    backend: str | None = None,
) -> Tensor:
    """Convolve depthwise with a kernel read from a scope, at coordinates that may vary with data.

    Args:
        input: [N, C, H, W], contiguous or channels_last; the output has the same memory format.
        weight: [C, 1, Sh, Sw], the scope.
        kernel_offset: the shift of each tap in the scope, relative to the grid, (y, x) interleaved
            and taps in row-major order: [N, 2*Kh*Kw, Ho, Wo] per position (local DK),
            [N, 2*Kh*Kw] per image (global DK), or None for the grid itself.
        image_offset: the shift of each tap in the input, relative to its rigid coordinate:
            [N, 2*Kh*Kw, Ho, Wo], laid out as torchvision.ops.deform_conv2d takes it, or None.
        kernel_size, stride, padding, dilation: an int or a pair (y, x).
        grid: "centered" (unit steps), "spread" (from end to end of the scope), or the step.
        clip: "hard" stops the gradient outside the scope, "projected" lets it through where it
            leads back inside.
        backend: None chooses by device and dtype; "reference", "taps", "cpu" or "triton" insist.

    Returns:
        [N, C, Ho, Wo]
    """
    if weight.dim() != 4 or weight.shape[1] != 1 or 0 in weight.shape[2:]:
        raise ValueError(f"weight must be [C, 1, Sh, Sw], got {list(weight.shape)}")
    input, weight, kernel_offset, image_offset = autocast(
        (input, weight), (kernel_offset, image_offset)
    )
    geometry = make_geometry(weight.shape[2:], kernel_size, stride, padding, dilation, grid, clip)
    check_input(input, geometry)
    if weight.shape[0] != input.shape[1]:
        raise ValueError(
            f"weight must be [C, 1, Sh, Sw] = [{input.shape[1]}, 1, Sh, Sw], "
            f"got {list(weight.shape)}"
        )
    check_same("weight", weight, input)
    check_offsets(input, kernel_offset, image_offset, geometry, per_image=True)
    check_backend(backend, input)

    if kernel_offset is None or kernel_offset.dim() == 2:
        weight = sample_kernel2d(
            weight,
            kernel_offset,
            kernel_size=geometry.kernel_size,
            grid=grid,
            clip=clip,
            backend=backend,
        )
        if kernel_offset is None and image_offset is None:
            return torch.nn.functional.conv2d(
                input,
                weight[0],
                None,
                geometry.stride,
                geometry.padding,
                geometry.dilation,
                groups=input.shape[1],
            )
        kernel_offset = None
    return library.call(input, weight, kernel_offset, image_offset, *geometry, backend or "")
