"""Data sets, and loaders that can be resumed at any step.

The built-in sets are in `dkcls.data.sets`, which is imported when one of them is asked for.
"""

from dkcls.data.dataset import (
    COCO_AREAS,
    DATASETS,
    Batch,
    Dataset,
    DetectionBatch,
    DetectionDataset,
    ImageDataset,
    Loaded,
    create_dataset,
    takes_image_size,
)
from dkcls.data.identity import DataIdentity
from dkcls.data.loader import Loader, create_loader
from dkcls.data.transforms import Normalize, fit_channels, for_channels

__all__ = [
    "COCO_AREAS",
    "DATASETS",
    "Batch",
    "DataIdentity",
    "Dataset",
    "DetectionBatch",
    "DetectionDataset",
    "ImageDataset",
    "Loaded",
    "Loader",
    "Normalize",
    "create_dataset",
    "create_loader",
    "fit_channels",
    "for_channels",
    "takes_image_size",
]
