"""Conditional convolution: one kernel per image, mixed from E experts, instead of E convolutions.

    y[n] = conv(x[n], sum_e routing[n,e] * W_e)

N batch, E experts, Cin/Cout channels, H/W input, Ho/Wo output, K kernel side.
"""

from collections.abc import Sequence

from torch import Tensor

from dkcls.ops.checks import autocast, check_offset, check_shape
from dkcls.ops.geometry import make_geometry
from dkcls.ops.per_image import check_convolution, per_image_conv2d, per_image_depthwise_conv2d


def cond_conv2d(
    input: Tensor,
    weight: Tensor,
    routing: Tensor,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolve each image with its own mix of the experts' kernels.

    Args:
        input: [N, Cin, H, W], contiguous or channels_last; the output has the same memory format.
        weight: [E, Cout, Cin/groups, Kh, Kw], a kernel per expert.
        routing: [N, E], the weight of each expert for each image.
        stride, padding, dilation: an int or a pair (y, x).

    Returns:
        [N, Cout, Ho, Wo]
    """
    if weight.dim() != 5 or 0 in weight.shape[3:]:
        raise ValueError(f"weight must be [E, Cout, Cin/groups, Kh, Kw], got {list(weight.shape)}")
    input, weight, routing = autocast((input, weight), (routing,))
    geometry = make_geometry(weight.shape[3:], tuple(weight.shape[3:]), stride, padding, dilation)
    check_convolution(input, weight, "[E, Cout, Cin/groups, Kh, Kw]", geometry, groups)
    check_shape("routing", routing, "[N, E]", [input.shape[0], weight.shape[0]])
    check_offset("routing", routing, input)
    if groups == input.shape[1] == weight.shape[1]:
        return per_image_depthwise_conv2d(input, mix_experts(weight, routing), geometry)
    return per_image_conv2d(input, weight, routing, mix_experts, geometry, groups)


def mix_experts(weight: Tensor, routing: Tensor) -> Tensor:
    """Return the mixed kernels [N, Cout, Cin/groups, Kh, Kw], in the weights' precision.

    `weight` is [E, Cout, Cin/groups, Kh, Kw], `routing` [N, E].
    """
    return (routing.to(weight.dtype) @ weight.flatten(1)).unflatten(1, weight.shape[1:])
