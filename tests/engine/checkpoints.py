"""Checkpoints and image folders without training: an awake network, with the trainer's facts."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dkcls.config import Config, DataConfig, ModelConfig
from dkcls.data import create_dataset
from dkcls.engine.checkpoint import write
from dkcls.engine.task import Card
from dkcls.tasks.classification.task import network_input
from tests.models.common import awake, create, stir


def write_checkpoint(path: Path, data: DataConfig | None = None, **arguments: Any) -> Path:
    """Of mobilenetv2_nano for the embedded data, or another set's images and classes."""
    config = Config(
        model=ModelConfig(name="mobilenetv2_nano", **arguments),
        data=data or DataConfig(name="deformed_fashion", workers=0),
    )
    dataset = create_dataset(config.data, "val")
    model = stir(
        awake(create(num_classes=dataset.num_classes, in_chans=dataset.channels, **arguments))
    )
    card = Card(config, dataset.class_names, network_input(config.data, dataset))
    write(path, {**card.to_dict(), "model": model.state_dict(), "ema": None})
    return path


def write_images(
    root: Path,
    count: int,
    classes: list[str] | None = None,
    split: str = "val",
    colour: bool = False,
) -> Path:
    """Write the first `count` images of the embedded test split, or those of `classes` among them.

    Files are root/<split>/<class>/*.png.
    """
    dataset = create_dataset(DataConfig(name="deformed_fashion"), "test")
    batch = dataset.load(np.arange(count)).batch
    for number, (image, target) in enumerate(
        zip(batch.images.numpy(), batch.targets.tolist(), strict=True)
    ):
        name = dataset.class_names[target]
        folder = root / split / name
        if classes is None or name in classes:
            folder.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray(image[0])
            (picture.convert("RGB") if colour else picture).save(folder / f"{number:03d}.png")
    return root
