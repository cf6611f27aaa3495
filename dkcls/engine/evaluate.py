"""Evaluation: each image exactly once over all ranks. The trainer's and eval.py's."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from dkcls.config import DataConfig, EvalConfig
from dkcls.config.convert import merged
from dkcls.data import create_dataset, create_loader, takes_image_size
from dkcls.engine import distributed
from dkcls.engine.distributed import World, autocast
from dkcls.engine.heartbeat import PATIENCE
from dkcls.engine.network import Network, load
from dkcls.engine.task import TASKS, Evaluation, Task
from dkcls.errors import UserError


def evaluate(
    path: str | None = None, config: EvalConfig | None = None, world: World | None = None
) -> dict[str, Any]:
    """Return the metrics of a file's network on a split, each image counted once over all ranks.

    `path` None is `config.checkpoint` or `config.model.pretrained`; `world` None starts one.
    UserError, on all ranks, if too many files are bad.
    """
    config = config or EvalConfig()
    path = path or config.checkpoint
    if world is None:
        with distributed.start(config.device, config.timeout) as own_world:
            return evaluate(path, config, own_world)
    with world.together():
        network = load(path, config.model, config.weights)
        task = TASKS.find(network.config.task.name)
        data = data_for(network, task, config.data)
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
        patience=PATIENCE * config.timeout,
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


def data_for(network: Network, task: type[Task], asked: Mapping[str, Any]) -> DataConfig:
    """Return the data that a network was trained on, as it takes images, with what is asked on top.

    If a name is asked for, the data set is another one, of which the run's config says nothing.
    """
    base = DataConfig() if "name" in asked else network.config.data
    taken = {key: getattr(network.input, key) for key in task.input_keys}
    if not takes_image_size(asked.get("name", base.name)):
        taken.pop("image_size", None)
    try:
        return merged(replace(base, **taken), asked)
    except ValueError as error:
        raise UserError(f"data: {error}") from error
