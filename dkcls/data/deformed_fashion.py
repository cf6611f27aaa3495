"""The embedded data set: images of Fashion-MNIST, scaled, turned and placed at random on a larger canvas, with noise.

The factors of every sample are known (`factors`), which is what the analysis of deformable kernels asks for. In training they
are drawn per (seed, epoch, index); otherwise they are the same for every seed and epoch. `val` is for choices, `test` for final
figures.
"""

import math
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dkcls.data.base import SPLITS, Batch, ImageDataset, Loaded, check_split
from dkcls.data.draws import bits, sample_keys, uniforms

CLASS_NAMES = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
_SIDE, _PATCH = 28, 8  # of an image, and of a patch of clutter
_FAINT = 32  # of 255: what is no brighter is not part of an object
_CLUTTER_DRAWS, _NOISE_DRAWS = 4, 1000  # number of the first draw; those before are the factors


class Factors(NamedTuple):
    """What was done to each sample, float64 [B]: size relative to 28 pixels, degrees clockwise, and the place of its centre, in
    pixels to the right of the canvas's centre and below it."""

    scale: np.ndarray
    rotation: np.ndarray
    x: np.ndarray
    y: np.ndarray


class DeformedFashion(ImageDataset):
    """A place is drawn so that a small object stays inside the canvas, and the canvas inside a large object.

    `object_scale`: range of the scale, drawn log-uniformly. `object_rotation`: range in degrees. `noise`: standard deviation of
    the pixels' noise, of 1. `clutter`: number of 8x8 pieces of other images of the split strewn over the canvas.
    `length`: only the first so many images.
    """

    channels, class_names = 1, CLASS_NAMES

    def __init__(
        self,
        split: str = "train",
        *,
        training: bool = False,
        image_size: int = 32,
        object_scale: tuple[float, float] = (0.4, 1.1),
        object_rotation: tuple[float, float] = (-60.0, 60.0),
        noise: float = 0.1,
        clutter: int = 0,
        length: int | None = None,
        seed: int = 0,
    ):
        if not 0 < object_scale[0] <= object_scale[1]:
            raise ValueError(f"object_scale must be a range of positive numbers, got {tuple(object_scale)}")
        if not object_rotation[0] <= object_rotation[1]:
            raise ValueError(f"object_rotation must be a range (low, high) in degrees, got {tuple(object_rotation)}")
        if image_size < _PATCH:
            raise ValueError(f"image_size must be at least {_PATCH}, got {image_size}")
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if noise < 0 or clutter < 0:
            raise ValueError(f"noise and clutter must not be negative, got {noise} and {clutter}")
        self.images, self.targets = (part[:length] for part in _read(check_split(split)))
        self.training, self.image_size, self.seed = training, image_size, seed if training else SPLITS.index(split)
        self.object_scale, self.object_rotation = tuple(object_scale), tuple(object_rotation)
        self.noise, self.clutter = noise, clutter
        self.mean, self.std = (0.15,), (0.25,)

    def __len__(self) -> int:
        return len(self.images)

    def factors(self, indices: np.ndarray, epoch: int = 0) -> Factors:
        """The factors of these samples in that epoch."""
        draws = uniforms(self._keys(indices, epoch), 0, 4)
        low, high = map(math.log, self.object_scale)
        # math.exp, not np.exp: a vectorised function may round otherwise in another place of the batch.
        scale = np.array([math.exp(low + (high - low) * u) for u in draws[:, 0].tolist()])
        rotation = self.object_rotation[0] + (self.object_rotation[1] - self.object_rotation[0]) * draws[:, 1]
        room = np.abs(self.image_size - _SIDE * scale)
        return Factors(scale, rotation, room * (draws[:, 2] - 0.5), room * (draws[:, 3] - 0.5))

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded:
        indices = np.asarray(indices, np.int64)
        images = self._draw(indices, self.factors(indices, epoch), epoch)
        return Loaded(Batch(images, torch.from_numpy(self.targets[indices]), torch.from_numpy(indices)), [])

    def render(self, indices: np.ndarray, factors: Factors) -> tuple[Tensor, Tensor]:
        """These samples with other factors than their own: images uint8 [B, 1, H, W] and the objects' masks, bool [B, H, W]."""
        mask = self._place(np.where(self.images[indices] > _FAINT, np.float32(1), np.float32(0)), factors)
        return self._draw(np.asarray(indices, np.int64), factors, epoch=0), torch.from_numpy(mask > 0.5)

    def _draw(self, indices: np.ndarray, factors: Factors, epoch: int) -> Tensor:
        """uint8 [B, 1, H, W]: object, clutter and noise."""
        keys = self._keys(indices, epoch)
        canvas = self._place(self.images[indices], factors)
        if self.clutter:
            self._strew(canvas, keys)
        if self.noise:
            canvas += (_normal_table() * np.float32(255 * self.noise))[self._random_levels(keys)]
        pixels = np.clip(np.rint(canvas, out=canvas), 0, 255, out=canvas).astype(np.uint8)
        return torch.from_numpy(pixels[:, None])

    def _keys(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        return sample_keys(self.seed, epoch if self.training else 0, indices)

    def _place(self, images: np.ndarray, factors: Factors) -> np.ndarray:
        """float32 [B, H, W], 0 to 255: bilinear, read at the places of the images that the canvas's pixels come from."""
        radians = np.deg2rad(factors.rotation).tolist()
        step = 2 / (_SIDE * factors.scale)  # of a pixel of the canvas, in grid_sample's units
        cos, sin = np.array([math.cos(r) for r in radians]) * step, np.array([math.sin(r) for r in radians]) * step
        axis = np.arange(self.image_size) - (self.image_size - 1) / 2
        x, y = axis - factors.x[:, None], axis - factors.y[:, None]
        grid = np.empty((len(images), self.image_size, self.image_size, 2), np.float32)
        grid[..., 0] = (cos[:, None] * x)[:, None, :] + (sin[:, None] * y)[:, :, None]
        grid[..., 1] = (cos[:, None] * y)[:, :, None] - (sin[:, None] * x)[:, None, :]
        source = torch.from_numpy(images[:, None].astype(np.float32))
        # In pieces so small that torch starts no threads for them: waiting for those costs more than the work.
        piece = max(1, 8192 // self.image_size**2)
        pairs = zip(source.split(piece), torch.from_numpy(grid).split(piece), strict=True)
        return torch.cat([F.grid_sample(part, at, align_corners=False) for part, at in pairs])[:, 0].numpy()

    def _strew(self, canvas: np.ndarray, keys: np.ndarray) -> None:
        """Pieces of other images, where they are brighter than what is there."""
        draws = uniforms(keys, _CLUTTER_DRAWS, 5 * self.clutter).reshape(len(keys), self.clutter, 5)
        sample, patch = np.arange(len(keys))[:, None, None], np.arange(_PATCH)
        for n in range(self.clutter):
            room = np.array([len(self.images), *[_SIDE - _PATCH + 1] * 2, *[self.image_size - _PATCH + 1] * 2])
            other, top, left, y, x = (draws[:, n] * room).astype(np.int64).T[:, :, None, None]
            piece = self.images[other, top + patch[:, None], left + patch]
            window = (sample, y + patch[:, None], x + patch)
            canvas[window] = np.maximum(canvas[window], piece)

    def _random_levels(self, keys: np.ndarray) -> np.ndarray:
        """uint16 [B, H, W], four from each draw."""
        count = -(-(self.image_size**2) // 4)
        levels = bits(keys, _NOISE_DRAWS, count).view(np.uint16)[:, : self.image_size**2]
        return levels.reshape(-1, self.image_size, self.image_size)


@cache
def _read(split: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(__file__).with_name("fashion.npz")) as file:
        return file[f"{split}_images"], file[f"{split}_targets"].astype(np.int64)


@cache
def _normal_table() -> np.ndarray:
    """float32 [65536]: the quantiles of a normal distribution, so that random 16-bit numbers index normal ones."""
    quantile = NormalDist().inv_cdf
    upper = [quantile((i + 0.5) / 65536) for i in range(32768, 65536)]
    return np.array([-q for q in reversed(upper)] + upper, np.float32)
