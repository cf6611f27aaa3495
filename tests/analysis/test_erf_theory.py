"""The paper's equations for effective receptive fields against autograd, in float64.

The networks are depthwise, with all operators. The sums over paths are written out here in plain
Python, from the layers' weights and the offsets that they used.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dkcls.analysis.erf import input_gradients
from dkcls.layers import layer_class, record_offsets
from tests.layers.common import stir

CHANNELS, SIZE = 2, (9, 8)
EXACT = {"rtol": 1e-10, "atol": 1e-13}


@dataclass
class Step:
    """A layer as in the equations: one image, numbers only.

    `gates` are those of the ReLU after the layer, if there is one.
    """

    weight: Tensor  # [C, S, S]
    stride: int
    kernel_offset: Tensor | None  # [9, 2, Ho, Wo]
    image_offset: Tensor | None
    size: tuple[int, int]  # of the input
    gates: Tensor | None = None  # bool [C, Ho, Wo]

    def sampled_weight(self, channel: int, tap: tuple[int, int], j: tuple[int, int]) -> float:
        """W at k + dk, bilinear, within the scope; the taps at rest are one apart in its middle."""
        side = self.weight.shape[-1]
        moved = self._offset(self.kernel_offset, tap, j)
        at = [
            min(max((side - 1) / 2 + k + d, 0.0), side - 1.0)
            for k, d in zip(tap, moved, strict=True)
        ]
        return sum(
            self.weight[channel, y, x].item() * share
            for (y, x), share in bilinear(*at)
            if y < side and x < side
        )

    def pixels(
        self, tap: tuple[int, int], j: tuple[int, int]
    ) -> Iterator[tuple[tuple[int, int], float]]:
        """I at j + k + dj, bilinear, zero outside."""
        moved = self._offset(self.image_offset, tap, j)
        at = [self.stride * p + k + d for p, k, d in zip(j, tap, moved, strict=True)]
        return (
            ((y, x), share)
            for (y, x), share in bilinear(*at)
            if share and 0 <= y < self.size[0] and 0 <= x < self.size[1]
        )

    @staticmethod
    def _offset(offset: Tensor | None, tap: tuple[int, int], j: tuple[int, int]) -> list[float]:
        return (
            [0.0, 0.0]
            if offset is None
            else offset[3 * (tap[0] + 1) + tap[1] + 1, :, j[0], j[1]].tolist()
        )


TAPS = list(itertools.product((-1, 0, 1), repeat=2))


def bilinear(y: float, x: float) -> list[tuple[tuple[int, int], float]]:
    top, left = math.floor(y), math.floor(x)
    v, u = y - top, x - left
    corners = [(0, 0, (1 - v) * (1 - u)), (0, 1, (1 - v) * u), (1, 0, v * (1 - u)), (1, 1, v * u)]
    return [((top + dy, left + dx), share) for dy, dx, share in corners]


def walk(
    steps: list[Step], channel: int, j: tuple[int, int], product: float = 1.0
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the pixel at the end of every path from position j, with the path's product of weights.

    A path is (k_n, ..., k_1).
    """
    if not steps:
        yield j, product
        return
    step = steps[-1]
    if step.gates is not None and not step.gates[channel, j[0], j[1]]:
        return
    for tap in TAPS:
        weight = step.sampled_weight(channel, tap, j)
        for pixel, share in step.pixels(tap, j):
            yield from walk(steps[:-1], channel, pixel, product * weight * share)


def sum_over_paths(steps: list[Step], j: tuple[int, int]) -> Tensor:
    """[C, H, W]"""
    field = torch.zeros(CHANNELS, *steps[0].size, dtype=torch.float64)
    for channel in range(CHANNELS):
        sums: Counter = Counter()
        for pixel, product in walk(steps, channel, j):
            sums[pixel] += product
        for (y, x), value in sums.items():
            field[channel, y, x] = value
    return field


