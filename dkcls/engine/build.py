"""From a config, and what a task makes of it, to the objects of a run."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkcls.config import Config, DataConfig
from dkcls.data import Loader, create_dataset, create_loader
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.optim import make_optimizer, make_schedule
from dkcls.engine.task import Builder, Parts
from dkcls.engine.trainer import Trainer


def build_trainer(config: Config, world: World, build: Builder) -> Trainer:
    """UserError, on all ranks, where the config asks for what cannot be on one of them."""
    with world.together():  # before they meet in `wrap`
        torch.use_deterministic_algorithms(config.train.deterministic)
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = not config.train.deterministic
        batch_size = batch_per_rank(config, world)
        parts = build(config, world)
        config, model = parts.config, parts.model.to(world.device)
        loaders = build_loaders(parts, batch_size, world)
        if config.train.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = make_optimizer(model, config.optim, config.learning_rate)
        schedule = make_schedule(optimizer, config.schedule, loaders[0].steps_per_epoch)
    return Trainer(parts, world, wrap(model, config, world), optimizer, schedule, *loaders)


def build_loaders(parts: Parts, batch_size: int, world: World) -> tuple[Loader, Loader]:
    config = parts.config
    common: dict[str, Any] = {
        "rank": world.rank, "world_size": world.size, "seed": config.seed, "workers": config.data.workers,
        "prefetch": config.data.prefetch, "pin_memory": world.device.type == "cuda", "bad_limit": config.data.bad_limit,
        "worker_restarts": config.data.worker_restarts,
    }  # fmt: skip
    try:
        train = create_loader(
            parts.train_set,
            batch_size,
            training=True,
            accumulation=config.train.accumulation,
            **common,
        )
        val = create_loader(
            parts.val_set, config.train.eval_batch_size or batch_size, training=False, **common
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return train, val


def batch_per_rank(config: Config, world: World) -> int:
    """Images per rank and accumulation step."""
    pieces = world.size * config.train.accumulation
    batch, rest = divmod(config.train.batch_size, pieces)
    if rest or not batch:
        raise UserError(
            f"train.batch_size is over all ranks and accumulation steps: {config.train.batch_size} does not divide by "
            f"{world.size} x {config.train.accumulation}"
        )
    return batch


def build_dataset(config: DataConfig, split: str, seed: int, training: bool = False) -> Any:
    if config.name is None:
        raise UserError(
            "data=NAME or data.name=NAME is needed: which images; data=deformed_fashion is embedded"
        )
    try:
        return create_dataset(
            split=split, training=training, seed=seed, **config.dataset_arguments()
        )
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"data: {error}") from error


def wrap(model: nn.Module, config: Config, world: World) -> nn.Module:
    """What training calls. Compiling and distributing leave the network's own names as they are."""
    wrapped = model
    if config.train.sync_bn:
        if world.device.type != "cuda":
            raise UserError(
                "train.sync_bn=true needs CUDA: PyTorch has no synchronised batch norm on the CPU"
            )
        wrapped = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped)
    if config.train.compile:
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    if world.size > 1:
        devices = [world.device] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(wrapped, devices, gradient_as_bucket_view=True)
    return wrapped


def milestones(steps_per_epoch: int, config: Config) -> list[tuple[str, int, float]]:
    """(what, step, learning rate) along the schedule."""
    total, warmup = config.schedule.steps(steps_per_epoch)
    peak, half, drops = (
        config.learning_rate,
        (total + warmup) // 2,
        config.schedule.drops(steps_per_epoch),
    )
    at_half = peak / 2 * (1 + math.cos(math.pi * (half - warmup) / (total - warmup)))
    after = [("half", half, at_half)] if drops is None else []
    after += [
        ("drop", step, peak * config.schedule.gamma ** (i + 1))
        for i, step in enumerate(drops or [])
    ]
    end = 0.0 if drops is None else peak * config.schedule.gamma ** len(drops)
    return [
        ("start", 0, 0.0 if warmup else peak),
        ("end of warm-up", warmup, peak),
        *after,
        ("end", total, end),
    ]
