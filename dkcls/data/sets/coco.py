"""Detection sets in COCO's layout.

The train split is root/annotations/instances_train2017.json with root/train2017/, or
root/annotations/train.json with root/train/; val likewise. Each annotation file lists every
category, as COCO's do: labels are 1, 2, ... in the order of the categories' ids.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dkcls.config import AugmentConfig, DataConfig
from dkcls.data.dataset import (
    DATASETS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    BadFile,
    DetectionBatch,
    DetectionDataset,
    Loaded,
    aspect_groups,
    root_of,
    sample_keys,
    split_names,
    uniforms,
)
from dkcls.data.decode import BadImage, EncodedImage, read_plain
from dkcls.data.encoded import EncodedFiles

# Pixels. The files are rounded, so a shorter side or overhang of a box does not count.
_LEAST = 0.05


@DATASETS.register("coco")
class CocoDetection(EncodedFiles[DetectionBatch], DetectionDataset):
    """Images of one split in COCO's layout, with boxes.

    Training mirrors images with probability `hflip` and leaves out images without objects;
    evaluation has all images. Crowds (iscrowd) are no objects, but `coco()` lists them.

    Boxes are clipped to their images, and boxes without an area there are left out. `bad_rows` says
    what happens to rows of the file that cannot be used: "stop" or "skip", see `read_annotations`.
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

    @classmethod
    def create(
        cls, data: DataConfig, augment: AugmentConfig, split: str, *, seed: int, training: bool
    ) -> Self:
        """Return a split of the images below `data.root`."""
        given = {"root": root_of(data), "split": split, "hflip": augment.hflip}
        made = cls(**cls.arguments(data, **given, training=training, seed=seed))
        made.max_pixels = data.max_pixels
        return made

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
        return read_plain(self.name(index), self.max_pixels)

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
        """Return the file's content, read again, without segmentations.

        Boxes that have no area within their image are left out.
        """
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
    # By numpy, because torch would start threads and wait for them.
    return torch.from_numpy(image.numpy()[..., ::-1].copy())


def places(root: Path, name: str) -> list[tuple[Path, Path]]:
    """Return the candidates for a split's annotation file and image folder."""
    names = ((f"instances_{name}2017", f"{name}2017"), (name, name))
    return [
        (root / "annotations" / f"{annotations}.json", root / images)
        for annotations, images in names
    ]


def find_split(root: Path, split: str) -> tuple[Path, Path]:
    """Return the split's annotation file and image folder."""
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


