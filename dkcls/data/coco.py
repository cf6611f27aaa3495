"""Detection sets in COCO's layout: root/annotations/instances_train2017.json and root/train2017/, or annotations/train.json
and train/; val likewise. A split's file lists every category, as COCO's do: labels are 1, 2, ... in the order of their ids."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dkcls.data.base import IMAGENET_MEAN, IMAGENET_STD, BadFile, Loaded, split_names
from dkcls.data.coco_file import read_annotations
from dkcls.data.decode import BadImage, EncodedImage
from dkcls.data.detection import DetectionBatch, DetectionDataset, aspect_groups
from dkcls.data.draws import sample_keys, uniforms
from dkcls.data.encoded import EncodedFiles


class CocoDetection(EncodedFiles[DetectionBatch], DetectionDataset):
    """In training images are mirrored with probability `hflip`, those without objects are left out, and crowds (iscrowd) are no
    objects; evaluation has all images, and the crowds are in `coco()`.

    Boxes are clipped to their images, and those that have no area there are left out. `bad_rows`: "stop" at rows of the file
    that cannot be used, or "skip" them, as `read_annotations` has it.
    """

    channels, mean, std = 3, IMAGENET_MEAN, IMAGENET_STD

    def __init__(
        self,
        root: str | Path,
        split: str = "train",
        *,
        training: bool = False,
        hflip: float = 0.5,
        seed: int = 0,
        bad_rows: str = "stop",
    ):
        if bad_rows not in ("stop", "skip"):
            raise ValueError(f"bad_rows must be stop or skip, got {bad_rows!r}")
        if not 0 <= hflip <= 1:
            raise ValueError(f"hflip must be from 0 to 1, got {hflip}")
        self.file, self.folder = find_split(Path(root), split)
        self.training, self.hflip, self.seed = training, hflip, seed
        self.skip = bad_rows == "skip"
        content = read_annotations(self.file, self.skip)
        boxes, has_area, outside = content.clipped()
        is_object = has_area & ~content.crowd
        counts = np.bincount(content.image[is_object], minlength=len(content.image_ids))
        kept = counts > 0 if training else np.ones(len(counts), bool)
        if not kept.any():
            raise ValueError(f"{self.file} holds no images" + (" with objects" if training else ""))
        order = np.argsort(content.image[is_object], kind="stable")
        # Flat arrays: workers are sent little, and nothing in many small pieces.
        self._boxes = boxes[is_object][order].astype(np.float32)
        self._labels = content.category[is_object][order].astype(np.int32) + 1
        self._ends = np.cumsum(counts)[kept]
        self._counts, self._names, self._sizes = (
            counts[kept],
            content.names[kept],
            content.sizes[kept],
        )
        self._image_ids, self._category_ids = content.image_ids[kept], content.category_ids
        self.class_names = content.category_names
        found = [
            (content.left_out[0], "images whose id is no integer are left out"),
            (content.left_out[1], "objects of unknown images or categories are left out"),
            (int(outside.sum()), "boxes that reach beyond their image are clipped"),
            (int((~has_area).sum()), "boxes without an area within their image are left out"),
            (int((~kept).sum()), "images without objects are left out of training"),
        ]
        self.notes = tuple(f"{self.file}: {what} ({count})" for count, what in found if count)

    def __len__(self) -> int:
        return len(self._image_ids)

    def size(self, index: int) -> tuple[int, int]:
        height, width = self._sizes[index].tolist()
        return height, width

    def image_id(self, index: int) -> int:
        return int(self._image_ids[index])

    def category_id(self, label: int) -> int:
        return int(self._category_ids[label - 1])

    def groups(self) -> np.ndarray | None:
        return aspect_groups(self._sizes)

    def read(self, index: int) -> bytes:
        return (self.folder / os.fsdecode(self._names[index])).read_bytes()

    def name(self, index: int) -> str:
        return str(self.folder / os.fsdecode(self._names[index]))

    def classes_in(self, index: int) -> list[int]:
        return (self._labels[self._objects(index)] - 1).tolist()

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[DetectionBatch]:
        draws = uniforms(sample_keys(self.seed, epoch, indices), 0, 1)[:, 0]
        mirrored = (draws < self.hflip) & self.training
        images: list[Tensor] = []
        targets: list[dict[str, Tensor]] = []
        kept: list[int] = []
        bad: list[BadFile] = []
        for index, mirror in zip(np.asarray(indices).tolist(), mirrored.tolist(), strict=True):
            found = self.first_good(index, self.decode, bad)
            if found is not None:
                images.append(_mirrored(found[1]) if mirror else found[1])
                targets.append(self._target(found[0], mirror))
                kept.append(found[0])
        return Loaded(DetectionBatch(images, targets, torch.tensor(kept, dtype=torch.int64)), bad)

    def coco(self) -> dict[str, Any]:
        """As the file has it, read again, but for segmentations and for boxes that have no area within their image."""
        content = read_annotations(self.file, self.skip)
        _, has_area, _ = content.clipped()
        kept = has_area & np.isin(content.image_ids, self._image_ids)[content.image]
        columns = (
            content.ids[kept].tolist(),
            content.image_ids[content.image[kept]].tolist(),
            content.category_ids[content.category[kept]].tolist(),
            content.boxes[kept].tolist(),
            content.areas[kept].tolist(),
            content.crowd[kept].astype(int).tolist(),
        )
        keys = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
        sizes = zip(self._image_ids.tolist(), self._sizes.tolist(), strict=True)
        categories = zip(self._category_ids.tolist(), self.class_names, strict=True)
        return {
            "images": [
                {"id": number, "width": width, "height": height}
                for number, (height, width) in sizes
            ],
            "annotations": [
                dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)
            ],
            "categories": [{"id": number, "name": name} for number, name in categories],
        }

    def decode(self, index: int, image: EncodedImage) -> Tensor:
        if image.size != self.size(index):
            expected, got = (" x ".join(map(str, size)) for size in (self.size(index), image.size))
            raise BadImage(
                f"height x width must be {expected}, as {self.file.name} has it, got {got}"
            )
        return image.rows()

    def _objects(self, index: int) -> slice:
        return slice(self._ends[index] - self._counts[index], self._ends[index])

    def _target(self, index: int, mirror: bool) -> dict[str, Tensor]:
        own = self._objects(index)
        boxes, width = self._boxes[own].copy(), np.float32(self._sizes[index, 1])
        if mirror:
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        return {
            "boxes": torch.from_numpy(boxes),
            "labels": torch.from_numpy(self._labels[own].astype(np.int64)),
        }


def _mirrored(image: Tensor) -> Tensor:
    return torch.from_numpy(
        image.numpy()[..., ::-1].copy()
    )  # torch would start threads and wait for them


def places(root: Path, name: str) -> list[tuple[Path, Path]]:
    """Where a split's file and folder may be."""
    names = ((f"instances_{name}2017", f"{name}2017"), (name, name))
    return [
        (root / "annotations" / f"{annotations}.json", root / images)
        for annotations, images in names
    ]


def find_split(root: Path, split: str) -> tuple[Path, Path]:
    """The split's file of annotations and its folder of images."""
    pairs = [pair for name in split_names(split) for pair in places(root, name)]
    for file, folder in pairs:
        if file.is_file():
            if not folder.is_dir():
                raise ValueError(
                    f"{folder} must hold the images of {file}; there is no such folder"
                )
            return file, folder
    files = " or ".join(file.name for file, _ in pairs[-2:])
    raise ValueError(f"{root / 'annotations'} must hold {files}; there is neither")
