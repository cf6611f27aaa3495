"""Small photographs, and folders of them."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dkcls.config import AugmentConfig, DataConfig
from dkcls.data import Batch, create_dataset
from dkcls.data.loader import Loader


def photograph(seed: int, width: int = 61, height: int = 47) -> Image.Image:
    """Return a smooth image with some detail, which JPEG and a resize are made for."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (9, 11, 3), dtype=np.uint8))
    noise = generator.normal(0, 4, (height, width, 3))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "jpeg", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def make_folder(root: Path, train: int = 22, val: int = 7, classes: int = 3) -> Path:
    """Write root/train/<class>/<number>.jpg and root/val/..., and return root."""
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            folder = root / split / f"class{number % classes}"
            folder.mkdir(parents=True, exist_ok=True)
            photograph(number + 1000 * (split == "val")).save(
                folder / f"{number:03d}.jpg", quality=90
            )
    return root


def make_dataset(
    name: str,
    root: str | Path | None = None,
    split: str = "train",
    *,
    training: bool = False,
    seed: int = 0,
    **keys: Any,
) -> Any:
    """Return a data set from keys of the config, as train.py would make it.

    Keys that neither `data` nor `augment` has are options of the data set.
    """
    of_data = {key: keys.pop(key) for key in list(keys) if hasattr(DataConfig(), key)}
    augment = AugmentConfig(
        **{key: keys.pop(key) for key in list(keys) if hasattr(AugmentConfig(), key)}
    )
    config = DataConfig(name=name, root=root and str(root), options=keys, **of_data)
    return create_dataset(config, split, seed, augment=augment, training=training)


def assert_same_batches(some: list[Batch], others: list[Batch]) -> None:
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def batches_from(loader: Loader, epoch: int, position: int) -> list[Batch]:
    loader.set_state(epoch, position)
    return list(loader)
