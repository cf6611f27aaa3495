"""Numbers for maps of effective receptive fields, [..., H, W] and not negative: each gives [...].

A map is taken as a distribution of mass over the pixels; lengths are in pixels.
"""

import torch
from torch import Tensor


def centre(field: Tensor) -> Tensor:
    """[..., 2]: the mean (row, column)."""
    return torch.stack([(_mass(field) * axis).sum((-2, -1)) for axis in _axes(field)], -1)


def radius(field: Tensor) -> Tensor:
    """The root mean square distance from the map's own centre."""
    return _covariance(field).diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()


def area(field: Tensor, threshold: float = 0.05) -> Tensor:
    """How many pixels have at least that share of the largest value."""
    return (field >= threshold * field.amax((-2, -1), keepdim=True)).sum((-2, -1)).to(field)


def anisotropy(field: Tensor) -> Tensor:
    """The longest over the shortest standard deviation of any direction: 1 is round."""
    short, long = torch.linalg.eigvalsh(_covariance(field)).clamp(min=0).sqrt().unbind(-1)
    return long / short


def share_inside(field: Tensor, mask: Tensor) -> Tensor:
    """The share of the mass that lies inside `mask`, bool [..., H, W]."""
    return (_mass(field) * mask).sum((-2, -1))


def overlap(field: Tensor, mask: Tensor, threshold: float = 0.05) -> Tensor:
    """Intersection over union of `mask` and the pixels that `area` counts."""
    above = field >= threshold * field.amax((-2, -1), keepdim=True)
    return (above & mask).sum((-2, -1)) / (above | mask).sum((-2, -1))


def _mass(field: Tensor) -> Tensor:
    return field / field.sum((-2, -1), keepdim=True)


def _axes(field: Tensor) -> tuple[Tensor, Tensor]:
    height, width = field.shape[-2:]
    return torch.arange(height, device=field.device)[:, None].to(field), torch.arange(
        width, device=field.device
    ).to(field)


def _covariance(field: Tensor) -> Tensor:
    """[..., 2, 2]"""
    mass, mean = _mass(field), centre(field)
    apart = [axis - mean[..., i, None, None] for i, axis in enumerate(_axes(field))]
    entries = [(mass * a * b).sum((-2, -1)) for a in apart for b in apart]
    return torch.stack(entries, -1).unflatten(-1, (2, 2))
