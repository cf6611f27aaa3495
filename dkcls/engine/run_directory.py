"""A run's directory, held by one process at a time: its config, metrics and, at the end, result."""

import fcntl
import io
import json
import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from dkcls.config import Config, changed_keys
from dkcls.errors import UserError
from dkcls.files import write_atomically

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "torchvision", "timm", "triton", "numba", "numpy", "hydra-core", "omegaconf")


class RunDirectory:
    """Used by rank 0 alone."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The lock goes with the process, however it ends."""
        with self._lock() as lock:
            with suppress(OSError):  # a full disk: the lock holds without a name
                lock.truncate(0)
                lock.write(f"process {os.getpid()} on {platform.node()}".encode())
            try:
                yield
            finally:
                if [path.name for path in self.path.iterdir()] == [".lock"]:  # nothing came of it
                    (self.path / ".lock").unlink()
                    with suppress(OSError):  # another process has begun one
                        self.path.rmdir()

    def _lock(self) -> io.FileIO:
        file = self.path / ".lock"
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = io.FileIO(file, "a+")
            except OSError as error:
                raise UserError(
                    f"the run directory {self.path} cannot be written: {error.strerror}"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                holder = lock.read().decode(errors="replace").strip() or "another process"
                raise UserError(
                    f"{self.path} is in use by {holder}; wait for it, or give another name=..."
                ) from error
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), file.stat()):
                    return lock
            # The holder has removed the file in the meantime: nothing came of its run.
            lock.close()

    def check_config(self, config: Config) -> None:
        """Raise UserError unless the config of a run that is there is the same."""
        file = self.path / "config.yaml"
        if file.exists():
            if config.resume == "never":
                raise UserError(
                    f"{self.path} holds a run already, and resume=never; give another name=..."
                )
            try:
                changed = changed_keys(self._read(file, yaml.safe_load), config.to_dict())
            except ValueError as error:
                raise UserError(
                    f"{self.path} was written by another version of dkcls, whose keys are not "
                    f"those of this one ({error}); give another name=..."
                ) from error
            if changed:
                raise UserError(
                    f"{self.path} holds a run with another config ({'; '.join(changed)}); "
                    "give another name=... or the old values"
                )

    def write_config(self, config: Config) -> None:
        self._write("config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        versions = {"python": platform.python_version()}
        for package in PACKAGES:
            with suppress(PackageNotFoundError):  # Triton, where there is none
                versions[package] = version(package)
        self._write("versions.json", json.dumps(versions, indent=2))

    def result(self) -> dict[str, Any] | None:
        """What a finished run came to."""
        file = self.path / "result.json"
        return self._read(file, json.loads) if file.exists() else None

    def finished(self, config: Config) -> dict[str, Any] | None:
        """Return the result if the run is finished, and was made with this config."""
        result = self.result()
        if result is not None:
            self.check_config(config)
            logger.info("%s is finished; give another name=... to train again", self.path)
        return result

    def finish(self, result: dict[str, Any]) -> None:
        self._write("result.json", json.dumps(result, indent=2))

    def rewind(self, step: int, evaluation_due: bool) -> float:
        """Forget the metrics that will be made again: of later steps, of an evaluation to come.

        Return the seconds that the run had taken by the last line that is left.
        """
        if not self.metrics.exists():
            return 0.0
        lines = self.metrics.read_text(errors="replace").splitlines()
        kept = [line for line in lines if _is_done(line, step, evaluation_due)]
        self._write(self.metrics.name, "".join(f"{line}\n" for line in kept))
        return json.loads(kept[-1]).get("seconds", 0.0) if kept else 0.0

    def _read(self, file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
        try:
            content = parse(file.read_text())
        except (OSError, ValueError, yaml.YAMLError):
            content = None
        if not isinstance(content, dict):
            raise UserError(
                f"{file} is damaged: it cannot be read as what a run wrote; "
                "remove it, or give another name=..."
            )
        return content

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text.encode())
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be written: {error.strerror}") from error


def _is_done(line: str, step: int, evaluation_due: bool) -> bool:
    """A line of metrics that will not be made again; one that a crash cut short will."""
    try:
        values = json.loads(line)
        return values["step"] < step or (
            values["step"] == step and not (evaluation_due and values["kind"] == "val")
        )
    except (ValueError, KeyError, TypeError):
        return False
