"""Checkpoints that are whole or not there: written aside, synced, renamed, with a SHA-256 beside each.

A run keeps `checkpoints/step-N.pt`, the newest few, and the links `last.pt` and `best.pt`. Files load with plain
`torch.load(path, weights_only=True)`, and nothing else is ever used to load them: no pickle of somebody else's runs.
"""

import hashlib
import io
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

FORMAT = 1
NAME = re.compile(r"step-(\d{8})(-trained)?\.pt")


class BadCheckpoint(Exception):
    """A file that is not what was once written."""


def write(path: Path, state: dict[str, Any]) -> None:
    """All or nothing. The hash is in place before the file is, so that a file never stands without its own."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    data = buffer.getbuffer()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(hash_path(path), f"{hashlib.sha256(data).hexdigest()}  {path.name}\n".encode())
    write_atomically(path, data)


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Through a temporary file: `path` has the old content or the new, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
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


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def read(path: Path, *, need_hash: bool = True) -> dict[str, Any]:
    """A checkpoint, verified. `need_hash=False` takes one that came without its hash, as a copied file does."""
    try:
        path = path.resolve()
        data = path.read_bytes()
        beside = hash_path(path)
        expected = beside.read_bytes().split()[:1] if beside.exists() else None
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise BadCheckpoint(
            f"{path} cannot be read: {getattr(error, 'strerror', error)}"
        ) from error
    if expected is None and need_hash:
        raise BadCheckpoint(
            f"{path} has no {beside.name} beside it, so nothing tells whether it is whole"
        )
    if expected is not None and expected != [hashlib.sha256(data).hexdigest().encode()]:
        raise BadCheckpoint(
            f"{path} does not have the SHA-256 that {beside.name} says: it was damaged after it was written"
        )
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of any kind, in a file that is damaged
        raise BadCheckpoint(f"{path} is not a checkpoint that is safe to load") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise BadCheckpoint(f"{path} is not a checkpoint of dkcls (format {FORMAT})")
    return state


class Checkpoints:
    """Those of a run directory."""

    def __init__(self, run: Path, keep: int):
        self.run, self.folder, self.keep = run, run / "checkpoints", keep

    def save(self, state: dict[str, Any], *, best: bool = False, trained: bool = False) -> Path:
        """`trained`: an epoch's evaluation is still to come; such a checkpoint goes when the evaluated one is there."""
        path = self.folder / f"step-{state['step']:08d}{'-trained' if trained else ''}.pt"
        write(path, state)
        self.link(path, best=best)
        self._prune()
        return path

    def newest_first(self) -> list[Path]:
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        found = {path: match for path in files if (match := NAME.fullmatch(path.name))}
        return sorted(
            found, key=lambda path: (int(found[path][1]), not found[path][2]), reverse=True
        )

    def load_newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest good one, if there is any. Every bad one on the way is named."""
        for path in self.newest_first():
            try:
                return path, read(path)
            except BadCheckpoint as error:
                logger.warning("%s; going back to the checkpoint before it", error)
        return None

    def link(self, path: Path, *, best: bool) -> None:
        """As `save` does; after a restart, which may have found the links before the file, or the file damaged."""
        self._link("last.pt", path)
        if best:
            self._link("best.pt", path)

    def _link(self, name: str, path: Path) -> None:
        temporary = self.run / f".{name}.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.relative_to(self.run))
        temporary.replace(self.run / name)
        sync_folder(self.run)

    def _prune(self) -> None:
        kept = {(self.run / name).resolve() for name in ("last.pt", "best.pt")}
        files = self.newest_first()
        kept.update(
            path.resolve()
            for path in [path for path in files if "-trained" not in path.name][: self.keep]
        )
        for path in files:
            if (
                path.resolve() not in kept and not path.is_dir()
            ):  # a folder is nobody's checkpoint, and not ours to remove
                path.unlink()
        for path in (
            self.folder.iterdir()
        ):  # what a process left that was killed in here: a hash, or a part of a file
            if path.suffix == ".tmp" or (
                path.suffix == ".sha256" and not path.with_suffix("").exists()
            ):
                path.unlink()
