"""Networks to use: from a checkpoint or an export, or from a file of weights and a name.

Files are checkpoints and exports of ours, .safetensors, and state dicts of PyTorch. No code in
them ever runs.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.data import ImageNetInfo, resolve_data_config
from timm.models import PretrainedCfg, build_model_with_cfg
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from dkcls.config import Config, ModelConfig
from dkcls.engine.checkpoint import FORMAT, read
from dkcls.engine.safe_load import safe_load
from dkcls.engine.task import TASKS, Card, Input
from dkcls.errors import UserError
from dkcls.files import DamagedFile
from dkcls.models.weights import check_same, load_weights_
from dkcls.words import keywords, near

BUILD_ERRORS = (
    *(ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError),
    *(AssertionError, ArithmeticError),
)
# What timm itself takes, beside the network: files, addresses, another network around it.
TIMMS_OWN = {
    *signature(timm.create_model).parameters,
    *signature(build_model_with_cfg).parameters,
    *("pruned", "features_only", "out_indices", "feature_cls", "device", "dtype"),
}
NO_NAME = "model.name=NAME is needed: which network; or model.pretrained=CHECKPOINT for its own"


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
        task: what the network must be for; None takes any. A task derived from it will do.
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
    kind = TASKS.find(found)
    if task is not None and not issubclass(kind, TASKS[task]):
        raise UserError(f"{path} must be a network for {task}, got one for {found}")
    return kind.load(replace(model, pretrained=path), weights, path)


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
    # A RecursionError is JSON of lists in lists in lists.
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise UserError(f"{path} is not a whole .safetensors file ({error})") from error
    return Weights(tensors, None if values is None else Card.parse(values, str(path)))


def _read_torch(path: Path, which: str) -> Weights:
    try:
        # Mapped, not read: a checkpoint of ours is read below, once, as the bytes that were hashed.
        content = safe_load(path)
    except ValueError as error:
        raise UserError(f"{path} is not a file of weights that is safe to load") from error
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return _read_checkpoint(path, which)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    return Weights(_state_dict(content, path), None)


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
    return Weights(_state_dict(tensors, path), Card.parse(state, str(path)))


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    good = isinstance(content, dict)
    if not good or not all(type(k) is str and isinstance(v, Tensor) for k, v in content.items()):
        raise UserError(f"{path} does not hold a state dict")
    return content


def network_config(config: ModelConfig, weights: Weights | None) -> ModelConfig:
    """Return the config of the weights' own network if `name` is null, with the rest on top."""
    if config.name is not None:
        return config
    if weights is None:
        raise UserError(NO_NAME)
    if weights.card is None:
        raise UserError(
            "model.name=NAME is needed to know which network this is: "
            f"{config.pretrained} does not say it"
        )
    trained = weights.card.config.model
    card = weights.card
    check_fit(
        lambda: create_network(trained, len(card.classes), card.input.channels),
        weights,
        str(config.pretrained),
    )
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
    if config.name is None:
        raise UserError(NO_NAME)
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
    arguments = arguments_of(config)
    torch.manual_seed(seed)
    try:
        return timm.create_model(name, num_classes=num_classes, in_chans=channels, **arguments)
    except BUILD_ERRORS as error:
        raise UserError(f"model: {explain(error, name)}") from error


def arguments_of(config: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of the network's own; UserError for one of timm's."""
    for name in config.kwargs:
        if name in TIMMS_OWN:
            raise UserError(
                f"model.kwargs.{name} must be left out: it is not the network's, but timm's, which "
                "would read, fetch or write for it; model.pretrained=FILE starts from weights"
            )
    return config.arguments()


def check_fit(build: Callable[[], nn.Module], weights: Weights, path: str) -> None:
    """Raise UserError unless a file holds the weights of the network that it says it holds.

    `build` makes the network as the file's card has it: here without memory for its weights, and
    no further than the file's weights reach.
    """
    try:
        with torch.device("meta"), _limited(weights.tensors.values()):
            model = build()
        check_same(model, weights.tensors)
    except (ValueError, _TooLarge) as error:
        raise UserError(f"{path} does not hold the network that it says: {error}") from error


class _TooLarge(Exception):
    """A network that is being built has more weights than it may have."""


@contextmanager
def _limited(tensors: Collection[Tensor]) -> Iterator[None]:
    """Let no network be built with many more weights than these."""
    left = {"tensors": 4 * len(tensors) + 1000, "numbers": 4 * sum(t.numel() for t in tensors)}
    left["numbers"] += 2**24  # of small networks too, which are cut out of larger ones

    def count(module: nn.Module, name: str, value: Tensor | None) -> None:
        if value is not None:
            left["tensors"] -= 1
            left["numbers"] -= value.numel()
            if min(left.values()) < 0:
                raise _TooLarge("that network has many more weights than the file")

    hooks = register_module_parameter_registration_hook(count)
    buffers = register_module_buffer_registration_hook(count)
    try:
        yield
    finally:
        hooks.remove()
        buffers.remove()


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
