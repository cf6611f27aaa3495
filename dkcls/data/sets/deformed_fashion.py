"""Embedded data set: images of Fashion-MNIST on a larger canvas with noise.

The images are scaled, turned and shifted at random. The factors of every sample are known
(`factors`), as the analysis of deformable kernels needs. In training the factors are drawn per
(seed, epoch, index); otherwise they are the same for every seed and epoch. Use `val` for choices
and `test` for final metrics.
"""

import numpy as np
import torch
from torch import Tensor

from dkcls.data.dataset import (
    DATASETS,
    SPLITS,
    Batch,
    ImageDataset,
    Loaded,
    check_split,
    sample_keys,
    uniforms,
)
from dkcls.data.sets.fashion import (
    CLASS_NAMES,
    FAINT,
    SIDE,
    Factors,
    log_uniform,
    place,
    read,
    with_noise,
)

_PATCH = 8  # side of a piece of clutter
_CLUTTER_DRAWS = 4  # number of the first draw; those before are the factors


@DATASETS.register("deformed_fashion")
class DeformedFashion(ImageDataset):
    """Canvases with one object each.

    A small object stays inside the canvas, and the canvas stays inside a large object.

    Args:
        object_scale: range of the scale, drawn log-uniformly.
        object_rotation: range in degrees.
        noise: standard deviation of the pixels' noise, where white is 1.
        clutter: number of 8 x 8 pieces of other images of the split strewn over the canvas.
        length: use only the first so many images.
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
            raise ValueError(
                f"object_scale must be a range of positive numbers, got {tuple(object_scale)}"
            )
        if not object_rotation[0] <= object_rotation[1]:
            raise ValueError(
                "object_rotation must be a range (low, high) in degrees, "
                f"got {tuple(object_rotation)}"
            )
        if image_size < _PATCH:
            raise ValueError(f"image_size must be at least {_PATCH}, got {image_size}")
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if noise < 0 or clutter < 0:
            raise ValueError(f"noise and clutter must not be negative, got {noise} and {clutter}")
        self.images, self.targets = (part[:length] for part in read(check_split(split)))
        self.training, self.image_size, self.seed = (
            training,
            image_size,
            seed if training else SPLITS.index(split),
        )
        self.object_scale, self.object_rotation = tuple(object_scale), tuple(object_rotation)
        self.noise, self.clutter = noise, clutter
        self.mean, self.std = (0.15,), (0.25,)

    def __len__(self) -> int:
        return len(self.images)

    def factors(self, indices: np.ndarray, epoch: int = 0) -> Factors:
        """Return the factors of these samples in `epoch`."""
        draws = uniforms(self._keys(indices, epoch), 0, 4)
        scale = log_uniform(self.object_scale, draws[:, 0])
        rotation = (
            self.object_rotation[0]
            + (self.object_rotation[1] - self.object_rotation[0]) * draws[:, 1]
        )
        room = np.abs(self.image_size - SIDE * scale)
        return Factors(scale, rotation, room * (draws[:, 2] - 0.5), room * (draws[:, 3] - 0.5))

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[Batch]:
        indices = np.asarray(indices, np.int64)
        images = self._draw(indices, self.factors(indices, epoch), epoch)
        return Loaded(
            Batch(images, torch.from_numpy(self.targets[indices]), torch.from_numpy(indices)), []
        )

    def render(self, indices: np.ndarray, factors: Factors) -> tuple[Tensor, Tensor]:
        """Return samples with the given factors in place of their own.

        Images are uint8 [B, 1, H, W] and the objects' masks bool [B, H, W].
        """
        mask = place(self.images[indices][:, None] > FAINT, factors, self.image_size)[:, 0]
        return self._draw(np.asarray(indices, np.int64), factors, epoch=0), torch.from_numpy(
            mask > 0.5
        )

    def _draw(self, indices: np.ndarray, factors: Factors, epoch: int) -> Tensor:
        """Return canvases uint8 [B, 1, H, W] with object, clutter and noise."""
        keys = self._keys(indices, epoch)
        canvas = place(self.images[indices][:, None], factors, self.image_size)[:, 0]
        if self.clutter:
            self._strew(canvas, keys)
        return torch.from_numpy(with_noise(canvas, keys, self.noise)[:, None])

    def _keys(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        return sample_keys(self.seed, epoch if self.training else 0, indices)

    def _strew(self, canvas: np.ndarray, keys: np.ndarray) -> None:
        """Add pieces of other images to `canvas` where they are brighter."""
        draws = uniforms(keys, _CLUTTER_DRAWS, 5 * self.clutter).reshape(len(keys), self.clutter, 5)
        sample, patch = np.arange(len(keys))[:, None, None], np.arange(_PATCH)
        for n in range(self.clutter):
            room = np.array(
                [len(self.images), *[SIDE - _PATCH + 1] * 2, *[self.image_size - _PATCH + 1] * 2]
            )
            other, top, left, y, x = (draws[:, n] * room).astype(np.int64).T[:, :, None, None]
            piece = self.images[other, top + patch[:, None], left + patch]
            window = (sample, y + patch[:, None], x + patch)
            canvas[window] = np.maximum(canvas[window], piece)
