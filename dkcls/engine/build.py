"""From a config to the objects of a run."""

import logging
import math
from difflib import get_close_matches
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dkcls.classification import Classification
from dkcls.config import Config, DataConfig, ModelConfig
from dkcls.data import ImageDataset, create_dataset, create_loader
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.optim import make_optimizer, make_schedule
from dkcls.engine.trainer import Trainer
from dkcls.engine.weights import read_weights
from dkcls.models import load_rigid_

logger = logging.getLogger(__name__)


def build_trainer(config: Config, world: World) -> Trainer:
    """UserError where the config asks for what cannot be."""
    torch.use_deterministic_algorithms(config.train.deterministic)
    if world.device.type == "cuda":
        torch.backends.cudnn.benchmark = not config.train.deterministic
    batch_size = batch_per_rank(config, world)
    train_set = build_dataset(config.data, "train", config.seed, training=True)
    val_set = build_dataset(config.data, "val", config.seed)
    common: dict[str, Any] = {
        "rank": world.rank, "world_size": world.size, "seed": config.seed, "workers": config.data.workers,
        "prefetch": config.data.prefetch, "pin_memory": world.device.type == "cuda", "bad_limit": config.data.bad_limit,
    }  # fmt: skip
    try:
        train = create_loader(train_set, batch_size, training=True, accumulation=config.train.accumulation, **common)
        val = create_loader(val_set, config.train.eval_batch_size or batch_size, training=False, **common)
    except ValueError as error:
        raise UserError(str(error)) from error
    model = build_model(config.model, train_set.num_classes, train_set.channels, config.seed).to(world.device)
    if config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    task = Classification(
        train_set.mean,
        train_set.std,
        train_set.num_classes,
        world.device,
        label_smoothing=config.train.label_smoothing,
        mixup=config.data.mixup,
        cutmix=config.data.cutmix,
        channels_last=config.train.channels_last,
    )
    optimizer = make_optimizer(model, config.optim, config.learning_rate)
    warmup = round(config.schedule.warmup_epochs * train.steps_per_epoch)
    schedule = make_schedule(optimizer, config.schedule.epochs * train.steps_per_epoch, warmup)
    wrapped = wrap(model, config, world)
    return Trainer(config, world, task, model, wrapped, optimizer, schedule, train, val, facts(config, train_set))


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


def build_model(config: ModelConfig, num_classes: int, channels: int, seed: int) -> nn.Module:
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), 3)
        raise UserError(f"model.name: there is no network {config.name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    torch.manual_seed(seed)
    try:
        model = timm.create_model(config.name, num_classes=num_classes, in_chans=channels, **config.arguments())
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error
    if config.pretrained is not None:
        try:
            fresh = load_weights_(model, read_weights(config.pretrained))
        except ValueError as error:
            raise UserError(f"model.pretrained={config.pretrained}: {error}") from error
        if fresh:
            logger.info("not in %s, left fresh: %s", config.pretrained, ", ".join(fresh))
    return model


def load_weights_(model: nn.Module, state: dict[str, Tensor]) -> list[str]:
    """The same network's weights, or those of its rigid form. Returns the names of a classifier of another size, left fresh."""
    own = model.state_dict()
    if own.keys() != state.keys():
        return load_rigid_(model, state)
    head = {f"{name}.{kind}" for name, m in model.named_modules() if m is model.get_classifier() for kind in ("weight", "bias")}  # type: ignore[operator]
    fresh = [name for name, value in state.items() if value.shape != own[name].shape]
    if other := [name for name in fresh if name not in head]:
        raise ValueError(f"{other[0]} must be {list(own[other[0]].shape)}, got {list(state[other[0]].shape)}")
    model.load_state_dict({name: value for name, value in state.items() if name not in fresh}, strict=False)
    return fresh


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


def facts(config: Config, dataset: ImageDataset) -> dict[str, Any]:
    """What somebody with nothing but a checkpoint has to know."""
    return {
        "config": config.to_dict(),
        "classes": list(dataset.class_names),
        "input": {
            "channels": dataset.channels,
            "image_size": dataset.image_size,
            "crop_ratio": config.data.crop_ratio,
            "mean": list(dataset.mean),
            "std": list(dataset.std),
        },
    }


def milestones(steps_per_epoch: int, config: Config) -> list[tuple[str, int, float]]:
    """(what, step, learning rate) along the schedule."""
    total, warmup = steps_per_epoch * config.schedule.epochs, round(config.schedule.warmup_epochs * steps_per_epoch)
    peak, half = config.learning_rate, (total + warmup) // 2
    at_half = peak / 2 * (1 + math.cos(math.pi * (half - warmup) / (total - warmup)))
    return [
        ("start", 0, 0.0 if warmup else peak),
        ("end of warm-up", warmup, peak),
        ("half", half, at_half),
        ("end", total, 0.0),
    ]