class Annotations(NamedTuple):
    """Content of an annotation file: N images, K categories, M annotations.

    Images have `image_ids` int64 [N], `names` bytes [N] and `sizes` int64 [N, 2], (height, width)
    in pixels.

    Categories are in the order of their ids: `category_ids` int64 [K] and `category_names`.

    Annotations have `ids` int64 [M]; `image` and `category` int64 [M], indices into the images and
    categories; `boxes` float64 [M, 4], (x, y, width, height) in pixels; `areas` float64 [M], in
    square pixels; and `crowd` bool [M].

    `left_out` is how many images and annotations `skip` left out.
    """

    image_ids: np.ndarray
    names: np.ndarray
    sizes: np.ndarray
    category_ids: np.ndarray
    category_names: list[str]
    ids: np.ndarray
    image: np.ndarray
    category: np.ndarray
    boxes: np.ndarray
    areas: np.ndarray
    crowd: np.ndarray
    left_out: tuple[int, int]

    def clipped(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return boxes clipped to their images, and masks of those with an area and of those cut.

        Boxes are float64 [M, 4], (x1, y1, x2, y2) in pixels. The first mask, bool [M], marks boxes
        with an area within their image; the second marks those of them that reached beyond the
        image.
        """
        corners = np.concatenate([self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]], axis=1)
        height, width = self.sizes[self.image].T
        boxes = np.clip(corners, 0, np.stack([width, height, width, height], axis=1))
        has_area = (boxes[:, 2:] - boxes[:, :2]).min(axis=1) > _LEAST  # false for NaN
        return boxes, has_area, has_area & (np.abs(corners - boxes).max(axis=1) > _LEAST)


def read_annotations(file: Path, skip: bool = False) -> Annotations:
    """Return the file's content; ValueError names the first row that is wrong.

    `skip` leaves out images whose id is no integer, and annotations of unknown images or
    categories.
    """
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must be JSON: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), list) for key in _Table.KINDS
    ):
        got = f"a {type(content).__name__}"
        if isinstance(content, dict):
            got = (
                ", ".join(f"{key} ({type(value).__name__})" for key, value in content.items())
                or "nothing"
            )
        raise ValueError(f"{file} must hold the lists {', '.join(_Table.KINDS)}, got {got}")
    images, annotations, categories = (_Table(file, kind, content[kind]) for kind in _Table.KINDS)
    if not categories.rows:
        raise ValueError(f"{file} must list the categories of its objects, got an empty list")
    category_ids = categories.ids()
    images.keep("id", _is_integer, "an integer", skip)
    image_ids = images.ids()
    for key, ids, kind in (
        ("image_id", image_ids, "images"),
        ("category_id", category_ids, "categories"),
    ):
        annotations.keep(
            key, partial(_is_among, set(ids.tolist())), f"the id of one of the {kind}", skip
        )
    sizes = np.stack([images.integers("height"), images.integers("width")], axis=1)
    images.require(sizes.min(axis=1) > 0, "a height and a width above 0")
    order = np.argsort(category_ids)
    names = [str(name) for name in categories.column("name")]
    boxes = annotations.boxes()
    areas = [
        row.get("area", box[2] * box[3])
        for row, box in zip(annotations.rows, boxes.tolist(), strict=True)
    ]
    return Annotations(
        image_ids,
        images.file_names(),
        sizes,
        category_ids[order],
        [names[place] for place in order],
        annotations.ids(),
        annotations.places("image_id", image_ids),
        annotations.places("category_id", category_ids[order]),
        boxes,
        annotations.numbers("area", areas),
        annotations.numbers("iscrowd", [row.get("iscrowd", 0) for row in annotations.rows]) != 0,
        (images.left_out, annotations.left_out),
    )


class _Table:
    """One list of the file, read by columns; an error names the first row that is wrong."""

    KINDS = ("images", "annotations", "categories")

    def __init__(self, file: Path, kind: str, rows: list[Any]):
        self.file, self.kind, self.rows = file, kind, rows
        self.row_numbers = np.arange(len(rows))  # each row's index in the file's list
        self.left_out = 0
        self.require([isinstance(row, dict) for row in rows], "keys and values")

    def require(self, good: np.ndarray | list[bool], what: str) -> None:
        wrong = np.flatnonzero(~np.asarray(good, bool))
        if len(wrong):
            row = self.rows[wrong[0]]
            if isinstance(row, dict):  # without the long part
                row = {key: value for key, value in row.items() if key != "segmentation"}
            raise ValueError(
                f"{self.file}: {self.kind}[{self.row_numbers[wrong[0]]}] must have {what}, "
                f"got {str(row)[:200]}"
            )

    def keep(self, key: str, is_good: Callable[[Any], bool], what: str, skip: bool) -> None:
        """Keep the rows with a good value of `key`; without `skip`, a bad value is an error."""
        good = np.array([is_good(row.get(key)) for row in self.rows], bool)
        wrong = np.flatnonzero(~good)
        if len(wrong) and not skip:
            value = repr(self.rows[wrong[0]].get(key))[:200]
            row = f"{self.file}: {self.kind}[{self.row_numbers[wrong[0]]}]"
            raise ValueError(
                f"{row} must have {what} as {key}, got {value}; "
                "data.options.bad_rows=skip leaves such rows out"
            )
        self.rows = [row for row, kept in zip(self.rows, good, strict=True) if kept]
        self.row_numbers = self.row_numbers[good]
        self.left_out += len(wrong)

    def column(self, key: str) -> list[Any]:
        self.require([key in row for row in self.rows], f"the key {key}")
        return [row[key] for row in self.rows]

    def integers(self, key: str) -> np.ndarray:
        values = self.column(key)
        self.require([_is_integer(value) for value in values], f"an integer as {key}")
        return np.array(values, np.int64)

    def numbers(self, key: str, values: list[Any]) -> np.ndarray:
        self.require([_is_number(value) for value in values], f"a number as {key}")
        return np.array(values, np.float64)

    def ids(self) -> np.ndarray:
        ids = self.integers("id")
        first = np.zeros(len(ids), bool)
        first[np.unique(ids, return_index=True)[1]] = True
        self.require(first, "an id of its own")
        return ids

    def places(self, key: str, ids: np.ndarray) -> np.ndarray:
        """Return the index in `ids` of each value in this column; every value must be in `ids`."""
        values, order = self.integers(key), np.argsort(ids)
        return order[np.searchsorted(ids[order], values)]

    def boxes(self) -> np.ndarray:
        values = self.column("bbox")
        good = [isinstance(v, list) and len(v) == 4 and all(map(_is_number, v)) for v in values]
        self.require(good, "four numbers as bbox")
        return np.array(values, np.float64).reshape(-1, 4)

    def file_names(self) -> np.ndarray:
        names = self.column("file_name")
        self.require([_is_inside(name) for name in names], "as file_name a path within its folder")
        return np.array([os.fsencode(name) for name in names], np.bytes_)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _is_integer(value: Any) -> bool:
    return type(value) is int and _is_number(value)


def _is_among(known: set[int], value: Any) -> bool:
    return _is_integer(value) and value in known


def _is_inside(name: Any) -> bool:
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts
