"""List of a data set's files in a few arrays, with a checksum, in memory that workers share.

The bytes in memory are those of the file: a SHA-256 of all that follows, the length of a header,
the header in JSON (facts, and each array's name, type and length), and the arrays.
"""

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

import numpy as np

from dkcls.files import write_atomically

_CHECKSUM, _LENGTH = 32, 8  # bytes
_TYPES = ("<i8", "|u1")


class FileIndex:
    """Names in one run of bytes, the `ends` of each, and targets int64 [N].

    `extra` holds whatever arrays a kind of data set adds. Workers are sent the memory, so they need
    no file and hold no copy.
    """

    def __init__(self, data: bytes | mmap.mmap, file: IO[bytes] | None = None):
        """Take the encoded index, which is the content of `file` if that is given."""
        self._data, self._file = data, file
        arrays, self.facts = _parse(data)
        self.names, self.ends, self.targets = (
            arrays.pop(key) for key in ("names", "ends", "targets")
        )
        self.extra = arrays

    @classmethod
    def build(
        cls,
        names: Sequence[bytes],
        targets: Sequence[int],
        facts: dict[str, Any],
        **extra: np.ndarray,
    ) -> "FileIndex":
        lengths = np.fromiter(map(len, names), np.int64, len(names))
        arrays = {"ends": np.cumsum(lengths), "targets": np.array(targets, np.int64), **extra}
        # Last, so that the others begin at a multiple of 8 bytes.
        arrays["names"] = np.frombuffer(b"".join(names), np.uint8)
        return cls(_encoded(arrays, facts))

    @classmethod
    def open(cls, path: Path) -> "FileIndex":
        """Return the index in `path`; OSError if there is no file, ValueError if it is no index."""
        data = path.read_bytes()
        if hashlib.sha256(memoryview(data)[_CHECKSUM:]).digest() != data[:_CHECKSUM]:
            raise ValueError(f"{path} is damaged: it does not have the checksum that it says")
        try:
            return cls(data)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not an index of files: {error!r}") from error

    def save(self, path: Path) -> None:
        """Write the index: `path` has the old content or the new, whatever happens."""
        write_atomically(path, memoryview(self._data))

    @property
    def checksum(self) -> bytes:
        return self._data[:_CHECKSUM]

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._file is None:  # from now on this process too reads the memory that it shares
            vars(self).update(vars(_mapped(_in_memory(self._data))))
        assert self._file is not None
        return _received, (reduction.DupFd(self._file.fileno()),)


def _encoded(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> bytes:
    rows = [(name, array.dtype.str, len(array)) for name, array in arrays.items()]
    header = json.dumps({"facts": facts, "arrays": rows}).encode()
    header += b" " * (-len(header) % 8)
    parts = [len(header).to_bytes(_LENGTH, "little"), header]
    content = b"".join([*parts, *(array.tobytes() for array in arrays.values())])
    return hashlib.sha256(content).digest() + content


def _parse(data: bytes | mmap.mmap) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return arrays and facts; ValueError, KeyError or TypeError if they are not there."""
    start = _CHECKSUM + _LENGTH
    end = start + int.from_bytes(data[_CHECKSUM:start], "little")
    header = json.loads(data[start:end])
    arrays = {}
    for name, kind, length in header["arrays"]:
        if kind not in _TYPES or length < 0:
            raise ValueError(f"an array of {length} {kind}")
        # `frombuffer` takes no place at the very end for an array of nothing.
        arrays[name] = np.frombuffer(data, kind, length, end) if length else np.empty(0, kind)
        end += arrays[name].nbytes
    return arrays, header["facts"]


def _in_memory(data: bytes | mmap.mmap) -> IO[bytes]:
    """Return a file that is in memory only, and goes with the last process that has it open."""
    if hasattr(os, "memfd_create"):  # on Linux
        file = os.fdopen(os.memfd_create("dkcls"), "w+b")
    else:
        file = tempfile.TemporaryFile()  # type: ignore[assignment]  # noqa: SIM115
    file.write(data)
    file.flush()
    return file


def _received(descriptor: Any) -> FileIndex:
    return _mapped(os.fdopen(descriptor.detach(), "rb"))


def _mapped(file: IO[bytes]) -> FileIndex:
    return FileIndex(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), file)
