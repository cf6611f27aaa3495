"""Images in tar files, each read by one pread: no untarring, one open file for thousands of images.

Beside the shards <split>-00000.tar, ... lies <split>.index, which says where each image is.
`pack_split` makes both from an image folder; packing the same folder again resumes where the first
run stopped.
"""

import errno
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dkcls.data.dataset import DATASETS, split_names
from dkcls.data.decode import BadImage, check_bytes, read_plain
from dkcls.data.encoded import EncodedImages
from dkcls.data.file_index import FileIndex
from dkcls.data.sets.folder import ImageFolder, passed_over
from dkcls.data.transforms import Transform

_HEADER = 512  # bytes before a member's data
_KIND = 156  # index of the header byte that tells the kind of the member


@DATASETS.register("tar")
class TarImages(EncodedImages):
    """Images of one split, in shards that `pack_split` wrote."""

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
        # Shard: file descriptor, opened in each process when first read.
        self._files: dict[int, int] = {}
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
        check_bytes(size, self.max_pixels)
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
        f"there is no {index_path(root, name)}, which dkcls pack makes from an image folder"
    )


def _check_index(index: FileIndex, path: Path) -> None:
    """Check that the index points inside the shards, and that its names stay inside the split.

    The file may come from anywhere.
    """
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
            f"{path} names images outside its shards or its classes: "
            "it is damaged, or not of these files"
        )
    if (bad := _leads_outside(index)) is not None:
        raise ValueError(
            f"{path} names {os.fsdecode(bad)!r}: names must not be absolute or contain '..'"
        )


def _within(numbers: np.ndarray, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _leads_outside(index: FileIndex) -> bytes | None:
    """Return the first name that leads outside the split, or None.

    Names are looked at one by one only if the bytes of all names show a sign of such a name.
    """
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


def pack_split(
    source: ImageFolder,
    split: str,
    root: Path,
    images_per_shard: int,
    progress: Callable[[int], None] = lambda count: None,
) -> int:
    """Write <root>/<split>-00000.tar, ... and <split>.index; return the number of shards.

    A shard is written under another name, read back and compared with its files' checksums, and
    only then renamed. Its part of the index lies beside it until all parts are joined. `progress`
    is called with the number of images just done.
    """
    if images_per_shard < 1:
        raise ValueError(f"images_per_shard must be positive, got {images_per_shard}")
    for name in source.index.facts["folders"]:
        if name and (source.folder / name).is_symlink():
            raise ValueError(
                f"{source.folder / name} is a link: what is packed must lie in the folder itself"
            )
    root.mkdir(parents=True, exist_ok=True)
    shards = [
        range(first, min(first + images_per_shard, len(source)))
        for first in range(0, len(source), images_per_shard)
    ]
    paths = [shard_path(root, split, shard) for shard in range(len(shards))]
    if _finished(source, range(len(source)), index_path(root, split), paths):
        progress(len(source))
        return len(paths)
    parts = []
    for shard, (members, path) in enumerate(zip(shards, paths, strict=True)):
        part = _finished(source, members, _part_path(path), [path])
        if part is None:
            part = _write(source, members, path, shard, progress)
        else:
            progress(len(members))
        parts.append(part)
    _join(source, parts).save(index_path(root, split))
    for path in paths:
        _part_path(path).unlink()
    return len(paths)


def _part_path(shard: Path) -> Path:
    return shard.with_suffix(".part")


def _finished(
    source: ImageFolder, members: Sequence[int], index: Path, shards: list[Path]
) -> FileIndex | None:
    """Return the index if the file lists these images and the shards are complete, else None."""
    try:
        found = FileIndex.open(index)
        whole = [path.stat().st_size for path in shards] == found.facts["shard_bytes"]
    except (OSError, ValueError):
        return None
    same = len(found) == len(members) and all(
        found.name(i) == source.index.name(member) for i, member in enumerate(members)
    )
    return found if whole and same else None


def _write(
    source: ImageFolder,
    members: Sequence[int],
    path: Path,
    shard: int,
    progress: Callable[[int], None],
) -> FileIndex:
    temporary = path.with_suffix(".tmp")
    checksums = []
    with temporary.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for member in members:
                data = _read_member(source.name(member), source.max_pixels)
                info = tarfile.TarInfo(os.fsdecode(source.index.name(member)))
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
                checksums.append(zlib.crc32(data))
                progress(1)
        file.flush()
        os.fsync(file.fileno())
    part = _verified(source, members, temporary, checksums, shard)
    os.replace(temporary, path)
    return part.save(_part_path(path))


def _read_member(path: str, max_pixels: int) -> bytes:
    """Return the bytes of a file that is no link: a link might lead to any file of this machine."""
    try:
        return read_plain(path, max_pixels, os.O_NOFOLLOW)
    except BadImage as error:
        raise ValueError(f"{path}: {error}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a link: what is packed must lie in the folder itself"
            ) from error
        raise


def _verified(
    source: ImageFolder, members: Sequence[int], path: Path, checksums: list[int], shard: int
) -> FileIndex:
    """Check the shard against the checksums and return its part of the index."""
    names, offsets, sizes = [], [], []
    with tarfile.open(path) as archive, path.open("rb") as file:
        for info, checksum in zip(archive, checksums, strict=True):
            file.seek(info.offset_data)
            if zlib.crc32(file.read(info.size)) != checksum:
                raise OSError(f"{path}: {info.name} does not read back as it was written")
            names.append(os.fsencode(info.name))
            offsets.append(info.offset_data)
            sizes.append(info.size)
    assert names == [source.index.name(member) for member in members]
    targets = [source.target(member) for member in members]
    places = {
        "shards": np.full(len(names), shard),
        "offsets": np.array(offsets),
        "sizes": np.array(sizes),
    }
    return FileIndex.build(names, targets, {"shard_bytes": [path.stat().st_size]}, **places)


def _join(source: ImageFolder, parts: list[FileIndex]) -> FileIndex:
    names = [part.name(i) for part in parts for i in range(len(part))]
    targets = [target for part in parts for target in part.targets.tolist()]
    shard_bytes = [size for part in parts for size in part.facts["shard_bytes"]]
    places = {
        key: np.concatenate([part.extra[key] for part in parts])
        for key in ("shards", "offsets", "sizes")
    }
    other_endings = source.index.facts["other_endings"]
    facts = {
        "class_names": source.class_names,
        "shard_bytes": shard_bytes,
        "other_endings": other_endings,
    }
    return FileIndex.build(names, targets, facts, **places)
