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

from dkcls.analysis.detections import Shown, draw_detections
from dkcls.engine import cli
from dkcls.engine.build import build_dataset
from dkcls.engine.weights import read_weights
from dkcls.tasks.detection_eval import load_detector


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
        model, classes, run = load_detector(path, read_weights(path))
        data = replace(run.data, root=arguments.root or run.data.root)
        dataset = build_dataset(data, arguments.split, run.seed)
        indices = np.arange(arguments.first, min(arguments.first + arguments.images, len(dataset)))
        if not len(indices):
            raise cli.UserError(
                f"first must be below the {len(dataset)} images of the split, got {arguments.first}"
            )
        batch = dataset.load(indices).batch
        with torch.inference_mode():
            found = model.eval()([image.float() / 255 for image in batch.images])
        rows[str(path)] = [
            Shown(*parts) for parts in zip(batch.images, batch.targets, found, strict=True)
        ]
    print(draw_detections(rows, classes, arguments.output, arguments.threshold))


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
