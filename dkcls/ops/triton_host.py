"""What launching a Triton kernel takes: the architecture, the device, and tensors in the layouts that kernels read."""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

AMD = "gfx942"  # of AMD's devices, the one that has tiles

logger = logging.getLogger("dkcls")


@cache
def _architecture(device: int) -> str | None:
    """The entry of the tile tables for a GPU; None for one that has none."""
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if name == AMD:
            return name
        _warn(name)
        return None
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major > 9 else "sm_80")


@cache
def _warn(name: str) -> None:
    logger.warning(
        "deform_kernel2d has no kernels for %s, of AMD's devices only for %s: it runs tap by tap in PyTorch, many times slower",
        name,
        AMD,
    )


@torch.compiler.assume_constant_result
def _has_tiles(device: int) -> bool:
    return _architecture(device) is not None


def has_kernels(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU for which there are Triton kernels."""
    return tensor.is_cuda and (torch.version.hip is None or _has_tiles(tensor.get_device()))


def architecture(tensor: Tensor) -> str:
    """The entry of the tile tables for a tensor's device: its generation, not its exact model."""
    found = "sm_80" if interpreting() else _architecture(tensor.get_device())
    assert found is not None, "who launches has asked has_kernels"
    return found


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return nullcontext() if interpreting() else torch.cuda.device(tensor.device)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def dense(offset: Tensor) -> Tensor:
    """Offsets as they are when they fill their memory, contiguous or channels_last; else a contiguous copy."""
    return (
        offset if offset.is_contiguous(memory_format=torch.channels_last) else offset.contiguous()
    )
