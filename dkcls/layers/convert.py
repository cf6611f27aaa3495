"""Conversion of rigid convolutions to layers that compute the same and can learn to do more."""

from typing import Any

import torch
from torch import Tensor, nn

from dkcls.layers.base import LAYERS, DynamicConv2d, layer_class
from dkcls.layers.deform_kernel import ScopeConv2d
from dkcls.layers.init import reads_every_kernel


@torch.no_grad()
def load_rigid_conv_(layer: DynamicConv2d, weight: Tensor, bias: Tensor | None = None) -> None:
    """Make a layer compute what a rigid convolution with this weight and bias computes.

    `weight` is [Cout, Cin/groups, Kh, Kw]. The layer's generators become zero. A layer whose grid
    cannot read every kernel from its scope is refused.
    """
    if isinstance(layer, ScopeConv2d) and not reads_every_kernel(
        layer.kernel_size, layer.scope, layer.grid
    ):
        raise ValueError(
            f"scope {layer.scope} with grid={layer.grid!r} cannot hold every kernel of "
            f"{layer.kernel_size}: take a scope of at least {layer.kernel_size}"
        )
    layer.load_kernel(weight.to(layer.weight))
    layer.reset_generators()
    if layer.bias is not None:
        layer.bias.zero_() if bias is None else layer.bias.copy_(bias)
    elif bias is not None:
        raise ValueError("the rigid convolution has a bias, the layer has none")


def convert_depthwise(
    model: nn.Module, op: str = "local_dk", *, scope: int | None = None, **options: Any
) -> nn.Module:
    """Replace every depthwise convolution of a model by a layer, in place.

    Until training, the layer computes the same as the convolution. Convert before the optimiser is
    made: the generators in `offset_generators(model)` then want a learning rate of their own.

        model = convert_depthwise(timm.create_model("convnext_tiny", pretrained=True), "local_dk")

    Args:
        model: any network of nn.Conv2d. Convolutions of a derived class do something of their own
            and are refused, such as timm's Conv2dSame (the networks named tf_...), whose padding
            depends on the input.
        op: a name of `dkcls.layers.LAYERS`.
        scope: for layers that have a scope; None takes one more than the kernel size, as the
            paper's 4 for 3 x 3.
        options: arguments of the layer: grid, clip, experts, backend, ...

    Returns:
        The model.
    """
    kind = layer_class(op)
    if not issubclass(kind, DynamicConv2d):
        raise ValueError(
            f"op must be one of {', '.join(name for name in LAYERS if name != op)}, got {op!r}"
        )
    found = [(name, module) for name, module in model.named_modules() if _is_depthwise(module)]
    if not found or found[0][0] == "":
        raise ValueError(f"{type(model).__name__} holds no depthwise convolution larger than 1 x 1")
    for name, conv in found:
        if type(conv) is not nn.Conv2d:
            raise ValueError(
                f"{name} is a {type(conv).__name__}, not an nn.Conv2d, and cannot be converted"
            )
    layers = [(name, _convert(name, conv, kind, scope, options)) for name, conv in found]
    for name, layer in layers:
        model.set_submodule(name, layer)
    return model


def _is_depthwise(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv2d):
        return False
    return (
        module.groups == module.in_channels == module.out_channels > 1
        and module.kernel_size != (1, 1)
    )


def _convert(
    name: str, conv: nn.Conv2d, kind: type[nn.Module], scope: int | None, options: dict[str, Any]
) -> nn.Module:
    if issubclass(kind, ScopeConv2d):
        options = {
            "scope": tuple(k + 1 for k in conv.kernel_size) if scope is None else scope,
            **options,
        }
    try:
        layer = kind(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            conv.bias is not None,
            padding_mode=conv.padding_mode,
            device=conv.weight.device,
            dtype=conv.weight.dtype,
            **options,
        )
        assert isinstance(layer, DynamicConv2d)
        load_rigid_conv_(layer, conv.weight, conv.bias)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return layer.train(conv.training)
