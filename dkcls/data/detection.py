"""What a data set for object detection is: images of their own sizes with boxes, and the ground truth as COCO writes it."""

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dkcls.data.base import BatchDataset, empty_bytes

COCO_AREAS = (32.0**2, 96.0**2)


class DetectionBatch(NamedTuple):
    """Images uint8 [C, H, W], targets and the indices int64 [B] of the images in their data set.

    A target is {boxes: float32 [n, 4], (x1, y1, x2, y2) in the image's pixels; labels: int64 [n], from 1 to num_classes}.
    """

    images: list[Tensor]
    targets: list[dict[str, Tensor]]
    indices: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """As few tensors: each takes a connection between processes to be shared."""
        pixels = empty_bytes(sum(image.numel() for image in self.images))
        np.concatenate(
            [np.empty(0, np.uint8), *(image.numpy().ravel() for image in self.images)],
            out=pixels.numpy(),
        )
        targets = [{key: value.numpy() for key, value in target.items()} for target in self.targets]
        return _unpacked, (
            pixels,
            [image.shape for image in self.images],
            targets,
            self.indices.numpy(),
        )


def _unpacked(
    pixels: Tensor,
    shapes: list[torch.Size],
    targets: list[dict[str, np.ndarray]],
    indices: np.ndarray,
) -> DetectionBatch:
    images = [
        part.view(shape)
        for part, shape in zip(pixels.split([s.numel() for s in shapes]), shapes, strict=True)
    ]
    tensors = [
        {key: torch.from_numpy(value) for key, value in target.items()} for target in targets
    ]
    return DetectionBatch(images, tensors, torch.from_numpy(indices))


class DetectionDataset(BatchDataset[DetectionBatch]):
    """Label k is class_names[k - 1]: 0 is the background. Resizing and normalising are the detector's."""

    areas: tuple[float, float] = (
        COCO_AREAS  # in pixels: below the first an object is small, above the second large
    )

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """Height and width."""

    @abstractmethod
    def image_id(self, index: int) -> int:
        """In COCO's structure."""

    @abstractmethod
    def category_id(self, label: int) -> int:
        """In COCO's structure."""

    @abstractmethod
    def coco(self) -> dict[str, Any]:
        """The ground truth in COCO's structure, made anew by every call: images, annotations and categories."""


def aspect_groups(sizes: np.ndarray) -> np.ndarray | None:
    """Portrait 0 or landscape 1 of each image, from (height, width), int [N, 2]; None if all images have one shape."""
    return None if (sizes == sizes[:1]).all() else (sizes[:, 1] >= sizes[:, 0]).astype(np.int8)
