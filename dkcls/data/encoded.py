"""Data sets of encoded images, one file or archive member each: read, decode, transform, and what happens to bad ones."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dkcls.data.base import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    B,
    BadFile,
    Batch,
    BatchDataset,
    DataError,
    ImageDataset,
    Loaded,
    empty_bytes,
)
from dkcls.data.decode import BadImage, EncodedImage
from dkcls.data.draws import sample_keys
from dkcls.data.transforms import Transform

T = TypeVar("T")
_HOPELESS = 100  # bad files in a row


class EncodedFiles(BatchDataset[B]):
    """In training a bad file is replaced by the next good one of the set, in evaluation it is left out."""

    training: bool

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The file's bytes; OSError if they cannot be had."""

    @abstractmethod
    def name(self, index: int) -> str:
        """The file's path, for people."""

    @abstractmethod
    def classes_in(self, index: int) -> list[int]:
        """Of the image, or of each object in it; the first is 0."""

    def decode(self, index: int, image: EncodedImage) -> Tensor:
        """The whole image, uint8 [C, H, W]; BadImage if it is not what it should be."""
        return image.rows()

    def attempt(self, index: int, use: Callable[[EncodedImage], T]) -> T | BadFile:
        """What `use` makes of the image, or what is wrong with its file."""
        try:
            return use(EncodedImage(self.read(index)))
        except (OSError, BadImage) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return BadFile(index, f"{self.name(index)}: {reason}")

    def first_good(
        self, index: int, use: Callable[[int, EncodedImage], T], bad: list[BadFile]
    ) -> tuple[int, T] | None:
        """What `use` makes of the image at `index`, or in training at the first after it that can be read, and where that is;
        the bad ones met are added to `bad`."""
        attempts = min(_HOPELESS, len(self)) if self.training else 1
        for candidate in ((index + step) % len(self) for step in range(attempts)):
            found = self.attempt(candidate, partial(use, candidate))
            if not isinstance(found, BadFile):
                return candidate, found
            bad.append(found)
        if self.training:
            raise DataError(
                f"{attempts} files in a row cannot be read, the last is {bad[-1].message}"
            )
        return None


class EncodedImages(EncodedFiles[Batch], ImageDataset):
    channels, mean, std = 3, IMAGENET_MEAN, IMAGENET_STD

    def __init__(self, transform: Transform, image_size: int, *, training: bool, seed: int):
        self.transform, self.image_size, self.training, self.seed = (
            transform,
            image_size,
            training,
            seed,
        )

    @abstractmethod
    def target(self, index: int) -> int: ...

    def classes_in(self, index: int) -> list[int]:
        return [self.target(index)]

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[Batch]:
        keys = sample_keys(self.seed, epoch if self.training else 0, indices).tolist()
        images = empty_batch(len(indices), self.channels, self.image_size, self.transform.planar)
        kept: list[int] = []
        bad: list[BadFile] = []
        for index, key in zip(np.asarray(indices).tolist(), keys, strict=True):

            def use(_: int, image: EncodedImage, key: int = key) -> Tensor:
                return self.transform(image, key)

            found = self.first_good(index, use, bad)
            if found is not None:
                images[len(kept)] = found[1]
                kept.append(found[0])
        targets = torch.tensor([self.target(index) for index in kept], dtype=torch.int64)
        return Loaded(
            Batch(images[: len(kept)], targets, torch.tensor(kept, dtype=torch.int64)), bad
        )


def empty_batch(count: int, channels: int, size: int, planar: bool) -> Tensor:
    """Uninitialised uint8 [count, channels, size, size] in planes or channels_last."""
    flat = empty_bytes(count * channels * size * size)
    return (
        flat.view(count, channels, size, size)
        if planar
        else flat.view(count, size, size, channels).permute(0, 3, 1, 2)
    )
