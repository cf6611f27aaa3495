"""What launching a Triton kernel takes: the architecture, the device, and tensors in the layouts that kernels read."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

from dkcls.ops.checks import interpreting


@cache
def _architecture(device: int) -> str:
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major > 9 else "sm_80")


def architecture(tensor: Tensor) -> str:
    """The entry of the tile tables for a tensor's device: its generation, not its exact model."""
    return "sm_80" if interpreting() else _architecture(tensor.get_device())


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return nullcontext() if interpreting() else torch.cuda.device(tensor.device)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def dense(offset: Tensor) -> Tensor:
    """Offsets as they are when they fill their memory, contiguous or channels_last; else a contiguous copy."""
    return offset if offset.is_contiguous(memory_format=torch.channels_last) else offset.contiguous()
