"""ResNet-50-DW: ResNet-50 with depthwise 3x3 convolutions, twice as wide, of any operator."""

from typing import Any

import torch
from timm.layers import LayerType
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import ResNet
from torch import Tensor, nn

from dkcls.models.init import init_weights_
from dkcls.models.variants import Variant, build_network, imagenet_cfg


class Bottleneck(nn.Module):
    """Block of 1x1, depthwise 3x3, 1x1; the names are those of timm's block."""

    expansion = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        *,
        variant: Variant,
        first_dilation: int = 1,
        act_layer: type[nn.Module] = nn.ReLU,
        norm_layer: type[nn.Module] = nn.BatchNorm2d,
        drop_path: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **_: Any,  # what timm passes to its own blocks besides
    ):
        super().__init__()
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        width = 2 * planes
        # From layer2 on, where images of 224 x 224 have become smaller than 56 x 56.
        deformable = planes > 64
        self.conv1 = variant.pointwise_conv(inplanes, width, **dd)
        self.bn1 = norm_layer(width, **dd)
        self.act1 = act_layer(inplace=True)
        self.conv2 = variant.spatial_conv(
            width, stride, first_dilation, deformable=deformable, **dd
        )
        self.bn2 = norm_layer(width, **dd)
        self.act2 = act_layer(inplace=True)
        self.conv3 = variant.pointwise_conv(width, planes * self.expansion, **dd)
        self.bn3 = norm_layer(planes * self.expansion, **dd)
        self.drop_path = nn.Identity() if drop_path is None else drop_path
        self.downsample = nn.Identity() if downsample is None else downsample
        self.act3 = act_layer(inplace=True)

    def zero_init_last(self) -> None:
        weight = getattr(self.bn3, "weight", None)
        if weight is not None:
            nn.init.zeros_(weight)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act1(self.bn1(self.conv1(x)))
        out = self.act2(self.bn2(self.conv2(out)))
        out = self.drop_path(self.bn3(self.conv3(out)))
        out += self.downsample(x)
        return self.act3(out)


class ResNetDW(ResNet):
    """ResNet of timm with these blocks, and with everything that timm's has."""

    def __init__(
        self,
        variant: Variant,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        output_stride: int = 32,
        global_pool: str = "avg",
        act_layer: LayerType = nn.ReLU,
        norm_layer: LayerType = nn.BatchNorm2d,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        zero_init_last: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        with torch.random.fork_rng(devices=[]):  # variants draw more or less as they are built
            super().__init__(
                Bottleneck,  # type: ignore[arg-type]
                (3, 4, 6, 3),
                num_classes=num_classes,
                in_chans=in_chans,
                output_stride=output_stride,
                global_pool=global_pool,
                act_layer=act_layer,
                norm_layer=norm_layer,
                drop_rate=drop_rate,
                drop_path_rate=drop_path_rate,
                block_args={"variant": variant},
                device=device,
                dtype=dtype,
            )
        self.variant = variant
        self.init_weights(zero_init_last)

    @torch.jit.ignore
    def init_weights(self, zero_init_last: bool = True) -> None:
        """Draw new weights; with one seed, the same for every variant."""
        if not hasattr(self, "variant"):
            return  # timm's constructor calls this one time too early
        init_weights_(self, self.variant, per_group=False)
        if zero_init_last:
            for module in self.modules():
                if isinstance(module, Bottleneck):
                    module.zero_init_last()


CFG = imagenet_cfg(first_conv="conv1", classifier="fc")
default_cfgs = generate_default_cfgs({"resnet50_dw": CFG})


def create_resnet50_dw(name: str, pretrained: bool, **arguments: Any) -> nn.Module:
    return build_network(ResNetDW, name, pretrained, 5, arguments)


@register_model
def resnet50_dw(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Build ResNet-50-DW, rigid unless `spatial` or `pointwise` say otherwise."""
    return create_resnet50_dw("resnet50_dw", pretrained, **arguments)
