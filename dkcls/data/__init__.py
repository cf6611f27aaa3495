"""Data sets, and loaders that can be resumed at any step. `data` imports no other part of dkcls."""

from dkcls.data.base import Batch, ImageDataset
from dkcls.data.create import DATASETS, create_dataset
from dkcls.data.detection import DetectionBatch, DetectionDataset
from dkcls.data.loader import Loader, create_loader
from dkcls.data.normalize import Normalize

__all__ = [
    "DATASETS",
    "Batch",
    "DetectionBatch",
    "DetectionDataset",
    "ImageDataset",
    "Loader",
    "Normalize",
    "create_dataset",
    "create_loader",
]
