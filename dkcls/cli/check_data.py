"""Decode every image of a data set, and report bad files, counts per class and sizes.

  dkcls check-data root=/data/imagenet
  dkcls check-data root=/data/imagenet workers=16 output=bad.txt

The data set is a folder of images, the tar shards that `dkcls pack` made of one, or COCO. The exit
code is 1 if a file is bad.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dkcls import cli
from dkcls.cli.arguments import REQUIRED
from dkcls.config import AugmentConfig, DataConfig
from dkcls.config.checks import check_least
from dkcls.data import DATASETS
from dkcls.data.check import Report, check
from dkcls.data.dataset import SPLITS
from dkcls.data.encoded import EncodedFiles
from dkcls.data.sets import coco
from dkcls.data.sets.tar import index_path
from dkcls.errors import UserError


@dataclass
class Arguments:
    """A data set that is to be checked."""

    # the folder with train/ and val/, with the indices of tar shards, or with annotations/ of
    # COCO's kind
    root: Path = REQUIRED
    workers: int = os.cpu_count() or 1  # processes that decode
    max_pixels: int = DataConfig.max_pixels  # an image file with more is a bad file
    output: Path | None = None  # a file for the list of bad files

    def __post_init__(self) -> None:
        check_least("workers", self.workers, 0)
        check_least("max_pixels", self.max_pixels, 1)


def main() -> int:
    return cli.script(Arguments, check_data, __doc__)


def splits_of(root: Path) -> dict[str, str]:
    """Return {split: kind of data set} for the splits that are there."""
    kinds = {split: "tar" for split in SPLITS if index_path(root, split).is_file()}
    kinds = kinds or {
        split: "coco"
        for split in SPLITS
        if any(file.is_file() for file, _ in coco.places(root, split))
    }
    return kinds or {split: "folder" for split in SPLITS if (root / split).is_dir()}


def describe(dataset: EncodedFiles, report: Report) -> str:
    good = report.bytes > 0
    lines = [
        f"  {good.sum()} good and {len(report.bad)} bad files, {report.bytes.sum() / 1e9:.3f} GB"
    ]
    what = "objects" if isinstance(dataset, coco.CocoDetection) else "images"
    few, many = int(report.counts.argmin()), int(report.counts.argmax())
    lines.append(
        f"  {dataset.num_classes} classes with {np.median(report.counts):g} {what} in the median, "
        f"fewest {report.counts[few]} ({dataset.class_names[few]}), "
        f"most {report.counts[many]} ({dataset.class_names[many]})"
    )
    for side, values in zip(("height", "width"), report.sides[good].T, strict=True):
        if len(values):
            lines.append(
                f"  {side} {values.min()} to {values.max()}, {np.median(values):g} in the median"
            )
    return "\n".join(
        [
            *lines,
            *(f"  {note}" for note in dataset.notes),
            *(f"  {bad.message}" for bad in report.bad),
        ]
    )


def check_data(arguments: Arguments) -> int:
    kinds = splits_of(arguments.root)
    if not kinds:
        raise UserError(
            f"{arguments.root} must hold the folders train and val, tar shards, "
            "or COCO's annotations"
        )
    messages = []
    for split, kind in kinds.items():
        options = {"bad_rows": "skip"} if kind == "coco" else {}  # they are counted in a note
        config = DataConfig(
            name=kind,
            root=str(arguments.root),
            options=options,
            max_pixels=arguments.max_pixels,
        )
        dataset = DATASETS.find(kind).create(config, AugmentConfig(), split, seed=0, training=False)
        assert isinstance(dataset, EncodedFiles)
        with tqdm(total=len(dataset), unit=" images", desc=split) as bar:
            report = check(dataset, arguments.workers, bar.update)
        print(f"{split}:\n{describe(dataset, report)}")
        messages += [*dataset.notes, *(bad.message for bad in report.bad)]
    if arguments.output:
        arguments.output.write_text("".join(f"{message}\n" for message in messages))
    return 1 if messages else 0
