"""Layers that read their kernel from a scope, and deformable convolution.

The coordinates at which the kernel is read differ per position, per image, or are fixed.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkcls.layers.base import LAYERS, DynamicConv2d
from dkcls.layers.generators import GlobalOffsets
from dkcls.layers.init import fill_scope_
from dkcls.ops import deform_kernel2d, global_deform_kernel2d, sample_kernel2d
from dkcls.ops.geometry import Grid, make_geometry, pair

for _operator in ("deform_kernel2d", "global_deform_kernel2d", "sample_kernel2d"):
    torch.fx.wrap(_operator)  # a node of its graphs: what an operator does depends on shapes


class ScopeConv2d(DynamicConv2d):
    """Base class of the layers with a scope, from which a Kh x Kw kernel is read.

    The weight is [Cout, Cin/groups, Sh, Sw].

    Args:
        scope: Sh, Sw or both as an int.
        grid: the coordinates of the taps without offsets: "centered" (unit steps), "spread" (end to
            end), or the step.
        clip: fate of the offsets' gradient outside the scope: "hard" stops the gradient,
            "projected" lets the gradient lead back.
        scope_init: "rigid" draws a kernel as nn.Conv2d does and takes the scope of least norm that
            reads as exactly that kernel, so that a fresh layer computes what the rigid layer would
            (least squares where the grid cannot read every kernel); "independent" draws every entry
            of the scope from the same distribution.
        backend: backend of the operator; None chooses by device.
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
        scope: int | Sequence[int] = 4,
        grid: Grid = "centered",
        clip: str = "hard",
        scope_init: str = "rigid",
        backend: str | None = None,
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
        if scope_init not in ("rigid", "independent"):
            raise ValueError(f'scope_init must be "rigid" or "independent", got {scope_init!r}')
        self.scope, self.grid, self.clip = pair(scope, "scope", 1), grid, clip
        self.scope_init, self.backend = scope_init, backend
        # Refuses what the operator would refuse.
        make_geometry(self.scope, self.kernel_size, grid=grid, clip=clip)
        self._add_parameters(
            out_channels, in_channels // groups, *self.scope, bias=bias, device=device, dtype=dtype
        )
        self._add_generators()
        self.reset_parameters()

    def _add_generators(self) -> None:
        """Add the generators of offsets, if any."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weight and bias as nn.Conv2d does, in its order; set the generators to zero.

        With `scope_init` "independent", every entry of the scope is then drawn anew.
        """
        super().reset_parameters()
        if self.scope_init == "independent":
            bound = self._fan_in**-0.5
            nn.init.uniform_(self.weight, -bound, bound)

    def load_kernel(self, kernel: Tensor, generator: torch.Generator | None = None) -> None:
        self._check_kernel(kernel)
        fill_scope_(self.weight, kernel.to(self.weight), self.grid, generator)

    @property
    def _sampling(self) -> dict:
        return {
            "kernel_size": self.kernel_size,
            "grid": self.grid,
            "clip": self.clip,
            "backend": self.backend,
        }

    @property
    def _options(self) -> dict:
        return {
            "stride": self.stride,
            "padding": self._padding,
            "dilation": self.dilation,
            **self._sampling,
        }

    def extra_repr(self) -> str:
        text = f"{super().extra_repr()}, scope={self.scope}, grid={self.grid!r}"
        for name, default in (("clip", "hard"), ("scope_init", "rigid"), ("backend", None)):
            value = getattr(self, name)
            text += f", {name}={value!r}" if value != default else ""
        return text


@LAYERS.register("static", label="static scope")
class StaticScope2d(ScopeConv2d):
    """Control: a scope read on its fixed grid, without offsets, with any groups.

    `clip` has no effect.
    """

    def forward(self, x: Tensor) -> Tensor:
        kernel = sample_kernel2d(self.weight, None, **self._sampling)[0]
        return F.conv2d(
            self._pad(x), kernel, self.bias, self.stride, self._padding, self.dilation, self.groups
        )


@LAYERS.register("global_dk", label="global DK")
class GlobalDeformKernel2d(ScopeConv2d):
    """Global deformable kernels, with any groups.

    Offsets from the pooled input move the taps in the scope, per image.
    """

    def _add_generators(self) -> None:
        out = 2 * self.kernel_size[0] * self.kernel_size[1]
        self.kernel_generator = GlobalOffsets(
            self.in_channels, out, device=self.weight.device, dtype=self.weight.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        offset = self.kernel_generator(x)
        return self._add_bias(
            global_deform_kernel2d(
                self._pad(x), self.weight, offset, groups=self.groups, **self._options
            )
        )


@LAYERS.register("local_dk", label="local DK")
class LocalDeformKernel2d(ScopeConv2d):
    """Local deformable kernels, depthwise.

    Offsets from a convolution move the taps in the scope, per position.
    """

    def _add_generators(self) -> None:
        self._require_depthwise()
        self.kernel_generator = self._local_offsets()

    def forward(self, x: Tensor) -> Tensor:
        x = self._pad(x)
        return self._add_bias(
            deform_kernel2d(x, self.weight, self.kernel_generator(x), **self._options)
        )


@LAYERS.register("dcn_local_dk", label="DCN + local DK")
class DeformKernelConv2d(LocalDeformKernel2d):
    """Local deformable kernels and deformable convolution in one, depthwise.

    Each of the two has a generator of its own.
    """

    def _add_generators(self) -> None:
        super()._add_generators()
        self.image_generator = self._local_offsets()

    def forward(self, x: Tensor) -> Tensor:
        x = self._pad(x)
        offsets = self.kernel_generator(x), self.image_generator(x)
        return self._add_bias(deform_kernel2d(x, self.weight, *offsets, **self._options))


@LAYERS.register("dcn", label="DCN")
class DeformConv2d(DynamicConv2d):
    """Deformable convolution, depthwise: offsets move where a Kh x Kw kernel reads the input.

    Args:
        backend: backend of the operator; None chooses by device.
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
        backend: str | None = None,
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
        self._require_depthwise()
        self.backend = backend
        self._add_parameters(*self._kernel_shape, bias=bias, device=device, dtype=dtype)
        self.image_generator = self._local_offsets()
        self.reset_parameters()

    @torch.no_grad()
    def load_kernel(self, kernel: Tensor, generator: torch.Generator | None = None) -> None:
        self._check_kernel(kernel)
        self.weight.copy_(kernel)

    def forward(self, x: Tensor) -> Tensor:
        x = self._pad(x)
        return self._add_bias(
            deform_kernel2d(
                x,
                self.weight,
                image_offset=self.image_generator(x),
                kernel_size=self.kernel_size,
                stride=self.stride,
                padding=self._padding,
                dilation=self.dilation,
                backend=self.backend,
            )
        )
