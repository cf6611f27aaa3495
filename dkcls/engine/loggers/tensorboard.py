"""Curves, texts and pictures for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from dkcls.engine.log import LOGGERS, Logger


@LOGGERS.register("tensorboard")
class TensorBoard(Logger):
    """Event files in the run's folder `tensorboard`; points after `step` are dropped."""

    def __init__(self, run: Path, step: int):
        self.writer = SummaryWriter(run / "tensorboard", purge_step=step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def text(self, name: str, text: str) -> None:
        self.writer.add_text(name, f"```\n{text}\n```")

    def image(self, name: str, image: Tensor) -> None:
        self.writer.add_image(name, image)

    def close(self) -> None:
        self.writer.close()
