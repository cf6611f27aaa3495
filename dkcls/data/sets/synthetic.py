"""Images that cost nothing, for benchmarks of everything but the data."""

import numpy as np
import torch

from dkcls.data.dataset import DATASETS, IMAGENET_MEAN, IMAGENET_STD, Batch, ImageDataset, Loaded

_POOL = 16


@DATASETS.register("synthetic")
class Synthetic(ImageDataset):
    """Pool of 16 images of noise, repeated.

    The image tells the class, so that a network can learn it. All splits are the same.
    """

    mean, std = IMAGENET_MEAN, IMAGENET_STD
    channels = 3

    def __init__(
        self,
        *,
        image_size: int = 224,
        num_classes: int = 1000,
        length: int = 1_281_167,
        seed: int = 0,
    ):
        if min(image_size, num_classes, length) < 1:
            raise ValueError(
                "image_size, num_classes and length must be positive, "
                f"got {image_size}, {num_classes} and {length}"
            )
        self.image_size, self.length = image_size, length
        self.class_names = [f"class {i}" for i in range(num_classes)]
        generator = torch.Generator().manual_seed(seed)
        pool = torch.randint(
            256, (_POOL, 3, image_size, image_size), generator=generator, dtype=torch.uint8
        )
        self.pool = pool.contiguous(memory_format=torch.channels_last)

    def __len__(self) -> int:
        return self.length

    def load(self, indices: np.ndarray, epoch: int = 0) -> Loaded[Batch]:
        index = torch.as_tensor(indices, dtype=torch.int64)
        member = index % _POOL
        return Loaded(Batch(self.pool[member], member % self.num_classes, index), [])
