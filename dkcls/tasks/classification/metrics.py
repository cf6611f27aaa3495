"""Metrics of classifiers, from sums over images, so that any number of ranks gives the same."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkcls.data import Batch
from dkcls.engine.distributed import World

if TYPE_CHECKING:
    from dkcls.tasks.classification.task import Classification

TOTALS = ("images", "loss", "top1", "top5")
BINS = 15  # of confidence, for the calibration error
FEW_CLASSES = 100  # up to which there is a confusion matrix


def count_hits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Count the targets that have the highest logit, and those among the five highest."""
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    return hits[:, :1].sum().to(logits.dtype), hits.sum().to(logits.dtype)


def sum_batch(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the `TOTALS` of a batch, float64, to be summed over batches and ranks."""
    loss = F.cross_entropy(logits.double(), targets, reduction="sum")
    hits = (count.double() for count in count_hits(logits, targets))
    return torch.stack([loss.new_tensor(len(targets)), loss, *hits])


def from_totals(sums: Sequence[float]) -> dict[str, Any]:
    """Return the mean loss, top-1 and top-5 in percent of the images, and their number."""
    images, loss, top1, top5 = sums
    count = max(images, 1)
    return {
        "loss": loss / count,
        "top1": 100 * top1 / count,
        "top5": 100 * top5 / count,
        "images": int(images),
    }


class Totals:
    """The evaluation that the trainer runs: loss, top-1 and top-5."""

    def __init__(self, task: "Classification"):
        self.task = task
        self.sums = torch.zeros(len(TOTALS), dtype=torch.float64, device=task.device)

    def add(self, model: nn.Module, batch: Batch) -> None:
        targets = batch.targets.to(self.task.device, non_blocking=True)
        self.sums += sum_batch(model(self.task.images(batch)).float(), targets)

    def metrics(self, world: World) -> dict[str, Any]:
        return from_totals(world.sum_(self.sums).tolist())


class Details:
    """The evaluation that eval.py runs: totals, calibration, per class, confusion matrix.

    Args:
        task: the network's, for the images that it takes.
        classes: the data's, in its order.
        outputs: the network's output for each of them; its other outputs are left out.
        flip: take the mean of the probabilities of an image and its mirror image.
    """

    def __init__(
        self,
        task: "Classification",
        classes: Sequence[str],
        outputs: Sequence[int],
        flip: bool = False,
    ):
        self.task = task
        self.class_names = list(classes)
        self.classes = len(outputs)
        self.flip = flip
        self.outputs = torch.tensor(outputs, device=task.device)
        self.sizes = {"totals": len(TOTALS), "bins": 3 * BINS, "per_class": 3 * self.classes}
        if self.classes <= FEW_CLASSES:
            self.sizes["confusion"] = self.classes**2
        size = sum(self.sizes.values())
        self.sums = torch.zeros(size, dtype=torch.float64, device=task.device)

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return float32 logits of the data's classes; with `flip` logarithms of probabilities."""
        logits = model(images).float()[:, self.outputs]
        if not self.flip:
            return logits
        mirrored = model(images.flip(-1)).float()[:, self.outputs]
        return torch.logaddexp(logits.log_softmax(1), mirrored.log_softmax(1)) - math.log(2)

    def add(self, model: nn.Module, batch: Batch) -> None:
        targets = batch.targets.to(self.task.device, non_blocking=True)
        self.add_logits(self.logits(model, self.task.images(batch)), targets)

    def add_logits(self, logits: Tensor, targets: Tensor) -> None:
        guesses = logits.topk(min(5, self.classes), dim=1).indices
        hits = (guesses == targets[:, None]).double()
        top1, top5 = hits[:, 0], hits.sum(1)
        confidence = logits.double().softmax(1).amax(1)
        bins = F.one_hot((confidence * BINS).long().clamp(max=BINS - 1), BINS).double()
        members = F.one_hot(targets, self.classes).double()
        ones = torch.ones_like(top1)
        parts = [
            sum_batch(logits, targets),
            torch.stack([ones, confidence, top1]) @ bins,
            torch.stack([ones, top1, top5]) @ members,
        ]
        if "confusion" in self.sizes:
            parts.append(members.t() @ F.one_hot(guesses[:, 0], self.classes).double())
        self.sums += torch.cat([part.flatten() for part in parts])

    def metrics(self, world: World) -> dict[str, Any]:
        """Return the metrics of `Totals`, `ece15` in percent, and tables of numbers of images.

        `per_class` is [3][C]: images, top-1 and top-5 hits; `confusion` is [C][C], a row for each
        true class.
        """
        sums = world.sum_(self.sums).cpu().split(list(self.sizes.values()))
        parts = dict(zip(self.sizes, sums, strict=True))
        metrics = from_totals(parts["totals"].tolist())
        _, confidence, correct = parts["bins"].view(3, BINS)
        images = metrics.pop("images")
        metrics["ece15"] = 100 * (confidence - correct).abs().sum().item() / max(images, 1)
        metrics["images"] = images
        metrics["classes"] = self.class_names
        metrics["per_class"] = parts["per_class"].view(3, self.classes).long().tolist()
        if "confusion" in parts:
            confusion = parts["confusion"].view(self.classes, self.classes)
            metrics["confusion"] = confusion.long().tolist()
        return metrics
