"""Images in tar files, read at their place by pread: one open file for thousands of images, no untarring.

Beside the shards <split>-00000.tar, ... lies <split>.index: the place of each image. `pack` makes both from an image folder.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from dkcls.data.base import split_names
from dkcls.data.decode import BadImage
from dkcls.data.encoded import EncodedImages
from dkcls.data.file_index import FileIndex
from dkcls.data.image_folder import passed_over
from dkcls.data.transforms import Transform

_HEADER = 512  # bytes before a member's data
_KIND = 156  # the place of its kind in them


class TarImages(EncodedImages):
    def __init__(
        self,
        root: str | Path,
        split: str,
        transform: Transform,
        image_size: int,
        *,
        training: bool = False,
        seed: int = 0,
    ):
        super().__init__(transform, image_size, training=training, seed=seed)
        self.root, self.split = Path(root), _find_split(Path(root), split)
        self.index = FileIndex.open(index_path(self.root, self.split))
        _check_index(self.index, index_path(self.root, self.split))
        self.notes = tuple(passed_over(index_path(self.root, self.split), self.index))
        self.class_names = self.index.facts["class_names"]
        self._files: dict[
            int, int
        ] = {}  # shard: file descriptor, opened in each process when first read
        for shard, expected in enumerate(self.index.facts["shard_bytes"]):
            path = shard_path(self.root, self.split, shard)
            found = path.stat().st_size if path.is_file() else "no file"
            if found != expected:
                raise ValueError(
                    f"{path} must have {expected} bytes, as its index says, got {found}"
                )

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        shard, offset, size = (
            int(self.index.extra[key][index]) for key in ("shards", "offsets", "sizes")
        )
        if shard not in self._files:
            self._files[shard] = os.open(
                shard_path(self.root, self.split, shard), os.O_RDONLY | os.O_CLOEXEC
            )
        data = os.pread(self._files[shard], _HEADER + size, offset - _HEADER)
        if len(data) != _HEADER + size:
            raise OSError(f"{max(len(data) - _HEADER, 0)} of its {size} bytes are there")
        if data[_KIND : _KIND + 1] not in (b"0", b"\0"):
            raise BadImage("not a plain file of the archive, but a link or the like")
        return data[_HEADER:]

    def name(self, index: int) -> str:
        shard = shard_path(self.root, self.split, int(self.index.extra["shards"][index]))
        return f"{shard}/{os.fsdecode(self.index.name(index))}"

    def target(self, index: int) -> int:
        return int(self.index.targets[index])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)


def shard_path(root: Path, split: str, shard: int) -> Path:
    return root / f"{split}-{shard:05d}.tar"


def index_path(root: Path, split: str) -> Path:
    return root / f"{split}.index"


def _find_split(root: Path, split: str) -> str:
    for name in split_names(split):
        if index_path(root, name).is_file():
            return name
    raise ValueError(
        f"there is no {index_path(root, name)}, which scripts/pack_tar.py makes from an image folder"
    )


def _check_index(index: FileIndex, path: Path) -> None:
    """It may come from anywhere: what it says must lie within the shards, and names within the split."""
    try:
        shards, offsets, sizes = (index.extra[key] for key in ("shards", "offsets", "sizes"))
        ends = np.array(index.facts["shard_bytes"], np.int64)
        lengths = {len(array) for array in (index.ends, index.targets, shards, offsets, sizes)}
        inside = (
            len(lengths) == 1
            and _within(shards, len(ends))
            and _within(index.targets, len(index.facts["class_names"]))
        )
        passed_over(path, index)  # can be read
        inside = inside and bool(
            ((offsets >= _HEADER) & (sizes >= 0) & (sizes <= ends[shards] - offsets)).all()
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} is not the index of a tar data set: {error!r}") from error
    if not inside:
        raise ValueError(
            f"{path} names images outside its shards or its classes: it is damaged, or not of these files"
        )
    if (bad := _leads_outside(index)) is not None:
        raise ValueError(
            f"{path} names {os.fsdecode(bad)!r}: names must not be absolute or contain '..'"
        )


def _within(numbers: np.ndarray, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _leads_outside(index: FileIndex) -> bytes | None:
    """The first name that does; names one by one only if there is any sign of such a one among a million."""
    starts = np.concatenate([[0], index.ends[:-1]])
    lengths = index.ends - starts
    if lengths.min(initial=1) < 1 or index.ends[-1] != len(index.names):
        raise ValueError("it has names without letters, or parts of names")
    if b".." not in index.names.tobytes() and not (index.names[starts] == ord("/")).any():
        return None
    names = (index.name(i) for i in range(len(index)))
    return next(
        (name for name in names if name.startswith(b"/") or b".." in name.split(b"/")), None
    )
