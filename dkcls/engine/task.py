"""What a network is trained for, as the engine sees it, and what a run for it is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from dkcls.config import Config
from dkcls.engine.distributed import World


class Evaluation(Protocol):
    """Figures of a network over batches, as they come."""

    def add(self, model: nn.Module, batch: Any) -> None: ...

    def figures(self, world: World) -> dict[str, Any]:
        """Over all batches of all ranks, the same on each."""


class Task(Protocol):
    """What a network is trained for. The engine moves batches through it and knows no more."""

    metric: str  # the figure by which a checkpoint is best, higher is better
    counts: tuple[str, ...]  # the names of what `loss` counts, "images" among them

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a training batch, and its `counts`, a vector to be summed over batches, detached."""

    def summarize(self, names: tuple[str, ...], sums: list[float]) -> dict[str, Any]:
        """Sums of `counts` as figures for people, "images" among them."""

    def evaluation(self) -> Evaluation: ...


@dataclass(frozen=True)
class Parts:
    """What a task makes of a config: all that the engine has to be told to train for it.

    `counted` is the network whose multiply-adds are told, for an image of [C, H, W] = `input_size`.
    """

    config: Config  # with what it left open
    task: Task
    model: nn.Module
    train_set: Any
    val_set: Any
    facts: dict[str, Any]  # what somebody with nothing but a checkpoint has to know
    counted: nn.Module
    input_size: tuple[int, int, int]


Builder = Callable[[Config, World], Parts]
