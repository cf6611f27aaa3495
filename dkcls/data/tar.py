"""Images in tar files, read at their place by pread: one open file for thousands of images, no untarring.

Beside the shards <split>-00000.tar, ... lies <split>.index: the place of each image. `pack` makes both from an image folder.
"""

import os
from pathlib import Path
from typing import Any

from dkcls.data.base import split_names
from dkcls.data.encoded import EncodedImages
from dkcls.data.file_index import FileIndex
from dkcls.data.transforms import Transform


class TarImages(EncodedImages):
    def __init__(
        self, root: str | Path, split: str, transform: Transform, image_size: int, *, training: bool = False, seed: int = 0
    ):
        super().__init__(transform, image_size, training=training, seed=seed)
        self.root, self.split = Path(root), _find_split(Path(root), split)
        self.index = FileIndex.open(index_path(self.root, self.split))
        self.class_names = self.index.facts["class_names"]
        self._files: dict[int, int] = {}  # shard: file descriptor, opened in each process when first read
        for shard, expected in enumerate(self.index.facts["shard_bytes"]):
            path = shard_path(self.root, self.split, shard)
            found = path.stat().st_size if path.is_file() else "no file"
            if found != expected:
                raise ValueError(f"{path} must have {expected} bytes, as its index says, got {found}")

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        shard, offset, size = (int(self.index.extra[key][index]) for key in ("shards", "offsets", "sizes"))
        if shard not in self._files:
            self._files[shard] = os.open(shard_path(self.root, self.split, shard), os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(self._files[shard], size, offset)
        if len(data) != size:
            raise OSError(f"{len(data)} of its {size} bytes are there")
        return data

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
    raise ValueError(f"there is no {index_path(root, name)}, which scripts/pack_tar.py makes from an image folder")
