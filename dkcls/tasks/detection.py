"""Detection from a config."""

import logging
from typing import Any

import timm
import torch
from torch import nn

from dkcls.config import Config, DetectorConfig, ModelConfig
from dkcls.detection.detector import Detector, freeze_norms_, pyramid_levels
from dkcls.detection.task import Detection
from dkcls.engine.build import build_dataset
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.network import Input, check_name, create_network, load_, start_from
from dkcls.engine.optim import freeze_
from dkcls.engine.task import Parts
from dkcls.engine.weights import Weights, read_weights
from dkcls.models.convert import classes_and_channels
from dkcls.tasks.classification import facts

logger = logging.getLogger(__name__)


def build(config: Config, world: World) -> Parts:
    """The parts of a run that trains a detector; model.pretrained is a classifier's weights, for its backbone."""
    for key in ("data.mixup", "data.cutmix", "train.label_smoothing"):
        group, name = key.split(".")
        if getattr(getattr(config, group), name):
            raise UserError(f"{key} is for classification, and must be 0 with task=detection")
    weights = read_weights(config.model.pretrained) if config.model.pretrained is not None else None
    if weights is None and config.model.freeze:
        logger.warning(
            "model.freeze keeps weights that nobody trained: model.pretrained=FILE is not given"
        )
    config = start_from(config, weights, ("mean", "std"))
    train_set = build_dataset(config.data, "train", config.seed, training=True)
    val_set = build_dataset(config.data, "val", config.seed)
    if not hasattr(train_set, "coco"):
        raise UserError(
            f"task=detection needs data with boxes, coco or deformed_detection, got data.name={config.data.name}"
        )
    if train_set.class_names != val_set.class_names:
        raise UserError(
            f"data: {config.data.root} has other categories to train on than to validate on"
        )
    taken = detector_input(config, train_set)
    logger.info("images: %s", taken)
    model = create_detector(
        config.model, config.detector, train_set.num_classes, taken, config.seed
    )
    if weights is not None:
        load_backbone_(model.body, config, weights, taken.channels)
    if config.train.freeze_bn:
        freeze_norms_(model.body)
    freeze_(model, config.model.freeze)
    size = (taken.channels, config.detector.min_size, config.detector.min_size)
    task = Detection(val_set, world.device)
    return Parts(
        config, task, model, train_set, val_set, facts(config, train_set, taken), model.body, size
    )


def detector_input(config: Config, dataset: Any) -> Input:
    """Return what the detector takes, normalised as the config says it, or else as the data set has it."""
    mean, std = list(config.data.mean or dataset.mean), list(config.data.std or dataset.std)
    taken = Input(
        dataset.channels, config.detector.min_size, 1.0, "bilinear", mean, std
    )  # as torchvision resizes
    return taken.with_channels(dataset.channels)


def create_detector(
    model: ModelConfig, config: DetectorConfig, num_classes: int, taken: Input, seed: int = 0
) -> Detector:
    """With fresh weights."""
    name = check_name(model)
    options = {key: value for key, value in vars(config).items() if key != "levels"}
    arguments: dict[str, Any] = {
        "in_chans": taken.channels,
        "features_only": True,
        **model.arguments(),
    }
    try:
        with torch.device("meta"):  # only to be asked
            strides = timm.create_model(name, **arguments).feature_info.reduction()  # type: ignore[operator,union-attr]
        levels = config.levels if config.levels is not None else pyramid_levels(strides)
        torch.manual_seed(seed)
        body = timm.create_model(name, out_indices=tuple(levels), **arguments)
        torch.manual_seed(
            seed
        )  # networks draw more or less; what is on top of them starts the same
        return Detector(body, num_classes, taken.mean, taken.std, **options)
    except (ValueError, TypeError, RuntimeError, IndexError, AssertionError) as error:
        raise UserError(f"detector: {error}") from error


def load_backbone_(body: nn.Module, config: Config, weights: Weights, channels: int) -> None:
    """A classifier's weights; rigid ones fit any variant, as in classification."""
    assert config.model.name is not None
    num_classes, _ = classes_and_channels(config.model.name, weights.tensors)
    classifier = create_network(config.model, num_classes, channels)
    load_(classifier, weights, config.model.pretrained)
    inner = getattr(body, "model", body)  # what timm wraps to get features of
    missing = inner.load_state_dict(classifier.state_dict(), strict=False).missing_keys
    if missing:
        raise UserError(
            f"model.pretrained={config.model.pretrained} has no weights for {', '.join(missing[:3])}"
        )
