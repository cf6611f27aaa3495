"""The log of a run, which rank 0 keeps: metrics.jsonl, TensorBoard, progress bar or plain lines."""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchvision.utils import make_grid
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from dkcls.layers import OffsetRecord

logger = logging.getLogger(__name__)

# Of a line of metrics: what no two runs have in common.
CLOCK = ("seconds", "images_per_s", "data_wait", "memory_mib")


class Log:
    """The log, and a context at whose end files are closed and the bar goes.

    Args:
        shown: the metrics that lines and bar show, besides images per second.
        seconds: that the run took before, up to `step`.
    """

    def __init__(
        self,
        run: Path,
        step: int,
        total_steps: int,
        tensorboard: bool,
        *,
        shown: Sequence[str] = (),
        seconds: float = 0.0,
    ):
        self.started = time.perf_counter() - seconds
        self.shown = {*shown, "images_per_s"}
        self.path = run / "metrics.jsonl"
        self.file = self.path.open("ab", buffering=0)
        self.unwritten = b""  # while the disk is full
        self.board: SummaryWriter | None = None
        if tensorboard:
            with self._board_may_fail():
                self.board = SummaryWriter(run / "tensorboard", purge_step=step)
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=total_steps, initial=step, unit="step", dynamic_ncols=True, disable=not terminal
        )
        self.redirect = (
            logging_redirect_tqdm() if terminal else None
        )  # of the root logger, which prints all others' lines

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
        with self._board_may_fail():
            if self.board is not None:
                self.board.close()
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
        with self._board_may_fail():
            if self.board is not None:
                for name, value in values.items():
                    self.board.add_scalar(f"{kind}/{name}", value, step)
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

    @contextmanager
    def _board_may_fail(self) -> Iterator[None]:
        """Curves are worth no run: when the disk is full there are none from then on."""
        try:
            yield
        except OSError as error:
            self.board = None
            logger.warning(
                "TensorBoard's files cannot be written (%s): no curves from here", error.strerror
            )

    def _of_a_thread(self, failure: threading.ExceptHookArgs) -> None:
        """TensorBoard's writer raises in its thread what its next call raises again."""
        if not isinstance(failure.exc_value, OSError):
            self.excepthook(failure)

    def offsets(self, step: int, records: Mapping[str, OffsetRecord]) -> None:
        """Draw for each layer how far its offsets reach on average, and the share out of scope."""
        with self._board_may_fail():
            for layer, record in records.items():
                reach = {"kernel_offset": record.kernel_offset, "image_offset": record.image_offset}
                values = {
                    name: offset.abs().mean()
                    for name, offset in reach.items()
                    if offset is not None
                }
                values |= {"clipped": record.clipped} if record.clipped is not None else {}
                for name, value in values.items():
                    if self.board is not None:
                        self.board.add_scalar(f"{name}/{layer}", value.item(), step)

    def text(self, name: str, text: str) -> None:
        with self._board_may_fail():
            if self.board is not None:
                self.board.add_text(name, f"```\n{text}\n```")

    def images(self, name: str, images: Sequence[Tensor]) -> None:
        """uint8 [C, H, W] each; those that have the first one's size."""
        with self._board_may_fail():
            if self.board is not None and len(images):
                shown = torch.stack([image for image in images if image.shape == images[0].shape])
                self.board.add_image(
                    name, make_grid(shown.float() / 255, nrow=max(1, int(len(shown) ** 0.5)))
                )


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of (name, value) under a title."""
    width = max(len(name) for name, _ in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)]))


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
