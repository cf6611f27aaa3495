"""List of a data set's files in a few arrays, mapped from a file.

As the file is mapped, a worker holds no copy of a million names.
"""

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
    """Names in one run of bytes, the `ends` of each, and targets int64 [N].

    `extra` holds whatever arrays a kind of data set adds.
    """

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
        """Return the index in `path`; OSError if there is no file, ValueError if it is no index."""
        try:
            with safe_open(path, framework="pt") as file:
                # The file is no dict, so only keys() gives the keys.
                arrays = {key: file.get_tensor(key).numpy() for key in file.keys()}  # noqa: SIM118
                return cls(arrays, json.loads(file.metadata()["facts"]), path)
        except (SafetensorError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not an index of files: {error}") from error

    def save(self, path: Path) -> "FileIndex":
        """Write the index and return it, mapped from the file.

        The file is written beside `path` and renamed, so that nobody reads half of it.
        """
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
        """Send a worker the path, to map the same file; an index without a file is copied."""
        if self.path is not None:
            return FileIndex.open, (self.path,)
        return FileIndex, (
            {"names": self.names, "ends": self.ends, "targets": self.targets, **self.extra},
            self.facts,
        )
