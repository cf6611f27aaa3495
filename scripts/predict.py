"""Predict the likeliest classes of images, with their probabilities.

    python scripts/predict.py checkpoint=runs/NAME/best.pt images=photos/
    python scripts/predict.py checkpoint=runs/NAME/best.pt images=[a.jpg,b.png] top=3 format=json
    find photos -name '*.jpg' | python scripts/predict.py checkpoint=best.pt images=- format=csv

Files that cannot be read are named on stderr; the others are still predicted, and the exit code is
1. Images are cropped and normalised as in the evaluation of the network. The network is a
checkpoint, an exported .safetensors or .onnx file, or model.name=NAME model.pretrained=FILE.
"""

import csv
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from dkcls import cli
from dkcls.config import ModelConfig, check_device, check_precision, check_weights
from dkcls.engine import distributed
from dkcls.engine.network import load
from dkcls.files import write_output
from dkcls.tasks.classification.predict import Prediction, Predictor, find_images


@dataclass
class Arguments:
    images: Any = MISSING  # a file, a folder, a list of them, or - for a list of files on stdin
    checkpoint: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    weights: str = "auto"  # auto: the moving average if there is one; ema, model
    top: int = 5
    format: str = "table"  # table, csv, json
    output: str | None = None  # a file; null: print it
    batch_size: int = 64
    workers: int = 4
    device: str = "auto"
    precision: str = "fp32"

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_device("", self.device)
        check_precision(self.precision)
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if min(self.top, self.batch_size) < 1 or self.workers < 0:
            raise ValueError(
                f"top and batch_size must be above 0, got {self.top} and {self.batch_size}"
            )


def as_table(predictions: Iterable[Prediction]) -> str:
    rows = [
        (image, [f"{name} {share:.1%}" for name, share in zip(names, shares, strict=True)])
        for image, names, shares in predictions
    ]
    wide = max((len(image) for image, _ in rows), default=0)
    columns = [max(map(len, column)) for column in zip(*(texts for _, texts in rows), strict=True)]
    lines = [
        "  ".join(
            [f"{image:<{wide}}", *(f"{t:<{w}}" for t, w in zip(texts, columns, strict=True))]
        ).rstrip()
        for image, texts in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def as_csv(predictions: Iterable[Prediction]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "probability"])
    for image, names, shares in predictions:
        writer.writerows(
            [image, rank, name, f"{share:.6f}"]
            for rank, (name, share) in enumerate(zip(names, shares, strict=True), 1)
        )
    return text.getvalue()


def as_json(predictions: Iterable[Prediction]) -> str:
    return json.dumps([prediction._asdict() for prediction in predictions], indent=2) + "\n"


FORMATS = {"table": as_table, "csv": as_csv, "json": as_json}


def main(arguments: Arguments) -> int:
    places = arguments.images if isinstance(arguments.images, list) else [arguments.images]
    if places == [None]:  # what "-" is in YAML
        places = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    paths = find_images([str(place) for place in places])
    with distributed.start(arguments.device, timeout=600) as world:
        network = load(
            arguments.checkpoint, arguments.model, arguments.weights, task="classification"
        )
        options = {
            name: getattr(arguments, name) for name in ("top", "batch_size", "workers", "precision")
        }
        predictor = Predictor(network, world.device, **options)
        text = FORMATS[arguments.format](predictor(paths))
    if arguments.output:
        write_output(arguments.output, text.encode())
    else:
        print(text, end="")
    return 1 if predictor.bad else 0


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
