"""Initial weights: timm's rules, one function for all variants of a seed, generators at zero."""

import math
from functools import cache

import pytest
import timm
import torch
from timm.models._efficientnet_builder import efficientnet_init_weights
from timm.models.resnet import ResNet
from torch import nn

from dkcls.layers import CondConv2d, DynamicConv2d, offset_generators
from dkcls.layers.generators import Routing
from dkcls.models import PAPER, Variant
from dkcls.models.init import init_weights_
from tests.models.common import VARIANTS, awake, create, images

MOVED = [key for key in VARIANTS if key != "rigid"]
# The largest one takes seconds to build, and its parts are in others.
FRESH = [row for row in PAPER if row.arguments and row.name != "resnet50_dw_point2_local4"]


@cache
def rigid_output(base: str) -> torch.Tensor:
    with torch.no_grad():
        return awake(create(base, num_classes=9))(images(3, (64, 64)))


@pytest.mark.parametrize("row", FRESH, ids=lambda row: row.name)
@torch.no_grad()
def test_a_fresh_network_is_the_rigid_one(row):
    x, model = images(3, (64, 64)), awake(create(row.name, num_classes=9))
    expected = rigid_output(row.base)
    assert expected.std() > 1e-3
    torch.testing.assert_close(
        model(x), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
    )


@pytest.mark.parametrize("key", MOVED)
@pytest.mark.parametrize(
    "options", [{}, {"scope_init": "independent"}, {"depthwise_gain": 0.2}], ids=str
)
def test_what_is_rigid_is_equal_to_the_bit(key, options):
    rigid, model = create(**options), create(**VARIANTS[key], **options)
    state, layers = (
        model.state_dict(),
        {n for n, m in model.named_modules() if isinstance(m, DynamicConv2d)},
    )
    compared = 0
    for name, expected in rigid.state_dict().items():
        if name.rpartition(".")[0] not in layers or key == "dcn":
            assert torch.equal(state[name], expected), name
            compared += 1
    assert compared > 30


@cache
def large_rigid() -> dict[str, torch.Tensor]:
    return create("resnet50_dw").state_dict()


@pytest.mark.parametrize("name", ["resnet50_dw_cond_local4", "resnet50_dw_dcn"])
def test_so_it_is_in_the_large_network(name):
    rigid, model = large_rigid(), create(name).state_dict()
    for key in (
        "conv1.weight",
        "layer3.0.downsample.0.weight",
        "layer4.2.bn3.weight",
        "fc.weight",
        "fc.bias",
    ):
        assert torch.equal(model[key], rigid[key])


def test_building_takes_the_same_from_the_global_stream():
    after = []
    for key in VARIANTS:
        create(**VARIANTS[key])
        after.append(torch.rand(3))
    assert all(torch.equal(a, after[0]) for a in after)
    assert not torch.equal(create(seed=0).conv_stem.weight, create(seed=1).conv_stem.weight)


def test_the_rules_are_timms():
    ours, theirs = create("mobilenetv2_dw"), create("mobilenetv2_100")
    for name, expected in theirs.named_parameters():
        got = ours.get_parameter(name)
        if expected.numel() > 3000:
            assert got.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
        elif not expected.any() or (expected == 1).all():
            assert torch.equal(got, expected), name
    ours, theirs = create("resnet50_dw"), create("resnet50")
    for name in (
        "conv1.weight",
        "layer2.0.downsample.0.weight",
        "layer3.1.conv3.weight",
        "fc.weight",
        "fc.bias",
    ):
        assert ours.get_parameter(name).std().item() == pytest.approx(
            theirs.get_parameter(name).std().item(), rel=0.1
        ), name
    assert ours.layer3[0].conv2.weight.std().item() == pytest.approx(
        math.sqrt(2 / (512 * 9)), rel=0.1
    )
    assert not ours.layer3[0].bn3.weight.any()
    assert create("resnet50_dw", zero_init_last=False).layer3[0].bn3.weight.all()


def test_gain_scales_depthwise_kernels_and_nothing_else():
    plain, scaled = create().state_dict(), create(depthwise_gain=0.25).state_dict()
    for name, value in plain.items():
        assert torch.equal(scaled[name], value * 0.25 if "conv_dw" in name else value), name
    local = create(spatial="local_dk", depthwise_gain=0.25).state_dict()
    torch.testing.assert_close(
        local["blocks.0.0.conv_dw.weight"],
        create(spatial="local_dk").blocks[0][0].conv_dw.weight * 0.25,
    )


def test_independent_entries_have_the_kernels_distribution():
    model = create(
        "mobilenetv2_dw", spatial="static", scope=9, scope_init="independent", num_classes=0
    )
    assert model.blocks[6][0].conv_dw.weight.std().item() == pytest.approx(
        math.sqrt(2 / 9), rel=0.02
    )


def test_experts_differ_and_mix_to_the_kernel():
    torch.manual_seed(0)
    layer, kernel = CondConv2d(32, 64, 3, experts=5), torch.randn(64, 32, 3, 3)
    layer.load_kernel(kernel)
    torch.testing.assert_close(layer.weight.sum(0) / 2, kernel.flatten(1))
    flat = layer.weight.flatten(1)
    torch.testing.assert_close(flat.std(1), torch.full((5,), 2 / 5**0.5), rtol=0.05, atol=0)
    assert (torch.corrcoef(flat) - torch.eye(5)).abs().max() < 0.05  # as independent draws


def untouched(model: nn.Module) -> bool:
    """Check that there are generators or routing, and that all are at zero."""
    parts = [part for _, part in offset_generators(model)] + [
        m for m in model.modules() if isinstance(m, Routing)
    ]
    return bool(parts) and not any(p.any() for part in parts for p in part.parameters())


@pytest.mark.parametrize("key", [key for key in MOVED if key != "static"])
def test_generators_stay_at_zero(key):
    model = create(**VARIANTS[key])
    assert untouched(model)
    model.reset_classifier(5)
    assert untouched(model)
    for initialise in (type(model).init_weights, efficientnet_init_weights, ResNet.init_weights):
        before = model.conv_stem.weight.clone()
        for _ in range(2):
            initialise(model)
        assert untouched(model)
        assert not torch.equal(model.conv_stem.weight, before)
    for part in model.modules():
        if isinstance(part, DynamicConv2d):
            nn.init.ones_(next(iter(part.children())).weight)
    model.init_weights()
    assert untouched(model)


@pytest.mark.parametrize("name", ["resnet50_dw", "mobilenetv2_nano"])
@pytest.mark.parametrize("key", ["global", "dcn_local", "cond"])
def test_meta_then_to_empty_then_init(name, key):
    with torch.device("meta"):
        model = timm.create_model(name, **VARIANTS[key] | {"pointwise": "rigid"})
    assert all(t.is_meta for t in model.state_dict().values())
    model = model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 7)
    torch.manual_seed(0)
    model.init_weights()
    expected = create(name, **VARIANTS[key] | {"pointwise": "rigid"}).state_dict()
    for tensor_name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[tensor_name]), tensor_name


def test_every_normalisation_starts_as_it_is_built():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(4))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 7.0)
    init_weights_(net, Variant(), per_group=True)
    for norm in net[1:]:
        assert norm.weight.tolist() == [1.0] * 4
        assert norm.bias.tolist() == [0.0] * 4


def test_init_weights_is_random_but_seeded():
    model = create(spatial="global_dk", pointwise="global_dk")
    torch.manual_seed(4)
    model.init_weights()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    model.init_weights()
    assert not torch.equal(model.conv_head.weight, first["conv_head.weight"])
    torch.manual_seed(4)
    model.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, first[name]), name
