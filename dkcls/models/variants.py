"""Variants of a network: the operators of its depthwise and 1x1 convolutions, and their options.

One class serves all families. Blocks ask it for their convolutions when they are built; nothing is
swapped afterwards.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg
from torch import nn

from dkcls.layers import LAYERS, layer_class
from dkcls.ops.geometry import Grid
from dkcls.words import check_keywords, keywords

POINTWISE = ("rigid", "global_dk", "cond")
# The rest of an operator without its image offsets.
NOT_DEFORMABLE = {"dcn": "rigid", "dcn_local_dk": "local_dk"}
TIMM_ARGUMENTS = (
    "features_only",
    "out_indices",
    "feature_cls",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_model_args",
    "cache_dir",
)


@dataclass(frozen=True)
class Variant:
    """Arguments that all families take.

    Args:
        spatial: operator of the depthwise convolutions, a name of `dkcls.layers.LAYERS`. Where a
            network is too shallow for image offsets, "dcn" is "rigid" and "dcn_local_dk" is
            "local_dk".
        pointwise: operator of the 1x1 convolutions in the blocks, and of MobileNet-V2's last:
            "rigid", "global_dk" or "cond".
        scope, pointwise_scope: scope of the deformable kernels of either.
        experts: number of experts of conditional convolutions.
        grid, clip, scope_init: as the layers take them.
        depthwise_gain: scales the initial depthwise weights.
        options: further arguments of the layer that `spatial` names.
    """

    spatial: str = "rigid"
    pointwise: str = "rigid"
    scope: int = 4
    pointwise_scope: int = 2
    experts: int = 2
    grid: Grid = "centered"
    clip: str = "hard"
    scope_init: str = "rigid"
    depthwise_gain: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_choice("spatial", self.spatial, LAYERS, "; --plugin MODULE adds those of a module")
        _check_choice("pointwise", self.pointwise, POINTWISE)
        if not self.depthwise_gain > 0:
            raise ValueError(f"depthwise_gain must be above 0, got {self.depthwise_gain!r}")
        layer = layer_class(self.spatial)
        given = [*keywords(nn.Conv2d), *self._arguments(self.spatial, self.scope)]
        check_keywords("model.options", self.options, layer, f"the layer {self.spatial!r}", given)

    def spatial_conv(
        self,
        channels: int,
        stride: int,
        dilation: int,
        *,
        deformable: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return a depthwise 3x3 convolution; `deformable` where image offsets are allowed."""
        name = self.spatial if deformable else NOT_DEFORMABLE.get(self.spatial, self.spatial)
        options = {
            "bias": False,
            "device": device,
            "dtype": dtype,
            **self._arguments(name, self.scope),
            **(self.options if name == self.spatial else {}),
        }
        return layer_class(name)(
            channels, channels, 3, stride, dilation, dilation, channels, **options
        )

    def pointwise_conv(
        self,
        in_channels: int,
        out_channels: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return a 1x1 convolution."""
        options = {
            "bias": False,
            "device": device,
            "dtype": dtype,
            **self._arguments(self.pointwise, self.pointwise_scope),
        }
        return layer_class(self.pointwise)(in_channels, out_channels, 1, **options)

    def _arguments(self, name: str, scope: int) -> dict[str, Any]:
        """Return those of the variant's arguments that the layer of that name takes."""
        own = {
            "scope": scope,
            "grid": self.grid,
            "clip": self.clip,
            "scope_init": self.scope_init,
            "experts": self.experts,
        }
        taken = keywords(layer_class(name))
        return {argument: value for argument, value in own.items() if argument in taken}


def imagenet_cfg(**changes: Any) -> dict[str, Any]:
    """Return the facts for 224 x 224 pixels, the centre of an image whose shorter side is 256.

    There are no pretrained weights.
    """
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        **changes,
    }


def build_network(
    network: Callable[..., nn.Module],
    name: str,
    pretrained: bool,
    feature_levels: int,
    arguments: Mapping[str, Any],
) -> nn.Module:
    """Build `network(variant, **arguments)` by timm, as an entry point returns it.

    The arguments are the fields of `Variant`, the keyword-only ones of `network`, and timm's own;
    any other is refused.
    """
    own = [each.name for each in fields(Variant)]
    keywords = [
        p.name for p in inspect.signature(network).parameters.values() if p.kind is p.KEYWORD_ONLY
    ]
    _check_arguments(name, arguments, [*own, *keywords, *TIMM_ARGUMENTS])
    variant = Variant(**{key: value for key, value in arguments.items() if key in own})
    return build_model_with_cfg(
        partial(network, variant),
        name,
        pretrained,
        feature_cfg={"feature_cls": "getter", "out_indices": tuple(range(feature_levels))},
        **{key: value for key, value in arguments.items() if key not in own},
    )


def _check_arguments(name: str, arguments: Iterable[str], valid: list[str]) -> None:
    for argument in arguments:
        if argument not in valid:
            raise ValueError(
                f"{name} has no argument {argument!r}; "
                f"it has {', '.join(_nearest_first(argument, valid))}"
            )


def _check_choice(argument: str, value: str, choices: Iterable[str], advice: str = "") -> None:
    if value not in choices:
        raise ValueError(
            f"{argument} must be one of {', '.join(_nearest_first(str(value), choices))}, "
            f"got {value!r}{advice}"
        )


def _nearest_first(word: str, choices: Iterable[str]) -> list[str]:
    return sorted(choices, key=lambda choice: -SequenceMatcher(None, word, choice).ratio())
