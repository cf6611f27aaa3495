"""MobileNet-V2 with any operator in its blocks, and a small network of the same blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers import DropPath, LayerType, create_classifier, get_norm_act_layer, make_divisible
from timm.models import generate_default_cfgs, register_model
from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn

from dkcls.models.init import init_weights_
from dkcls.models.variants import Variant, build_network, imagenet_cfg


class Stage(NamedTuple):
    expansion: int
    channels: int
    blocks: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """Shape of a network of width 1."""

    stem: int
    stages: tuple[Stage, ...]
    head: int
    deformable_from: int  # image offsets where one step is at least so many pixels of the image
    divisor: int  # of all numbers of channels
    narrow_head: bool  # whether the head becomes narrower with the network


MOBILENET_V2 = Layout(
    stem=32,
    stages=(
        Stage(1, 16, 1, 1),
        Stage(6, 24, 2, 2),
        Stage(6, 32, 3, 2),
        Stage(6, 64, 4, 2),
        Stage(6, 96, 3, 1),
        Stage(6, 160, 3, 2),
        Stage(6, 320, 1, 1),
    ),
    head=1280,
    deformable_from=8,  # outputs smaller than 56 x 56 at 224 x 224
    divisor=8,
    narrow_head=False,
)
NANO = Layout(
    stem=16,
    stages=(Stage(1, 16, 1, 1), Stage(3, 24, 3, 2), Stage(3, 40, 2, 2)),
    head=128,
    deformable_from=2,  # everywhere
    divisor=2,
    narrow_head=True,
)


class BlockShape(NamedTuple):
    """Shape and place of a block in its network; image offsets are possible where `deformable`."""

    in_channels: int
    out_channels: int
    mid_channels: int
    stride: int
    dilation: int
    deformable: bool
    drop_path: float

    @property
    def has_skip(self) -> bool:
        return self.stride == 1 and self.in_channels == self.out_channels


class DepthwiseSeparable(nn.Module):
    """Block without expansion: depthwise 3x3, 1x1. The names are those of timm's block."""

    def __init__(self, shape: BlockShape, variant: Variant, norm_act: Any, **dd: Any):
        super().__init__()
        cin, cout = shape.in_channels, shape.out_channels
        self.conv_dw = variant.spatial_conv(
            cin, shape.stride, shape.dilation, deformable=shape.deformable, **dd
        )
        self.bn1 = norm_act(cin, inplace=True, **dd)
        self.conv_pw = variant.pointwise_conv(cin, cout, **dd)
        self.bn2 = norm_act(cout, apply_act=False, **dd)
        self.has_skip = shape.has_skip
        self.drop_path = DropPath(shape.drop_path) if shape.drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv_pw(self.bn1(self.conv_dw(x))))
        return self.drop_path(out) + x if self.has_skip else out


class InvertedResidual(nn.Module):
    """Block of 1x1 to more channels, depthwise 3x3, 1x1 to fewer; the names are those of timm's."""

    def __init__(self, shape: BlockShape, variant: Variant, norm_act: Any, **dd: Any):
        super().__init__()
        mid = shape.mid_channels
        self.conv_pw = variant.pointwise_conv(shape.in_channels, mid, **dd)
        self.bn1 = norm_act(mid, inplace=True, **dd)
        self.conv_dw = variant.spatial_conv(
            mid, shape.stride, shape.dilation, deformable=shape.deformable, **dd
        )
        self.bn2 = norm_act(mid, inplace=True, **dd)
        self.conv_pwl = variant.pointwise_conv(mid, shape.out_channels, **dd)
        self.bn3 = norm_act(shape.out_channels, apply_act=False, **dd)
        self.has_skip = shape.has_skip
        self.drop_path = DropPath(shape.drop_path) if shape.drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv_dw(self.bn1(self.conv_pw(x))))
        out = self.bn3(self.conv_pwl(out))
        return self.drop_path(out) + x if self.has_skip else out


