"""The one place that maps a name to a data set."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dkcls.data.base import BatchDataset, check_split
from dkcls.data.coco import CocoDetection
from dkcls.data.deformed_detection import DeformedDetection
from dkcls.data.deformed_fashion import DeformedFashion
from dkcls.data.detection import DetectionDataset
from dkcls.data.encoded import EncodedImages
from dkcls.data.image_folder import ImageFolder
from dkcls.data.normalize import for_channels
from dkcls.data.synthetic import Synthetic
from dkcls.data.tar import TarImages
from dkcls.data.torchvision_sets import TORCHVISION_SETS, TorchvisionImages
from dkcls.data.transforms import EvalTransform, TrainTransform

DETECTION_SETS = ("coco", "deformed_detection")
DATASETS = (
    "imagefolder",
    "tar",
    "deformed_fashion",
    "synthetic",
    *TORCHVISION_SETS,
    *DETECTION_SETS,
)


def create_dataset(
    name: str,
    root: str | Path | None = None,
    split: str = "train",
    *,
    training: bool = False,
    image_size: int | None = None,
    crop_ratio: float = 0.875,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    hflip: float = 0.5,
    color_jitter: float = 0.4,
    rand_augment: str | None = None,
    erase_prob: float = 0.0,
    interpolation: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    seed: int = 0,
    download: bool = False,
    **options: Any,
) -> BatchDataset[Any]:
    """`training` chooses the augmentation (`scale` to `erase_prob`) instead of the evaluation's centre crop (`crop_ratio`).

    `interpolation`, None for bilinear, is that of resizing. `mean` and `std` are what the images will be normalised with, None
    for the set's own: erasing and RandAugment need them.
    deformed_fashion, deformed_detection and synthetic have none of this, coco has `hflip` only. Their own keywords go into
    `options`: object_scale, object_rotation, noise, clutter and objects; num_classes and length; bad_rows of coco.
    `image_size` None is the set's own size. coco and deformed_detection are for detection, a DetectionDataset; the others are
    an ImageDataset.
    """
    if name not in DATASETS:
        raise ValueError(f"data set must be one of {', '.join(DATASETS)}, got {name!r}")
    check_split(split)
    if name in DETECTION_SETS:
        asked = {
            "image_size": image_size,
            "rand_augment": rand_augment,
            "erase_prob": erase_prob or None,
        }
        asked |= {"interpolation": interpolation, **options}
        given = {key: value for key, value in asked.items() if value is not None}
        return _detection_set(name, root, split, training, hflip, seed, given)
    if name in ("deformed_fashion", "synthetic"):
        if image_size is not None:
            options["image_size"] = image_size
        if name == "synthetic":
            return Synthetic(seed=seed, **options)
        return DeformedFashion(split, training=training, seed=seed, **options)
    if options:
        raise ValueError(f"data set {name!r} takes no {', '.join(options)}")
    if root is None:
        raise ValueError(f"data set {name!r} needs root, the folder that its files are in")
    facts = TORCHVISION_SETS.get(name)
    image_size = image_size or (facts.image_size if facts else 224)
    interpolation = interpolation or "bilinear"
    transform: EvalTransform | TrainTransform = EvalTransform(image_size, crop_ratio, interpolation)
    if training:
        own = facts or EncodedImages
        transform = TrainTransform(
            image_size,
            scale=scale,
            ratio=ratio,
            hflip=hflip,
            color_jitter=color_jitter,
            rand_augment=rand_augment,
            erase_prob=erase_prob,
            interpolation=interpolation,
            mean=for_channels(mean or own.mean, len(own.mean)),
            std=for_channels(std or own.std, len(own.std)),
        )
    if facts:
        return TorchvisionImages(
            name,
            root,
            split,
            transform,
            image_size,
            training=training,
            seed=seed,
            download=download,
        )
    kind = TarImages if name == "tar" else ImageFolder
    return kind(root, split, transform, image_size, training=training, seed=seed)


def _detection_set(
    name: str,
    root: str | Path | None,
    split: str,
    training: bool,
    hflip: float,
    seed: int,
    options: dict[str, Any],
) -> DetectionDataset:
    kind = CocoDetection if name == "coco" else DeformedDetection
    unknown = [key for key in options if key not in inspect.signature(kind).parameters]
    if unknown:
        raise ValueError(f"data set {name!r} takes no {', '.join(unknown)}")
    if name == "deformed_detection":
        return DeformedDetection(split, training=training, seed=seed, **options)
    if root is None:
        raise ValueError(f"data set {name!r} needs root, the folder that its files are in")
    return CocoDetection(root, split, training=training, hflip=hflip, seed=seed, **options)
