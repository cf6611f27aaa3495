"""The operator on a GPU: which Triton kernels run a call, and with which tiles."""

from collections.abc import Sequence

from torch import Tensor

from dkcls.ops.deform_kernel import triton_dot_host, triton_gather
from dkcls.ops.geometry import Geometry
from dkcls.ops.triton_host import device_guard


def _kernels(x: Tensor, weight: Tensor, kernel_offset: Tensor | None, image_offset: Tensor | None, geometry: Geometry):
    on_tensor_cores = kernel_offset is not None and image_offset is None and triton_dot_host.supports(x, weight, geometry)
    return triton_dot_host if on_tensor_cores else triton_gather


def forward(x: Tensor, weight: Tensor, kernel_offset: Tensor | None, image_offset: Tensor | None, geometry: Geometry) -> Tensor:
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
