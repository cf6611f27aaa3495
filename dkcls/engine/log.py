"""What rank 0 tells while a run goes on: metrics.jsonl, TensorBoard, and a progress bar or plain lines."""

import json
import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchvision.utils import make_grid
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)


class Log:
    """Also a context: files are closed and the bar goes when it ends."""

    def __init__(self, run: Path, step: int, total_steps: int, tensorboard: bool):
        self.file = (run / "metrics.jsonl").open("a", buffering=1)
        self.board = SummaryWriter(run / "tensorboard", purge_step=step) if tensorboard else None
        terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, disable=not terminal)
        self.redirect = logging_redirect_tqdm([logging.getLogger("dkcls")]) if terminal else None

    def __enter__(self) -> "Log":
        if self.redirect is not None:
            self.redirect.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.redirect is not None:
            self.redirect.__exit__(kind, error, trace)
        self.bar.close()
        self.file.close()
        if self.board is not None:
            self.board.close()

    def step(self) -> None:
        self.bar.update()

    def metrics(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        """A line of the file, a point on each of TensorBoard's curves, and a word to whoever watches."""
        self.file.write(json.dumps({"kind": kind, "step": step, "epoch": epoch, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)
        shown = {name: f"{value:.4g}" for name, value in values.items() if name in ("loss", "top1", "images_per_s")}
        if kind == "train":
            self.bar.set_postfix(shown)
        if kind != "train" or self.bar.disable:
            logger.info("epoch %d step %d of %d %s %s", epoch, step, self.bar.total, kind, _words(shown))

    def offsets(self, step: int, values: dict[str, dict[str, float]]) -> None:
        """Per layer and quantity."""
        if self.board is not None:
            for layer, quantities in values.items():
                for name, value in quantities.items():
                    self.board.add_scalar(f"{name}/{layer}", value, step)

    def text(self, name: str, text: str) -> None:
        if self.board is not None:
            self.board.add_text(name, f"```\n{text}\n```")

    def images(self, name: str, images: Tensor) -> None:
        """uint8 [B, C, H, W]"""
        if self.board is not None and len(images):
            self.board.add_image(name, make_grid(images.float() / 255, nrow=max(1, int(len(images) ** 0.5))))


def _words(values: dict[str, Any]) -> str:
    return " ".join(f"{name} {value}" for name, value in values.items())


def peak_memory(device: torch.device) -> float:
    """In MiB: of the device's tensors, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
