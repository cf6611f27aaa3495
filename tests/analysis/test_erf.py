"""Receptive fields, effective and theoretical, of networks where they are known; errors."""

import pytest
import timm
import torch
from torch import nn

import dkcls.models  # noqa: F401
from dkcls.analysis.erf import effective_receptive_field, feature_map, input_gradients
from dkcls.analysis.theoretical import (
    nearest_position,
    position_centres,
    theoretical_receptive_field,
)
from tests.models.common import awake, create, stir


@pytest.fixture(scope="module")
def nano() -> nn.Module:
    return stir(awake(create(spatial="dcn_local_dk", in_chans=1, num_classes=10)))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))


def test_the_field_is_the_norm_of_the_jacobian(nano, images):
    jacobian = input_gradients(nano, images[:1], torch.eye(40), (1, 2))
    exact = effective_receptive_field(nano, images[:1], (1, 2), channels=range(40))
    torch.testing.assert_close(exact, jacobian.square().sum((0, 2)).sqrt())
    assert exact.shape == (1, 32, 32)
    some = effective_receptive_field(nano, images[:1], (1, 2), channels=[3, 5])
    torch.testing.assert_close(some, jacobian[[3, 5]].square().sum((0, 2)).sqrt())


def test_random_projections_estimate_it(nano, images):
    exact = effective_receptive_field(nano, images[:1], channels=range(40))
    few, many = (effective_receptive_field(nano, images[:1], projections=n) for n in (4, 128))
    errors = [
        ((estimate.square() - exact.square()).norm() / exact.square().norm()).item()
        for estimate in (few, many)
    ]
    assert errors[1] < errors[0]
    assert errors[1] < 2 * (2 / 128) ** 0.5


def test_images_and_positions_in_a_batch_are_those_alone(nano, images):
    positions = torch.tensor([[0, 1], [2, 2], [3, 0]])
    together = effective_receptive_field(nano, images, positions)
    alone = [
        effective_receptive_field(nano, image[None], position)[0]
        for image, position in zip(images, positions, strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-3, atol=1e-4)
    middle = effective_receptive_field(nano, images)
    torch.testing.assert_close(middle, effective_receptive_field(nano, images, (2, 2)))


def test_a_position_is_row_and_column():
    """A single convolution of 3 x 3 looks at the pixels around its position."""
    field = effective_receptive_field(
        nn.Conv2d(1, 2, 3, padding=1), torch.zeros(1, 1, 8, 12), (2, 9), channels=[0, 1]
    )[0]
    assert field.nonzero().tolist() == [[y, x] for y in (1, 2, 3) for x in (8, 9, 10)]


def test_a_module_by_its_name(nano, images):
    torch.testing.assert_close(feature_map(nano, images), feature_map(nano, images, "blocks.2"))
    early = effective_receptive_field(nano, images, module="blocks.0")
    assert early.count_nonzero() < effective_receptive_field(nano, images).count_nonzero()


def test_the_network_is_left_as_it_was(nano, images):
    nano.train()
    before = {name: value.clone() for name, value in nano.state_dict().items()}
    effective_receptive_field(nano, images)
    assert nano.training
    assert all(torch.equal(value, before[name]) for name, value in nano.state_dict().items())
    assert all(parameter.grad is None for parameter in nano.parameters())
    assert not any(module._forward_hooks for module in nano.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": "blocks.9"}, r"no module 'blocks\.9'; its parts are conv_stem"),
        (
            {"module": "classifier"},
            r"output of classifier must be a feature map \[N, C, H, W\], got \[1, 10\]",
        ),
        ({"position": (4, 0)}, r"must lie in the feature map of 4 x 4, got"),
        (
            {"position": torch.zeros(2, 2)},
            r"position must be \(row, column\) or \[3, 2\], got \[2, 2\]",
        ),
        ({"channels": [40]}, r"channels must be numbers from 0 to 39, got \[40\]"),
        ({"channels": []}, r"channels must be numbers from 0 to 39, got \[\]"),
    ],
)
def test_wrong_arguments(nano, images, arguments, message):
    with pytest.raises(ValueError, match=message):
        effective_receptive_field(nano, images, **arguments)


def stack(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def square(size: int, first: int, last: int) -> torch.Tensor:
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[first : last + 1, first : last + 1] = True
    return mask


@pytest.mark.parametrize(
    ("model", "first", "last"),
    [
        (stack(*(nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))), 7, 13),
        (
            stack(
                nn.Conv2d(1, 4, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)
            ),
            7,
            13,
        ),
        (
            stack(
                nn.Conv2d(1, 2, 3, 2, 1),
                nn.BatchNorm2d(2),
                nn.ReLU6(),
                nn.Conv2d(2, 2, 3, padding=1),
            ),
            7,
            13,
        ),
        (stack(nn.MaxPool2d(3, 2, 1), nn.Conv2d(1, 2, 1)), 9, 11),
    ],
    ids=["three layers", "dilated", "strided", "pooled"],
)
def test_theoretical_fields(model, first, last):
    """21 x 21 pixels; the middle position looks at pixel 10."""
    for parameter in model.parameters():
        nn.init.constant_(parameter, -1.0)  # neither weights nor signs matter
    assert torch.equal(theoretical_receptive_field(model, (1, 21, 21)), square(21, first, last))


def test_what_normalisation_has_seen_does_not_change_the_theoretical_field():
    """With such a mean no ReLU would be open."""
    norm = nn.BatchNorm2d(2)
    norm.running_mean.fill_(100.0)
    model = stack(nn.Conv2d(1, 2, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
    assert torch.equal(theoretical_receptive_field(model, (1, 21, 21)), square(21, 8, 12))
    assert norm.running_mean.tolist() == [100.0, 100.0]


def test_offsets_do_not_change_the_theoretical_field(nano):
    rigid = create(spatial="rigid", in_chans=1, num_classes=10)
    fields = [theoretical_receptive_field(model, (1, 64, 64)) for model in (nano, rigid)]
    assert torch.equal(*fields)
    assert fields[0].any(0).sum() == 51
    assert torch.equal(fields[0], square(64, 7, 57))


def test_the_effective_field_lies_in_the_theoretical_one():
    model = awake(create(spatial="rigid", in_chans=1, num_classes=10))
    field = effective_receptive_field(model, torch.randn(1, 1, 64, 64))[0]
    assert not field[~theoretical_receptive_field(model, (1, 64, 64))].any()


@pytest.mark.parametrize(
    ("model", "size", "rows"),
    [
        (create(in_chans=1), (1, 32, 40), [0, 8, 16, 24]),
        (
            stack(nn.Conv2d(1, 1, 5), nn.Conv2d(1, 1, 4, 4)),
            (1, 24, 32),
            [3.5, 7.5, 11.5, 15.5, 19.5],
        ),
        (
            timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64),
            (3, 64, 64),
            [7.5, 23.5, 39.5, 55.5],
        ),
    ],
    ids=["padded", "not padded", "one size only"],
)
def test_where_positions_look(model, size, rows):
    centres = position_centres(model, size)
    assert centres[0].tolist() == rows
    assert nearest_position(centres, (0, rows[1] + 1)) == (1, 0)
