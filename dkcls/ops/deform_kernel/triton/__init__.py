"""Backend "triton": tensor-core kernels where they take a call, else gather kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dkcls.ops.deform_kernel.backend import Backend, Call, announce
from dkcls.ops.deform_kernel.triton import dot, gather
from dkcls.ops.triton_launch import device_guard


def _choose(call: Call) -> Backend:
    if call.kernel_offset is None or call.image_offset is not None:
        why = "the tensor cores take local DK only"
    elif call.x.dtype == torch.float32:
        why = "float32: the tensor cores take half precision only"
    elif not dot.supports(call):
        why = "scope, taps or channels do not fit the tensor cores' tiles"
    else:
        announce("on Triton's tensor-core kernels")
        return dot
    announce("on Triton's gather kernels", why)
    return gather


def forward(call: Call) -> Tensor:
    with device_guard(call.x):
        return _choose(call).forward(call)


def backward(grad: Tensor, call: Call, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    with device_guard(call.x):
        return _choose(call).backward(grad, call, needs)
