"""Packs an image folder into tar shards with an index, as `tar.TarImages` reads them; a second run goes on with the first."""

import errno
import io
import os
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dkcls.data.file_index import FileIndex
from dkcls.data.image_folder import ImageFolder
from dkcls.data.tar import index_path, shard_path


def pack_split(
    source: ImageFolder,
    split: str,
    root: Path,
    images_per_shard: int,
    progress: Callable[[int], None] = lambda count: None,
) -> int:
    """Writes <root>/<split>-00000.tar, ... and <split>.index. Returns the number of shards; `progress` is told of images done.

    A shard is written under another name, read back and compared with its files' checksums, and only then named; beside it lies
    its part of the index, until all are joined.
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
    """The index in that file, if it is of these files, and the shards are there and whole."""
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
                data = _read_plain(source.name(member))
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


def _read_plain(path: str) -> bytes:
    """A file that is no link, which might lead to any file of this machine."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"{path} is a link: what is packed must lie in the folder itself"
            ) from error
        raise
    with open(descriptor, "rb", buffering=0) as file:
        return file.readall()


def _verified(
    source: ImageFolder, members: Sequence[int], path: Path, checksums: list[int], shard: int
) -> FileIndex:
    """The part of the index, from what is in the file."""
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
