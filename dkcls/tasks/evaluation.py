"""What the evaluations of all tasks share: which data, and how a checkpoint goes through it."""

import time
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from torch import nn
from tqdm import tqdm

from dkcls.config import DataConfig, EvalConfig
from dkcls.data import create_loader
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.evaluate import evaluate
from dkcls.engine.task import Task


def data_of(
    trained: DataConfig | None, asked: DataConfig, overrides: Iterable[str], **taken: Any
) -> DataConfig:
    """Return the data that the network was trained on, or what data=NAME chose, with what the network takes.

    On top goes what the command line gives as data.KEY=VALUE, and, without data=NAME, all that is not at its default.
    """
    keys, default = {override.lstrip("+~").split("=")[0] for override in overrides}, DataConfig()
    chosen = "data" in keys
    base = asked if trained is None or chosen else trained
    names = [field.name for field in fields(DataConfig)]
    differing = (
        [] if chosen else [name for name in names if getattr(asked, name) != getattr(default, name)]
    )
    given = {
        name: getattr(asked, name) for name in names if f"data.{name}" in keys or name in differing
    }
    return replace(base, **{**taken, **given})


def evaluate_on(
    dataset: Any,
    data: DataConfig,
    task: Task,
    model: nn.Module,
    path: str,
    config: EvalConfig,
    world: World,
) -> dict[str, Any]:
    """The figures, and how fast they came; UserError if too many files are bad."""
    loader = create_loader(
        dataset, config.batch_size, training=False, rank=world.rank, world_size=world.size, workers=data.workers,
        prefetch=data.prefetch, pin_memory=world.device.type == "cuda", bad_limit=data.bad_limit,
    )  # fmt: skip
    batches = tqdm(loader, path, leave=False, disable=None if world.is_main else True)
    started = time.perf_counter()
    result = evaluate(task, model, batches, world, config.precision)
    speed = result["images"] / (time.perf_counter() - started)
    if world.any(loader.bad_files.exceeded)[0]:
        raise UserError(
            f"more than {data.bad_limit:.2%} of the images cannot be read (data.bad_limit); they are named above"
        )
    return {"checkpoint": path, "split": config.split, **result, "images_per_s": speed}
