"""Pictures of networks, by value: their lines and dots are read back."""

import numpy as np
import pytest

from dkcls.analysis.dynamics import read_scopes
from dkcls.report.network_plots import (
    Cloud,
    clouds,
    overlay,
    radius_over_scale,
    scope_row,
    taps_over_images,
)
from tests.analysis.common import scope_of
from tests.models.common import awake, create, images, stir
from tests.report.common import points


def test_the_line_of_radii_is_the_mean_of_each_tenth():
    scales = np.random.default_rng(0).permutation(np.geomspace(0.4, 1.1, 20))
    figure = radius_over_scale(scales, {"last": {"a": 10 * scales}}, {"last": {"a": 1.0}})
    dots, means = figure.axes[0].lines
    assert points(dots) == list(zip(scales.tolist(), (10 * scales).tolist(), strict=True))
    ordered = np.sort(scales).reshape(10, 2)
    assert means.get_xdata() == pytest.approx(np.sqrt(ordered[:, 0] * ordered[:, 1]))
    assert means.get_ydata() == pytest.approx(10 * ordered.mean(1))


@pytest.mark.parametrize("pixels", [0, 1])
def test_a_field_of_few_pixels_is_shown(pixels):
    """Its 99.5th percentile is 0."""
    field = np.zeros((32, 32))
    field[3, :pixels] = 7.0
    shown = overlay(np.ones((32, 32)), field)
    assert shown.shape == (32, 32, 3)
    assert ((shown >= 0) & (shown <= 1)).all()
    assert shown[3, 0].mean() < 0.5 if pixels else (shown == 1).all()
    assert (shown[4] == 1).all()


def test_taps_are_drawn_in_their_position_of_the_image():
    """Draw two positions, one above the other, over an image of 20 x 10.

    The second tap of the lower position is in the last corner.
    """
    coordinates = np.zeros((1, 2, 2, 2, 1))
    coordinates[0, 1, :, 1, 0] = 4, 8
    figure = taps_over_images(
        {"a": np.zeros((20, 10))},
        [scope_of([])._replace(coordinates=coordinates)],
        [scope_of([[[1, 2], [3, 6]]])],
    )
    panel = figure.subfigs[0].axes[0]
    first, second = (drawn.get_offsets() for drawn in panel.collections)
    assert np.allclose(first, [[1.2, 1.2]] * 2)  # (x, y), 12 % into the upper half
    assert np.allclose(second, [[1.2, 11.2], [8.8, 18.8]])


def test_clouds_are_coloured_by_class_and_by_tenths_of_the_scale():
    scales = np.random.default_rng(0).permutation(30) / 30
    cloud = Cloud("offsets", np.arange(60.0).reshape(30, 2), "by class", "by scale")
    figure = clouds([cloud], np.arange(30) % 10, scales, list("abcdefghij"))
    by_class, by_scale = (figure.axes[i].collections[0].get_array() for i in (0, 1))
    assert by_class.tolist() == [i % 10 for i in range(30)]
    assert by_scale.tolist() == [int(sum(scales < scale) // 3) for scale in scales]


def test_pictures():
    model = stir(awake(create(spatial="local_dk", scope=5)))
    scopes = read_scopes(model, images())
    figure = taps_over_images(
        {"a": np.zeros((32, 32)), "b": np.ones((32, 32))}, scopes[::5], scopes
    )
    assert len(figure.subfigs[0].axes) == 4
    assert len(scope_row(scopes).axes) == 6
    cloud = Cloud(
        "offsets", np.random.default_rng(0).standard_normal((30, 2)), "by class", "by scale"
    )
    assert (
        len(clouds([cloud], np.arange(30) % 10, np.linspace(0.4, 1, 30), list("abcdefghij")).axes)
        == 4
    )
