"""Where taps fall and how large outputs are, against numbers on paper."""

import pytest

from dkcls.ops.geometry import grid_step, make_geometry, pair, tap_grid


@pytest.mark.parametrize(
    ("grid", "kernel_size", "scope", "places"),
    [
        ("centered", 3, 4, [0.5, 1.5, 2.5]),
        ("centered", 3, 3, [0, 1, 2]),
        ("centered", 3, 5, [1, 2, 3]),
        ("centered", 3, 9, [3, 4, 5]),
        ("centered", 2, 4, [1, 2]),
        ("centered", 1, 2, [0.5]),
        ("centered", 3, 2, [0, 0.5, 1]),
        ("centered", 5, 4, [0, 0.5, 1.5, 2.5, 3]),
        ("centered", 3, 1, [0, 0, 0]),
        ("spread", 3, 4, [0, 1.5, 3]),
        ("spread", 3, 3, [0, 1, 2]),
        ("spread", 3, 9, [0, 4, 8]),
        ("spread", 2, 6, [0, 5]),
        ("spread", 5, 3, [0, 0.5, 1, 1.5, 2]),
        ("spread", 1, 4, [1.5]),
        ("spread", 3, 1, [0, 0, 0]),
        (2.0, 3, 7, [1, 3, 5]),
        (0.25, 3, 4, [1.25, 1.5, 1.75]),
        (0, 3, 4, [1.5, 1.5, 1.5]),
        (2, 3, 4, [0, 1.5, 3]),
        (3.0, 2, 2, [0, 1]),
    ],
)
def test_the_grid(grid, kernel_size, scope, places):
    assert tap_grid(kernel_size, scope, grid_step(grid, kernel_size, scope)) == places


@pytest.mark.parametrize(
    ("grid", "places"),
    [
        ("centered", [(0.5, 1.5), (0.5, 2.5), (1.5, 1.5), (1.5, 2.5), (2.5, 1.5), (2.5, 2.5)]),
        ("spread", [(0, 0), (0, 4), (1.5, 0), (1.5, 4), (3, 0), (3, 4)]),
    ],
)
def test_taps_are_in_row_major_order_and_axes_have_steps_of_their_own(grid, places):
    geometry = make_geometry((4, 5), (3, 2), grid=grid)
    assert geometry.taps == 6
    assert [geometry.tap_origin(tap, (4, 5)) for tap in range(6)] == places


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, (5, 8)),
        ({"padding": 1}, (7, 10)),
        ({"stride": 2}, (3, 4)),
        ({"dilation": (2, 3)}, (3, 4)),
        ({"kernel_size": (2, 5)}, (6, 6)),
        ({"stride": (3, 2), "padding": (0, 2), "dilation": (3, 1)}, (1, 6)),
        ({"dilation": 4}, (-1, 2)),
    ],
    ids=str,
)
def test_output_sizes_of_7_by_10(options, size):
    assert make_geometry((4, 4), **{"kernel_size": 3, **options}).output_size(7, 10) == size


def test_the_order_of_the_fields():
    geometry = make_geometry((4, 7), (2, 3), (4, 5), (6, 7), (8, 9), "spread", "projected")
    assert tuple(geometry) == ((2, 3), (4, 5), (6, 7), (8, 9), (3.0, 3.0), "projected")
    assert make_geometry((4, 4), 3)[1:] == ((1, 1), (0, 0), (1, 1), (1.0, 1.0), "hard")


@pytest.mark.parametrize(
    "value", [0, True, 1.0, "11", (1,), (1, 2, 3), (1, 0), (1, True), (1.0, 1)]
)
def test_what_is_no_pair_is_refused(value):
    with pytest.raises(
        ValueError, match="stride must be an int or a pair of ints, each at least 1, got "
    ):
        pair(value, "stride", 1)


def test_pairs():
    assert pair(3, "stride", 1) == (3, 3)
    assert pair([2, 1], "stride", 1) == (2, 1)
    assert pair(0, "padding", 0) == (0, 0)


@pytest.mark.parametrize("grid", [-0.5, float("inf"), float("nan"), True, "wide", None])
def test_what_is_no_grid_is_refused(grid):
    with pytest.raises(
        ValueError, match='grid must be "centered", "spread" or a step of at least 0, got '
    ):
        grid_step(grid, 3, 4)
