"""Measures of ERFs, on maps whose measures are known."""

import pytest
import torch

from dkcls.analysis import erf

ROWS, COLUMNS = torch.meshgrid(torch.arange(61.0), torch.arange(81.0), indexing="ij")


def blob(sigma_y: float, sigma_x: float, angle: float = 0.0) -> torch.Tensor:
    y, x = ROWS - 28, COLUMNS - 41
    c, s = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
    return torch.exp(-(((c * y + s * x) / sigma_y) ** 2 + ((c * x - s * y) / sigma_x) ** 2) / 2)


def test_radius_and_centre():
    fields = torch.stack([blob(3, 3), 7 * blob(6, 6)])  # the size of the values does not matter
    torch.testing.assert_close(
        erf.radius(fields), torch.tensor([3.0, 6.0]) * 2**0.5, rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        erf.centre(fields), torch.tensor([[28.0, 41.0]] * 2), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("angle", [0.0, 0.5, 2.0])
def test_anisotropy_does_not_depend_on_direction(angle):
    assert erf.anisotropy(blob(3, 6, angle)).item() == pytest.approx(2, rel=1e-3)
    assert erf.anisotropy(blob(4, 4, angle)).item() == pytest.approx(1, rel=1e-3)


def test_area_above_a_threshold():
    field = blob(5, 5)
    expected = (
        2 * torch.pi * 25 * torch.log(torch.tensor(1 / 0.05))
    )  # of the disk where a Gaussian is above 5 %
    assert erf.area(field).item() == pytest.approx(expected.item(), rel=0.03)
    assert erf.area(field, threshold=1.0) == 1


def test_measures_of_a_batch_are_those_of_each_map():
    fields = torch.stack([blob(3, 6), 0.001 * blob(6, 3), 50 * blob(4, 5, 0.5)])
    mask = blob(5, 5) > 0.5
    for measure in (erf.centre, erf.radius, erf.area, erf.anisotropy):
        torch.testing.assert_close(
            measure(fields), torch.stack([measure(field) for field in fields])
        )
    for measure in (erf.share_inside, erf.overlap):
        torch.testing.assert_close(
            measure(fields, mask), torch.stack([measure(field, mask) for field in fields])
        )


def test_overlap_with_a_mask():
    field = torch.zeros(6, 6)
    field[:2] = 3.0
    field[2] = 0.1  # below 5 %
    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[1:3] = True
    assert erf.share_inside(field, mask).item() == pytest.approx((18 + 0.6) / (36 + 0.6))
    assert erf.overlap(field, mask).item() == pytest.approx(6 / 18)
