"""Loading what torch.save wrote, from anybody: numbers, words and tensors, no larger than its file.

`weights_only=True` keeps code in a file from running. But it inflates what is compressed, makes
tensors of any size out of one number, and calls a few constructors with what the file says.
"""

import io
import math
import pickletools
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

DEPTH = 32  # of lists and dictionaries in one another
THINGS = 5_000_000  # numbers, words, tensors, lists and dictionaries of a file
PICKLES = 5  # at the beginning of a file in the format before PyTorch 1.6
# What state dicts are made of; all storages' names end in Storage.
CALLED = {
    "collections OrderedDict",
    "torch Size",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
}


def safe_load(source: Path | bytes) -> Any:
    """Return a file's content as plain dictionaries, lists, tuples, numbers, words and tensors.

    A file that is given by its path is mapped, not read. ValueError for anything else.
    """
    file = source.open("rb") if isinstance(source, Path) else io.BytesIO(source)
    with file:
        size = file.seek(0, io.SEEK_END)
        try:
            is_zip = _check_parts(file, size)
            mapped = is_zip and isinstance(source, Path)
            place: Any = source if isinstance(source, Path) else io.BytesIO(source)
            content = torch.load(place, map_location="cpu", weights_only=True, mmap=mapped)
            return _Plain(size).plain(content, DEPTH)
        except Exception as error:  # of any kind, in a file that is damaged
            raise ValueError(str(error)) from error


def _check_parts(file: BinaryIO, size: int) -> bool:
    """Look at a file's parts before PyTorch does; return whether it is a zip archive."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        for _ in range(PICKLES):
            _check_pickle(file)
        return False
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if sum(part.file_size for part in parts) > size:
            raise ValueError("its parts are larger than the file")
        for part in parts:
            if part.filename.endswith(".pkl"):
                with archive.open(part) as pickle:
                    _check_pickle(pickle)
    return True


def _check_pickle(file: Any) -> None:
    for opcode, argument, _ in pickletools.genops(file):
        named = opcode.name in ("STACK_GLOBAL", "INST") or opcode.name.startswith("EXT")
        if opcode.name == "GLOBAL":
            named = argument not in CALLED and not _is_storage(str(argument))
        if named:
            raise ValueError(f"it names {argument}, of which no weights are made")


def _is_storage(name: str) -> bool:
    module, _, kind = name.partition(" ")
    return module in ("torch", "torch.storage") and kind.endswith("Storage")


class _Plain:
    """A walk over a content, whose tensors must not be larger than the file of `size` bytes."""

    def __init__(self, size: int):
        self.things = THINGS
        self.bytes = size

    def plain(self, value: Any, depth: int) -> Any:
        self.things -= 1
        if self.things < 0 or depth < 0:
            raise ValueError("it has more in it than any weights")
        kind = type(value)
        if kind in (dict, OrderedDict):
            if not all(type(key) in (str, int) for key in value):
                raise ValueError("its dictionaries must have words or whole numbers as keys")
            return {key: self.plain(each, depth - 1) for key, each in value.items()}
        if kind is list:
            return [self.plain(each, depth - 1) for each in value]
        if kind in (tuple, torch.Size):
            return tuple(self.plain(each, depth - 1) for each in value)
        if kind in (Tensor, nn.Parameter):
            return self._tensor(value.detach())
        if kind is int and not -(2**63) <= value < 2**63:
            raise ValueError("a whole number in it has more than 64 bits")
        if value is None or kind in (bool, int, float, str):
            return value
        raise ValueError(f"a {kind.__name__} is in it")

    def _tensor(self, tensor: Tensor) -> Tensor:
        good = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not good or tensor.is_quantized or tensor.is_nested or tensor.is_complex():
            raise ValueError("a tensor in it is not of plain numbers")
        self.bytes -= math.prod(tensor.shape) * tensor.element_size()
        if self.bytes < 0:
            raise ValueError("its tensors are larger than the file")
        return tensor
