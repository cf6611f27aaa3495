"""The operator on a GPU: which Triton kernels run a call, and with which tiles."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dkcls.ops.deform_kernel import triton_dot_host, triton_gather
from dkcls.ops.deform_kernel.library import announce
from dkcls.ops.geometry import Geometry
from dkcls.ops.triton_host import device_guard


def _kernels(
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    geometry: Geometry,
):
    if kernel_offset is None or image_offset is not None:
        why = "the tensor cores take local DK only"
    elif x.dtype == torch.float32:
        why = "float32: the tensor cores take half precision only"
    elif not triton_dot_host.supports(x, weight, geometry):
        why = "scope, taps or channels do not fit the tensor cores' tiles"
    else:
        announce("on Triton's tensor-core kernels")
        return triton_dot_host
    announce("on Triton's gather kernels", why)
    return triton_gather


def forward(
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    geometry: Geometry,
) -> Tensor:
    with device_guard(x):
        return _kernels(x, weight, kernel_offset, image_offset, geometry).forward(
            x, weight, kernel_offset, image_offset, geometry
        )


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    geometry: Geometry,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    with device_guard(x):
        return _kernels(x, weight, kernel_offset, image_offset, geometry).backward(
            grad, x, weight, kernel_offset, image_offset, geometry, needs
        )
