"""Conditional convolution as a layer: the pooled input decides how experts are mixed, per image."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dkcls.layers.base import LAYERS, DynamicConv2d
from dkcls.layers.generators import Routing
from dkcls.layers.init import draw_bias_, draw_kernel, draw_noise
from dkcls.ops import cond_conv2d

torch.fx.wrap("cond_conv2d")  # a node of its graphs: what an operator does depends on shapes


@LAYERS.register("cond", label="CondConv")
class CondConv2d(DynamicConv2d):
    """Convolution whose kernel is a mix of experts, per image; a fresh layer takes half of each.

    The weight is [E, Cout, Cin/groups*Kh*Kw], because `.to(memory_format=torch.channels_last)`
    breaks on five dimensions.

    Args:
        experts: E, the number of kernels to mix.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        experts: int = 4,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            padding_mode=padding_mode,
        )
        if experts < 1:
            raise ValueError(f"experts must be at least 1, got {experts}")
        self.experts = experts
        self._add_parameters(
            experts, out_channels, self._fan_in, bias=bias, device=device, dtype=dtype
        )
        self.routing = Routing(in_channels, experts, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every expert as nn.Conv2d draws a kernel, then the bias; set the routing to zero."""
        for expert in self.weight:
            expert.copy_(draw_kernel(self.weight, self._kernel_shape).flatten(1))
        draw_bias_(self.bias, self._fan_in)
        self.reset_generators()

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor, generator: torch.Generator | None = None) -> None:
        """Load experts whose mix, one half of each, is `kernel`, but that are different.

        Equal experts would get equal gradients and stay equal. So the experts are E independent
        draws, of 2/sqrt(E) times the kernel's size, under the condition that their mix is the
        kernel: each expert is 2/E of the kernel plus noise, and the noise sums to zero over the
        experts.
        """
        self._check_kernel(kernel)
        kernel = kernel.to(self.weight).flatten(1)
        noise = draw_noise(self.weight, kernel, generator)
        self.weight.copy_(
            2 / self.experts * kernel + 2 / self.experts**0.5 * (noise - noise.mean(0))
        )

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(2, self._kernel_shape[1:])
        return self._add_bias(
            cond_conv2d(
                self._pad(x),
                weight,
                self.routing(x),
                stride=self.stride,
                padding=self._padding,
                dilation=self.dilation,
                groups=self.groups,
            )
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, experts={self.experts}"
