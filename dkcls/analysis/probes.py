"""Probes: objects of the embedded data, centred where a feature map's middle position looks.

All objects are on the same pixel, so that only scale and rotation differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dkcls.analysis.erf import effective_receptive_field, feature_map
from dkcls.analysis.theoretical import position_centres
from dkcls.data import ImageDataset, Normalize
from dkcls.data.sets.deformed_fashion import DeformedFashion, Factors

BATCH = 100


class Look(NamedTuple):
    """A position (row, column) of `module`'s feature map, and the pixel (x, y) that it looks at."""

    point: tuple[float, float]
    position: tuple[int, int]
    module: str | None = None


class Probe(NamedTuple):
    """N objects that stand where a position looks."""

    look: Look
    images: Tensor  # uint8 [N, 1, H, W]
    masks: Tensor  # bool [N, H, W]


def middle(model: nn.Module, dataset: ImageDataset, module: str | None = None) -> Look:
    """Return the middle position of a feature map, with the pixel that it looks at."""
    rows, columns = position_centres(
        model, (dataset.channels, dataset.image_size, dataset.image_size), module
    )
    position = len(rows) // 2, len(columns) // 2
    return Look((float(columns[position[1]]), float(rows[position[0]])), position, module)


def place(
    look: Look,
    dataset: DeformedFashion,
    indices: np.ndarray,
    scale: float | np.ndarray,
    rotation: float | np.ndarray = 0.0,
) -> Probe:
    """Render these objects where the position looks, with this scale and rotation.

    Scale and rotation (degrees clockwise) are one value for all objects, or one for each.
    """
    x, y = (p - (dataset.image_size - 1) / 2 for p in look.point)
    factors = (
        np.broadcast_to(np.asarray(value, np.float64), len(indices))
        for value in (scale, rotation, x, y)
    )
    return Probe(look, *dataset.render(indices, Factors(*factors)))


def probe_fields(
    model: nn.Module, dataset: DeformedFashion, probe: Probe, projections: int | None = None
) -> Tensor:
    """Return the ERFs of the probe's position, [N, H, W].

    They are exact over all channels, or estimated from that many random projections.
    """
    normalize = Normalize(dataset.mean, dataset.std)
    channels = None
    if projections is None:
        with torch.no_grad():
            channels = range(
                feature_map(model, normalize(probe.images[:1]), probe.look.module).shape[1]
            )
    parts = probe.images.split(BATCH)
    options = {"module": probe.look.module, "channels": channels, "projections": projections or 1}
    return torch.cat(
        [
            effective_receptive_field(
                model,
                normalize(part),
                probe.look.position,
                **options,  # type: ignore[arg-type]
            )
            for part in parts
        ]
    )


def first_of_classes(dataset: DeformedFashion, classes: Sequence[int]) -> np.ndarray:
    """Return the index of the first image of each of these classes."""
    return np.array([np.flatnonzero(dataset.targets == c)[0] for c in classes])


def turned_back(fields: Tensor, point: tuple[float, float], quarters: int) -> Tensor:
    """Return the largest square around `point`, turned clockwise by so many quarters, [N, S, S]."""
    x, y = map(round, point)
    reach = min(x, y, fields.shape[-1] - 1 - x, fields.shape[-2] - 1 - y)
    return torch.rot90(
        fields[..., y - reach : y + reach + 1, x - reach : x + reach + 1], -quarters, (-2, -1)
    )
