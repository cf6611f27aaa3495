"""Detectors small enough for a test, and a folder in COCO's layout."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.data.common import make_dataset

# On top of what all small runs are given: 2 epochs of 3 steps on the embedded canvases, made small.
TINY = (
    "experiment=det_quickstart", "name=tiny", "data=deformed_detection",
    "data.options.num_classes=null", "data.options.length=14", "data.image_size=64",
    "data.options.object_scale=[0.4,1.5]", "task.min_size=64", "task.max_size=64",
    "task.fpn_channels=8", "task.box_channels=16",
    "task.proposals=50", "task.score_threshold=0.0", "train.batch_size=4", "log.every=1",
)  # fmt: skip


def write_coco(root: Path, train: int = 6, val: int = 5) -> Path:
    """Write canvases of the embedded set as files in COCO's layout, half of them wider.

    Images are root/train2017/*.png and root/val2017/*.png, with their annotations.
    """
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train", train), ("val", val)):
        dataset = make_dataset(
            "deformed_detection", split=split, length=count, image_size=64, object_scale=(0.4, 1.5)
        )
        truth, folder = dataset.coco(), root / f"{split}2017"
        folder.mkdir()
        for number, (row, image) in enumerate(
            zip(truth["images"], dataset.load(np.arange(count)).batch.images, strict=True)
        ):
            picture = Image.fromarray(image[0].numpy())
            if number % 2:  # wider, to the right of all objects
                wide = Image.new("L", (80, 64))
                wide.paste(picture)
                picture, row["width"] = wide, 80
            row["file_name"] = f"{number:04d}.png"
            picture.save(folder / row["file_name"])
        (root / f"annotations/instances_{split}2017.json").write_text(json.dumps(truth))
    return root
