"""Draw images of a data set with true boxes (dashed), and the boxes that a detector finds.

    python scripts/draw_detections.py checkpoint=runs/NAME/best.pt output=detections.png
    python scripts/draw_detections.py checkpoint=[runs/A/best.pt,runs/B/best.pt] split=val

Found boxes have their class and score.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import MISSING

from dkcls import cli
from dkcls.data import create_dataset
from dkcls.engine.network import load
from dkcls.errors import UserError
from dkcls.report.plots import Shown, draw_detections


@dataclass
class Arguments:
    checkpoint: Any = MISSING  # a detector's, or several as [a,b]: a row each
    output: Path = Path("detections.png")
    split: str = "test"  # train, val, test
    images: int = 6
    first: int = 0  # index of the first
    root: str | None = None  # the data's folder, if it is not the training's
    threshold: float = 0.5  # lowest score that is shown


def main(arguments: Arguments) -> None:
    paths = (
        arguments.checkpoint if isinstance(arguments.checkpoint, list) else [arguments.checkpoint]
    )
    rows = {}
    for path in paths:
        network = load(path, task="detection")
        trained = network.config
        data = replace(trained.data, root=arguments.root or trained.data.root)
        dataset = create_dataset(data, arguments.split, trained.seed)
        indices = np.arange(arguments.first, min(arguments.first + arguments.images, len(dataset)))
        if not len(indices):
            raise UserError(
                f"first must be below the {len(dataset)} images of the split, got {arguments.first}"
            )
        batch = dataset.load(indices).batch
        with torch.inference_mode():
            found = network.model.eval()([image.float() / 255 for image in batch.images])
        rows[str(path)] = [
            Shown(*parts) for parts in zip(batch.images, batch.targets, found, strict=True)
        ]
    names = network.class_names()
    print(draw_detections(rows, names, arguments.output, arguments.threshold))


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