class MobileNetV2(EfficientNet):
    """EfficientNet of timm with these blocks, and with everything that timm's has.

    The state dict of a rigid network is that of timm's network.
    """

    def __init__(
        self,
        layout: Layout,
        variant: Variant,
        *,
        width: float = 1.0,
        num_classes: int = 1000,
        in_chans: int = 3,
        output_stride: int = 32,
        global_pool: str = "avg",
        act_layer: LayerType = nn.ReLU6,
        norm_layer: LayerType = nn.BatchNorm2d,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        nn.Module.__init__(self)  # not EfficientNet's, which would build timm's blocks
        if not width > 0:
            raise ValueError(f"width must be above 0, got {width!r}")
        if output_stride not in (8, 16, 32):
            raise ValueError(f"output_stride must be 8, 16 or 32, got {output_stride!r}")
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        norm_act = get_norm_act_layer(norm_layer, act_layer)
        assert norm_act is not None
        self.variant = variant
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False
        with torch.random.fork_rng(devices=[]):  # variants draw more or less as they are built
            stem = make_divisible(layout.stem * width, layout.divisor)
            self.conv_stem = nn.Conv2d(in_chans, stem, 3, 2, 1, bias=False, **dd)
            self.bn1 = norm_act(stem, inplace=True, **dd)
            stages, self.feature_info = [], []
            for shapes, info in _stages(layout, stem, width, output_stride, drop_path_rate):
                block = InvertedResidual if shapes[0].mid_channels else DepthwiseSeparable
                stages.append(
                    nn.Sequential(*(block(shape, variant, norm_act, **dd) for shape in shapes))
                )
                self.feature_info += info
            self.blocks = nn.Sequential(*stages)
            self.stage_ends = [info["stage"] for info in self.feature_info]
            self.num_features = make_divisible(layout.head * width, layout.divisor)
            if not layout.narrow_head:
                self.num_features = max(layout.head, self.num_features)
            self.conv_head = variant.pointwise_conv(
                self.feature_info[-1]["num_chs"], self.num_features, **dd
            )
            self.bn2 = norm_act(self.num_features, inplace=True, **dd)
            self.global_pool, self.classifier = create_classifier(
                self.num_features, num_classes, pool_type=global_pool, **dd
            )
        self.head_hidden_size = self.num_features * self.global_pool.feat_mult()
        self.init_weights()

    @torch.jit.ignore
    def init_weights(self) -> None:
        """Draw new weights; with one seed, the same for every variant."""
        init_weights_(self, self.variant, per_group=True)


def _stages(
    layout: Layout, channels: int, width: float, output_stride: int, drop_path_rate: float
) -> Iterator[tuple[list[BlockShape], list[dict[str, Any]]]]:
    """Yield the blocks of every stage, and what timm wants to know of its output.

    timm wants to know nothing of a stage's output if the next stage's output has the same size.
    """
    total = sum(stage.blocks for stage in layout.stages)
    # actual: pixels of the image per step, in a network that stops at output_stride.
    index, dilation, actual = 0, 1, 2
    # nominal: without that stop, as output_stride does not decide which layers are deformable.
    nominal = 2
    for number, stage in enumerate(layout.stages, start=1):
        shapes = []
        out = make_divisible(stage.channels * width, layout.divisor)
        for i in range(stage.blocks):
            stride, next_dilation = stage.stride if i == 0 else 1, dilation
            nominal *= stride
            if actual * stride > output_stride:
                stride, next_dilation = 1, dilation * stride
            actual *= stride
            mid = (
                make_divisible(channels * stage.expansion, layout.divisor)
                if stage.expansion > 1
                else 0
            )
            deformable = nominal >= layout.deformable_from
            shapes.append(
                BlockShape(
                    channels, out, mid, stride, dilation, deformable, drop_path_rate * index / total
                )
            )
            channels, dilation, index = out, next_dilation, index + 1
        last_of_its_size = number == len(layout.stages) or layout.stages[number].stride > 1
        info = {
            "num_chs": out,
            "reduction": actual,
            "module": f"blocks.{number - 1}",
            "stage": number,
        }
        yield shapes, [info] if last_of_its_size else []


CFG = imagenet_cfg(first_conv="conv_stem", classifier="classifier")
NANO_CFG = {
    **CFG,
    "num_classes": 10,
    "input_size": (1, 32, 32),
    "pool_size": (4, 4),
    "crop_pct": 1.0,
    "mean": (0.15,),
    "std": (0.25,),
}
default_cfgs = generate_default_cfgs({"mobilenetv2_dw": CFG, "mobilenetv2_nano": NANO_CFG})


def create_mobilenetv2_dw(name: str, pretrained: bool, **arguments: Any) -> nn.Module:
    return build_network(
        partial(MobileNetV2, MOBILENET_V2), name, pretrained, 5, {"experts": 8, **arguments}
    )


@register_model
def mobilenetv2_dw(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Build MobileNet-V2; `spatial` and `pointwise` make it differ from timm's mobilenetv2_100."""
    return create_mobilenetv2_dw("mobilenetv2_dw", pretrained, **arguments)


@register_model
def mobilenetv2_nano(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Build a network of six blocks for grey images of 32 x 32, with ten classes."""
    network = partial(MobileNetV2, NANO)
    return build_network(network, "mobilenetv2_nano", pretrained, 3, {"experts": 8, **arguments})
