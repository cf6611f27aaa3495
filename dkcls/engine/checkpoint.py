"""Checkpoints that are whole or absent: written aside, synced, renamed, with a SHA-256 beside each.

A run keeps `checkpoints/step-N.pt`, the newest few, and the links `last.pt` and `best.pt`. Files
load with plain `torch.load(path, weights_only=True)`, and nothing else ever loads them: a pickle of
somebody else's run could execute code.
"""

import io
import logging
import re
from pathlib import Path
from typing import Any

import torch

from dkcls.engine.safe_load import safe_load
from dkcls.files import (
    DamagedFile,
    is_plain,
    read_hashed,
    save_hashed,
    sync_folder,
    temporary_path,
)

logger = logging.getLogger(__name__)

FORMAT = 1
NAME = re.compile(r"step-(\d{8})(-trained)?\.pt")


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint and its hash, all or nothing."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    save_hashed(path, buffer.getbuffer())


def read(path: Path, *, need_hash: bool = True) -> dict[str, Any]:
    """Return a checkpoint's state; DamagedFile if it is not what was written.

    `need_hash=False` also takes one that came without its hash, as a copied file does.
    """
    data = read_hashed(path, need_hash=need_hash)
    path = path.resolve()
    try:
        state = safe_load(data)
    except ValueError as error:
        raise DamagedFile(f"{path} is not a checkpoint that is safe to load") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise DamagedFile(f"{path} is not a checkpoint of dkcls (format {FORMAT})")
    return state


class Checkpoints:
    """The checkpoints of a run directory."""

    def __init__(self, run: Path, keep: int):
        self.run, self.folder, self.keep = run, run / "checkpoints", keep

    def save(self, state: dict[str, Any], *, best: bool = False, trained: bool = False) -> Path:
        """Write a checkpoint, link it and remove old ones. Return its path.

        `trained`: an epoch's evaluation is still to come. Such a checkpoint is removed once the
        evaluated one is written.
        """
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

    @staticmethod
    def step_of(path: Path) -> int:
        """Return the step that a checkpoint's name says."""
        match = NAME.fullmatch(path.name)
        assert match is not None
        return int(match[1])

    def load_newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest good checkpoint, if there is any. Every bad one on the way is named."""
        for path in self.newest_first():
            try:
                return path, read(path)
            except DamagedFile as error:
                logger.warning("%s; going back to the checkpoint before it", error)
        return None

    def link(self, path: Path, *, best: bool) -> None:
        """Point last.pt, and best.pt too, at a checkpoint.

        `save` does this; so does a restart, which may have found the links without their file, or
        the newest file damaged.
        """
        self._link("last.pt", path)
        if best:
            self._link("best.pt", path)

    def _link(self, name: str, path: Path) -> None:
        temporary = temporary_path(self.run / name)
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.relative_to(self.run))
        temporary.replace(self.run / name)
        sync_folder(self.run)

    def _prune(self) -> None:
        kept = {(self.run / name).resolve() for name in ("last.pt", "best.pt")}
        # A folder or a pipe is nobody's checkpoint, and not ours to remove.
        files = [path for path in self.newest_first() if not path.exists() or path.is_file()]
        kept.update(
            path.resolve()
            for path in [path for path in files if "-trained" not in path.name][: self.keep]
        )
        for path in files:
            if path.resolve() not in kept:
                path.unlink()
        # A process that was killed in here leaves a hash, or a part of a file.
        for path in self.folder.iterdir():
            left = path.suffix == ".tmp" or (
                path.suffix == ".sha256" and not path.with_suffix("").exists()
            )
            if left and is_plain(path):
                path.unlink()
