"""A network to use, with what has to be known to use it: from a checkpoint or an export, or from weights and a name."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, resolve_data_config
from timm.models import PretrainedCfg
from torch import nn

from dkcls.config import Config, ModelConfig, from_dict
from dkcls.data.normalize import for_channels
from dkcls.engine.errors import UserError
from dkcls.engine.weights import Weights, read_weights
from dkcls.models.convert import classes_and_channels, load_weights_


@dataclass(frozen=True)
class Input:
    """What a network takes: the centre of an image whose shorter side is image_size / crop_ratio, normalised."""

    channels: int
    image_size: int
    crop_ratio: float
    interpolation: str  # of resizing: bilinear, bicubic
    mean: list[float]
    std: list[float]

    def with_channels(self, channels: int) -> "Input":
        """The same for grey images instead of colour, or the other way round."""
        mean, std = (for_channels(values, channels) for values in (self.mean, self.std))
        return replace(self, channels=channels, mean=mean, std=std)

    def __str__(self) -> str:
        size = f"{self.channels} x {self.image_size} x {self.image_size}"
        return f"{size}, crop_ratio {self.crop_ratio}, {self.interpolation}, mean {self.mean}, std {self.std}"


@dataclass(frozen=True)
class Network:
    """`run` is the config that it was trained with, as far as its file tells."""

    path: str
    model: nn.Module
    num_classes: int
    input: Input
    run: Config
    classes: list[str] | None = (
        None  # in the order of the outputs; None: weights that are not ours do not say
    )

    def class_names(self) -> list[str]:
        """ImageNet's WordNet numbers for a network of 1000 classes that nobody named, else just numbers."""
        if self.classes is not None:
            return self.classes
        return (
            ImageNetInfo().label_names()
            if self.num_classes == 1000
            else [str(i) for i in range(self.num_classes)]
        )


def load_network(
    config: ModelConfig, which: str = "auto", weights: Weights | None = None
) -> Network:
    """The network of `config.pretrained`, whole: UserError where the file and the network do not fit each other.

    `which` of a checkpoint's weights, as `read_weights` has it; `weights`: what the file holds, if it has been read.
    """
    path = config.pretrained
    if path is None:
        raise UserError("checkpoint=FILE is needed, or model.name=NAME and model.pretrained=FILE")
    if path.endswith(".onnx"):
        from dkcls.engine.onnx_network import (
            load_onnx,
        )  # here, because onnxruntime need not be installed

        return load_onnx(path)
    if weights is None:
        weights = read_weights(path, which)
    if (
        weights.facts is not None
        and (task := parse_facts(weights.facts, path)[0].task) != "classification"
    ):
        raise UserError(f"{path} must be a network for classification, got one for {task}")
    config = network_config(config, weights)
    assert config.name is not None
    taken = weights_input(config, weights)
    num_classes, channels = classes_and_channels(config.name, weights.tensors)
    taken = taken.with_channels(channels)
    model = create_network(config, num_classes, channels)
    if fresh := load_(model, weights, path):
        raise UserError(f"{path} has no weights for {', '.join(fresh)} of {config.name}")
    own = replace(config, pretrained=None, freeze=None)
    if weights.facts is not None:
        run, classes, _ = parse_facts(weights.facts, path)
        if len(classes) != num_classes:
            raise UserError(
                f"{path} names {len(classes)} classes, but its network has {num_classes}"
            )
        return Network(path, model, num_classes, taken, replace(run, model=own), classes)
    return Network(path, model, num_classes, taken, Config(model=own))


def network_config(config: ModelConfig, weights: Weights | None) -> ModelConfig:
    """With `name` null, the network that the weights are of, and what else the config says on top."""
    if config.name is not None:
        return config
    if weights is None or weights.facts is None:
        if weights is None:
            raise UserError(
                "model=NAME or model.name=NAME is needed: which network; or model.pretrained=CHECKPOINT for its own"
            )
        raise UserError(
            f"model.name=NAME is needed to know which network this is: {config.pretrained} does not say it"
        )
    trained = parse_facts(weights.facts, config.pretrained)[0].model
    given = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) is not None
    }
    return replace(trained, **{"freeze": None, **given, "kwargs": trained.kwargs | config.kwargs})


def weights_input(config: ModelConfig, weights: Weights) -> Input:
    """Return what the network of the weights takes: as their file says, or else as timm's validate.py has it by the name."""
    if weights.facts is not None:
        return parse_facts(weights.facts, config.pretrained)[2]
    try:
        cfg = timm.get_pretrained_cfg(check_name(config)) or PretrainedCfg()
    except RuntimeError as error:
        raise UserError(f"model.name: {error}") from error
    taken = resolve_data_config(pretrained_cfg=cfg.to_dict(), use_test_size=True)
    mean, std = list(taken["mean"]), list(taken["std"])
    return Input(
        len(mean), taken["input_size"][-1], taken["crop_pct"], taken["interpolation"], mean, std
    )


def start_from(config: Config, weights: Weights | None, keys: Iterable[str]) -> Config:
    """Return the config with the network of the weights, and with what they say of these keys of `data` where they are null."""
    model = network_config(config.model, weights)
    if weights is None:
        return config
    taken = weights_input(model, weights)
    said = {key: getattr(taken, key) for key in keys if getattr(config.data, key) is None}
    return replace(config, model=model, data=replace(config.data, **said))


def parse_facts(facts: dict[str, Any], path: str | None) -> tuple[Config, list[str], Input]:
    """The run's config, the names of the classes, and what the network takes, as a file of ours says them."""
    try:
        return (
            from_dict(facts["config"]),
            [str(name) for name in facts["classes"]],
            Input(**facts["input"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} does not say what its network is: {error}") from error


def check_name(config: ModelConfig) -> str:
    """The network's name, if timm has it."""
    assert config.name is not None
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), 3)
        raise UserError(
            f"model.name: there is no network {config.name!r}"
            + (f"; near it: {', '.join(near)}" if near else "")
        )
    return config.name


def create_network(
    config: ModelConfig, num_classes: int, channels: int, seed: int = 0
) -> nn.Module:
    name = check_name(config)
    torch.manual_seed(seed)
    try:
        return timm.create_model(
            name, num_classes=num_classes, in_chans=channels, **config.arguments()
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"model: {error}") from error


def load_(model: nn.Module, weights: Weights, path: str | None) -> list[str]:
    """Returns the names of a classifier of another size, left fresh."""
    try:
        return load_weights_(model, weights.tensors)
    except ValueError as error:
        raise UserError(f"model.pretrained={path}: {error}") from error
