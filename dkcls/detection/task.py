"""Batches of images with boxes to losses, counts and average precisions."""

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dkcls.data.detection import DetectionBatch, DetectionDataset
from dkcls.detection.coco_map import coco_map, result_rows

LOSSES = (
    "loss_classifier",
    "loss_box_reg",
    "loss_objectness",
    "loss_rpn_box_reg",
)  # torchvision's names


class Ranks(Protocol):
    def gather(self, value: Any) -> list[Any]:
        """Every rank's value."""


class Detection:
    """The sum of Faster R-CNN's four losses, and COCO's average precision on `dataset`."""

    metric = "map"
    counts: tuple[str, ...] = ("images", "loss", *LOSSES)

    def __init__(self, dataset: DetectionDataset, device: torch.device):
        self.dataset, self.device = dataset, device

    def images(self, batch: DetectionBatch) -> list[Tensor]:
        """As the detector takes them."""
        return [image.to(self.device, non_blocking=True).float() / 255 for image in batch.images]

    def loss(self, model: nn.Module, batch: DetectionBatch) -> tuple[Tensor, Tensor]:
        targets = [
            {name: value.to(self.device, non_blocking=True) for name, value in t.items()}
            for t in batch.targets
        ]
        losses = model(self.images(batch), targets)
        parts = torch.stack([losses[name] for name in LOSSES])
        total, images = parts.sum(), len(batch.images)
        return total, torch.cat(
            [total.new_tensor([1.0]), total.detach()[None], parts.detach()]
        ) * images

    def summarize(self, names: tuple[str, ...], sums: list[float]) -> dict[str, Any]:
        """Mean losses, and the number of images."""
        images, *losses = sums
        return {
            name: value / max(images, 1) for name, value in zip(names[1:], losses, strict=True)
        } | {"images": int(images)}

    def evaluation(self) -> "AveragePrecision":
        return AveragePrecision(self)


class AveragePrecision:
    """The detections in all images, and then their average precision."""

    def __init__(self, task: Detection):
        self.task = task
        self.rows: list[dict[str, Any]] = []
        self.seen: list[int] = []  # the images' ids

    def add(self, model: nn.Module, batch: DetectionBatch) -> None:
        dataset = self.task.dataset
        for index, found in zip(
            batch.indices.tolist(), model(self.task.images(batch)), strict=True
        ):
            self.rows += result_rows(found, dataset.image_id(index), dataset.category_id)
            self.seen.append(dataset.image_id(index))

    def figures(self, world: Ranks) -> dict[str, Any]:
        """Over the images that could be read, each of which is on one rank; what there is no object for is left out."""
        gathered = world.gather((self.rows, self.seen))
        rows = [row for each, _ in gathered for row in each]
        seen = [image for _, each in gathered for image in each]
        figures = coco_map(self.task.dataset.coco(), rows, self.task.dataset.areas, seen)
        there = {
            name: value
            for name, value in figures.items()
            if name == self.task.metric or not math.isnan(value)
        }
        return {**there, "images": len(seen)}
