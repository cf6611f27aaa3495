"""Evaluation: each image exactly once over all ranks. The trainer's and eval.py's."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dkcls.engine.distributed import World
from dkcls.engine.task import Task


def evaluate(
    task: Task, model: nn.Module, batches: Iterable[Any], world: World, precision: str = "fp32"
) -> dict[str, Any]:
    """The task's figures over all batches of all ranks, which may have different numbers of them."""
    was_training = model.training
    model.eval()
    evaluation = task.evaluation()
    with torch.inference_mode(), autocast(world.device, precision):
        for batch in batches:
            evaluation.add(model, batch)
    model.train(was_training)
    return evaluation.figures(world)


def choose_precision(asked: str, world: World) -> str:
    """Return the precision that `asked` means on these devices: "auto" is bf16 where every rank's has it, else fp32."""
    if asked != "auto":
        return asked
    has = False
    if world.device.type == "cuda":
        with torch.cuda.device(world.device):
            has = torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp32" if world.any(not has)[0] else "bf16"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)
