"""Embedded data set for detection: several images of Fashion-MNIST on one canvas with noise.

The images are scaled and turned. In training everything is drawn per (seed, epoch, index);
otherwise a canvas is the same for every seed and epoch. Use `val` for choices and `test` for final
metrics.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from dkcls.data.dataset import (
    DATASETS,
    SPLITS,
    DetectionBatch,
    DetectionDataset,
    Loaded,
    check_split,
    sample_keys,
    uniforms,
)
from dkcls.data.sets.fashion import (
    CLASS_NAMES,
    FAINT,
    NOISE_DRAWS,
    SIDE,
    Factors,
    log_uniform,
    place,
    read,
    with_noise,
)

LENGTHS = {"train": 6000, "val": 1000, "test": 2000}
_TRIES = 8  # coordinates drawn for an object before it is left out
_COVERED = 0.25  # share of the smaller of two boxes that may lie in the other
_FILLED = 0.87  # side of the median object's box, relative to 28 pixels times its scale
_DRAWS = 3 + 2 * _TRIES  # of an object: image, scale, rotation, coordinates
_MOST = (NOISE_DRAWS - 1) // _DRAWS
_CHUNK = 64  # canvases at a time, where all are looked at


class _Objects(NamedTuple):
    """Objects of a batch that found room on their canvas.

    `canvas` int64 [n] is the index of the canvas in the batch, `labels` int64 [n]. `boxes`
    int64 [n, 4], (x1, y1, x2, y2), and `corners` int64 [n, 2], (x, y) of a patch's upper left
    corner, are in pixels of the canvas. `patches` float32 [n, P, P] are the objects' pixels, 0 to
    255.
    """

    canvas: np.ndarray
    labels: np.ndarray
    boxes: np.ndarray
    patches: np.ndarray
    corners: np.ndarray


@DATASETS.register("deformed_detection")
class DeformedDetection(DetectionDataset):
    """Canvases with objects; boxes are tight around the objects' masks and within the canvas.

    Two boxes share at most a quarter of the smaller one.

    Args:
        image_size: side of the canvas in pixels.
        objects: range of the number of objects; an object that finds no room is left out.
        object_scale, object_rotation, noise: as for DeformedFashion.
        length: number of canvases, for val and test at most that of `LENGTHS`.
    """

    channels, class_names = 1, CLASS_NAMES

    def __init__(
        self,
        split: str = "train",
        *,
        training: bool = False,
        image_size: int = 96,
        objects: tuple[int, int] = (1, 4),
        object_scale: tuple[float, float] = (0.4, 2.2),
        object_rotation: tuple[float, float] = (-60.0, 60.0),
        noise: float = 0.1,
        length: int | None = None,
        seed: int = 0,
    ):
        largest = image_size / (SIDE * math.sqrt(2))
        if not 0 < object_scale[0] <= object_scale[1] <= largest:
            raise ValueError(
                f"object_scale must be a range of positive numbers up to {largest:.2f}, "
                f"beyond which a turned object does not fit into {image_size} pixels, "
                f"got {tuple(object_scale)}"
            )
        if not object_rotation[0] <= object_rotation[1]:
            raise ValueError(
                "object_rotation must be a range (low, high) in degrees, "
                f"got {tuple(object_rotation)}"
            )
        if not 1 <= objects[0] <= objects[1] <= _MOST:
            raise ValueError(
                f"objects must be a range of numbers from 1 to {_MOST}, got {tuple(objects)}"
            )
        if length is not None and length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if noise < 0:
            raise ValueError(f"noise must not be negative, got {noise}")
        self.images, self.targets = read(check_split(split))
        self.training, self.image_size, self.seed = (
            training,
            image_size,
            seed if training else SPLITS.index(split),
        )
        self.objects, self.noise = tuple(objects), noise
        self.length = (
            LENGTHS[split]
            if length is None
            else length
            if split == "train"
            else min(length, LENGTHS[split])
        )
        self.object_scale, self.object_rotation = tuple(object_scale), tuple(object_rotation)
        self.mean, self.std = (0.15,), (0.25,)
        # At a third and two thirds of the scales, so that about as many objects are small, medium
        # and large.
        sides = log_uniform(self.object_scale, np.array([1 / 3, 2 / 3])) * SIDE * _FILLED
        small, large = (float(round(side) ** 2) for side in sides)
        self.areas = small, large

    def __len__(self) -> int:
        return self.length

    def size(self, index: int) -> tuple[int, int]:
        return self.image_size, self.image_size

    def image_id(self, index: int) -> int:
        return index

    def category_id(self, label: int) -> int:
        return label

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[DetectionBatch]:
        indices = np.asarray(indices, np.int64)
        keys = self._keys(indices, epoch)
        objects = self._draw_objects(keys)
        images = torch.from_numpy(
            with_noise(self._paint(objects, len(indices)), keys, self.noise)[:, None]
        )
        counts = np.bincount(objects.canvas, minlength=len(indices)).tolist()
        boxes = torch.from_numpy(objects.boxes.astype(np.float32)).split(counts)
        labels = torch.from_numpy(objects.labels).split(counts)
        targets = [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)]
        return Loaded(DetectionBatch(list(images), targets, torch.from_numpy(indices)), [])

    def coco(self) -> dict[str, Any]:
        """Return the ground truth; with `training`, that of epoch 0."""
        annotations: list[dict[str, Any]] = []
        for first in range(0, len(self), _CHUNK):
            found = self._draw_objects(
                self._keys(np.arange(first, min(first + _CHUNK, len(self))), epoch=0)
            )
            for canvas, label, (x1, y1, x2, y2) in zip(
                *(part.tolist() for part in found[:3]), strict=True
            ):
                box = {
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": (x2 - x1) * (y2 - y1),
                    "iscrowd": 0,
                }
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": first + canvas,
                        "category_id": label,
                        **box,
                    }
                )
        side = self.image_size
        return {
            "images": [{"id": index, "width": side, "height": side} for index in range(len(self))],
            "annotations": annotations,
            "categories": [
                {"id": number, "name": name} for number, name in enumerate(self.class_names, 1)
            ],
        }

    def _keys(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        return sample_keys(self.seed, epoch if self.training else 0, indices)

    def _draw_objects(self, keys: np.ndarray) -> _Objects:
        low, high = self.objects
        counts = low + (uniforms(keys, 0, 1) * (high - low + 1)).astype(np.int64)
        canvas, number = np.nonzero(np.arange(high) < counts)
        draws = uniforms(keys, 1, high * _DRAWS).reshape(len(keys), high, _DRAWS)[canvas, number]
        images = (draws[:, 0] * len(self.images)).astype(np.int64)
        turn = (
            self.object_rotation[0]
            + (self.object_rotation[1] - self.object_rotation[0]) * draws[:, 2]
        )
        centre = np.zeros(len(draws))
        factors = Factors(log_uniform(self.object_scale, draws[:, 1]), turn, centre, centre)
        pixels = self.images[images]
        patch = math.ceil(SIDE * math.sqrt(2) * self.object_scale[1])
        rendered = place(np.stack([pixels, pixels > FAINT], axis=1), factors, patch)
        tight = _tight_boxes(rendered[:, 1] > 0.5)
        room = self.image_size - (tight[:, 2:] - tight[:, :2])
        places = (draws[:, 3:].reshape(-1, _TRIES, 2) * (room[:, None] + 1)).astype(np.int64)
        kept, boxes = _choose_places(canvas, tight, places)
        corners = boxes[:, :2] - tight[kept, :2]
        return _Objects(
            canvas[kept], self.targets[images[kept]] + 1, boxes, rendered[kept, 0], corners
        )

    def _paint(self, objects: _Objects, count: int) -> np.ndarray:
        """Return canvases float32 [count, H, W], 0 to 255; of overlapping objects, the brighter."""
        patch = objects.patches.shape[-1]
        # With a margin for what a patch has around its object.
        canvas = np.zeros((count, *[self.image_size + 2 * patch] * 2), np.float32)
        for number, (x, y), pixels in zip(
            objects.canvas, objects.corners + patch, objects.patches, strict=True
        ):
            window = canvas[number, y : y + patch, x : x + patch]
            np.maximum(window, pixels, out=window)
        return canvas[:, patch:-patch, patch:-patch]


def _tight_boxes(masks: np.ndarray) -> np.ndarray:
    """Return boxes int64 [n, 4], (x1, y1, x2, y2), of masks bool [n, H, W]; zeros if empty."""
    sides = []
    for axis in (1, 2):
        line = np.asarray(masks.any(axis=axis))
        first, last = line.argmax(axis=1), line.shape[1] - line[:, ::-1].argmax(axis=1)
        sides.append(np.where(line.max(axis=1), [first, last], 0))
    (x1, x2), (y1, y2) = sides
    return np.stack([x1, y1, x2, y2], axis=1)


def _choose_places(
    canvas: np.ndarray, tight: np.ndarray, places: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the objects that find room, and their boxes, int64 [kept, 4].

    An object takes the first of its `places`, int64 [n, tries, 2], that is free enough.
    """
    kept: list[int] = []
    boxes: list[tuple[int, int, int, int]] = []
    sizes = (tight[:, 2:] - tight[:, :2]).tolist()
    for number, ((width, height), corners) in enumerate(zip(sizes, places.tolist(), strict=True)):
        others = [
            box for other, box in zip(kept, boxes, strict=True) if canvas[other] == canvas[number]
        ]
        for x, y in corners if width else ():
            box = (x, y, x + width, y + height)
            if all(_covered(box, other) <= _COVERED for other in others):
                kept.append(number)
                boxes.append(box)
                break
    return np.array(kept, np.int64), np.array(boxes, np.int64).reshape(-1, 4)


def _covered(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> float:
    """Return the share of the smaller box that lies in the other."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return max(width, 0) * max(height, 0) / smaller
