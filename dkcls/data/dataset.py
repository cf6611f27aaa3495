"""Data sets: their interface to the loader, their random numbers, and their creation by name.

A data set has a length, facts about its images, and `load`, which makes a batch from indices.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sized
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dkcls.config import AugmentConfig, DataConfig
from dkcls.errors import UserError
from dkcls.registry import Registry
from dkcls.words import check_keywords, keywords

SPLITS = ("train", "val", "test")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COCO_AREAS = (32.0**2, 96.0**2)
_STEP = np.uint64(0x9E3779B97F4A7C15)


class AnyBatch(Protocol):
    """Interface of every kind of batch."""

    @property
    def targets(self) -> Sized: ...

    @property
    def indices(self) -> Tensor: ...


B = TypeVar("B", bound=AnyBatch)


class Batch(NamedTuple):
    """Images uint8 [B, C, H, W], targets int64 [B] and the images' indices int64 [B]."""

    images: Tensor
    targets: Tensor
    indices: Tensor


class DetectionBatch(NamedTuple):
    """Images uint8 [C, H, W] of any size, targets, and the images' indices int64 [B].

    A target has `boxes` float32 [n, 4], (x1, y1, x2, y2) in the image's pixels, and `labels`
    int64 [n], from 1 to num_classes.
    """

    images: list[Tensor]
    targets: list[dict[str, Tensor]]
    indices: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Pack into few tensors: each shared tensor takes a connection between processes."""
        pixels = empty_bytes(sum(image.numel() for image in self.images))
        np.concatenate(
            [np.empty(0, np.uint8), *(image.numpy().ravel() for image in self.images)],
            out=pixels.numpy(),
        )
        targets = [{key: value.numpy() for key, value in target.items()} for target in self.targets]
        return _unpacked, (
            pixels,
            [image.shape for image in self.images],
            targets,
            self.indices.numpy(),
        )


def _unpacked(
    pixels: Tensor,
    shapes: list[torch.Size],
    targets: list[dict[str, np.ndarray]],
    indices: np.ndarray,
) -> DetectionBatch:
    images = [
        part.view(shape)
        for part, shape in zip(pixels.split([s.numel() for s in shapes]), shapes, strict=True)
    ]
    tensors = [
        {key: torch.from_numpy(value) for key, value in target.items()} for target in targets
    ]
    return DetectionBatch(images, tensors, torch.from_numpy(indices))


class BadFile(NamedTuple):
    sample: int  # its index
    message: str  # "path: reason"


class Loaded(NamedTuple, Generic[B]):
    """A batch, and the files that could not be read for it."""

    batch: B
    bad: list[BadFile]


class Dataset(ABC, Generic[B]):
    """Images of one split. Everything random depends on (seed, epoch, index) alone."""

    class_names: list[str]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # Problems of the set as a whole, "path: reason" each; the loader reports them with bad files.
    notes: tuple[str, ...] = ()

    @classmethod
    def create(
        cls, data: DataConfig, augment: AugmentConfig, split: str, *, seed: int, training: bool
    ) -> Self:
        """Return a split of the set that a config names, as `create_dataset` does.

        The constructor gets what it takes of split, root, training and seed, and its options.
        """
        given = {"split": split, "training": training, "seed": seed}
        if "root" in keywords(cls):
            given["root"] = root_of(data)
        return cls(**cls.arguments(data, **given))

    @classmethod
    def arguments(cls, data: DataConfig, **given: Any) -> dict[str, Any]:
        """Return those of the given arguments that the constructor takes, and `data.options`.

        ValueError if the constructor does not take an option, or the image size.
        """
        taken = keywords(cls)
        if data.image_size is not None and "image_size" not in given:
            if "image_size" not in taken:
                raise ValueError(
                    f"data set {data.name!r} takes no image_size, got {data.image_size}; "
                    "data.image_size=null leaves it to the set"
                )
            given["image_size"] = data.image_size
        options = {name: value for name, value in data.options.items() if value is not None}
        known = {*given, "image_size"}
        check_keywords("data.options", options, cls, f"data set {data.name!r}", known)
        return {name: value for name, value in given.items() if name in taken} | options

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[B]:
        """Return the images of `indices`, int64 [B], in that order, as they are in `epoch`."""

    def groups(self) -> np.ndarray | None:
        """Return each image's group, integers [len], or None for one group.

        Images of one group fit well into one batch of training.
        """
        return None


class ImageDataset(Dataset[Batch]):
    """Images of one size, one class each."""

    image_size: int


class DetectionDataset(Dataset[DetectionBatch]):
    """Images with boxes; label k is class_names[k - 1], and label 0 is the background.

    The detector resizes and normalises the images.
    """

    # Square pixels: objects below the first are small, above the second large.
    areas: tuple[float, float] = COCO_AREAS

    @abstractmethod
    def size(self, index: int) -> tuple[int, int]:
        """Return the image's height and width in pixels."""

    @abstractmethod
    def image_id(self, index: int) -> int:
        """Return the image's id in COCO's structure."""

    @abstractmethod
    def category_id(self, label: int) -> int:
        """Return the id of the label's category in COCO's structure."""

    @abstractmethod
    def coco(self) -> dict[str, Any]:
        """Return the ground truth in COCO's structure: images, annotations and categories.

        Every call makes the structure anew.
        """


