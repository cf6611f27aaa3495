"""Global deformable kernels with any groups.

    y[n] = conv(x[n], w[n]),  w[n,o,i,k] = W_oi(g_k + kernel_offset[n,k])

N batch, Cin/Cout channels, H/W input, Ho/Wo output, K kernel side (K*K taps), S scope side (S*S
stored weights).
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from dkcls.ops.checks import autocast, check_backend, check_offset, check_shape
from dkcls.ops.deform_kernel import deform_kernel2d
from dkcls.ops.geometry import Grid, make_geometry
from dkcls.ops.per_image import check_convolution, per_image_conv2d
from dkcls.ops.sample_kernel import sample_kernel2d


def global_deform_kernel2d(
    input: Tensor,
    weight: Tensor,
    kernel_offset: Tensor,
    *,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    grid: Grid = "centered",
    clip: str = "hard",
    backend: str | None = None,
) -> Tensor:
    """Convolve each image with a kernel read from a scope, at coordinates that vary by image.

    Args:
        input: [N, Cin, H, W], contiguous or channels_last; the output has the same memory format.
        weight: [Cout, Cin/groups, Sh, Sw], the scope.
        kernel_offset: [N, 2*Kh*Kw], the shift of each tap in the scope, relative to the grid;
            (y, x) interleaved, taps in row-major order.
        kernel_size, stride, padding, dilation: an int or a pair (y, x).
        grid, clip, backend: as deform_kernel2d takes them. Where the convolution is not
            depthwise, the backend only samples the kernels.

    Returns:
        [N, Cout, Ho, Wo]
    """
    if weight.dim() != 4 or 0 in weight.shape[2:]:
        raise ValueError(f"weight must be [Cout, Cin/groups, Sh, Sw], got {list(weight.shape)}")
    input, weight, kernel_offset = autocast((input, weight), (kernel_offset,))
    geometry = make_geometry(weight.shape[2:], kernel_size, stride, padding, dilation, grid, clip)
    check_convolution(input, weight, "[Cout, Cin/groups, Sh, Sw]", geometry, groups)
    check_shape("kernel_offset", kernel_offset, "[N, 2*Kh*Kw]", [input.shape[0], 2 * geometry.taps])
    check_offset("kernel_offset", kernel_offset, input)
    check_backend(backend, input)
    if groups == input.shape[1] == weight.shape[0]:
        return deform_kernel2d(
            input,
            weight,
            kernel_offset,
            kernel_size=kernel_size,
            stride=stride,
            padding=padding,
            dilation=dilation,
            grid=grid,
            clip=clip,
            backend=backend,
        )
    make_kernels = partial(
        sample_kernel2d, kernel_size=geometry.kernel_size, grid=grid, clip=clip, backend=backend
    )
    return per_image_conv2d(input, weight, kernel_offset, make_kernels, geometry, groups)
