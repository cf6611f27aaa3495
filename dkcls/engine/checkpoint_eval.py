"""Figures of checkpoints: the network, the data set and its transforms are in them."""

import logging
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch
from timm.data import ImageNetInfo
from tqdm import tqdm

from dkcls.config import DataConfig, EvalConfig
from dkcls.data import create_loader
from dkcls.engine.build import build_dataset
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.evaluate import evaluate
from dkcls.engine.figures import Figures
from dkcls.engine.network import Network, load_network

logger = logging.getLogger(__name__)


def evaluate_checkpoint(path: str | None, config: EvalConfig, overrides: Iterable[str], world: World) -> dict[str, Any]:
    """The figures on the split, each image counted exactly once over all ranks.

    `path` None is config.model.pretrained; `overrides` are the command line's, which tell what was asked of the data.
    """
    with world.together():
        network = load_network(replace(config.model, pretrained=path or config.model.pretrained), config.weights)
        data = evaluation_data(network, config.data, overrides)
        dataset = build_dataset(data, config.split, network.run.seed)
        outputs = outputs_of(network, dataset.class_names)
    if network.interpolation != "bilinear" and world.is_main:
        logger.warning("timm resizes for %s by %s; here it is bilinear", network.run.model.name, network.interpolation)
    channels_last = network.run.train.channels_last
    model = network.model.to(world.device, memory_format=torch.channels_last if channels_last else torch.contiguous_format)  # type: ignore[call-overload]
    task = Figures(
        network.input.mean, network.input.std, dataset.num_classes, world.device, channels_last=channels_last,
        outputs=outputs, flip=config.flip,
    )  # fmt: skip
    loader = create_loader(
        dataset, config.batch_size, training=False, rank=world.rank, world_size=world.size, workers=data.workers,
        prefetch=data.prefetch, pin_memory=world.device.type == "cuda", bad_limit=data.bad_limit,
    )  # fmt: skip
    batches = tqdm(loader, network.path, leave=False, disable=None if world.is_main else True)
    started = time.perf_counter()
    result = evaluate(task, model, batches, world, config.precision)
    speed = result["images"] / (time.perf_counter() - started)
    if world.any(loader.bad_files.exceeded)[0]:
        raise UserError(f"more than {data.bad_limit:.2%} of the images cannot be read (data.bad_limit); they are named above")
    tables: dict[str, Any] = {name: result.pop(name) for name in ("per_class", "confusion") if name in result}
    about = {"checkpoint": network.path, "split": config.split}
    return {**about, **result, "images_per_s": speed, "classes": list(dataset.class_names), **tables}


def evaluation_data(network: Network, asked: DataConfig, overrides: Iterable[str]) -> DataConfig:
    """The data that the network was trained on, or what data=NAME chose, cut to what the network takes.

    Keys that the command line gives, data.KEY=VALUE, are as they are given.
    """
    keys = {override.lstrip("+~").split("=")[0] for override in overrides}
    base = asked if network.classes is None or "data" in keys else network.run.data
    given = {field.name: getattr(asked, field.name) for field in fields(DataConfig) if f"data.{field.name}" in keys}
    taken = {"image_size": network.input.image_size, "crop_ratio": network.input.crop_ratio}
    return replace(base, **{**taken, **given})


def outputs_of(network: Network, names: list[str]) -> list[int]:
    """The network's output for each of the data's classes, which may be some of the network's own."""
    classes = network.classes
    if classes is None:  # plain weights: ImageNet's classes, or the data's, in its order
        imagenet = ImageNetInfo().label_names()
        classes = imagenet if network.num_classes == len(imagenet) and set(names) <= set(imagenet) else names
        if len(classes) != network.num_classes:
            raise UserError(f"{network.path} is for {network.num_classes} classes, the data has {len(names)}")
    if unknown := [name for name in names if name not in set(classes)]:
        raise UserError(
            f"{network.path} has no class {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}: "
            f"its {len(classes)} classes are {', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"
        )
    place = {name: i for i, name in enumerate(classes)}
    return [place[name] for name in names]
