"""Files that are whole or absent: written aside, synced and renamed, some with a hash beside."""

import errno
import hashlib
import itertools
import os
import stat
from pathlib import Path

from dkcls.errors import UserError


class DamagedFile(Exception):
    """A file does not hold what was once written."""


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write through a temporary file: `path` has the old content or the new, whatever happens."""
    temporary = temporary_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def temporary_path(path: Path) -> Path:
    """Return a name beside a path that nothing has, or a plain file that was left there."""
    for number in itertools.count():
        found = path.with_name(f".{path.name}.{number or ''}tmp")
        if not os.path.lexists(found) or is_plain(found):
            return found
    raise AssertionError


def is_plain(path: Path) -> bool:
    """Return whether a file is there: no folder, link, pipe or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


class NotPlain(OSError):
    """Error for a folder, a pipe or a device in a file's place: the last two might never end."""


def open_plain(path: str | bytes | os.PathLike, flags: int = 0) -> int:
    """Return the descriptor of a file; NotPlain for anything else, which is not waited for.

    `flags` are added to those of `os.open`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise NotPlain(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise NotPlain(errno.EINVAL, "it is not a plain file", os.fspath(path))
    return descriptor


def read_plain(path: Path) -> bytes:
    """Return a file's content."""
    with open(open_plain(path), "rb") as file:
        return file.read()


def write_output(path: str | Path, data: bytes) -> None:
    """Write a file that the user asked for, and the folders above it; UserError if that fails."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def save_hashed(path: Path, data: bytes | memoryview) -> None:
    """Write a file and its hash, the hash first, so that no file ever stands without its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(hash_path(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    write_atomically(path, data)


def read_hashed(path: Path, *, need_hash: bool = True) -> bytes:
    """Return the content of a file that has the hash beside it; DamagedFile if it has another.

    `need_hash=False` also takes a file that came without its hash, as a copied one does.
    """
    try:
        path = path.resolve()
        data = read_plain(path)
        beside = hash_path(path)
        expected = read_plain(beside).split()[:1] if beside.exists() else None
    # RuntimeError: a link to itself; MemoryError: a file with holes, of any size.
    except (OSError, RuntimeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise DamagedFile(f"{path} cannot be read: {reason}") from error
    if expected is None and need_hash:
        raise DamagedFile(
            f"{path} has no {beside.name} beside it, so nothing tells whether it is whole"
        )
    if expected is not None and expected != [hashlib.sha256(data).hexdigest().encode()]:
        raise DamagedFile(
            f"{path} does not have the SHA-256 that {beside.name} says: "
            "it was damaged after it was written"
        )
    return data
