"""Conversion of any network's depthwise convolutions: the same outputs until trained."""

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

from dkcls.layers import (
    DynamicConv2d,
    LocalDeformKernel2d,
    StaticScope2d,
    convert_depthwise,
    load_rigid_conv_,
    offset_generators,
)
from tests.layers.common import image, stir

OPS = ["static", "global_dk", "local_dk", "dcn", "dcn_local_dk", "cond"]
NETWORKS = {
    "convnext": lambda: timm.create_model("convnext_atto", num_classes=3),
    "efficientnet": lambda: timm.create_model("efficientnet_lite0", num_classes=3),
    "torchvision": lambda: torchvision.models.mobilenet_v3_small(num_classes=3),
}


def network(key: str) -> nn.Module:
    """Return a network in eval mode, without small scales that hide a convolution's effect."""
    torch.manual_seed(0)
    model = NETWORKS[key]().eval()
    for name, p in model.named_parameters():
        if name.endswith("gamma"):
            nn.init.ones_(p)
    return model


def depthwise(model: nn.Module) -> dict[str, nn.Conv2d]:
    return {
        n: m
        for n, m in model.named_modules()
        if isinstance(m, nn.Conv2d) and m.groups == m.in_channels > 1
    }


@pytest.mark.parametrize("key", NETWORKS)
@pytest.mark.parametrize("op", OPS)
def test_outputs_agree(key, op):
    model, x = network(key), torch.randn(2, 3, 64, 64)
    expected, convolutions = model(x), depthwise(model)
    converted = convert_depthwise(copy.deepcopy(model), op)
    torch.testing.assert_close(
        converted(x), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
    )
    assert depthwise(converted) == {}
    for name, conv in convolutions.items():
        layer = converted.get_submodule(name)
        assert isinstance(layer, DynamicConv2d)
        assert not layer.training
        assert getattr(layer, "scope", None) in (None, (conv.kernel_size[0] + 1,) * 2)
    per_layer = {"static": 0, "cond": 0, "dcn_local_dk": 2}.get(op, 1)
    assert len(list(offset_generators(converted))) == per_layer * len(convolutions)


def test_the_networks_have_what_they_are_for():
    sizes = {
        key: {conv.kernel_size for conv in depthwise(network(key)).values()} for key in NETWORKS
    }
    assert sizes == {
        "convnext": {(7, 7)},
        "efficientnet": {(3, 3), (5, 5)},
        "torchvision": {(3, 3), (5, 5)},
    }


def test_options_and_placement():
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 1, groups=8)
    ).double()
    first = model[0].weight.clone()
    assert convert_depthwise(model, "local_dk", scope=7, grid=2.0, clip="projected") is model
    assert isinstance(model[0], LocalDeformKernel2d)
    assert (model[0].scope, model[0].grid, model[0].clip, model[0].bias) == (
        (7, 7),
        2.0,
        "projected",
        None,
    )
    assert model[0].weight.dtype == torch.float64
    assert [type(m) for m in model[1:]] == [nn.Conv2d, nn.Conv2d]
    torch.testing.assert_close(model[0].weight[..., 1::2, 1::2], first)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("kernel_size", "options"),
    [
        (3, {"dilation": 2}),
        (3, {"stride": (1, 2), "padding": (2, 3), "dilation": (2, 3)}),
        ((7, 1), {"padding": (3, 0), "bias": False}),
    ],
    ids=str,
)
def test_geometry_is_kept(op, kernel_size, options):
    torch.manual_seed(0)
    conv, x = (
        nn.Conv2d(4, 4, kernel_size, groups=4, **options, dtype=torch.float64),
        torch.randn(2, 4, 9, 11).double(),
    )
    model = convert_depthwise(nn.Sequential(conv), op)
    torch.testing.assert_close(model(x), conv(x))
    assert getattr(model[0], "scope", None) in (None, tuple(k + 1 for k in conv.kernel_size))


def test_two_outputs_per_channel_are_not_depthwise():
    model = convert_depthwise(
        nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 8, 3, groups=8))
    )
    assert [type(m) for m in model] == [nn.Conv2d, LocalDeformKernel2d]


@pytest.mark.parametrize("scope", [(2, 4), (4, 2)])
def test_a_scope_too_small_along_one_axis_is_refused(scope):
    with pytest.raises(
        ValueError,
        match=r"0: scope .* cannot hold every kernel of \(3, 3\): take a scope of at least",
    ):
        convert_depthwise(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), scope=scope)


@pytest.mark.parametrize("op", OPS)
def test_rigid_weights_stop_what_moved(op):
    layer = stir(convert_depthwise(nn.Sequential(nn.Conv2d(6, 6, 3, groups=6).double()), op)[0])
    conv = nn.Conv2d(6, 6, 3, groups=6).double()
    load_rigid_conv_(layer, conv.weight, conv.bias)
    torch.testing.assert_close(layer(image()), conv(image()))


def test_it_trains():
    model = convert_depthwise(network("convnext"), "dcn_local_dk").train()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(generator.weight.grad.any() for _, generator in offset_generators(model))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            lambda: timm.create_model("tf_efficientnet_lite0"),
            {},
            r"blocks.1.0.conv_dw is a Conv2dSame, not an nn.Conv2d",
        ),
        (
            lambda: timm.create_model("convnext_atto"),
            {"scope": 4},
            r"stages.0.blocks.0.conv_dw: scope \(4, 4\) .* \(7, 7\)",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3)),
            {},
            "Sequential holds no depthwise convolution",
        ),
        (lambda: nn.Conv2d(4, 4, 3, groups=4), {}, "Conv2d holds no depthwise convolution"),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)),
            {"op": "rigid"},
            "op must be one of cond, .*, got 'rigid'",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)),
            {"op": "dk"},
            "layer must be one of .*, got 'dk'",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="reflect")),
            {},
            'padding_mode must be "zeros"',
        ),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_is(build, options, message):
    model = build()
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        convert_depthwise(model, **options)
    assert repr(model) == before


def test_a_bias_needs_a_place():
    layer = StaticScope2d(4, 4, 3, groups=4, bias=False)
    with pytest.raises(ValueError, match="the rigid convolution has a bias, the layer has none"):
        load_rigid_conv_(layer, torch.randn(4, 1, 3, 3), torch.randn(4))
    layer = StaticScope2d(4, 4, 3, groups=4)
    load_rigid_conv_(layer, torch.randn(4, 1, 3, 3))
    assert not layer.bias.any()
