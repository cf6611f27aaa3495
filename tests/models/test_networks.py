"""Networks as timm's users use them."""

import copy
import io

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import list_models
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models.feature_extraction import create_feature_extractor

from dkcls.layers import DynamicConv2d, offset_generators
from dkcls.models import Variant
from dkcls.models.resnet_dw import Bottleneck
from tests.models.common import (
    OWN_NAMES,
    VARIANTS,
    awake,
    create,
    drawn_once,
    images,
    shapes_of,
    stir,
)

RESNET = [64, 256, 512, 1024, 2048]
MOBILENET = [16, 24, 32, 96, 320]


def test_all_names_are_registered():
    assert len(OWN_NAMES) == 22
    assert set(OWN_NAMES) <= set(list_models())
    for name in ("resnet50", "mobilenetv2_100"):
        assert timm.model_entrypoint(name).__module__.startswith("timm.")


def test_drop_path_drops_the_branch_and_keeps_the_shortcut():
    torch.manual_seed(0)
    x = torch.randn(4, 24, 5, 5)
    block = create(drop_path_rate=0.1).blocks[1][1]
    assert not torch.equal(block.eval()(x), x)
    block.drop_path.drop_prob = 1.0
    assert torch.equal(block.train()(x), x)
    x = torch.randn(4, 256, 3, 3)
    block = Bottleneck(256, 64, variant=Variant(), drop_path=DropPath(1.0))
    assert not torch.equal(block.eval()(x), x.relu())
    assert torch.equal(block.train()(x), x.relu())


@pytest.mark.parametrize("name", ["resnet50_dw", "mobilenetv2_nano"])
def test_dropout_is_before_the_classifier(name):
    """Check that only the bias is left at a rate of 1; the classifier alone has numbers."""
    with torch.device("meta"):
        model = timm.create_model(name, drop_rate=1.0, num_classes=3)
    classifier = model.get_classifier().to_empty(device="cpu")
    nn.init.ones_(classifier.weight)
    classifier.bias.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    features = torch.ones(2, model.num_features, 2, 2)
    assert model.train().forward_head(features).tolist() == [[1.0, 2.0, 3.0]] * 2
    assert model.eval().forward_head(features)[0].tolist() == [
        model.num_features + b for b in (1, 2, 3)
    ]


def test_the_activation_is_the_one_asked_for():
    model = create(act_layer=nn.ELU)
    assert not any(isinstance(module, (nn.ReLU, nn.ReLU6)) for module in model.modules())
    out = model.bn1(model.conv_stem(images() * 9))
    assert -1 <= out.min() < -0.5
    assert out.max() > 2
    with torch.device("meta"):
        model = timm.create_model("resnet50_dw", act_layer=nn.ELU)
    assert sum(isinstance(module, nn.ELU) for module in model.modules()) == 1 + 3 * 16
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())


