"""Normalisation of a batch on the device: what crosses the bus is uint8."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def for_channels(values: Sequence[float], channels: int) -> list[float]:
    """Return one number per channel: these, or their mean for each channel where their number differs."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


class Normalize(nn.Module):
    """uint8 [B, C, H, W] to (x / 255 - mean) / std in `dtype`; the memory format is kept."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(
                f"mean and std must have one number per channel, std positive, got {tuple(mean)} and {tuple(std)}"
            )
        self.dtype = dtype
        scale, shift = (
            [1 / (255 * s) for s in std],
            [-m / s for m, s in zip(mean, std, strict=True)],
        )
        self.register_buffer("scale", torch.tensor(scale).view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", torch.tensor(shift).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale).to(self.dtype)
