"""The images of the embedded sets, ten classes of Fashion-MNIST, and how one is put on a canvas."""

import itertools
import math
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from dkcls.data.dataset import bits

CLASS_NAMES = [
    "T-shirt",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
SIDE = 28  # of an image
FAINT = 32  # of 255: what is no brighter is not part of an object
NOISE_DRAWS = 1000  # number of the first draw of a canvas's noise


class Factors(NamedTuple):
    """Factors of each sample, float64 [B].

    `scale` is the size relative to 28 pixels, `rotation` is in degrees clockwise. `x` and `y` are
    the object's centre, in pixels to the right of the canvas's centre and below it.
    """

    scale: np.ndarray
    rotation: np.ndarray
    x: np.ndarray
    y: np.ndarray


@cache
def read(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images uint8 [N, 28, 28] and classes int64 [N]."""
    with np.load(Path(__file__).with_name("fashion.npz")) as file:
        return file[f"{split}_images"], file[f"{split}_targets"].astype(np.int64)


def log_uniform(interval: tuple[float, ...], draws: np.ndarray) -> np.ndarray:
    """Map draws in [0, 1) to the interval, as many between 1 and 2 as between 2 and 4."""
    low, high = map(math.log, interval)
    # math.exp, not np.exp: a vectorised function may round otherwise in another place of the batch.
    return np.array([math.exp(low + (high - low) * u) for u in draws.tolist()])


def place(images: np.ndarray, factors: Factors, size: int) -> np.ndarray:
    """Return images [B, C, 28, 28] on canvases, float32 [B, C, size, size].

    Each pixel of a canvas is read bilinearly at its coordinates in the image.
    """
    radians = np.deg2rad(factors.rotation).tolist()
    step = 2 / (SIDE * factors.scale)  # of a pixel of the canvas, in grid_sample's units
    cos, sin = (
        np.array([math.cos(r) for r in radians]) * step,
        np.array([math.sin(r) for r in radians]) * step,
    )
    axis = np.arange(size) - (size - 1) / 2
    x, y = axis - factors.x[:, None], axis - factors.y[:, None]
    grid = np.empty((len(images), size, size, 2), np.float32)
    grid[..., 0] = (cos[:, None] * x)[:, None, :] + (sin[:, None] * y)[:, :, None]
    grid[..., 1] = (cos[:, None] * y)[:, :, None] - (sin[:, None] * x)[:, None, :]
    source = torch.from_numpy(images.astype(np.float32))
    places, canvas = torch.from_numpy(grid), torch.empty(*images.shape[:2], size, size)
    # In pieces so small that torch starts no threads: to wait for threads costs more than the work.
    piece, rows = max(1, 8192 // size**2), max(1, 8192 // size)
    for first, top in itertools.product(range(0, len(images), piece), range(0, size, rows)):
        part, strip = slice(first, first + piece), slice(top, top + rows)
        canvas[part, :, strip] = F.grid_sample(
            source[part], places[part, strip], align_corners=False
        )
    return canvas.numpy()


def with_noise(canvas: np.ndarray, keys: np.ndarray, noise: float) -> np.ndarray:
    """Return the canvas with noise as uint8 [B, H, W].

    `canvas` is float32 [B, H, W], 0 to 255, and is overwritten. `noise` is the standard deviation,
    where white is 1.
    """
    if noise:
        canvas += (_normal_table() * np.float32(255 * noise))[
            _random_levels(keys, canvas.shape[1:])
        ]
    return np.clip(np.rint(canvas, out=canvas), 0, 255, out=canvas).astype(np.uint8)


def _random_levels(keys: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return random uint16 [B, H, W], four from each draw."""
    count = math.prod(shape)
    return bits(keys, NOISE_DRAWS, -(-count // 4)).view(np.uint16)[:, :count].reshape(-1, *shape)


@cache
def _normal_table() -> np.ndarray:
    """Return the quantiles of a normal distribution, float32 [65536].

    Random 16-bit numbers as indices then give normally distributed numbers.
    """
    quantile = NormalDist().inv_cdf
    upper = [quantile((i + 0.5) / 65536) for i in range(32768, 65536)]
    return np.array([-q for q in reversed(upper)] + upper, np.float32)
