"""What every operator checks and casts before it computes."""

from typing import Any

import torch
from torch import Tensor

from dkcls.ops.geometry import Geometry

BACKENDS = (None, "reference", "triton", "cpu")


def autocast(input: Tensor, weight: Tensor, *offsets: Tensor | None) -> list[Any]:
    """Under autocast: input and weight in the low precision, offsets in float32. Float64 is left alone, as PyTorch does."""
    device = input.device.type
    tensors = [input, weight, *offsets]
    if not _autocasts(device):
        return tensors
    low = torch.get_autocast_dtype(device)
    dtypes = [low, low, *(torch.float32 for _ in offsets)]
    return [t if t is None or t.dtype == torch.float64 else t.to(d) for t, d in zip(tensors, dtypes, strict=True)]


def _autocasts(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # it raises on the meta device


def widen(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors in float32, or in float64 where that is the data's `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return [t if t is None else t.to(wide) for t in tensors]


def memory_format(x: Tensor) -> torch.memory_format:
    """channels_last only where the tensor is that and nothing else."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def check_input(input: Tensor, geometry: Geometry) -> None:
    """A batch of floating-point images into which the kernel fits."""
    if input.dim() != 4:
        raise ValueError(f"input must be [N, C, H, W], got {list(input.shape)}")
    if not input.is_floating_point():
        raise ValueError(f"input must be floating point, got {input.dtype}")
    if 0 in input.shape[2:]:
        raise ValueError(f"input must have at least one row and one column, got {list(input.shape)}")
    ho, wo = geometry.output_size(input.shape[2], input.shape[3])
    if ho < 1 or wo < 1:
        raise ValueError(
            f"input of {list(input.shape[2:])} is too small for kernel_size {geometry.kernel_size}, padding {geometry.padding} "
            f"and dilation {geometry.dilation}: the output would be [{ho}, {wo}]"
        )


def check_same(name: str, tensor: Tensor, like: Tensor, like_name: str = "input") -> None:
    """One device and, outside autocast, one dtype."""
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {tensor.device}")
    if tensor.dtype != like.dtype and not _autocasts(like.device.type):
        raise ValueError(f"{name} must have {like_name}'s dtype {like.dtype}, got {tensor.dtype}")


def check_offset(name: str, offset: Tensor, like: Tensor, like_name: str = "input") -> None:
    """Offsets are float32 or of the data's dtype: other mixes lose precision unseen."""
    if offset.dtype != torch.float32:
        check_same(name, offset, like, like_name)
    elif offset.device != like.device:
        raise ValueError(f"{name} must be on {like_name}'s device {like.device}, got {offset.device}")


def check_backend(backend: str | None, tensor: Tensor) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "cpu" and tensor.device.type != "cpu":
        raise ValueError(f'backend "cpu" needs tensors on the CPU, got {tensor.device}')
    if backend == "triton":
        if tensor.dtype == torch.float64:
            raise ValueError('backend "triton" takes float32, float16 and bfloat16, got torch.float64')
        if tensor.device.type == "cpu" and not interpreting():
            raise ValueError('backend "triton" needs tensors on a GPU, or TRITON_INTERPRET=1, got cpu')


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)
