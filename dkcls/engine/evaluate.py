"""Evaluation: each image exactly once over all ranks. The trainer's and eval.py's."""

import time
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from dkcls.config import DataConfig, EvalConfig
from dkcls.data import create_dataset, create_loader
from dkcls.engine.distributed import World, autocast
from dkcls.engine.network import Network, load
from dkcls.engine.task import TASKS, Evaluation, Task
from dkcls.errors import UserError


def evaluate(
    path: str | None, config: EvalConfig, world: World, overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the metrics of a file's network on a split, each image counted once over all ranks.

    `path` None is `config.model.pretrained`; `overrides` are the command line's, which tell what
    was asked of the data. UserError, on all ranks, if too many files are bad.
    """
    with world.together():
        network = load(path, config.model, config.weights)
        task = TASKS.find(network.config.task)
        data = data_for(network, task, config.data, overrides)
        dataset = create_dataset(data, config.split, network.config.seed)
        evaluation = task.evaluation_of(network, dataset, data, config, world.device)
    channels_last = network.config.train.channels_last
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = network.model.to(world.device, memory_format=layout)  # type: ignore[call-overload]
    loader = create_loader(
        dataset,
        config.batch_size,
        training=False,
        rank=world.rank,
        world_size=world.size,
        workers=data.workers,
        prefetch=data.prefetch,
        pin_memory=world.device.type == "cuda",
        bad_limit=data.bad_limit,
    )
    batches = tqdm(loader, network.path, leave=False, disable=None if world.is_main else True)
    started = time.perf_counter()
    metrics = measure(evaluation, model, batches, world, config.precision)
    speed = metrics["images"] / (time.perf_counter() - started)
    if world.any(loader.bad_files.exceeded)[0]:
        raise UserError(
            f"more than {data.bad_limit:.2%} of the images cannot be read (data.bad_limit); "
            "they are named above"
        )
    return {
        "checkpoint": network.path,
        "split": config.split,
        **metrics,
        "images_per_s": speed,
    }


def measure(
    evaluation: Evaluation,
    model: nn.Module,
    batches: Iterable[Any],
    world: World,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Return the metrics over all batches of all ranks, of which each may have another number."""
    was_training = model.training
    model.eval()
    with torch.inference_mode(), autocast(world.device, precision):
        for batch in batches:
            evaluation.add(model, batch)
    model.train(was_training)
    return evaluation.metrics(world)


def data_for(
    network: Network, task: type[Task], asked: DataConfig, overrides: Iterable[str] = ()
) -> DataConfig:
    """Return the data that a network was trained on, or that data=NAME chose, as it takes images.

    On top goes what the command line gives as data.KEY=VALUE, and, without data=NAME, all that is
    not at its default.
    """
    keys = {override.lstrip("+~").split("=")[0] for override in overrides}
    names = [field.name for field in fields(DataConfig)]
    if "data" in keys:
        base, differing = asked, set()
    else:
        base = asked if network.classes is None else network.config.data
        default = DataConfig()
        differing = {name for name in names if getattr(asked, name) != getattr(default, name)}
    taken = {key: getattr(network.input, key) for key in task.input_keys}
    chosen = [name for name in names if f"data.{name}" in keys or name in differing]
    return replace(base, **{**taken, **{name: getattr(asked, name) for name in chosen}})
