"""Networks to use: from a checkpoint or an export, or from a file of weights and a name.

Files are checkpoints and exports of ours, .safetensors, and state dicts of PyTorch. No code in
them ever runs.
"""

import json
import re
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.data import ImageNetInfo, resolve_data_config
from timm.models import PretrainedCfg
from torch import Tensor, nn

from dkcls.config import Config, ModelConfig
from dkcls.engine.checkpoint import FORMAT, read
from dkcls.engine.task import TASKS, Card, Input
from dkcls.errors import UserError
from dkcls.files import DamagedFile
from dkcls.models.weights import load_weights_
from dkcls.words import keywords, near


@dataclass(frozen=True)
class Network:
    """A network with its weights, and what has to be known to use it.

    `config` is the config that it was trained with, as far as its file tells.
    """

    path: str
    model: nn.Module
    num_classes: int
    input: Input
    config: Config
    classes: list[str] | None = None  # in the order of outputs; None: the file does not say

    def class_names(self) -> list[str]:
        """Return the classes; for 1000 unnamed ones ImageNet's WordNet numbers, else numbers."""
        if self.classes is not None:
            return self.classes
        if self.num_classes == 1000:
            return ImageNetInfo().label_names()
        return [str(i) for i in range(self.num_classes)]


class Weights(NamedTuple):
    """A state dict, and the card of its file; None if the file is not one of ours."""

    tensors: dict[str, Tensor]
    card: Card | None


def load(
    path: str | None,
    model: ModelConfig | None = None,
    which: str = "auto",
    task: str | None = None,
) -> Network:
    """Return the whole network of a file: UserError where the two do not fit each other.

    Args:
        path: a checkpoint, an export (.safetensors, .onnx), or weights that `model` names.
        model: what the file does not say of its network, or what is wanted otherwise.
        which: of a checkpoint's weights, as `read_weights` has it.
        task: what the network must be for; None takes any.
    """
    model = model or ModelConfig()
    path = path or model.pretrained
    if path is None:
        raise UserError("checkpoint=FILE is needed, or model.name=NAME and model.pretrained=FILE")
    if path.endswith(".onnx"):
        from dkcls.engine.onnx import load_onnx  # here, because onnxruntime need not be installed

        return load_onnx(path)
    weights = read_weights(path, which)
    found = weights.card.config.task.name if weights.card is not None else "classification"
    if task is not None and found != task:
        raise UserError(f"{path} must be a network for {task}, got one for {found}")
    return TASKS.find(found).load(replace(model, pretrained=path), weights, path)


def read_weights(path: str | Path, which: str = "auto") -> Weights:
    """Return a file's weights.

    `which` of a checkpoint's: "auto" is the moving average if there is one; "ema", "model".
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path} to take weights from")
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path, which)


def _read_safetensors(path: Path) -> Weights:
    values: dict[str, Any] | None = None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if "dkcls" in metadata:
                values = {k: json.loads(metadata[k]) for k in Card.KEYS if k in metadata}
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole .safetensors file ({error})") from error
    return Weights(tensors, None if values is None else Card.parse(values, str(path)))


def _read_torch(path: Path, which: str) -> Weights:
    try:
        # Mapped, not read: a checkpoint of ours is read below, once, as the bytes that were hashed.
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # of any kind, in a file that is damaged
        raise UserError(f"{path} is not a file of weights that is safe to load") from error
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return _read_checkpoint(path, which)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{path} does not hold a state dict")
    return Weights(content, None)


def _read_checkpoint(path: Path, which: str) -> Weights:
    try:
        state = read(path, need_hash=False)
    except DamagedFile as error:
        raise UserError(str(error)) from error
    average = state.get("ema")
    if which == "ema" and average is None:
        raise UserError(
            f"{path} has no moving average of the weights; weights=model or auto would use its own"
        )
    tensors = state.get("model") if which == "model" or average is None else average
    if not isinstance(tensors, dict):
        raise UserError(f"{path} does not hold a state dict")
    return Weights(tensors, Card.parse(state, str(path)))


def network_config(config: ModelConfig, weights: Weights | None) -> ModelConfig:
    """Return the config of the weights' own network if `name` is null, with the rest on top."""
    if config.name is not None:
        return config
    if weights is None:
        raise UserError(
            "model.name=NAME is needed: which network; or model.pretrained=CHECKPOINT for its own"
        )
    if weights.card is None:
        raise UserError(
            "model.name=NAME is needed to know which network this is: "
            f"{config.pretrained} does not say it"
        )
    trained = weights.card.config.model
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    given = {name: value for name, value in values.items() if value is not None}
    merged = {"options": trained.options | config.options, "kwargs": trained.kwargs | config.kwargs}
    return replace(trained, **{"freeze": None, **given, **merged})


def weights_input(config: ModelConfig, weights: Weights) -> Input:
    """Return what the network of the weights takes.

    The weights' file says it, or else the network's name, as timm's validate.py has it.
    """
    if weights.card is not None:
        return weights.card.input
    try:
        cfg = timm.get_pretrained_cfg(check_name(config)) or PretrainedCfg()
    except RuntimeError as error:
        raise UserError(f"model.name: {error}") from error
    found = resolve_data_config(pretrained_cfg=cfg.to_dict(), use_test_size=True)
    mean, std = list(found["mean"]), list(found["std"])
    size, crop_ratio = found["input_size"][-1], found["crop_pct"]
    return Input(len(mean), size, crop_ratio, found["interpolation"], mean, std)


def start_from(config: Config, weights: Weights | None, keys: Iterable[str]) -> Config:
    """Return the config with the weights' network, and their input for null `keys` of `data`."""
    model = network_config(config.model, weights)
    if weights is None:
        return config
    taken = weights_input(model, weights)
    found = {key: getattr(taken, key) for key in keys if getattr(config.data, key) is None}
    return replace(config, model=model, data=replace(config.data, **found))


def check_name(config: ModelConfig) -> str:
    """Return the network's name if timm has it."""
    assert config.name is not None
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), 3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        raise UserError(f"model.name: there is no network {config.name!r}{hint}")
    return config.name


def create_network(
    config: ModelConfig, num_classes: int, channels: int, seed: int = 0
) -> nn.Module:
    """Return a network with fresh weights."""
    name = check_name(config)
    torch.manual_seed(seed)
    try:
        return timm.create_model(
            name, num_classes=num_classes, in_chans=channels, **config.arguments()
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"model: {explain(error, name)}") from error


def explain(error: Exception, name: str) -> str:
    """Return the sentence of an error in timm, with what is near to an unknown argument."""
    pattern = r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
    unknown = re.search(pattern, str(error))
    module = sys.modules[timm.models.model_entrypoint(name.split(".")[0]).__module__]
    if unknown is None or not hasattr(module, unknown[1]):
        return str(error)
    takes = keywords(getattr(module, unknown[1]))
    return f"{name} takes no argument {unknown[2]!r}{near(unknown[2], takes)}"


def load_(model: nn.Module, weights: Weights, path: str | None) -> list[str]:
    """Load weights; return the names of a classifier of another size, which is left fresh."""
    try:
        return load_weights_(model, weights.tensors)
    except ValueError as error:
        raise UserError(f"model.pretrained={path}: {error}") from error
