"""Figures of detectors: the network and the data set are in their checkpoints."""

from collections.abc import Iterable
from typing import Any

import torch

from dkcls.config import Config, EvalConfig
from dkcls.data.normalize import for_channels
from dkcls.detection.detector import Detector
from dkcls.detection.task import Detection
from dkcls.engine.build import build_dataset
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.network import parse_facts
from dkcls.engine.weights import Weights
from dkcls.tasks.detection import create_detector
from dkcls.tasks.evaluation import data_of, evaluate_on


def evaluate_checkpoint(
    config: EvalConfig, weights: Weights | None, overrides: Iterable[str], world: World
) -> dict[str, Any]:
    """The figures of config.model.pretrained, whose content `weights` are.

    `overrides` are the command line's, which tell what was asked of the data.
    """
    path = config.model.pretrained
    assert path is not None
    assert weights is not None
    with world.together():
        if config.flip or config.per_class or config.confusion:
            raise UserError(
                f"flip, per_class and confusion are for classification, {path} is a detector"
            )
        model, classes, run = load_detector(path, weights)
        images = model.transform
        data = data_of(
            run.data, config.data, overrides, mean=images.image_mean, std=images.image_std
        )
        channels = len(images.image_mean)
        images.image_mean = for_channels(data.mean or [], channels)
        images.image_std = for_channels(data.std or [], channels)
        dataset = build_dataset(data, config.split, run.seed)
        if list(dataset.class_names) != classes:
            raise UserError(
                f"{path} finds {', '.join(classes)}; the data has {', '.join(dataset.class_names)}"
            )
    model = model.to(world.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return evaluate_on(dataset, data, Detection(dataset, world.device), model, path, config, world)


def load_detector(path: str, weights: Weights) -> tuple[Detector, list[str], Config]:
    """With the names of its classes and the config that it was trained with."""
    if weights.facts is None:
        raise UserError(f"{path} does not say what its network is")
    run, classes, taken = parse_facts(weights.facts, path)
    if run.task != "detection":
        raise UserError(f"{path} must be a detector, got a network for {run.task}")
    model = create_detector(run.model, run.detector, len(classes), taken)
    try:
        model.load_state_dict(weights.tensors)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit its own network: {error}") from error
    return model, classes, run
