"""Classification from a config."""

import logging
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from dkcls.classification import Classification
from dkcls.config import Config
from dkcls.data import ImageDataset
from dkcls.data.base import BatchDataset
from dkcls.engine.build import batch_per_rank, build_dataset
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.network import Input, create_network, load_, network_config, parse_facts
from dkcls.engine.optim import freeze_
from dkcls.engine.task import Parts
from dkcls.engine.weights import Weights, read_weights

logger = logging.getLogger(__name__)


def build(config: Config, world: World) -> Parts:
    """The parts of a run that trains a classifier."""
    if (config.data.mixup or config.data.cutmix) and (batch := batch_per_rank(config, world)) % 2:
        raise UserError(f"mixup and cutmix need an even number of images per rank and step, got {batch}")
    weights = read_weights(config.model.pretrained) if config.model.pretrained is not None else None
    config, source = start_from(config, weights)
    train_set = build_dataset(config.data, "train", config.seed, training=True)
    val_set = build_dataset(config.data, "val", config.seed)
    if not isinstance(train_set, ImageDataset):
        raise UserError(f"task=classification needs images with classes, data.name={config.data.name} is for task=detection")
    model = build_model(config, weights, train_set)
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
    size = (val_set.channels, val_set.image_size, val_set.image_size)
    return Parts(config, task, model, train_set, val_set, facts(config, train_set, taken), model, size)


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


def network_input(config: Config, dataset: ImageDataset, source: Input | None) -> Input:
    """What the network takes in evaluation; normalised as the one that it was made from, if it is from a checkpoint."""
    crop_ratio = config.data.crop_ratio if hasattr(dataset, "transform") else 1.0
    taken = Input(dataset.channels, dataset.image_size, crop_ratio, list(dataset.mean), list(dataset.std))
    if source is None:
        return taken
    source = source.with_channels(dataset.channels)
    return replace(taken, mean=source.mean, std=source.std)


def facts(config: Config, dataset: BatchDataset[Any], taken: Input) -> dict[str, Any]:
    """What somebody with nothing but a checkpoint has to know."""
    return {"config": config.to_dict(), "classes": list(dataset.class_names), "input": asdict(taken)}