@pytest.mark.parametrize(("theirs", "width"), [("mobilenetv2_050", 0.5), ("mobilenetv2_140", 1.4)])
def test_widths_are_timms(theirs, width):
    with torch.device("meta"):
        ours, theirs = timm.create_model("mobilenetv2_dw", width=width), timm.create_model(theirs)
    assert {n: t.shape for n, t in ours.state_dict().items()} == {
        n: t.shape for n, t in theirs.state_dict().items()
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_fx_features_are_the_networks(variant):
    """Check features by timm, by torchvision's extractor and from torch.fx, and their gradients."""
    model, x = awake(stir(create(**VARIANTS[variant]))), images()
    features = create(**VARIANTS[variant], features_only=True, feature_cls="fx")
    features.graph_module.load_state_dict(model.state_dict(), strict=False)
    nodes = {info["module"]: str(i) for i, info in enumerate(model.feature_info)}
    seen = {}
    hooks = [
        model.get_submodule(node).register_forward_hook(
            lambda m, a, out, key=key: seen.update({key: out})
        )
        for node, key in nodes.items()
    ]
    expected = model(x)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.fx.symbolic_trace(model)(x), expected)
    by_torchvision = create_feature_extractor(model, nodes)(x)
    by_timm = features.eval()(x)
    assert len(by_timm) == len(seen) == len(nodes) > 2
    for key, feature in enumerate(by_timm):
        assert torch.equal(feature, seen[str(key)])
        assert torch.equal(by_torchvision[str(key)], seen[str(key)])
    for name, p in features.graph_module.named_parameters():
        (a,) = torch.autograd.grad(by_timm[-1].square().sum(), p, retain_graph=True)
        (b,) = torch.autograd.grad(
            seen[str(len(seen) - 1)].square().sum(), model.get_parameter(name), retain_graph=True
        )
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "name",
    [
        "mobilenetv2_100_dcn_local4",
        *(
            pytest.param(f"resnet50_dw_{kind}_local4", marks=pytest.mark.long)
            for kind in ("cond", "dcn")
        ),
    ],
)
def test_fx_features_of_the_papers_networks(name):
    with torch.device("meta"):
        model = timm.create_model(name, features_only=True, feature_cls="fx")
        shapes = [tuple(feature.shape[1:]) for feature in model(torch.empty(1, 3, 64, 64))]
    assert [shape[0] for shape in shapes] == model.feature_info.channels()
    assert [64 // shape[1] for shape in shapes] == model.feature_info.reduction()


@pytest.mark.parametrize("name", OWN_NAMES)
def test_what_timm_knows_of_the_images(name):
    expected = {
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "num_classes": 1000,
    }
    if name == "mobilenetv2_nano":
        expected |= {"input_size": (1, 32, 32), "pool_size": (4, 4), "crop_pct": 1.0}
        expected |= {"mean": (0.15,), "std": (0.25,), "num_classes": 10}
    cfg = timm.get_pretrained_cfg(name).to_dict()
    assert {key: cfg[key] for key in expected} == expected


def test_width_of_the_small_network():
    sizes = [
        sum(p.numel() for p in create(width=w).parameters()) for w in (0.5, 0.9, 1.0, 1.1, 1.5)
    ]
    assert sizes == sorted(set(sizes))
    assert create(width=1.5, spatial="local_dk").eval()(images()).shape == (2, 10)
    assert [create(width=w).num_features for w in (0.5, 1.5)] == [64, 192]
    with pytest.raises(ValueError, match="width must be above 0, got 0"):
        create(width=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_train_step(name):
    """Check that every parameter gets a gradient and that the step changes the output.

    The sizes are odd, the memory is channels_last, and images have one channel.
    """
    model = drawn_once(name, in_chans=1, num_classes=3).to(memory_format=torch.channels_last)
    for module in model.modules():
        if hasattr(module, "zero_init_last"):
            nn.init.ones_(module.bn3.weight)
    x = images(size=(47, 33), n=3).contiguous(memory_format=torch.channels_last)
    out = model(x)
    assert out.shape == (3, 3)
    cross_entropy(out, torch.tensor([0, 1, 2])).backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        assert p.grad.isfinite().all(), parameter_name
    moving = dict(offset_generators(model))
    assert bool(moving) == any(part in name for part in ("local", "global", "dcn"))
    assert all(generator.weight.grad.any() for generator in moving.values())
    torch.optim.SGD(model.parameters(), 0.01).step()
    with torch.no_grad():
        assert not torch.equal(model(x), out)


@pytest.mark.parametrize("name", OWN_NAMES)
def test_features_only(name):
    with torch.device("meta"):
        plain, dilated = (
            timm.create_model(name, features_only=True, **o) for o in ({}, {"output_stride": 16})
        )
    channels = RESNET if "resnet" in name else MOBILENET
    channels, size = ([16, 24, 40], 32) if "nano" in name else (channels, 64)
    inputs = 1 if "nano" in name else 3
    assert plain.feature_info.channels() == channels
    assert plain.feature_info.reduction() == [2, 4, 8, 16, 32][: len(channels)]
    sizes = [size // r for r in plain.feature_info.reduction()]
    assert shapes_of(plain, inputs, (size, size)) == [
        (c, s, s) for c, s in zip(channels, sizes, strict=True)
    ]
    assert dilated.feature_info.reduction() == [2, 4, 8, 16, 16][: len(channels)]
    sizes = [max(s, size // 16) for s in sizes]
    assert shapes_of(dilated, inputs, (size, size)) == [
        (c, s, s) for c, s in zip(channels, sizes, strict=True)
    ]


def test_features_are_those_of_the_whole_network():
    for name, indices, inputs in (
        ("mobilenetv2_100_dcn_local4", (1, 3), 3),
        ("mobilenetv2_nano", (0, 2), 1),
    ):
        whole, features = create(name), create(name, features_only=True, out_indices=indices)
        x = images(inputs, (64, 64))
        whole.eval(), features.eval()
        features.model.load_state_dict(whole.state_dict(), strict=False)
        _, expected = whole.forward_intermediates(x, indices=indices)
        for got, feature in zip(features(x), expected, strict=True):
            torch.testing.assert_close(got, feature)


@pytest.mark.parametrize("key", ["static", "dcn_local", "cond"])
@pytest.mark.parametrize("output_stride", [8, 16])
def test_output_stride_dilates_and_changes_no_parameter(key, output_stride):
    for name in ("resnet50_dw", "mobilenetv2_dw"):
        arguments = {"num_classes": 0, **VARIANTS[key]}
        with torch.device("meta"):
            plain, model = (
                timm.create_model(name, output_stride=s, **arguments) for s in (32, output_stride)
            )
        assert {n: p.shape for n, p in model.named_parameters()} == {
            n: p.shape for n, p in plain.named_parameters()
        }
        side = 64 // output_stride
        model.reset_classifier(0, "")
        assert shapes_of(model, 3, (64, 64)) == [(model.num_features, side, side)]
        dilations = {
            m.dilation
            for m in model.modules()
            if isinstance(m, (nn.Conv2d, DynamicConv2d)) and m.groups > 1
        }
        assert dilations == {16: {(1, 1), (2, 2)}, 8: {(1, 1), (2, 2), (4, 4)}}[output_stride]


@pytest.mark.parametrize("output_stride", [8, 16, 32])
def test_rigid_mobilenet_is_timms(output_stride):
    theirs = awake(create("mobilenetv2_100", output_stride=output_stride))
    ours = create("mobilenetv2_dw", output_stride=output_stride).eval()
    expected = {name: value.shape for name, value in theirs.state_dict().items()}
    assert {name: value.shape for name, value in ours.state_dict().items()} == expected
    ours.load_state_dict(theirs.state_dict())
    x = images(3, (64, 48))
    torch.testing.assert_close(ours(x), theirs(x))
    assert [(i["num_chs"], i["reduction"], i["stage"]) for i in ours.feature_info] == [
        (i["num_chs"], i["reduction"], i["stage"]) for i in theirs.feature_info
    ]


def test_rigid_resnet_is_timms_with_other_3x3():
    with torch.device("meta"):
        ours, theirs = timm.create_model("resnet50_dw"), timm.create_model("resnet50")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, width in (("layer1.2", 128), ("layer4.0", 1024)):
        conv = ours.get_submodule(name).conv2
        assert (conv.in_channels, conv.out_channels, conv.groups) == (width,) * 3
        assert conv.stride == theirs.get_submodule(name).conv2.stride


def test_where_image_offsets_are():
    def placed(name, **arguments):
        with torch.device("meta"):
            model = timm.create_model(name, **arguments)
        return [n for n, m in model.named_modules() if hasattr(m, "image_generator")]

    for arguments in (
        {"spatial": "dcn"},
        {"spatial": "dcn_local_dk"},
        {"spatial": "dcn", "output_stride": 8},
    ):
        layers = placed("resnet50_dw", **arguments)
        assert len(layers) == 13
        assert not any(name.startswith("layer1") for name in layers)
        layers = placed("mobilenetv2_dw", **arguments)
        assert len(layers) == 14
        assert layers[0] == "blocks.2.0.conv_dw"
        assert len(placed("mobilenetv2_nano", **arguments)) == 6


@pytest.mark.parametrize("key", VARIANTS)
def test_heads(key):
    model, x = create(**VARIANTS[key], num_classes=0), images()
    assert model(x).shape == (2, 128)
    assert model.forward_features(x).shape == (2, 128, 4, 4)
    model.reset_classifier(7, "max")
    assert model(x).shape == (2, 7)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 128)
    assert create(**VARIANTS[key], global_pool="", num_classes=0)(x).shape == (2, 128, 4, 4)


def test_dropout_drop_path_and_checkpointing():
    for name in ("resnet50_dw_local4", "mobilenetv2_nano"):
        model = create(name, drop_rate=0.3, drop_path_rate=0.2, num_classes=2, in_chans=1)
        rates = [m.drop_prob for m in model.modules() if type(m).__name__ == "DropPath"]
        assert rates == sorted(rates)
        assert max(rates) == pytest.approx(0.2 if "resnet" in name else 0.2 * 5 / 6)
        model.set_grad_checkpointing()
        model(images()).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("size", [(1, 1), (7, 50)])
def test_tiny_images(size):
    for name in ("mobilenetv2_100_dcn_local4", "mobilenetv2_100_point2_global4"):
        assert create(name, num_classes=2).eval()(images(3, size)).isfinite().all()


@pytest.mark.parametrize("key", VARIANTS)
def test_formats_and_precisions(key):
    model, x = stir(create(**VARIANTS[key])).eval(), images()
    expected = model(x)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        last(x.contiguous(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5
    )
    with torch.autocast("cpu", torch.bfloat16):
        low = model(x)
    assert low.dtype == torch.bfloat16
    assert (low - expected).norm() < 0.1 * expected.norm()
    torch.testing.assert_close(
        copy.deepcopy(model).double()(x.double()).float(), expected, rtol=1e-4, atol=1e-5
    )
    assert create(**VARIANTS[key], dtype=torch.float64)(x.double()).dtype == torch.float64


@pytest.mark.parametrize("key", VARIANTS)
def test_save_and_load(key):
    model, x = stir(create(**VARIANTS[key])).eval(), images()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = create(seed=1, **VARIANTS[key]).eval()
    assert not torch.equal(loaded(x), model(x))
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(loaded(x), model(x))


def test_names_in_the_state_dict():
    names = list(create(spatial="dcn_local_dk", pointwise="cond").state_dict())
    assert "blocks.1.0.conv_dw.kernel_generator.weight" in names
    assert "blocks.1.0.conv_dw.image_generator.bias" in names
    assert "blocks.1.0.conv_pwl.routing.weight" in names


def test_compiles_as_one_graph():
    torch.compiler.reset()
    model, x = stir(create(**VARIANTS["dcn_local"])), images()
    expected = copy.deepcopy(model)(x)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    got.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("key", ["dcn_local", "cond"])
def test_exports(key):
    model, x = stir(create(**VARIANTS[key])).eval(), images(n=3)
    program = torch.export.export(
        model, (images(),), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=64)},)
    )
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)
