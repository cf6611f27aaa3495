"""Images in tar files, each read by one pread: no untarring, one open file for thousands of images.

Beside the shards <split>-00000.tar, ... lies <split>.index, which says where each image is.
`pack_split` makes both from an image folder; packing the same folder again writes only the shards
that are not there or whose files have changed.
"""

import errno
import io
import os
import tarfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dkcls.data.dataset import DATASETS, split_names
from dkcls.data.decode import BadImage, check_bytes, read_plain
from dkcls.data.encoded import EncodedImages
from dkcls.data.file_index import FileIndex
from dkcls.data.sets.folder import ImageFolder, passed_over
from dkcls.data.transforms import Transform

_HEADER = 512  # bytes before a member's data
_KIND = 156  # index of the header byte that tells the kind of the member
# Seconds. A file that changed so shortly before it was read may have the same times after another
# change.
SETTLED = 2.0
# Arrays of the index: where each image is, and the times of its file when it was packed.
_PLACES, _TIMES = ("shards", "offsets", "sizes"), ("modified", "changed")


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
        shard, offset, size = (int(self.index.extra[key][index]) for key in _PLACES)
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
        shards, offsets, sizes, *times = (index.extra[key] for key in (*_PLACES, *_TIMES))
        ends = np.array(index.facts["shard_bytes"], np.int64)
        arrays = (index.ends, index.targets, shards, offsets, sizes, *times)
        lengths = {len(array) for array in arrays}
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


class Packed(NamedTuple):
    """The number of a split's shards, and of those among them that had to be written."""

    shards: int
    written: int


def pack_split(
    source: ImageFolder,
    split: str,
    root: Path,
    images_per_shard: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Packed:
    """Write <root>/<split>-00000.tar, ... and <split>.index.

    A shard is written under another name, read back and compared with its files' checksums, and
    only then renamed. Its part of the index lies beside it until all parts are joined. A shard that
    is there is kept if it holds the same files with the same content. `progress` is called with the
    number of images just done.
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
    index = index_path(root, split)
    before = _whole_index(index)
    kept: list[FileIndex | None] = []
    for shard, (members, path) in enumerate(zip(shards, paths, strict=True)):
        kept.append(_kept(source, members, path, before and _part_of(before, shard)))
        progress(len(members) if kept[-1] is not None else 0)
    missing = kept.count(None)
    if missing:
        for part, path in zip(kept, paths, strict=True):
            if part is not None:
                part.save(_part_path(path))
        index.unlink(missing_ok=True)  # it does not fit the shards that are written from now on
    parts = [
        _write(source, members, path, shard, progress) if part is None else part
        for shard, (members, path, part) in enumerate(zip(shards, paths, kept, strict=True))
    ]
    joined = _join(source, parts)
    if before is None or missing or joined.checksum != before.checksum:
        joined.save(index)
    for path in paths:
        _part_path(path).unlink(missing_ok=True)
    return Packed(len(paths), missing)


def _part_path(shard: Path) -> Path:
    return shard.with_suffix(".part")


def _whole_index(path: Path) -> FileIndex | None:
    try:
        index = FileIndex.open(path)
        _check_index(index, path)
    except (OSError, ValueError):
        return None
    return index


def _part_of(index: FileIndex, shard: int) -> FileIndex | None:
    """Return the rows of a shard; None if there is no such shard."""
    rows = np.flatnonzero(index.extra["shards"] == shard).tolist()
    if not rows:
        return None
    names = [index.name(row) for row in rows]
    facts = {"shard_bytes": index.facts["shard_bytes"][shard : shard + 1]}
    places = {key: index.extra[key][rows] for key in (*_PLACES, *_TIMES)}
    return FileIndex.build(names, index.targets[rows].tolist(), facts, **places)


def _kept(
    source: ImageFolder, members: Sequence[int], path: Path, part: FileIndex | None
) -> FileIndex | None:
    """Return the part of the index, given or in a file, that says the shard is still right."""
    with suppress(OSError, ValueError):
        part = FileIndex.open(_part_path(path))
    return part if part is not None and _is_same(source, members, path, part) else None


def _is_same(source: ImageFolder, members: Sequence[int], path: Path, part: FileIndex) -> bool:
    """Return whether the shard holds these files, with the content that they have now."""
    if not path.is_file() or [path.stat().st_size] != part.facts["shard_bytes"]:
        return False
    if [part.name(i) for i in range(len(part))] != [source.index.name(i) for i in members]:
        return False
    with path.open("rb", buffering=0) as file:
        return all(
            _is_same_content(source, member, part, i, file.fileno())
            for i, member in enumerate(members)
        )


def _is_same_content(source: ImageFolder, member: int, part: FileIndex, i: int, shard: int) -> bool:
    name = source.name(member)
    _, offset, size, *times = (int(part.extra[key][i]) for key in (*_PLACES, *_TIMES))
    status = os.lstat(name)
    if status.st_size != size:
        return False
    if times == _times(status):
        return True
    return _read_member(name, source.max_pixels) == os.pread(shard, size, offset)


def _times(status: os.stat_result) -> list[int]:
    """Return the times of the last change of content and of anything, in nanoseconds."""
    return [status.st_mtime_ns, status.st_ctime_ns]


def _write(
    source: ImageFolder,
    members: Sequence[int],
    path: Path,
    shard: int,
    progress: Callable[[int], None],
) -> FileIndex:
    temporary = path.with_suffix(".tmp")
    checksums, times = [], []
    with temporary.open("wb") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for member in members:
                status = os.lstat(source.name(member))  # before: a change after it is seen
                data = _read_member(source.name(member), source.max_pixels)
                info = tarfile.TarInfo(os.fsdecode(source.index.name(member)))
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
                checksums.append(zlib.crc32(data))
                settled = max(_times(status)) < (time.time() - SETTLED) * 1e9
                times.append(_times(status) if settled else [0, 0])
                progress(1)
        file.flush()
        os.fsync(file.fileno())
    part = _verified(source, members, temporary, checksums, shard, times)
    os.replace(temporary, path)
    part.save(_part_path(path))
    return part


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
    source: ImageFolder,
    members: Sequence[int],
    path: Path,
    checksums: list[int],
    shard: int,
    times: list[list[int]],
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
        **dict(zip(_TIMES, np.array(times, np.int64).T, strict=True)),
    }
    return FileIndex.build(names, targets, {"shard_bytes": [path.stat().st_size]}, **places)


def _join(source: ImageFolder, parts: list[FileIndex]) -> FileIndex:
    names = [part.name(i) for part in parts for i in range(len(part))]
    targets = [source.target(i) for i in range(len(source))]
    shard_bytes = [size for part in parts for size in part.facts["shard_bytes"]]
    places = {
        key: np.concatenate([part.extra[key] for part in parts]) for key in (*_PLACES, *_TIMES)
    }
    other_endings = source.index.facts["other_endings"]
    facts = {
        "class_names": source.class_names,
        "shard_bytes": shard_bytes,
        "other_endings": other_endings,
    }
    return FileIndex.build(names, targets, facts, **places)
