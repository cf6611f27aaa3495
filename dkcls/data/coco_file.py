"""A file of COCO's annotations, checked and in arrays."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

_LEAST = 0.05  # pixels: by less a box neither reaches beyond its image nor has a side; the files are rounded


class Annotations(NamedTuple):
    """A file's content. N images: ids int64 [N], names bytes [N], sizes (height, width) int64 [N, 2]. Categories by their ids,
    int64. M annotations: ids, the places of their image and category in these lists, int64 [M]; boxes (x, y, width, height)
    float64 [M, 4], areas float64 [M], crowd bool [M]. left_out: how many images and annotations `skip` left out."""

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
        """Boxes (x1, y1, x2, y2), float64 [M, 4], within their images; which have an area there, and which of these reached
        beyond, bool [M]."""
        corners = np.concatenate([self.boxes[:, :2], self.boxes[:, :2] + self.boxes[:, 2:]], axis=1)
        height, width = self.sizes[self.image].T
        boxes = np.clip(corners, 0, np.stack([width, height, width, height], axis=1))
        has_area = (boxes[:, 2:] - boxes[:, :2]).min(axis=1) > _LEAST  # false for NaN
        return boxes, has_area, has_area & (np.abs(corners - boxes).max(axis=1) > _LEAST)


def read_annotations(file: Path, skip: bool = False) -> Annotations:
    """Return the file's content; ValueError names the first row that is wrong.

    `skip`: leave out images whose id is no integer, and annotations of images or categories that are not there.
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
        self.row_numbers = np.arange(len(rows))  # the rows' places in the file
        self.left_out = 0
        self.require([isinstance(row, dict) for row in rows], "keys and values")

    def require(self, good: np.ndarray | list[bool], what: str) -> None:
        wrong = np.flatnonzero(~np.asarray(good, bool))
        if len(wrong):
            row = self.rows[wrong[0]]
            if isinstance(row, dict):  # without the long part
                row = {key: value for key, value in row.items() if key != "segmentation"}
            raise ValueError(
                f"{self.file}: {self.kind}[{self.row_numbers[wrong[0]]}] must have {what}, got {str(row)[:200]}"
            )

    def keep(self, key: str, is_good: Callable[[Any], bool], what: str, skip: bool) -> None:
        """Keep the rows with a good value of `key`: without `skip` all must have one."""
        good = np.array([is_good(row.get(key)) for row in self.rows], bool)
        wrong = np.flatnonzero(~good)
        if len(wrong) and not skip:
            value = repr(self.rows[wrong[0]].get(key))[:200]
            row = f"{self.file}: {self.kind}[{self.row_numbers[wrong[0]]}]"
            raise ValueError(
                f"{row} must have {what} as {key}, got {value}; data.bad_rows=skip leaves such rows out"
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
        """Return where in `ids` this column's values are, all of which are there."""
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
