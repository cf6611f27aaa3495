"""Weights from files: checkpoints of ours, .safetensors, and state dicts that PyTorch saved. Never a pickle with code in it."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dkcls.engine.checkpoint import FORMAT, BadCheckpoint, read
from dkcls.engine.errors import UserError


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint of ours, verified if its hash is there."""
    try:
        return read(Path(path), need_hash=False)
    except BadCheckpoint as error:
        raise UserError(str(error)) from error


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a file; of a checkpoint of ours the moving average, if it has one."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path} to take weights from")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a file of weights that is safe to load") from error
    if isinstance(content, dict) and content.get("format") == FORMAT:
        state = read_checkpoint(path)
        return state["ema"] or state["model"]
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} does not hold a state dict")
    return content
