"""Common parts of the layers: nn.Conv2d's arguments, checked; a weight; and a bias, added last.

No layer is an nn.Conv2d, so that initialisers that go by that class, as timm's do, leave the layers
alone: a layer draws its weight itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkcls.layers.generators import LocalOffsets
from dkcls.layers.init import draw_bias_, draw_kernel
from dkcls.ops.geometry import Pair, pair
from dkcls.registry import Registry

LAYERS: Registry[type[nn.Module]] = Registry("layer", "dkcls.layers")
LAYERS.register("rigid")(nn.Conv2d)


def register_layer(name: str, label: str | None = None) -> Callable[[Any], Any]:
    """Return a decorator that makes a layer a value of `model.spatial`.

    The layer takes nn.Conv2d's arguments; `label` is its name in tables and pictures.
    """
    return LAYERS.register(name, label)


def layer_class(name: str) -> type[nn.Module]:
    """Return the layer of that name; each takes nn.Conv2d's arguments and keywords of its own."""
    return LAYERS.find(name)


class DynamicConv2d(nn.Module):
    """Base class of the layers.

    A subclass adds its parameters and generators, implements `load_kernel`, and calls
    `reset_parameters`.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        *,
        padding_mode: str = "zeros",
    ):
        super().__init__()
        if padding_mode != "zeros":
            raise ValueError(
                'padding_mode must be "zeros": taps that leave the input read zeros, '
                f"got {padding_mode!r}"
            )
        if (
            groups < 1
            or in_channels % groups
            or out_channels % groups
            or in_channels < 1
            or out_channels < 1
        ):
            raise ValueError(
                f"groups must divide in_channels = {in_channels} and "
                f"out_channels = {out_channels}, got {groups}"
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = pair(kernel_size, "kernel_size", 1)
        self.stride, self.dilation = pair(stride, "stride", 1), pair(dilation, "dilation", 1)
        self.padding = padding if isinstance(padding, str) else pair(padding, "padding", 0)
        self._padding, self._pad_first = self._resolve_padding()

    def _resolve_padding(self) -> tuple[Pair, list[int]]:
        """Return the operator's padding, and the arguments of F.pad before the operator, if any.

        "same" may need more padding at the end than at the start, which takes F.pad.
        """
        if not isinstance(self.padding, str):
            return self.padding, []
        if self.padding not in ("same", "valid"):
            raise ValueError(
                f'padding must be an int, a pair, "same" or "valid", got {self.padding!r}'
            )
        if self.padding == "valid":
            return (0, 0), []
        if self.stride != (1, 1):
            raise ValueError(f'padding="same" needs stride 1, got stride {self.stride}')
        y, x = (d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True))
        if y % 2 == 0 and x % 2 == 0:
            return (y // 2, x // 2), []
        return (0, 0), [x // 2, x - x // 2, y // 2, y - y // 2]

    def _require_depthwise(self) -> None:
        if not self.in_channels == self.out_channels == self.groups:
            raise ValueError(
                f"{type(self).__name__} is depthwise: in_channels, out_channels and groups must be "
                f"equal, got {self.in_channels}, {self.out_channels} and {self.groups}; "
                f"pass out_channels={self.in_channels}, groups={self.in_channels}"
            )

    def _add_parameters(
        self, *shape: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        vector = (
            nn.Parameter(torch.empty(self.out_channels, device=device, dtype=dtype))
            if bias
            else None
        )
        self.register_parameter("bias", vector)

    def _local_offsets(self) -> LocalOffsets:
        """Return an offset generator with this layer's geometry."""
        return LocalOffsets(
            self.in_channels,
            self.kernel_size,
            self.stride,
            self._padding,
            self.dilation,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias as nn.Conv2d does, in its order; set the generators to zero."""
        kernel = draw_kernel(self.weight, self._kernel_shape)
        draw_bias_(self.bias, self._fan_in)
        self.load_kernel(kernel)
        self.reset_generators()

    def reset_generators(self) -> None:
        """Set offset generators and routing to zero.

        The layer then computes what `load_kernel` says.
        """
        for generator in self.children():
            generator.reset_parameters()  # type: ignore[operator]

    def load_kernel(self, kernel: Tensor, generator: torch.Generator | None = None) -> None:
        """Make a fresh layer compute what a rigid layer with the weight `kernel` computes.

        `kernel` is [Cout, Cin/groups, Kh, Kw]. `generator` draws whatever else has to be drawn, so
        that parts that start alike can grow apart.
        """
        raise NotImplementedError(f"{type(self).__name__} has no one kernel to load")

    def _check_kernel(self, kernel: Tensor) -> None:
        expected = list(self._kernel_shape)
        if list(kernel.shape) != expected:
            raise ValueError(
                f"kernel must be [Cout, Cin/groups, Kh, Kw] = {expected}, got {list(kernel.shape)}"
            )

    @property
    def _kernel_shape(self) -> tuple[int, int, int, int]:
        return self.out_channels, self.in_channels // self.groups, *self.kernel_size

    @property
    def _fan_in(self) -> int:
        return self.in_channels // self.groups * self.kernel_size[0] * self.kernel_size[1]

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, self._pad_first) if self._pad_first else x

    def _add_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias.to(out.dtype)[:, None, None]

    def extra_repr(self) -> str:
        text = (
            f"{self.in_channels}, {self.out_channels}, "
            f"kernel_size={self.kernel_size}, stride={self.stride}"
        )
        for name, default in (("padding", (0, 0)), ("dilation", (1, 1)), ("groups", 1)):
            value = getattr(self, name)
            text += f", {name}={value!r}" if value != default else ""
        return text if self.bias is not None else f"{text}, bias=False"
