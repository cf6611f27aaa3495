"""Generators of offsets, per position or per image, and the routing of conditional convolution.

Generators hold their parameters themselves and are no nn.Conv2d or nn.Linear, so that initialisers
that go by those classes, as timm's do, leave the zeros alone.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkcls.ops.geometry import Pair


class _Generator(nn.Module):
    def __init__(
        self,
        *shape: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


class _PooledLinear(_Generator):
    """Global average pool, then a linear map: [N, C, H, W] -> [N, out]."""

    def __init__(
        self,
        channels: int,
        out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(out, channels, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mean((2, 3)), self.weight, self.bias)


class OffsetGenerator(_Generator):
    """Base class of the generators of kernel and image offsets, which start at zero.

    The class marks them for a learning rate of their own.
    """


class LocalOffsets(OffsetGenerator):
    """Offsets per position: [N, C, H, W] -> [N, 2*Kh*Kw, Ho, Wo].

    A dense convolution of the layer's own geometry makes the offsets.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            2 * kernel_size[0] * kernel_size[1], channels, *kernel_size, device=device, dtype=dtype
        )
        self.stride, self.padding, self.dilation = stride, padding, dilation

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation)

    def extra_repr(self) -> str:
        kernel_size = tuple(self.weight.shape[2:])
        return (
            f"{super().extra_repr()}, {kernel_size=}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}"
        )


class GlobalOffsets(_PooledLinear, OffsetGenerator):
    """Offsets per image: [N, C, H, W] -> [N, 2*Kh*Kw]."""


class Routing(_PooledLinear):
    """Share of each expert for each image, in (0, 1): [N, C, H, W] -> [N, experts].

    Every share is one half at first.
    """

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


def offset_generators(module: nn.Module) -> Iterator[tuple[str, OffsetGenerator]]:
    """Yield the names and generators of all offsets in a module, without those of routing."""
    for name, child in module.named_modules():
        if isinstance(child, OffsetGenerator):
            yield name, child
