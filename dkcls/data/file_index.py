"""The list of a data set's files in a few arrays, mapped from a file: a worker holds no copy of a million names."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save


class FileIndex:
    """Names in one run of bytes, `ends` of each, int64 targets, and whatever arrays a kind of data set adds (`extra`)."""

    def __init__(
        self, arrays: dict[str, np.ndarray], facts: dict[str, Any], path: Path | None = None
    ):
        self.names, self.ends, self.targets = arrays["names"], arrays["ends"], arrays["targets"]
        self.extra = {
            key: value for key, value in arrays.items() if key not in ("names", "ends", "targets")
        }
        self.facts, self.path = facts, path

    @classmethod
    def build(
        cls,
        names: Sequence[bytes],
        targets: Sequence[int],
        facts: dict[str, Any],
        **extra: np.ndarray,
    ) -> "FileIndex":
        lengths = np.fromiter(map(len, names), np.int64, len(names))
        arrays: dict[str, np.ndarray] = {
            "names": np.frombuffer(b"".join(names), np.uint8),
            "ends": np.cumsum(lengths),
            "targets": np.array(targets, np.int64),
            **extra,
        }
        return cls(arrays, facts)

    @classmethod
    def open(cls, path: Path) -> "FileIndex":
        """OSError if there is no such file, ValueError if it is no index."""
        try:
            with safe_open(path, framework="pt") as file:
                arrays = {key: file.get_tensor(key).numpy() for key in file.keys()}  # noqa: SIM118  # it is not a dict
                return cls(arrays, json.loads(file.metadata()["facts"]), path)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not an index of files: {error}") from error

    def save(self, path: Path) -> "FileIndex":
        """Written beside its place and renamed, so that nobody reads half of it; returns the index mapped from the file."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        arrays = {"names": self.names, "ends": self.ends, "targets": self.targets, **self.extra}
        tensors = {key: torch.from_numpy(value.copy()) for key, value in arrays.items()}
        temporary.write_bytes(save(tensors, {"facts": json.dumps(self.facts)}))
        os.replace(temporary, path)
        return FileIndex.open(path)

    def __len__(self) -> int:
        return len(self.ends)

    def name(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker maps the same file; an index that has none is copied."""
        if self.path is not None:
            return FileIndex.open, (self.path,)
        return FileIndex, (
            {"names": self.names, "ends": self.ends, "targets": self.targets, **self.extra},
            self.facts,
        )
