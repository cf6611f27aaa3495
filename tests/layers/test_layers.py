"""Layers as modules: outputs, arguments, errors, and what PyTorch does with a module."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dkcls.layers import LAYERS, GlobalDeformKernel2d, layer_class
from dkcls.ops import cond_conv2d, deform_kernel2d
from tests.layers.common import MOVING, SMALL, build, image, rigid, stir

ONE_OF_EACH = ["static", "global_dk", "global_dk_dense", "local_dk", "dcn", "dcn_local_dk", "cond"]
HERE = {"stride": 2, "dilation": (1, 2), "padding": (1, 2)}


@pytest.mark.parametrize("key", ["local_dk", "global_dk", "dcn", "dcn_local_dk"])
def test_forward_is_generators_then_operator(key):
    layer, x = stir(build(key, **HERE)), image()

    def generated(generator):
        if generator is None:
            return None
        if generator.weight.dim() == 2:
            return F.linear(
                F.adaptive_avg_pool2d(x, 1).flatten(1), generator.weight, generator.bias
            )
        return F.conv2d(x, generator.weight, generator.bias, **HERE)

    offsets = [generated(getattr(layer, f"{kind}_generator", None)) for kind in ("kernel", "image")]
    expected = (
        deform_kernel2d(x, layer.weight, *offsets, kernel_size=3, **HERE)
        + layer.bias[:, None, None]
    )
    torch.testing.assert_close(layer(x), expected)
    assert (layer(x) - rigid(key, **HERE)(x)).abs().max() > 0.01


def test_conditional_forward():
    layer, x = stir(build("cond_dense")), image()
    routing = F.linear(x.mean((2, 3)), layer.routing.weight, layer.routing.bias).sigmoid()
    expected = (
        cond_conv2d(x, layer.weight.view(2, 6, 6, 3, 3), routing, padding=1)
        + layer.bias[:, None, None]
    )
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 3}, {"kernel_size": (2, 4), "dilation": (1, 3)}, {"kernel_size": (4, 3)}],
)
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("key", SMALL)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_padding_in_words(key, padding, options):
    layer, x = build(key, padding=padding, **options), image(size=(9, 12))
    expected = rigid(key, padding=padding, **options)(x)
    assert layer(x).shape == expected.shape
    if "cond" not in key:
        torch.testing.assert_close(layer(x), expected)


def test_padding_the_same_does_not_change_what_is_routed():
    layer, x = stir(build("cond_dense", kernel_size=2, padding="same")), image()
    routing = torch.sigmoid(x.mean((2, 3)) @ layer.routing.weight.t() + layer.routing.bias)
    kernels = (routing @ layer.weight.flatten(1)).view(2, 6, 6, 2, 2)
    padded = F.pad(x, (0, 1, 0, 1))
    expected = torch.cat([F.conv2d(padded[n : n + 1], kernels[n], layer.bias) for n in range(2)])
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("name", "out_channels"),
    [("global_dk", 1), ("global_dk", 2), ("local_dk", 1), ("dcn_local_dk", 1)],
)
def test_clip_decides_what_an_offset_outside_the_scope_learns(name, out_channels):
    """Check one tap over the scope [1, 3, 7].

    The tap reads two steps to the right of the scope's middle, which is one step too far.
    """

    def gradient(clip: str, pixel: float) -> float:
        layer = layer_class(name)(
            1, out_channels, 1, scope=(1, 3), clip=clip, bias=False, dtype=torch.float64
        )
        layer.weight.data.copy_(torch.tensor([1.0, 3.0, 7.0]))
        layer.kernel_generator.bias.data.copy_(torch.tensor([0.0, 2.0]))
        out = layer(torch.full((1, 1, 1, 1), pixel, dtype=torch.float64))
        assert out.flatten().tolist() == [7 * pixel] * out_channels
        out.sum().backward()
        return layer.kernel_generator.bias.grad[1].item()

    assert gradient("hard", 1.0) == 0
    assert gradient("hard", -1.0) == 0
    assert gradient("projected", 1.0) == 4 * out_channels  # descent leads back inside
    assert gradient("projected", -1.0) == 0  # and here further out


@pytest.mark.parametrize("key", ["static", *MOVING])
def test_backend_is_the_one_that_was_asked_for(key):
    with pytest.raises(ValueError, match=r'backend "triton" takes float32, .*, got torch\.float64'):
        build(key, backend="triton")(image())


@pytest.mark.parametrize("key", ["local_dk", "dcn", "dcn_local_dk"])
def test_the_reference_backend_can_be_differentiated_twice(key):
    layer, x = stir(build(key, backend="reference")), image().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert layer.weight.grad.any()


def test_padding_the_same_does_not_change_what_is_pooled():
    layer = stir(build("global_dk", kernel_size=2, padding="same"))
    offset = layer.kernel_generator(image())
    expected = (
        deform_kernel2d(F.pad(image(), (0, 1, 0, 1)), layer.weight, offset, kernel_size=2)
        + layer.bias[:, None, None]
    )
    torch.testing.assert_close(layer(image()), expected)


@pytest.mark.parametrize("key", SMALL)
@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_format_is_kept(key, channels_last):
    layer, x = stir(build(key)), image()
    expected = layer(x)
    if channels_last:
        layer, x = (
            layer.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
    got = layer(x)
    torch.testing.assert_close(got, expected)
    assert got.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )
    got.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("key", SMALL)
def test_autocast_and_half(key):
    layer, x = stir(build(key, dtype=torch.float32), 0.05), image(torch.float32)
    wide = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(layer(x).double(), wide, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    assert (low - wide).norm() < 0.03 * wide.norm()
    low.sum().backward()
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters()
    )
    half = layer.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half - wide).norm() < 0.05 * wide.norm()


@pytest.mark.parametrize("key", SMALL)
def test_copies(key):
    layer, x = stir(build(key)), image()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = build(key, seed=1)
    loaded.load_state_dict(torch.load(file))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(other(x), layer(x))


def test_names_in_the_state_dict():
    generator, image_generator = (
        ["kernel_generator.weight", "kernel_generator.bias"],
        ["image_generator.weight", "image_generator.bias"],
    )
    added = {
        "static": [],
        "global_dk": generator,
        "local_dk": generator,
        "dcn": image_generator,
        "dcn_local_dk": generator + image_generator,
        "cond": ["routing.weight", "routing.bias"],
    }
    for key, names in added.items():
        assert list(build(key).state_dict()) == ["weight", "bias", *names]
        assert list(build(key, bias=False).state_dict()) == ["weight", *names]


@pytest.mark.parametrize("key", ONE_OF_EACH)
def test_compiles_as_one_graph(key):
    torch.compiler.reset()
    layer, x = stir(build(key)), image()
    expected = layer(x)
    expected.square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    got.square().sum().backward()
    torch.testing.assert_close(got, expected)
    for p, g in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize(
    "options", [{}, {"padding": "same", "kernel_size": (2, 3), "bias": False}], ids=str
)
@pytest.mark.parametrize("key", SMALL)
def test_fx_traces(key, options):
    layer = stir(build(key, **options))
    graph = torch.fx.symbolic_trace(layer)
    assert graph.state_dict().keys() <= layer.state_dict().keys()
    for traced in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        for x in (image(), image(n=3, size=(9, 5))):
            got, expected = traced(x), layer(x)
            assert torch.equal(got, expected)
            names = [name for name, _ in traced.named_parameters()]
            weights = [dict(network.named_parameters()) for network in (traced, layer)]
            assert len(names) == len(list(layer.parameters()))
            grads = [
                torch.autograd.grad(out.square().sum(), [parameters[name] for name in names])
                for out, parameters in zip((got, expected), weights, strict=True)
            ]
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("key", ONE_OF_EACH)
def test_exports(key):
    layer, x = stir(build(key)), image()
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    other = image(n=5)
    torch.testing.assert_close(program.module()(other), layer(other))


def test_exports_where_kernels_outweigh_the_images():
    layer, x = stir(GlobalDeformKernel2d(6, 40, 1, scope=2).double()), image(size=(2, 2))
    torch.testing.assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))


def test_the_registry():
    assert layer_class("rigid") is nn.Conv2d
    with pytest.raises(
        ValueError, match=r"layer must be one of cond, dcn, .*, rigid, static, got 'dk'"
    ):
        layer_class("dk")


@pytest.mark.parametrize("name", ["local_dk", "dcn", "dcn_local_dk"])
def test_depthwise_layers_say_so(name):
    for arguments in ((6, 6, 3), (6, 12, 3, 1, 1, 1, 6)):
        with pytest.raises(
            ValueError,
            match=r"is depthwise: .* must be equal, got 6, .*; pass out_channels=6, groups=6",
        ):
            layer_class(name)(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_mode": "reflect"}, 'padding_mode must be "zeros".*got .reflect'),
        ({"padding": "full"}, 'padding must be an int, a pair, "same" or "valid", got .full'),
        ({"padding": "same", "stride": 2}, r'padding="same" needs stride 1, got stride \(2, 2\)'),
        ({"padding": -1}, "padding must be"),
        ({"stride": 0}, "stride must be"),
        ({"groups": 4}, "groups must divide in_channels = 6 and out_channels = 6, got 4"),
        (
            {"padding": "same", "stride": (1, 2)},
            r'padding="same" needs stride 1, got stride \(1, 2\)',
        ),
    ],
)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "rigid"])
def test_errors_of_every_layer(name, options, message):
    with pytest.raises(ValueError, match=message):
        layer_class(name)(6, 6, 3, **{"groups": 6, **options})


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "rigid"])
@pytest.mark.parametrize("channels", [(6, 8), (8, 6)])
def test_groups_divide_both_numbers_of_channels(name, channels):
    with pytest.raises(
        ValueError,
        match="groups must divide in_channels = {} and out_channels = {}, got 4".format(*channels),
    ):
        layer_class(name)(*channels, 3, groups=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": 0}, "scope must be"),
        ({"grid": "wide"}, "grid must be"),
        ({"clip": "soft"}, "clip must be"),
        ({"scope_init": "zeros"}, 'scope_init must be "rigid" or "independent", got .zeros'),
    ],
)
def test_errors_of_layers_with_a_scope(options, message):
    with pytest.raises(ValueError, match=message):
        GlobalDeformKernel2d(6, 6, 3, **options)
    with pytest.raises(ValueError, match="experts must be at least 1, got 0"):
        layer_class("cond")(6, 6, 3, experts=0)


def test_repr_says_what_it_is():
    assert repr(build("static", scope=5, grid="spread", padding="same")) == (
        "StaticScope2d(6, 6, kernel_size=(3, 3), stride=(1, 1), padding='same', groups=6, "
        "scope=(5, 5), grid='spread')"
    )
    text = repr(build("local_dk", bias=False, clip="projected", backend="reference"))
    assert (
        "bias=False, scope=(4, 4), grid='centered', clip='projected', backend='reference'" in text
    )
    assert "(kernel_generator): LocalOffsets(6, 18, kernel_size=(3, 3)" in text
    assert "experts=2" in repr(build("cond_dense"))


@pytest.mark.parametrize("key", MOVING)
def test_batch_zero(key):
    layer = build(key)
    out = layer(image(n=0))
    assert out.shape == (0, 6, 7, 6)
    out.sum().backward()
    assert not any(p.grad.any() for p in layer.parameters())
