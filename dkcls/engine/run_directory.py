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
from dkcls.config.checks import is_number
from dkcls.errors import UserError
from dkcls.files import read_plain, write_atomically

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "torchvision", "timm", "triton", "numba", "numpy", "hydra-core", "omegaconf")


# What a run writes, beside its checkpoints; the links are files too.
FILES = ("config.yaml", "versions.json", "metrics.jsonl", "result.json", "bad_files.txt", ".lock")
LINKS = ("last.pt", "best.pt")


class RunDirectory:
    """Used by rank 0 alone."""

    def __init__(self, path: Path):
        self.path = path
        self.metrics = path / "metrics.jsonl"

    def check_names(self) -> None:
        """Raise UserError for a folder, pipe or device that has the name of a file of a run's."""
        for name in (*FILES, *LINKS, "checkpoints"):
            path = self.path / name
            is_dangling = name in LINKS and path.is_symlink() and not path.exists()
            good = path.is_dir() if name == "checkpoints" else path.is_file() or is_dangling
            if os.path.lexists(path) and not good:
                ought = "a folder" if name == "checkpoints" else "a plain file"
                raise UserError(f"{path} must be {ought}; remove it, or give another name=...")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The lock goes with the process, however it ends."""
        self.check_names()
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
        self.check_names()
        file = self.path / "result.json"
        return self._read(file, parse_result) if file.exists() else None

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
        kept = [line for line in read_metrics(self.metrics) if _is_done(line, step, evaluation_due)]
        self._write(self.metrics.name, "".join(f"{json.dumps(line)}\n" for line in kept))
        return kept[-1].get("seconds", 0.0) if kept else 0.0

    def _read(self, file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
        try:
            content = parse(read_plain(file).decode())
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
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


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without those that no run wrote or a crash cut short."""
    lines = read_plain(Path(path)).decode(errors="replace").splitlines()
    return [values for line in lines if (values := _parse_line(line)) is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(values, dict) and type(values.get("kind")) is str
    good = good and type(values.get("step")) is int and type(values.get("epoch", 0)) is int
    return values if good and is_number(values.get("seconds", 0.0)) else None


def parse_result(text: str) -> dict[str, Any]:
    """Return a run's result; ValueError for what no run wrote."""
    values = json.loads(text)
    good = isinstance(values, dict) and type(values.get("name")) is str
    good = good and all(key == "name" or type(v) in (int, float) for key, v in values.items())
    if not good or not is_number(values.get("seconds")):
        raise ValueError("it must have a name, seconds and metrics")
    return values


def _is_done(line: dict[str, Any], step: int, evaluation_due: bool) -> bool:
    """Return whether a line of metrics will not be made again."""
    due = evaluation_due and line["kind"] == "val"
    return line["step"] < step or (line["step"] == step and not due)
