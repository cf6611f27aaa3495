"""Classification from a config."""

import logging
from dataclasses import asdict
from typing import Any

from torch import nn

from dkcls.classification import Classification
from dkcls.config import Config
from dkcls.data import ImageDataset
from dkcls.data.base import BatchDataset
from dkcls.engine.build import batch_per_rank, build_dataset
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.network import Input, create_network, load_, start_from
from dkcls.engine.optim import freeze_
from dkcls.engine.task import Parts
from dkcls.engine.weights import Weights, read_weights

logger = logging.getLogger(__name__)


def build(config: Config, world: World) -> Parts:
    """The parts of a run that trains a classifier."""
    if (config.data.mixup or config.data.cutmix) and (batch := batch_per_rank(config, world)) % 2:
        raise UserError(
            f"mixup and cutmix need an even number of images per rank and step, got {batch}"
        )
    weights = read_weights(config.model.pretrained) if config.model.pretrained is not None else None
    keys = ["interpolation", "mean", "std"]
    if config.model.name is None:
        keys.append("image_size")
    config = start_from(config, weights, keys)
    train_set = build_dataset(config.data, "train", config.seed, training=True)
    val_set = build_dataset(config.data, "val", config.seed)
    if not isinstance(train_set, ImageDataset):
        raise UserError(
            f"task=classification needs images with classes, data.name={config.data.name} is for task=detection"
        )
    model = build_model(config, weights, train_set)
    taken = network_input(config, train_set)
    logger.info("images: %s", taken)
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
    size = (val_set.channels, val_set.image_size, val_set.image_size)
    return Parts(
        config, task, model, train_set, val_set, facts(config, train_set, taken), model, size
    )


def build_model(config: Config, weights: Weights | None, dataset: ImageDataset) -> nn.Module:
    model = create_network(config.model, dataset.num_classes, dataset.channels, config.seed)
    if weights is not None:
        path = config.model.pretrained
        if fresh := load_(model, weights, path):
            logger.info("not in %s, left fresh: %s", path, ", ".join(fresh))
    freeze_(model, config.model.freeze)
    return model


def network_input(config: Config, dataset: ImageDataset) -> Input:
    """Return what the network takes in evaluation: as the config says it, or else as the data set has it."""
    data = config.data
    crop_ratio = data.crop_ratio if hasattr(dataset, "transform") else 1.0
    mean, std = list(data.mean or dataset.mean), list(data.std or dataset.std)
    taken = Input(
        dataset.channels,
        dataset.image_size,
        crop_ratio,
        data.interpolation or "bilinear",
        mean,
        std,
    )
    return taken.with_channels(dataset.channels)


def facts(config: Config, dataset: BatchDataset[Any], taken: Input) -> dict[str, Any]:
    """What somebody with nothing but a checkpoint has to know."""
    return {
        "config": config.to_dict(),
        "classes": list(dataset.class_names),
        "input": asdict(taken),
    }