def layer(name: str, stride: int = 1, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    options = {"scope": 4 + seed % 2} if "dk" in name or name == "static" else {}
    built = layer_class(name)(
        CHANNELS, CHANNELS, 3, stride, 1, 1, CHANNELS, False, **options, dtype=torch.float64
    )
    return stir(built, 0.7)


def image() -> Tensor:
    return torch.randn(
        1, CHANNELS, *SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def steps_of(network: nn.Sequential, x: Tensor) -> list[Step]:
    """What each layer did with this image."""
    steps: list[Step] = []
    with record_offsets(network) as records:
        network(x)
    for name, module in network.named_children():
        before, x = x, module(x)
        if isinstance(module, nn.ReLU):
            steps[-1].gates = before[0] > 0
            continue
        record, places = records.get(name), (9, 2, *x.shape[2:])
        offsets = [getattr(record, f"{kind}_offset", None) for kind in ("kernel", "image")]
        # One offset for the whole image holds at each of its positions.
        filled = [
            None if o is None else o[0].reshape(9, 2, *o.shape[2:] or (1, 1)).expand(places)
            for o in offsets
        ]
        steps.append(
            Step(module.weight.detach()[:, 0], module.stride[0], *filled, tuple(before.shape[2:]))
        )
    return steps


def autograd_field(network: nn.Module, x: Tensor, j: tuple[int, int]) -> Tensor:
    """[C, H, W]: depthwise, each channel of the output sees that of the input alone."""
    rows = input_gradients(network, x, torch.eye(CHANNELS), j)[:, 0]
    assert not rows[0, 1].any()
    assert not rows[1, 0].any()
    return rows.diagonal().movedim(-1, 0)


NETWORKS = {
    "rigid": ["rigid"] * 3,
    "static scope": ["static", "rigid"],
    "local DK": ["local_dk"] * 3,
    "global DK": ["global_dk"] * 3,
    "DCN": ["dcn"] * 3,
    "DCN and local DK in one": ["dcn_local_dk"] * 3,
    "one of each": ["local_dk", "dcn", "global_dk", "rigid"],
}


@pytest.mark.parametrize("names", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("gated", [False, True], ids=["linear", "with ReLUs"])
def test_the_field_is_the_sum_over_sampled_kernel_paths(names, gated):
    """Check eq:erf-grad, eq:erf-grad-dk, eq:erf-grad-dc and eq:dkdc2d.

    With ReLUs, paths count where every unit on them is open.
    """
    layers = [layer(name, stride=2 if i == 1 else 1, seed=i) for i, name in enumerate(names)]
    network = nn.Sequential(
        layers[0], *(m for each in layers[1:] for m in ([nn.ReLU(), each] if gated else [each]))
    )
    x, j = image(), (2, 2)
    steps = steps_of(network, x)
    expected = sum_over_paths(steps, j)
    assert expected.ne(0).sum() > 3
    torch.testing.assert_close(autograd_field(network, x, j), expected, **EXACT)
    if gated:
        for step in steps:
            step.gates = None
        linear = sum_over_paths(steps, j)
        assert not torch.allclose(linear, expected)  # the gates do something
        assert not expected[linear == 0].any()  # and only take away


def test_offsets_are_constants_in_the_derivative():
    network, x = nn.Sequential(layer("local_dk"), layer("dcn", seed=1)), image()
    through = x.clone().requires_grad_()
    network(through)[0, 0, 4, 4].backward()
    assert not torch.allclose(autograd_field(network, x, (4, 4))[0], through.grad[0, 0])
    assert not any(module._forward_hooks for module in network.modules())


def single_tap(
    network: nn.Sequential, m: int, tap: tuple[int, int], value: Tensor
) -> nn.Sequential:
    """The network with layer m's kernel replaced by one value per channel at one tap."""
    kernel = torch.zeros(CHANNELS, 1, 3, 3, dtype=torch.float64)
    kernel[:, 0, tap[0] + 1, tap[1] + 1] = value
    rigid = layer("rigid")
    rigid.weight.data = kernel
    return nn.Sequential(*(rigid if i == m else module for i, module in enumerate(network)))


@pytest.mark.parametrize("m", range(3))
def test_a_kernel_is_the_sum_of_its_taps(m):
    """eq:erf-grad-reformulate: R(i; j) = sum over k_m of R(i; j + k_m, k_m)."""
    network, x, j = nn.Sequential(*(layer("rigid", seed=i) for i in range(3))), image(), (4, 4)
    weight = network[m].weight.detach()[:, 0]
    parts = [
        autograd_field(single_tap(network, m, tap, weight[:, tap[0] + 1, tap[1] + 1]), x, j)
        for tap in TAPS
    ]
    torch.testing.assert_close(sum(parts), autograd_field(network, x, j), **EXACT)


@pytest.mark.parametrize(("name", "m"), [("local_dk", 2), *(("global_dk", m) for m in range(3))])
def test_sampling_the_kernel_samples_the_field(name, m):
    """Check eq:erf-grad-dk: R_DK(i; j) = sum over k_m of R(i; j + k_m, k_m + dk_m).

    Between the scope's entries, R is the bilinear mix of R at these. A local offset belongs to one
    position: there m is the last layer, whose position is j.
    """
    network, x, j = (
        nn.Sequential(*(layer(name if i == m else "rigid", seed=i) for i in range(3))),
        image(),
        (4, 4),
    )
    step = steps_of(network, x)[m]
    side, total = step.weight.shape[-1], torch.zeros(CHANNELS, *SIZE, dtype=torch.float64)
    for tap in TAPS:
        moved = step._offset(step.kernel_offset, tap, j)
        at = [
            min(max((side - 1) / 2 + k + d, 0.0), side - 1.0)
            for k, d in zip(tap, moved, strict=True)
        ]
        for (y, x_), share in bilinear(*at):
            if share:
                total += share * autograd_field(
                    single_tap(network, m, tap, step.weight[:, y, x_]), x, j
                )
    torch.testing.assert_close(total, autograd_field(network, x, j), **EXACT)
