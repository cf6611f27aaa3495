"""Small sets that torchvision can download, held in memory.

The set's own test part serves as val and as test.
"""

from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dkcls.config import AugmentConfig, DataConfig
from dkcls.data.dataset import DATASETS, Batch, ImageDataset, Loaded, sample_keys
from dkcls.data.encoded import empty_batch, with_transform
from dkcls.data.transforms import Transform


class Facts(NamedTuple):
    reader: str  # in torchvision.datasets
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


SETS = {
    "cifar10": Facts("CIFAR10", 32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Facts("CIFAR100", 32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "fashion_mnist": Facts("FashionMNIST", 28, (0.2860,), (0.3530,)),
}


class Pixels(NamedTuple):
    """Image that is already decoded, [C, H, W]."""

    pixels: Tensor

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[2]

    def rows(self, count: int | None = None) -> Tensor:
        return self.pixels


@DATASETS.register("fashion_mnist")
@DATASETS.register("cifar100")
@DATASETS.register("cifar10")
class TorchvisionImages(ImageDataset):
    """Images of one part of a set; `name` is a key of `SETS`."""

    def __init__(
        self,
        name: str,
        root: str | Path,
        split: str,
        transform: Transform,
        image_size: int,
        *,
        training: bool = False,
        seed: int = 0,
        download: bool = False,
    ):
        from torchvision import datasets  # here, because it takes a second

        facts = SETS[name]
        try:
            source = getattr(datasets, facts.reader)(
                str(root), train=split == "train", download=download
            )
        except (RuntimeError, OSError) as error:
            advice = "it could not be downloaded" if download else "download=true fetches it"
            raise ValueError(f"{name} is not complete in {root}, and {advice}: {error}") from error
        pixels = torch.as_tensor(source.data)  # [N, H, W] or [N, H, W, C]
        self.images = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
        self.targets = torch.as_tensor(source.targets, dtype=torch.int64)
        self.class_names, self.channels, self.mean, self.std = (
            list(source.classes),
            len(facts.mean),
            facts.mean,
            facts.std,
        )
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
        """Return a split of the set below `data.root`, downloaded if the config allows it."""
        assert data.name is not None
        facts = SETS[data.name]
        given = with_transform(data, augment, training, facts.mean, facts.std, facts.image_size)
        given |= {"name": data.name, "download": data.download}
        return cls(**cls.arguments(data, **given, split=split, training=training, seed=seed))

    def __len__(self) -> int:
        return len(self.images)

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[Batch]:
        keys = sample_keys(self.seed, epoch if self.training else 0, indices).tolist()
        index = torch.as_tensor(indices, dtype=torch.int64)
        images = empty_batch(len(index), self.channels, self.image_size, self.transform.planar)
        for slot, (image, key) in enumerate(zip(self.images[index], keys, strict=True)):
            images[slot] = self.transform(Pixels(image), key)
        return Loaded(Batch(images, self.targets[index], index), [])
