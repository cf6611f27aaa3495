"""Dynamics of networks: as their layers gave them, and measured on known data."""

import numpy as np
import pytest
import torch

from dkcls.analysis.dynamics import (
    Dynamics,
    beside,
    collect_dynamics,
    explain,
    explain_control,
    moves,
    read_scopes,
    variance_share,
)
from dkcls.layers import record_offsets
from tests.analysis.common import scope_of
from tests.models.common import awake, create, images, stir

GENERATORS = {"rigid": 0, "local_dk": 6, "dcn_local_dk": 12, "global_dk": 6, "cond": 6}


@pytest.mark.parametrize(("spatial", "generators"), GENERATORS.items())
def test_every_generator_is_heard(spatial, generators):
    model, batch = stir(awake(create(spatial=spatial))), images(n=4)
    found = collect_dynamics(model, batch.split(2))
    assert len(found) == generators
    assert not any(module._forward_hooks for module in model.modules())
    with record_offsets(model) as records:
        model(batch)
    for name, said in found.items():
        layer, _, kind = name.rpartition(".")
        assert len(said.values) == len(said.features) == 4
        if kind != "routing":
            offset = getattr(records[layer], kind.replace("generator", "offset"))
            mean = offset.mean((2, 3)) if offset.ndim == 4 else offset
            torch.testing.assert_close(torch.from_numpy(said.values), mean, rtol=1e-4, atol=1e-5)


def test_features_are_means_over_the_positions_that_the_generator_saw():
    model, batch = stir(awake(create(spatial="local_dk"))), images(n=3)
    seen = {}
    for name, module in model.named_modules():
        if name.endswith("kernel_generator"):
            module.register_forward_hook(
                lambda module, args, out, name=name: seen.update({name: args[0].flatten(2)})
            )
    found = collect_dynamics(model, [batch])
    assert found.keys() == seen.keys()
    for name, said in found.items():
        expected = [[row.sum().item() / len(row) for row in image] for image in seen[name]]
        np.testing.assert_allclose(said.features, expected, rtol=1e-3, atol=1e-5)


def test_shares_of_variance():
    groups = np.repeat(np.arange(5), 20)
    noise = np.random.default_rng(0).standard_normal((100, 3))
    assert variance_share(groups[:, None] * np.ones((1, 3)), groups) == pytest.approx(1)
    assert variance_share(noise, groups) < 0.15
    assert variance_share(noise, np.zeros(100)) == pytest.approx(0)


def test_what_follows_class_and_what_follows_scale_are_told_apart():
    generator = np.random.default_rng(0)
    classes, scales = generator.integers(10, size=600), generator.uniform(0.4, 1.1, 600)
    noise = 0.05 * generator.standard_normal((600, 10))
    of_scale = explain(np.log(scales)[:, None] * np.arange(1, 11) + noise, classes, scales)
    of_class = explain(np.eye(10)[classes] + noise, classes, scales)
    assert of_scale.scale_r2 > 0.95 > 0.3 > of_scale.class_accuracy
    assert of_class.class_accuracy > 0.95 > 0.1 > of_class.scale_r2
    assert of_scale.scale_share > 0.9 > 0.1 > of_scale.class_share
    assert of_class.class_share > 0.9 > 0.1 > of_class.scale_share


def test_models_are_scored_on_images_that_they_were_not_fitted_on():
    """With as many dimensions as images, noise explains what it was fitted on, and nothing else."""
    generator = np.random.default_rng(0)
    classes, scales = np.tile(np.repeat(np.arange(2), 2), 50), generator.uniform(0.4, 1.1, 200)
    noise = explain(generator.standard_normal((200, 100)), classes, scales)
    assert noise.scale_r2 < 0
    assert noise.class_accuracy < 0.7


def test_the_control_is_of_the_same_size_and_knows_what_the_features_know():
    generator = np.random.default_rng(0)
    classes, scales = generator.integers(10, size=400), generator.uniform(0.4, 1.1, 400)
    features = np.log(scales)[:, None] + 0.01 * generator.standard_normal((400, 24))
    dynamics = Dynamics(generator.standard_normal((400, 18)), features)
    assert dynamics.control(0).shape == (400, 18)
    assert not np.allclose(dynamics.control(0), dynamics.control(1))
    own, control = (
        explain(dynamics.values, classes, scales),
        explain_control(dynamics, classes, scales),
    )
    assert own.scale_r2 < 0.1 < 0.9 < control.scale_r2
    assert beside(own, control)["R2 of log scale"] == f"{own.scale_r2:.2f} ({control.scale_r2:.2f})"


def test_taps_rest_on_the_grid_and_stay_in_the_scope():
    fresh = create(spatial="local_dk", scope=7, grid=2.0)
    scopes = read_scopes(fresh, images())
    assert [scope.coordinates.shape for scope in scopes] == [
        (2, 9, 2, side, side) for side in (16, 8, 8, 8, 4, 4)
    ]
    for scope in scopes:
        assert scope.rest.tolist() == [[y, x] for y in (1, 3, 5) for x in (1, 3, 5)]
        assert (scope.coordinates == scope.rest[..., None, None]).all()
        assert moves(scope) == dict.fromkeys(moves(scope), 0.0)
    moved = read_scopes(stir(awake(fresh)), 100 * images())
    assert all((scope.coordinates >= 0).all() and (scope.coordinates <= 6).all() for scope in moved)
    for scope in moved:
        parts = moves(scope)
        squares = sum(
            parts[name] ** 2 for name in ("the same for all", "between images", "between positions")
        )
        assert squares == pytest.approx(parts["from rest"] ** 2, rel=1e-4)
        assert parts["share on the scope's edge"] > 0
    assert read_scopes(create(spatial="dcn"), images()) == []


def test_distances_on_paper():
    """Compare two images: in one, both taps are at rest.

    In the other, the first tap is 3 down and 4 to the right, the second 3 up, on the edge.
    """
    parts = moves(scope_of([[[1, 2], [3, 6]], [[4, 6], [0, 6]]]))
    assert parts["from rest"] == pytest.approx(((25 + 9) / 4) ** 0.5)
    assert parts["the same for all"] == pytest.approx(((1.5**2 + 2**2 + 1.5**2) / 2) ** 0.5)
    assert parts["between images"] == pytest.approx(((1.5**2 + 2**2 + 1.5**2) / 2) ** 0.5)
    assert parts["between positions"] == 0
    assert parts["share on the scope's edge"] == 2 / 8  # 4 and 0 are the first and the last row


@pytest.mark.parametrize("spatial", ["local_dk", "global_dk"])
def test_offsets_are_pairs_of_row_and_column_for_one_tap_after_the_other(spatial):
    """As torchvision's deformable convolution has them: y of tap 0, x of tap 0, y of tap 1, ..."""
    model = create(spatial=spatial, scope=7, grid=2.0)
    wanted = torch.arange(18) / 20 - 0.4
    for module in model.modules():
        if hasattr(module, "kernel_generator"):
            module.kernel_generator.register_forward_hook(
                lambda module, args, out: give(wanted, out)
            )
    scopes = read_scopes(model, images())
    assert len(scopes) == 6
    for scope in scopes:
        for tap in range(9):
            y, x = 1 + 2 * (tap // 3) + wanted[2 * tap], 1 + 2 * (tap % 3) + wanted[2 * tap + 1]
            assert np.allclose(scope.coordinates[:, tap, 0], y)
            assert np.allclose(scope.coordinates[:, tap, 1], x)


def give(wanted: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return wanted.view(1, -1, *[1] * (like.ndim - 2)).expand_as(like).to(like)
