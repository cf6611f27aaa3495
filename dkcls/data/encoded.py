"""Data sets of encoded images, one file or archive member each: read, decode, transform."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dkcls.config import AugmentConfig, DataConfig
from dkcls.data import watch
from dkcls.data.dataset import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    B,
    BadFile,
    Batch,
    Dataset,
    ImageDataset,
    Loaded,
    empty_bytes,
    root_of,
    sample_keys,
)
from dkcls.data.decode import BadImage, EncodedImage, reason
from dkcls.data.transforms import Transform, create_transform
from dkcls.errors import DataError

T = TypeVar("T")
_HOPELESS = 100  # bad files in a row


class EncodedFiles(Dataset[B]):
    """Data set of encoded images.

    Training replaces a bad file by the next good one of the set, evaluation leaves it out.
    """

    training: bool
    max_pixels: int = DataConfig.max_pixels  # of an image; one with more is bad

    @abstractmethod
    def read(self, index: int) -> bytes:
        """Return the file's bytes; raise OSError or BadImage if they cannot be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the file's path, for messages."""

    @abstractmethod
    def classes_in(self, index: int) -> list[int]:
        """Return the class of the image, or of each object in it; the first class is 0."""

    def decode(self, index: int, image: EncodedImage) -> Tensor:
        """Return the whole image, uint8 [C, H, W]; raise BadImage if something is wrong with it."""
        return image.rows()

    def attempt(self, index: int, use: Callable[[EncodedImage], T]) -> T | BadFile:
        """Return what `use` makes of the image, or what is wrong with its file."""
        watch.at(index)
        try:
            return use(EncodedImage(self.read(index), self.max_pixels))
        except (OSError, BadImage) as error:
            return BadFile(index, f"{self.name(index)}: {reason(error)}")

    def first_good(
        self, index: int, use: Callable[[int, EncodedImage], T], bad: list[BadFile]
    ) -> tuple[int, T] | None:
        """Return the index of the first good image and what `use` makes of it.

        The search begins at `index`; only in training it goes on to the images after that. In
        evaluation the result is None if the image is bad. Bad files on the way are added to `bad`.
        """
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

    @classmethod
    def create(
        cls, data: DataConfig, augment: AugmentConfig, split: str, *, seed: int, training: bool
    ) -> Self:
        """Return a split of the images below `data.root`."""
        given = with_transform(data, augment, training, cls.mean, cls.std, 224)
        made = cls(**cls.arguments(data, **given, split=split, training=training, seed=seed))
        made.max_pixels = data.max_pixels
        return made

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


def with_transform(
    data: DataConfig,
    augment: AugmentConfig,
    training: bool,
    mean: Sequence[float],
    std: Sequence[float],
    image_size: int,
) -> dict[str, Any]:
    """Return root, transform and image size, for the constructor of a set that takes them.

    `mean`, `std` and `image_size` are the set's own, for what the config leaves open.
    """
    root, image_size = root_of(data), data.image_size or image_size
    transform = create_transform(data, augment, image_size, mean, std, training)
    return {"root": root, "transform": transform, "image_size": image_size}


def empty_batch(count: int, channels: int, size: int, planar: bool) -> Tensor:
    """Return uninitialised uint8 [count, channels, size, size], in planes or channels_last."""
    flat = empty_bytes(count * channels * size * size)
    return (
        flat.view(count, channels, size, size)
        if planar
        else flat.view(count, size, size, channels).permute(0, 3, 1, 2)
    )
