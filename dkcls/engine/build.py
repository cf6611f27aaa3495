"""From a config to the objects of a run."""

import logging
import math
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkcls.classification import Classification
from dkcls.config import Config, DataConfig
from dkcls.data import ImageDataset, create_dataset, create_loader
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.network import Input, create_network, load_, network_config, parse_facts
from dkcls.engine.optim import freeze_, make_optimizer, make_schedule
from dkcls.engine.trainer import Trainer
from dkcls.engine.weights import Weights, read_weights

logger = logging.getLogger(__name__)


def build_trainer(config: Config, world: World) -> Trainer:
    """UserError, on all ranks, where the config asks for what cannot be on one of them."""
    with world.together():  # before they meet in `wrap`
        config, task, model, *rest = _build(config, world)
    return Trainer(config, world, task, model, wrap(model, config, world), *rest)


def _build(config: Config, world: World) -> tuple[Any, ...]:
    """What a Trainer takes, but for the network as training calls it."""
    torch.use_deterministic_algorithms(config.train.deterministic)
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = not config.train.deterministic
    batch_size = batch_per_rank(config, world)
    weights = read_weights(config.model.pretrained) if config.model.pretrained is not None else None
    config, source = start_from(config, weights)
    train_set = build_dataset(config.data, "train", config.seed, training=True)
    val_set = build_dataset(config.data, "val", config.seed)
    common: dict[str, Any] = {
        "rank": world.rank, "world_size": world.size, "seed": config.seed, "workers": config.data.workers,
        "prefetch": config.data.prefetch, "pin_memory": world.device.type == "cuda", "bad_limit": config.data.bad_limit,
        "worker_restarts": config.data.worker_restarts,
    }  # fmt: skip
    try:
        train = create_loader(train_set, batch_size, training=True, accumulation=config.train.accumulation, **common)
        val = create_loader(val_set, config.train.eval_batch_size or batch_size, training=False, **common)
    except ValueError as error:
        raise UserError(str(error)) from error
    model = build_model(config, weights, train_set).to(world.device)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    taken = network_input(config, train_set, source)
    task = Classification(
        taken.mean,
        taken.std,
        train_set.num_classes,
        world.device,
        label_smoothing=config.train.label_smoothing,
        mixup=config.data.mixup,
        cutmix=config.data.cutmix,
        channels_last=config.train.channels_last,
    )
    optimizer = make_optimizer(model, config.optim, config.learning_rate)
    schedule = make_schedule(optimizer, *config.schedule.steps(train.steps_per_epoch))
    return config, task, model, optimizer, schedule, train, val, facts(config, train_set, taken)


def batch_per_rank(config: Config, world: World) -> int:
    """Images per rank and accumulation step."""
    pieces = world.size * config.train.accumulation
    batch, rest = divmod(config.train.batch_size, pieces)
    if rest or not batch:
        raise UserError(
            f"train.batch_size is over all ranks and accumulation steps: {config.train.batch_size} does not divide by "
            f"{world.size} x {config.train.accumulation}"
        )
    if (config.data.mixup or config.data.cutmix) and batch % 2:
        raise UserError(f"mixup and cutmix need an even number of images per rank and step, got {batch}")
    return batch


def build_dataset(config: DataConfig, split: str, seed: int, training: bool = False) -> ImageDataset:
    try:
        return create_dataset(split=split, training=training, seed=seed, **config.dataset_arguments())
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"data: {error}") from error


def start_from(config: Config, weights: Weights | None) -> tuple[Config, Input | None]:
    """With model.name=null, the network of the checkpoint, the size of its images, and what it takes."""
    if config.model.name is not None:
        return config, None
    model = network_config(config.model, weights)
    assert weights is not None
    assert weights.facts is not None
    source = parse_facts(weights.facts, model.pretrained)[2]
    data = replace(config.data, image_size=config.data.image_size or source.image_size)
    return replace(config, model=model, data=data), source


def build_model(config: Config, weights: Weights | None, dataset: ImageDataset) -> nn.Module:
    model = create_network(config.model, dataset.num_classes, dataset.channels, config.seed)
    if weights is not None:
        path = config.model.pretrained
        if fresh := load_(model, weights, path):
            logger.info("not in %s, left fresh: %s", path, ", ".join(fresh))
    freeze_(model, config.model.freeze)
    return model


def wrap(model: nn.Module, config: Config, world: World) -> nn.Module:
    """What training calls. Compiling and distributing leave the network's own names as they are."""
    wrapped = model
    if config.train.sync_bn:
        if world.device.type != "cuda":
            raise UserError("train.sync_bn=true needs CUDA: PyTorch has no synchronised batch norm on the CPU")
        wrapped = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped)
    if config.train.compile:
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    if world.size > 1:
        devices = [world.device] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(wrapped, devices, gradient_as_bucket_view=True)
    return wrapped


def network_input(config: Config, dataset: ImageDataset, source: Input | None) -> Input:
    """What the network takes in evaluation; normalised as the one that it was made from, if it is from a checkpoint."""
    crop_ratio = config.data.crop_ratio if hasattr(dataset, "transform") else 1.0
    taken = Input(dataset.channels, dataset.image_size, crop_ratio, list(dataset.mean), list(dataset.std))
    if source is None:
        return taken
    source = source.with_channels(dataset.channels)
    return replace(taken, mean=source.mean, std=source.std)


def facts(config: Config, dataset: ImageDataset, taken: Input) -> dict[str, Any]:
    """What somebody with nothing but a checkpoint has to know."""
    return {"config": config.to_dict(), "classes": list(dataset.class_names), "input": asdict(taken)}


def milestones(steps_per_epoch: int, config: Config) -> list[tuple[str, int, float]]:
    """(what, step, learning rate) along the schedule."""
    total, warmup = config.schedule.steps(steps_per_epoch)
    peak, half = config.learning_rate, (total + warmup) // 2
    at_half = peak / 2 * (1 + math.cos(math.pi * (half - warmup) / (total - warmup)))
    return [
        ("start", 0, 0.0 if warmup else peak),
        ("end of warm-up", warmup, peak),
        ("half", half, at_half),
        ("end", total, 0.0),
    ]
