"""Checks and casts that every operator makes before it computes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dkcls.ops.geometry import Geometry
from dkcls.ops.triton_launch import AMD, has_kernels, interpreting

BACKENDS = (None, "reference", "taps", "cpu", "triton")


def autocast(data: Sequence[Tensor], offsets: Sequence[Tensor | None]) -> list[Any]:
    """Return data in autocast's low precision and offsets in float32; float64 is left alone."""
    tensors: list[Any] = [*data, *offsets]
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # it raises on the meta device
        return tensors
    low = torch.get_autocast_dtype(device)
    dtypes = [*(low for _ in data), *(torch.float32 for _ in offsets)]
    return [
        t.to(d) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t, d in zip(tensors, dtypes, strict=True)
    ]


def widen(dtype: torch.dtype, *tensors: Tensor | None) -> list[Any]:
    """Return the tensors in float32, or in float64 where that is the data's `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    return [t if t is None else t.to(wide) for t in tensors]


def memory_format(x: Tensor) -> torch.memory_format:
    """Return channels_last only for a tensor that is channels_last and not contiguous too."""
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if channels_last else torch.contiguous_format


def check_input(input: Tensor, geometry: Geometry) -> None:
    """Check that `input` is a batch of floating-point images into which the kernel fits."""
    if input.dim() != 4:
        raise ValueError(f"input must be [N, C, H, W], got {list(input.shape)}")
    if not input.is_floating_point():
        raise ValueError(f"input must be floating point, got {input.dtype}")
    height, width = input.shape[2], input.shape[3]
    if height == 0 or width == 0:
        raise ValueError(
            f"input must have at least one row and one column, got {list(input.shape)}"
        )
    ho, wo = geometry.output_size(height, width)
    if ho < 1 or wo < 1:
        raise ValueError(
            f"input of {list(input.shape[2:])} is too small for "
            f"kernel_size {geometry.kernel_size}, padding {geometry.padding} "
            f"and dilation {geometry.dilation}: the output would be [{ho}, {wo}]"
        )


def check_shape(name: str, tensor: Tensor, layout: str, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape):
        raise ValueError(f"{name} must be {layout} = {list(shape)}, got {list(tensor.shape)}")


def check_same(name: str, tensor: Tensor, like: Tensor, like_name: str = "input") -> None:
    """Check that both tensors have the same device and dtype."""
    if tensor.device != like.device:
        raise ValueError(
            f"{name} must be on {like_name}'s device {like.device}, got {tensor.device}"
        )
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} must have {like_name}'s dtype {like.dtype}, got {tensor.dtype}")


def check_offset(name: str, offset: Tensor, like: Tensor, like_name: str = "input") -> None:
    """Check that offsets are float32 or of the data's dtype: other mixes lose precision unseen."""
    if offset.dtype != torch.float32:
        check_same(name, offset, like, like_name)
    elif offset.device != like.device:
        raise ValueError(
            f"{name} must be on {like_name}'s device {like.device}, got {offset.device}"
        )


def check_offsets(
    input: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    geometry: Geometry,
    *,
    per_image: bool,
) -> None:
    """Check offsets per position, and a kernel_offset per image where `per_image` allows it."""
    whole = [input.shape[0], 2 * geometry.taps]
    local = [*whole, *geometry.output_size(input.shape[2], input.shape[3])]
    for name, offset in (("kernel_offset", kernel_offset), ("image_offset", image_offset)):
        if offset is None:
            continue
        shape, may_be_whole = list(offset.shape), per_image and name == "kernel_offset"
        if shape != local and not (may_be_whole and shape == whole):
            shapes = f"[N, 2*Kh*Kw, Ho, Wo] = {local}"
            shapes += f" or [N, 2*Kh*Kw] = {whole}" if may_be_whole else ""
            raise ValueError(f"{name} must be {shapes}, got {shape}")
        check_offset(name, offset, input)


def check_backend(
    backend: str | None, tensor: Tensor, known: tuple[str | None, ...] = BACKENDS
) -> None:
    """Check that a backend is among the known ones and takes the tensor's device and dtype."""
    if backend not in known:
        raise ValueError(f"backend must be one of {known}, got {backend!r}")
    if backend == "cpu" and tensor.device.type != "cpu":
        raise ValueError(f'backend "cpu" needs tensors on the CPU, got {tensor.device}')
    if backend == "triton":
        if tensor.dtype == torch.float64:
            raise ValueError(
                'backend "triton" takes float32, float16 and bfloat16, got torch.float64'
            )
        if tensor.device.type == "cpu" and not interpreting():
            raise ValueError(
                'backend "triton" needs tensors on a GPU, or TRITON_INTERPRET=1, got cpu'
            )
        if tensor.is_cuda and not has_kernels(tensor):
            name = torch.cuda.get_device_properties(tensor.device).gcnArchName
            raise ValueError(f'backend "triton" needs an NVIDIA device or {AMD}, got {name}')
