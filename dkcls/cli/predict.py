"""Predict the likeliest classes of images, with their probabilities; or draw what a detector finds.

  dkcls predict checkpoint=runs/NAME/best.pt images=photos/
  dkcls predict checkpoint=runs/NAME/best.pt images=embedded:12
  dkcls predict checkpoint=runs/NAME/best.pt images=[a.jpg,b.png] top=3 format=json
  find photos -name '*.jpg' | dkcls predict checkpoint=best.pt images=- format=csv
  dkcls predict checkpoint=runs/DETECTOR/best.pt images=photos/ output=found.png
  dkcls predict checkpoint=[runs/A/best.pt,runs/B/best.pt] images=embedded:6   detectors: a row each

Files that cannot be read are named on stderr; the others are still predicted, and the exit code is
1. Images are cropped and normalised as in the evaluation of the network, which is a checkpoint, an
exported .safetensors or .onnx file, or any file of weights with model.name=NAME. A detector's
prediction is a picture with boxes, their classes and scores; embedded:6 are canvases of
deformed_detection, with their true boxes dashed.
"""

import csv
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dkcls import cli
from dkcls.cli.arguments import REQUIRED, NamedModel
from dkcls.config import DataConfig, check_device, check_precision, check_weights
from dkcls.config.checks import check_choice, check_least
from dkcls.errors import UserError
from dkcls.files import write_output

if TYPE_CHECKING:
    from torch import Tensor

    from dkcls.engine.network import Network
    from dkcls.tasks.classification.predict import Prediction


@dataclass
class Arguments:
    """Images, and the network that looks at them."""

    checkpoint: Any = REQUIRED  # a file of the network; detectors: or several as [a,b]
    # a file, a folder, embedded:12 (that many test images of the embedded data), several of these
    # as [a,b], or - for a list of files on stdin
    images: Any = REQUIRED
    model: NamedModel = field(default_factory=NamedModel)
    weights: str = "auto"  # of a checkpoint: auto (the moving average if there is one), ema, model
    top: int = 5  # how many classes
    threshold: float = 0.5  # detectors: the lowest score that is drawn
    format: str = "table"  # table, csv, json
    output: str | None = None  # a file; null: print it, or detections.png beside the checkpoint
    batch_size: int = 64  # images at once
    workers: int = 4  # processes that load images
    # an image file with more pixels is not read
    max_pixels: int = DataConfig.max_pixels
    device: str = "auto"  # auto, cpu, cuda
    precision: str = "fp32"  # fp32, bf16, fp16

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_device("device", self.device)
        check_precision(self.precision)
        check_choice("format", self.format, tuple(FORMATS))
        for key, least in (("top", 1), ("batch_size", 1), ("workers", 0), ("max_pixels", 1)):
            check_least(key, getattr(self, key), least)


def main() -> int:
    return cli.script(Arguments, predict, __doc__)


def predict(arguments: Arguments) -> int:
    with cli.importing_torch():
        from dkcls.data.named import find_images
        from dkcls.engine import distributed
        from dkcls.engine.network import load
        from dkcls.tasks.classification.predict import Predictor
    places = arguments.images if isinstance(arguments.images, list) else [arguments.images]
    if places == ["-"]:
        places = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    names = find_images([str(place) for place in places])
    files = arguments.checkpoint
    files = [str(file) for file in (files if isinstance(files, list) else [files])]
    networks = [load(file, arguments.model.config(), arguments.weights) for file in files]
    if any(network.config.task.name == "detection" for network in networks):
        return draw(networks, names, arguments)
    if len(networks) > 1:
        raise UserError(f"checkpoint must be one file of a classifier, got {', '.join(files)}")
    with distributed.start(arguments.device, timeout=600) as world:
        taken = ("top", "batch_size", "workers", "precision", "max_pixels")
        options = {name: getattr(arguments, name) for name in taken}
        predictor = Predictor(networks[0], world.device, **options)
        text = FORMATS[arguments.format](predictor(names))
    if arguments.output:
        write_output(arguments.output, text.encode())
    else:
        print(text, end="")
    return 1 if predictor.bad else 0


def as_table(predictions: Iterable["Prediction"]) -> str:
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


def as_csv(predictions: Iterable["Prediction"]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "probability"])
    for image, names, shares in predictions:
        writer.writerows(
            [image, rank, name, f"{share:.6f}"]
            for rank, (name, share) in enumerate(zip(names, shares, strict=True), 1)
        )
    return text.getvalue()


def as_json(predictions: Iterable["Prediction"]) -> str:
    return json.dumps([prediction._asdict() for prediction in predictions], indent=2) + "\n"


FORMATS = {"table": as_table, "csv": as_csv, "json": as_json}


def draw(networks: list["Network"], names: list[str], arguments: Arguments) -> int:
    """Draw the boxes that detectors find, a row for each of them; return the exit code."""
    import torch

    from dkcls.data.transforms import fit_channels
    from dkcls.report.plots import Shown, draw_detections

    images, targets = images_of(names, arguments.max_pixels)
    if not images:
        raise UserError("there is no image that can be read")
    rows: dict[str, list[Shown]] = {}
    for network in networks:
        if network.config.task.name != "detection":
            raise UserError(f"{network.path} must be a detector, as the others are")
        taken = [fit_channels(image[None], network.input.channels)[0] for image in images]
        with torch.inference_mode():
            found = network.model.eval()([image.float() / 255 for image in taken])
        shown = zip(images, found, targets, strict=True)
        rows[network.path] = [Shown(*parts) for parts in shown]
    output = arguments.output or Path(networks[0].path).parent / "detections.png"
    print(draw_detections(rows, networks[0].class_names(), output, arguments.threshold))
    return int(len(images) < len(names))


def images_of(names: list[str], max_pixels: int) -> tuple[list["Tensor"], list[Any]]:
    """Return the images that can be read, uint8 [C, H, W], and their true boxes, or None.

    Those of the embedded data are test images of deformed_detection, of which they are known.
    """
    from dkcls.data.decode import BadImage, EncodedImage, reason
    from dkcls.data.named import EMBEDDED, read_image
    from dkcls.data.sets.deformed_detection import DeformedDetection

    if all(name.startswith(EMBEDDED) for name in names):
        batch = DeformedDetection("test", length=len(names)).load(np.arange(len(names))).batch
        return batch.images, batch.targets
    images = []
    for name in names:
        try:
            images.append(EncodedImage(read_image(name, max_pixels), max_pixels).rows())
        except (OSError, BadImage) as error:
            print(f"{name}: {reason(error)}", file=sys.stderr)
    return images, [None] * len(images)
