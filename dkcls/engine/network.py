"""A network to use, with what has to be known to use it: from a checkpoint or an export, or from weights and a name."""

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, resolve_data_config
from torch import nn

from dkcls.config import Config, ModelConfig, from_dict
from dkcls.engine.errors import UserError
from dkcls.engine.weights import Weights, read_weights
from dkcls.models.convert import classes_and_channels, load_weights_


@dataclass(frozen=True)
class Input:
    """What a network takes: the centre of an image whose shorter side is image_size / crop_ratio, normalised."""

    channels: int
    image_size: int
    crop_ratio: float
    mean: list[float]
    std: list[float]

    def with_channels(self, channels: int) -> "Input":
        """The same for grey images instead of colour, or the other way round."""
        mean, std = ([sum(v) / len(v)] * channels if len(v) != channels else v for v in (self.mean, self.std))
        return replace(self, channels=channels, mean=mean, std=std)


@dataclass(frozen=True)
class Network:
    """`run` is the config that it was trained with, as far as its file tells."""

    path: str
    model: nn.Module
    num_classes: int
    input: Input
    run: Config
    classes: list[str] | None = None  # in the order of the outputs; None: weights that are not ours do not say
    interpolation: str = "bilinear"  # in which its images were resized

    def class_names(self) -> list[str]:
        """ImageNet's WordNet numbers for a network of 1000 classes that nobody named, else just numbers."""
        if self.classes is not None:
            return self.classes
        return ImageNetInfo().label_names() if self.num_classes == 1000 else [str(i) for i in range(self.num_classes)]


def load_network(config: ModelConfig, which: str = "auto", weights: Weights | None = None) -> Network:
    """The network of `config.pretrained`, whole: UserError where the file and the network do not fit each other.

    `which` of a checkpoint's weights, as `read_weights` has it; `weights`: what the file holds, if it has been read.
    """
    path = config.pretrained
    if path is None:
        raise UserError("checkpoint=FILE is needed, or model.name=NAME and model.pretrained=FILE")
    if path.endswith(".onnx"):
        from dkcls.engine.onnx_network import load_onnx  # here, because onnxruntime need not be installed

        return load_onnx(path)
    if weights is None:
        weights = read_weights(path, which)
    if weights.facts is not None and (task := parse_facts(weights.facts, path)[0].task) != "classification":
        raise UserError(f"{path} must be a network for classification, got one for {task}")
    config = network_config(config, weights)
    assert config.name is not None
    num_classes, channels = classes_and_channels(config.name, weights.tensors)
    model = create_network(config, num_classes, channels)
    if fresh := load_(model, weights, path):
        raise UserError(f"{path} has no weights for {', '.join(fresh)} of {config.name}")
    own = replace(config, pretrained=None, freeze=None)
    if weights.facts is not None:
        run, classes, taken = parse_facts(weights.facts, path)
        if len(classes) != num_classes:
            raise UserError(f"{path} names {len(classes)} classes, but its network has {num_classes}")
        return Network(path, model, num_classes, taken.with_channels(channels), replace(run, model=own), classes)
    # As timm's validate.py: the network knows what it was trained with.
    cfg = resolve_data_config(model=model, use_test_size=True)
    size, mean, std = cfg["input_size"][-1], list(cfg["mean"]), list(cfg["std"])
    taken = Input(len(mean), size, cfg["crop_pct"], mean, std).with_channels(channels)
    return Network(path, model, num_classes, taken, Config(model=own), interpolation=cfg["interpolation"])


def network_config(config: ModelConfig, weights: Weights | None) -> ModelConfig:
    """With `name` null, the network that the weights are of, and what else the config says on top."""
    if config.name is not None:
        return config
    if weights is None or weights.facts is None:
        if weights is None:
            raise UserError(
                "model=NAME or model.name=NAME is needed: which network; or model.pretrained=CHECKPOINT for its own"
            )
        raise UserError(f"model.name=NAME is needed to know which network this is: {config.pretrained} does not say it")
    trained = parse_facts(weights.facts, config.pretrained)[0].model
    given = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) is not None}
    return replace(trained, **{"freeze": None, **given, "kwargs": trained.kwargs | config.kwargs})


def parse_facts(facts: dict[str, Any], path: str | None) -> tuple[Config, list[str], Input]:
    """The run's config, the names of the classes, and what the network takes, as a file of ours says them."""
    try:
        return from_dict(facts["config"]), [str(name) for name in facts["classes"]], Input(**facts["input"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} does not say what its network is: {error}") from error


def check_name(config: ModelConfig) -> str:
    """The network's name, if timm has it."""
    assert config.name is not None
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), 3)
        raise UserError(f"model.name: there is no network {config.name!r}" + (f"; near it: {', '.join(near)}" if near else ""))
    return config.name


def create_network(config: ModelConfig, num_classes: int, channels: int, seed: int = 0) -> nn.Module:
    name = check_name(config)
    torch.manual_seed(seed)
    try:
        return timm.create_model(name, num_classes=num_classes, in_chans=channels, **config.arguments())
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"model: {error}") from error


def load_(model: nn.Module, weights: Weights, path: str | None) -> list[str]:
    """Returns the names of a classifier of another size, left fresh."""
    try:
        return load_weights_(model, weights.tensors)
    except ValueError as error:
        raise UserError(f"model.pretrained={path}: {error}") from error
