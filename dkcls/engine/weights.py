"""Weights from files: checkpoints and exports of ours, .safetensors, state dicts of PyTorch. No code in them ever runs."""

import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dkcls.engine.checkpoint import FORMAT, BadCheckpoint, read
from dkcls.engine.errors import UserError

FACTS = ("config", "classes", "input")


class Weights(NamedTuple):
    """A state dict, and what the file says of the network: config, classes, input. None if the file is not one of ours."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any] | None


def read_weights(path: str | Path, which: str = "auto") -> Weights:
    """`which` of a checkpoint's weights: "auto" is the moving average if there is one; "ema", "model"."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path} to take weights from")
    weights = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path, which)
    if weights.facts is not None and not all(key in weights.facts for key in FACTS):
        raise UserError(
            f"{path} must say what its network is by {', '.join(FACTS)}, got {', '.join(weights.facts) or 'none'}"
        )
    return weights


def _read_safetensors(path: Path) -> Weights:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = (
                {key: json.loads(metadata[key]) for key in FACTS if key in metadata}
                if "dkcls" in metadata
                else None
            )
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is not a whole .safetensors file ({error})") from error
    return Weights(tensors, facts)


def _read_torch(path: Path, which: str) -> Weights:
    try:
        # Mapped, not read: a checkpoint of ours is read below, once, as the bytes that its hash is of.
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except Exception as error:  # of any kind, in a file that is damaged
        raise UserError(f"{path} is not a file of weights that is safe to load") from error
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return _read_checkpoint(path, which)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise UserError(f"{path} does not hold a state dict")
    return Weights(content, None)


def _read_checkpoint(path: Path, which: str) -> Weights:
    try:
        state = read(path, need_hash=False)
    except BadCheckpoint as error:
        raise UserError(str(error)) from error
    average = state.get("ema")
    if which == "ema" and average is None:
        raise UserError(
            f"{path} has no moving average of the weights; weights=model or auto would use its own"
        )
    tensors = state.get("model") if which == "model" or average is None else average
    if not isinstance(tensors, dict):
        raise UserError(f"{path} does not hold a state dict")
    return Weights(tensors, {key: state[key] for key in FACTS if key in state})