DATASETS: Registry[type[Dataset]] = Registry("data set", "dkcls.data.sets")


def register_dataset(name: str) -> Callable[[Any], Any]:
    """Return a decorator that makes a subclass of Dataset a value of data=NAME."""
    return DATASETS.register(name)


def takes_image_size(name: str | None) -> bool:
    """Return whether the images of a data set can be had in any size; True for an unknown name."""
    return str(name) not in DATASETS or "image_size" in keywords(DATASETS[str(name)])


def create_dataset(
    config: DataConfig,
    split: str,
    seed: int = 0,
    *,
    augment: AugmentConfig | None = None,
    training: bool = False,
) -> Dataset[Any]:
    """Return a split of the data set that a config names; UserError if it cannot be had.

    `training` turns on augmentation in place of evaluation's centre crop.

    A set for classification is an ImageDataset, coco and deformed_detection are a DetectionDataset.
    deformed_fashion, deformed_detection and synthetic have an augmentation of their own or none,
    and coco only `hflip`.
    """
    augment = augment or AugmentConfig()
    if config.name is None:
        raise UserError("data=NAME is needed: which images; data=deformed_fashion is embedded")
    try:
        kind = DATASETS.find(config.name)
        check_split(split)
        if issubclass(kind, DetectionDataset):
            _refuse_transforms(config, augment)
        return kind.create(config, augment, split, seed=seed, training=training)
    except (ValueError, TypeError, OSError) as error:
        raise UserError(f"data: {error}") from error


def _refuse_transforms(data: DataConfig, augment: AugmentConfig) -> None:
    """Raise ValueError for what the images of a detector do not go through."""
    given = {
        "data.interpolation": data.interpolation,
        "augment.rand_augment": augment.rand_augment,
        "augment.erase_prob": augment.erase_prob,
    }
    if unused := [key for key, value in given.items() if value]:
        raise ValueError(f"data set {data.name!r} takes no {', '.join(unused)}")


def check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    return split


def split_names(split: str) -> tuple[str, ...]:
    """Return the names to look for: a set without a test split uses its val images for it."""
    return ("test", "val") if check_split(split) == "test" else (split,)


def root_of(config: DataConfig) -> str:
    """Return the folder of the files; ValueError if the config has none."""
    if config.root is None:
        raise ValueError(
            f"data set {config.name!r} needs data.root=FOLDER, the folder that its files are in"
        )
    return config.root


def aspect_groups(sizes: np.ndarray) -> np.ndarray | None:
    """Return 0 for portrait, 1 for landscape images, [N]; None if all have one shape.

    `sizes` is int [N, 2], (height, width) in pixels.
    """
    return None if (sizes == sizes[:1]).all() else (sizes[:, 1] >= sizes[:, 0]).astype(np.int8)


def empty_bytes(count: int) -> Tensor:
    """Return uninitialised uint8 [count]; in a worker it is in shared memory.

    Shared memory is sent to the main process without a copy.
    """
    if torch.utils.data.get_worker_info() is None:
        return torch.empty(count, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(count))


# Random numbers of each sample, for a whole batch at once. The hash is that of splitmix64.


def sample_keys(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """Return one key per index, uint64 [B], a function of (seed, epoch, index) alone."""
    key = np.zeros(1, np.uint64)
    for number in (np.array([seed]), np.array([epoch]), np.asarray(indices)):
        key = _mix(key + _STEP + number.astype(np.uint64) * _STEP)
    return key


def bits(keys: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return the draws number first, first + 1, ... of each key, uint64 [B, count]."""
    return _mix(keys[:, None] + np.arange(first + 1, first + count + 1, dtype=np.uint64) * _STEP)


def uniforms(keys: np.ndarray, first: int, count: int) -> np.ndarray:
    """Return draws in [0, 1), float64 [B, count]."""
    return (bits(keys, first, count) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Map 64-bit integers one to one, so that neighbours have nothing in common."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
