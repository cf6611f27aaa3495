"""Evaluation: each image exactly once over all ranks. The trainer's and eval.py's."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dkcls.engine.distributed import World


class Task(Protocol):
    """What a network is trained for. The engine moves batches through it and knows no more."""

    metric: str  # the result by which a checkpoint is best, higher is better
    measures: tuple[str, ...]  # the names of what `measure` adds up, "images" among them
    counts: tuple[str, ...]  # the same of `loss`

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss of a training batch, and its `counts`, a vector to be summed over batches, detached."""

    def measure(self, model: nn.Module, batch: Any) -> Tensor:
        """The `measures` of an evaluation batch, a float64 vector to be summed over batches and ranks."""

    def summarize(self, names: tuple[str, ...], sums: list[float]) -> dict[str, float]:
        """Sums of `counts` or `measures` as figures for people."""


def evaluate(task: Task, model: nn.Module, batches: Iterable[Any], world: World, precision: str = "fp32") -> dict[str, float]:
    """The task's figures over all batches of all ranks, which may have different numbers of them."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(len(task.measures), dtype=torch.float64, device=world.device)
    with torch.inference_mode(), autocast(world.device, precision):
        for batch in batches:
            sums += task.measure(model, batch)
    model.train(was_training)
    return task.summarize(task.measures, world.sum_(sums).tolist())


def autocast(device: torch.device, precision: str) -> torch.autocast:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
