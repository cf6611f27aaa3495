"""Fresh layers: equal to the rigid layer, with generators at zero.

The generators learn from the first step, and timm leaves them alone.
"""

import copy

import pytest
import torch
from timm.models._efficientnet_builder import efficientnet_init_weights
from timm.models.resnet import ResNet
from torch import nn

from dkcls.layers import (
    CondConv2d,
    GlobalDeformKernel2d,
    fill_scope_,
    offset_generators,
    scope_from_kernel,
)
from dkcls.ops import sample_kernel2d
from tests.layers.common import DK, MOVING, SMALL, build, image, rigid

OPTIONS = [
    {},
    {"stride": 2, "dilation": 2, "bias": False},
    {"padding": (0, 2)},
    {"stride": (1, 2), "dilation": (2, 1)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("key", [key for key in SMALL if "cond" not in key])
def test_a_fresh_layer_is_the_rigid_layer_of_the_same_seed(key, options):
    torch.testing.assert_close(build(key, **options)(image()), rigid(key, **options)(image()))


@pytest.mark.parametrize(
    "options",
    [{"scope": s} for s in (3, 5, 9, (3, 6))] + [{"grid": "spread"}, {"scope": 7, "grid": 2.0}],
)
@pytest.mark.parametrize("key", ["static", *DK])
def test_so_it_is_with_other_scopes_and_grids(key, options):
    torch.testing.assert_close(build(key, **options)(image()), rigid(key)(image()))


@pytest.mark.parametrize("key", ["cond", "cond_dense"])
def test_a_fresh_conditional_convolution_gives_every_expert_one_half(key):
    layer, plain = build(key), rigid(key)
    plain.weight.data = layer.weight.detach().sum(0).view(plain.weight.shape) / 2
    plain.bias.data = layer.bias.detach()
    torch.testing.assert_close(layer(image()), plain(image()))
    torch.testing.assert_close(layer.weight[0].view(plain.weight.shape), rigid(key).weight)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=str)
@pytest.mark.parametrize("key", ["cond", "cond_dense"])
def test_so_it_does_with_other_strides(key, options):
    options = {**options, "bias": False}
    layer, plain = build(key, **options), rigid(key, **options)
    plain.weight.data = layer.weight.detach().sum(0).view(plain.weight.shape) / 2
    torch.testing.assert_close(layer(image()), plain(image()))


@pytest.mark.parametrize("key", ["cond", "cond_dense"])
def test_fresh_experts_are_different_draws(key):
    """Check that experts differ: equal ones would get equal gradients and stay equal."""
    layer = build(key)
    first, *others = layer.weight.detach()
    assert len(others) == layer.experts - 1
    assert all((first - other).abs().mean() > 0.2 * first.abs().mean() for other in others)


@pytest.mark.parametrize("scope", [3, 4, 5, 9])
@pytest.mark.parametrize("grid", ["centered", "spread"])
@pytest.mark.parametrize("key", MOVING)
def test_every_generator_learns_from_the_first_step(key, scope, grid):
    layer = build(key) if key == "dcn" else build(key, scope=scope, grid=grid)
    layer(image()).square().sum().backward()
    generators = dict(offset_generators(layer))
    assert len(generators) == (2 if key == "dcn_local_dk" else 1)
    for generator in generators.values():
        for parameter in generator.parameters():
            assert (
                parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
            ).any(1).float().mean() > 0.6


@pytest.mark.parametrize("scope", [2, 4])
def test_a_1x1_scope_does_not_start_flat(scope):
    """Check one tap between two entries, whose least-norm scope is flat.

    In a flat scope nothing would ever move.
    """
    kernel = torch.randn(4, 6, 1, 1, dtype=torch.float64)
    flat = scope_from_kernel(kernel, scope)
    middle = flat[..., scope // 2 - 1 : scope // 2 + 1, scope // 2 - 1 : scope // 2 + 1]
    torch.testing.assert_close(middle, kernel.expand(4, 6, 2, 2))

    layer = GlobalDeformKernel2d(6, 4, 1, scope=scope, dtype=torch.float64)
    layer.load_kernel(kernel)
    torch.testing.assert_close(sample_kernel2d(layer.weight, None, kernel_size=1)[0], kernel)
    layer(image()).square().sum().backward()
    assert (layer.kernel_generator.weight.grad.abs() > 1e-3).all()


@pytest.mark.parametrize(("kernel_size", "scope"), [((1, 3), (2, 4)), ((3, 1), (4, 2))])
def test_a_scope_that_is_flat_along_one_axis_does_not_start_flat(kernel_size, scope):
    torch.manual_seed(0)
    kernel = torch.randn(4, 6, *kernel_size, dtype=torch.float64)
    layer = GlobalDeformKernel2d(6, 4, kernel_size, scope=scope, dtype=torch.float64)
    layer.load_kernel(kernel)
    # Every tap is in the middle of four entries.
    rows = (layer.weight[..., :-1, :] + layer.weight[..., 1:, :]) / 2
    torch.testing.assert_close((rows[..., :-1] + rows[..., 1:]) / 2, kernel)
    layer(image()).square().sum().backward()
    assert (layer.kernel_generator.bias.grad.abs() > 1e-3).all()


def test_the_noise_of_a_flat_scope_comes_from_the_generator():
    kernel, scopes = torch.randn(4, 6, 1, 1), torch.empty(3, 4, 6, 2, 2)
    for scope, seed in zip(scopes, (1, 1, 2), strict=True):
        fill_scope_(scope, kernel, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(scopes[0], scopes[1])
    assert not torch.equal(scopes[0], scopes[2])


@pytest.mark.parametrize("key", [key for key in SMALL if "cond" not in key])
def test_load_kernel_is_loading_a_rigid_layer(key):
    layer, plain = build(key), rigid(key, seed=7)
    layer.load_kernel(plain.weight)
    layer.bias.data.copy_(plain.bias.data)
    torch.testing.assert_close(layer(image()), plain(image()))
    with pytest.raises(
        ValueError,
        match=r"kernel must be \[Cout, Cin/groups, Kh, Kw\] = \[6, .*, got \[6, 1, 5, 5\]",
    ):
        layer.load_kernel(torch.zeros(6, 1, 5, 5))


@pytest.mark.parametrize("grid", ["centered", "spread", 1.5])
@pytest.mark.parametrize(
    ("kernel_size", "scope"), [(3, 4), (3, 9), (2, 5), ((3, 1), (4, 3)), ((2, 3), 7)]
)
def test_scope_from_kernel_is_exact_and_of_least_norm(kernel_size, scope, grid):
    kh, kw = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    kernel = torch.randn(5, 2, kh, kw, dtype=torch.float64)
    got = scope_from_kernel(kernel, scope, grid)
    torch.testing.assert_close(
        sample_kernel2d(got, None, kernel_size=(kh, kw), grid=grid)[0], kernel
    )
    # least norm: orthogonal to everything that the taps do not read
    unread = torch.randn_like(got)
    unread -= scope_from_kernel(
        sample_kernel2d(unread, None, kernel_size=(kh, kw), grid=grid)[0], scope, grid
    )
    torch.testing.assert_close((unread * got).sum((2, 3)), torch.zeros(5, 2, dtype=torch.float64))


@pytest.mark.parametrize("grid", ["centered", 0.0])
def test_scope_from_kernel_is_least_squares_where_the_grid_cannot_read_the_kernel(grid):
    kernel, scope = torch.randn(1, 1, 3, 3, dtype=torch.float64), 2
    got = scope_from_kernel(kernel, scope, grid).requires_grad_()
    residual = sample_kernel2d(got, None, kernel_size=3, grid=grid)[0] - kernel
    assert residual.norm() > 0.1
    (gradient,) = torch.autograd.grad(residual.square().sum(), got)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_fill_scope_adds_no_noise_where_none_is_needed():
    kernel = torch.randn(4, 1, 3, 3)
    scope = torch.empty(4, 1, 4, 4)
    fill_scope_(scope, kernel)
    torch.testing.assert_close(scope, scope_from_kernel(kernel, 4))


def test_independent_entries_have_the_rigid_layers_distribution():
    layer = GlobalDeformKernel2d(64, 64, 3, scope_init="independent")
    bound = (64 * 9) ** -0.5
    assert layer.weight.abs().max() <= bound
    assert abs(layer.weight.std() / (bound / 3**0.5) - 1) < 0.02


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(6, 6, 3)
        self.layers = nn.ModuleList(build(key) for key in SMALL)
        self.head = nn.Linear(6, 3)


@pytest.mark.parametrize("initialise", [ResNet.init_weights, efficientnet_init_weights])
def test_timms_initialisers_leave_the_layers_alone(initialise):
    net = Net()
    before = copy.deepcopy(net)
    for _ in range(2):
        initialise(net)
    assert not torch.equal(net.stem.weight, before.stem.weight)
    for name, value in before.layers.state_dict().items():
        assert torch.equal(net.layers.state_dict()[name], value), name
        if "generator" in name or "routing" in name:
            assert not value.any(), name


@pytest.mark.parametrize("key", SMALL)
@pytest.mark.parametrize("channels_last", [False, True])
def test_meta_then_to_empty_then_reset(key, channels_last):
    with torch.device("meta"):
        layer = build(key, dtype=torch.float32)
    assert all(p.is_meta for p in layer.parameters())
    layer = layer.to_empty(device="cpu")
    if channels_last:
        layer = layer.to(memory_format=torch.channels_last)
    for p in layer.parameters():
        p.data.fill_(float("nan"))
    torch.manual_seed(0)
    layer.reset_parameters()
    for (name, got), expected in zip(
        layer.named_parameters(), build(key, dtype=torch.float32).parameters(), strict=True
    ):
        assert torch.equal(got, expected), name


def test_offset_generators_leave_routing_out():
    net = nn.ModuleDict(
        {"cond": build("cond"), "dk": build("dcn_local_dk"), "rigid": nn.Conv2d(6, 6, 1)}
    )
    assert [name for name, _ in offset_generators(net)] == [
        "dk.kernel_generator",
        "dk.image_generator",
    ]
    assert isinstance(net["cond"], CondConv2d)
