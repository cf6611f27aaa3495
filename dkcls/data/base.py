"""What a data set is, to the loader: a length, facts about its images, and `load`, which makes a batch from indices."""

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

SPLITS = ("train", "val", "test")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class AnyBatch(Protocol):
    """What every kind of batch has."""

    @property
    def targets(self) -> Sized: ...

    @property
    def indices(self) -> Tensor: ...


B = TypeVar("B", bound=AnyBatch)


class Batch(NamedTuple):
    """Images uint8 [B, C, H, W], targets int64 [B] and the indices int64 [B] of the images in their data set."""

    images: Tensor
    targets: Tensor
    indices: Tensor


class DataError(RuntimeError):
    """The data cannot be read on: one sentence, for the person who started the run."""


class BadFile(NamedTuple):
    sample: int  # its index
    message: str  # "path: reason"


class Loaded(NamedTuple, Generic[B]):
    """A batch, and the files that could not be read for it."""

    batch: B
    bad: list[BadFile]


class BatchDataset(ABC, Generic[B]):
    """Images of one split. Everything random in them is a function of (seed, epoch, index) alone."""

    class_names: list[str]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[
        str, ...
    ] = ()  # what is wrong with the set as a whole, "path: reason"; the loader reports it with bad files

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[B]:
        """The images of `indices`, int64 [B], as they are in that epoch, in that order."""

    def groups(self) -> np.ndarray | None:
        """Integers [len]: images with the same one fit well into one batch of training. None: all do."""
        return None


class ImageDataset(BatchDataset[Batch]):
    """Images of one size, one class each."""

    image_size: int


def check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return split


def empty_bytes(count: int) -> Tensor:
    """Uninitialised uint8 [count]; in a worker in shared memory, which is sent without a copy."""
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(count, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count))


def split_names(split: str) -> tuple[str, ...]:
    """Where to look for the split: a set without a test split of its own has its val images for it."""
    return ("test", "val") if check_split(split) == "test" else (split,)
