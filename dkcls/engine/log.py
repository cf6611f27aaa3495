"""The log of a run, which rank 0 keeps: metrics.jsonl, loggers, progress bar or plain lines."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from dkcls.errors import UserError
from dkcls.layers import OffsetRecord
from dkcls.registry import Registry

logger = logging.getLogger(__name__)

# Of a line of metrics: what no two runs have in common.
CLOCK = ("seconds", "images_per_s", "data_wait", "memory_mib")


class Logger:
    """A place where metrics go. A subclass overrides what it has a use for.

    When a method raises OSError, the run goes on without the logger.

    Args:
        run: the run's folder.
        step: where the run starts or resumes; what was logged of later steps will come again.
    """

    def __init__(self, run: Path, step: int):
        pass

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name, such as train/loss or val/top1."""

    def text(self, name: str, text: str) -> None:
        """Log a text, such as the config."""

    def image(self, name: str, image: Tensor) -> None:
        """Log a picture, uint8 [C, H, W]."""

    def close(self) -> None:
        """Write what is not written yet, at the end of the run."""


LOGGERS: Registry[type[Logger]] = Registry("logger", "dkcls.engine.loggers")


def register_logger(name: str) -> Callable[[Any], Any]:
    """Return a decorator that makes a subclass of Logger a value of log.to=[...]."""
    return LOGGERS.register(name)


def make_loggers(names: Sequence[str], run: Path, step: int) -> dict[str, Logger]:
    """Return the loggers of these names; UserError if there is none of a name."""
    try:
        kinds = {name: LOGGERS.find(name) for name in names}
    except ValueError as error:
        raise UserError(f"log.to: {error}") from error
    loggers = {}
    for name, kind in kinds.items():
        try:
            loggers[name] = kind(run, step)
        except OSError as error:
            _warn(name, error)
    return loggers


def _warn(name: str, error: OSError) -> None:
    logger.warning("%s cannot be written (%s): the run goes on without it", name, error.strerror)


class Log:
    """The log, and a context at whose end files are closed and the bar goes.

    Args:
        to: names of loggers.
        shown: the metrics that lines and bar show, besides images per second.
        seconds: that the run took before, up to `step`.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        total_steps: int,
        to: Sequence[str],
        *,
        shown: Sequence[str] = (),
        seconds: float = 0.0,
    ):
        self.started = time.perf_counter() - seconds
        self.shown = {*shown, "images_per_s"}
        self.path = run / "metrics.jsonl"
        self.loggers = make_loggers(to, run, step)
        self.file = self.path.open("ab", buffering=0)
        self.unwritten = b""  # while the disk is full
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total_steps, initial=step, unit="step", dynamic_ncols=True, disable=not terminal
        )
        # Of the root logger, which prints all others' lines.
        self.redirect = logging_redirect_tqdm() if terminal else None

    def __enter__(self) -> "Log":
        self.excepthook, threading.excepthook = threading.excepthook, self._of_a_thread
        if self.redirect is not None:
            self.redirect.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.redirect is not None:
            self.redirect.__exit__(kind, error, trace)
        self.bar.close()
        self.file.close()
        self._tell(lambda each: each.close())
        threading.excepthook = self.excepthook

    @property
    def seconds(self) -> float:
        """That the run took so far, without what was done twice after an interruption."""
        return time.perf_counter() - self.started

    def step(self) -> None:
        self.bar.update()

    def metrics(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """Write a line of the file and points on TensorBoard's curves, and show the main values."""
        line = {
            "kind": kind,
            "step": step,
            "epoch": epoch,
            "seconds": round(self.seconds, 3),
            **values,
        }
        self.unwritten += json.dumps(line).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s); its lines are kept until it can",
                self.path,
                error.strerror,
            )
        self._scalars({f"{kind}/{name}": value for name, value in values.items()}, step)
        shown = {name: f"{value:.4g}" for name, value in values.items() if name in self.shown}
        if kind == "train":
            self.bar.set_postfix(shown)
        if kind != "train" or self.bar.disable:
            logger.info(
                "epoch %d step %d of %d %s %s", epoch, step, self.bar.total, kind, _words(shown)
            )

    def sync(self) -> None:
        """All lines are on the disk, or OSError: a checkpoint must not be ahead of its metrics."""
        self._write()
        os.fsync(self.file.fileno())

    def _write(self) -> None:
        while self.unwritten:
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        self._tell(lambda each: each.scalars(values, step))

    def _tell(self, what: Callable[[Logger], None]) -> None:
        """Tell every logger, and drop one that cannot be written: curves are worth no run."""
        for name, each in list(self.loggers.items()):
            try:
                what(each)
            except OSError as error:
                del self.loggers[name]
                _warn(name, error)

    def _of_a_thread(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's writer raises in its thread what its next call raises again."""
        if not isinstance(failure.exc_value, OSError):
            self.excepthook(failure)

    def offsets(self, step: int, records: Mapping[str, OffsetRecord]) -> None:
        """Log for each layer how far its offsets reach on average, and the share out of scope."""
        for layer, record in records.items():
            reach = {"kernel_offset": record.kernel_offset, "image_offset": record.image_offset}
            values = {
                name: offset.abs().mean() for name, offset in reach.items() if offset is not None
            }
            values |= {"clipped": record.clipped} if record.clipped is not None else {}
            self._scalars({f"{name}/{layer}": v.item() for name, v in values.items()}, step)

    def text(self, name: str, text: str) -> None:
        self._tell(lambda each: each.text(name, text))

    def images(self, name: str, images: Sequence[Tensor]) -> None:
        """Log a grid of those uint8 images [C, H, W] that have the size of the first one."""
        if len(images):
            from torchvision.utils import make_grid  # here, because it takes a second

            shown = torch.stack([image for image in images if image.shape == images[0].shape])
            grid = make_grid(shown, nrow=max(1, int(len(shown) ** 0.5)))
            self._tell(lambda each: each.image(name, grid))


def _words(values: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in values.items())


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # a system without it: the peak is that of the process's whole life
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> float:
    """In MiB: of the device's tensors, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
