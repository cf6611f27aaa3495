"""A run's directory: held by one run at a time, with its config, its metrics and, when it is done, its result."""

import fcntl
import json
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from dkcls.config import Config, changed_keys
from dkcls.engine.checkpoint import write_atomically
from dkcls.engine.errors import UserError

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
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise UserError(f"the run directory {self.path} cannot be written: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.seek(0)
                holder = lock.read().strip() or "another process"
                raise UserError(f"{self.path} is in use by {holder}; wait for it, or give another name=...") from error
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}")
            lock.flush()
            try:
                yield
            finally:
                if [path.name for path in self.path.iterdir()] == [".lock"]:  # nothing came of it
                    (self.path / ".lock").unlink()
                    self.path.rmdir()

    def check_config(self, config: Config) -> None:
        """The config of a run that is there must be the same."""
        file = self.path / "config.yaml"
        if file.exists():
            if config.resume == "never":
                raise UserError(f"{self.path} holds a run already, and resume=never; give another name=...")
            changed = changed_keys(yaml.safe_load(file.read_text()) or {}, config.to_dict())
            if changed:
                raise UserError(
                    f"{self.path} holds a run with another config ({'; '.join(changed)}); "
                    "give another name=... or the old values"
                )

    def write_config(self, config: Config) -> None:
        self._write("config.yaml", yaml.safe_dump(config.to_dict(), sort_keys=False))
        versions = {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}}
        self._write("versions.json", json.dumps(versions, indent=2))

    def result(self) -> dict[str, Any] | None:
        """What a finished run came to."""
        file = self.path / "result.json"
        return json.loads(file.read_text()) if file.exists() else None

    def finish(self, result: dict[str, Any]) -> None:
        self._write("result.json", json.dumps(result, indent=2))

    def rewind(self, step: int) -> None:
        """Forget the metrics of later steps: they will be made again."""
        if self.metrics.exists():
            lines = [line for line in self.metrics.read_text().splitlines() if _step(line) <= step]
            self._write(self.metrics.name, "".join(f"{line}\n" for line in lines))

    def _write(self, name: str, text: str) -> None:
        try:
            write_atomically(self.path / name, text.encode())
        except OSError as error:
            raise UserError(f"{self.path / name} cannot be written: {error.strerror}") from error


def _step(line: str) -> float:
    """Of a line of metrics; one that a crash cut short is later than all."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
