"""Objects with factors of the caller's choice, and where they stand."""

import numpy as np
import pytest
import torch

from dkcls.analysis.erf import centre, effective_receptive_field
from dkcls.analysis.probes import Look, first_of_classes, middle, place, probe_fields, turned_back
from dkcls.data import Normalize
from dkcls.data.sets.deformed_fashion import DeformedFashion
from tests.models.common import awake, create, stir

CLEAN = DeformedFashion("test", noise=0.0)


@pytest.mark.parametrize("clutter", [0, 2])
def test_with_its_own_factors_an_object_is_rendered_as_it_is_loaded(clutter):
    dataset, indices = DeformedFashion("val", clutter=clutter), np.arange(10, 30)
    images, masks = dataset.render(indices, dataset.factors(indices))
    assert torch.equal(images, dataset.load(indices).batch.images)
    assert masks.shape == (20, 32, 32)
    bright = [
        image[0][mask].float().mean() > image[0][~mask].float().mean()
        for image, mask in zip(images, masks, strict=True)
    ]
    assert all(bright)


def test_objects_stand_on_the_pixel_that_the_position_looks_at():
    model, indices = create(), np.arange(50)
    look = middle(model, CLEAN)
    assert look == ((16.0, 16.0), (2, 2), None)
    probe = place(look, CLEAN, indices, scale=0.5)
    off = centre(probe.masks.float()) - 16
    assert off.abs().mean() < 1
    assert middle(model, CLEAN, "blocks.1") == ((16.0, 16.0), (4, 4), "blocks.1")
    sizes = [place(look, CLEAN, indices, scale).masks.sum() for scale in (0.4, 0.8)]
    assert sizes[1] / sizes[0] == pytest.approx(4, rel=0.1)


def test_objects_stand_at_x_and_y():
    """Away from the diagonal: 10 pixels from the left, 20 from the top."""
    probe = place(Look((10.0, 20.0), (2, 1)), CLEAN, np.arange(20), scale=0.4)
    rows, columns = centre(probe.masks.float()).mean(0).tolist()
    assert (columns, rows) == (pytest.approx(10, abs=1), pytest.approx(20, abs=1))


def test_a_turned_object_turned_back_is_the_object():
    indices = first_of_classes(CLEAN, [9, 8])
    point = (16.0, 16.0)
    still, turned = (
        place(Look(point, (2, 2)), CLEAN, indices, 0.6, angle).images[:, 0].float()
        for angle in (45.0, -45.0)
    )
    torch.testing.assert_close(
        turned_back(turned, point, 1), turned_back(still, point, 0), rtol=0, atol=1
    )
    assert (turned_back(turned, point, -1) - turned_back(still, point, 0)).abs().mean() > 5


def test_fields_of_a_probe():
    model = stir(awake(create(spatial="local_dk")))
    probe = place(Look((16.0, 16.0), (2, 2)), CLEAN, np.arange(2), np.array([0.4, 1.0]))
    exact = effective_receptive_field(
        model,
        Normalize(CLEAN.mean, CLEAN.std)(probe.images),
        probe.look.position,
        channels=range(40),
    )
    torch.testing.assert_close(probe_fields(model, CLEAN, probe), exact)
    assert probe_fields(model, CLEAN, probe, projections=4).shape == exact.shape
