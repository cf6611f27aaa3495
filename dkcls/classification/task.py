"""Batches of (images, targets) to losses, counts and figures."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from dkcls.data import Batch, Normalize

GREY = (0.299, 0.587, 0.114)  # what red, green and blue count


class Classification:
    """Cross entropy, top-1 and top-5.

    Args:
        mean, std: of the channels, for normalisation on the device.
        mixup, cutmix: alphas of timm's Mixup, which takes its random numbers from numpy's global generator; 0 is off.
    """

    metric = "top1"
    measures: tuple[str, ...] = ("images", "loss", "top1", "top5")
    counts: tuple[str, ...] = measures

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        num_classes: int,
        device: torch.device,
        *,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        channels_last: bool = True,
    ):
        self.device, self.channels, self.label_smoothing = device, len(mean), label_smoothing
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.normalize = Normalize(mean, std).to(device)
        self.mixup = None
        if mixup or cutmix:
            self.mixup = Mixup(
                mixup, cutmix, label_smoothing=label_smoothing, num_classes=num_classes
            )

    def images(self, batch: Batch) -> Tensor:
        """As the network takes them."""
        images = fit_channels(batch.images, self.channels)
        return self.normalize(images.to(self.device, non_blocking=True, memory_format=self.layout))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = self.images(batch), batch.targets.to(self.device, non_blocking=True)
        soft = targets
        if self.mixup is not None:
            images, soft = self.mixup(images, targets)
        logits = model(images).float()
        loss = F.cross_entropy(
            logits, soft, label_smoothing=0.0 if self.mixup else self.label_smoothing
        )
        with torch.no_grad():
            counts = torch.stack(
                [
                    loss.new_tensor(len(targets)),
                    loss.detach() * len(targets),
                    *_correct(logits, targets),
                ]
            )
        return loss, counts

    def evaluation(self) -> "Sums":
        return Sums(self)

    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        """The `measures` of an evaluation batch, a float64 vector to be summed over batches and ranks."""
        targets = batch.targets.to(self.device, non_blocking=True)
        return self.measure_logits(model(self.images(batch)).float(), targets)

    def measure_logits(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.double(), targets, reduction="sum")
        return torch.stack(
            [
                loss.new_tensor(len(targets)),
                loss,
                *(count.double() for count in _correct(logits, targets)),
            ]
        )

    def summarize(self, names: tuple[str, ...], sums: list[float]) -> dict[str, Any]:
        """Shares of the images in percent, the mean loss, and the number of images."""
        total = dict(zip(names, sums, strict=True))
        images = max(total["images"], 1)
        shares = {name: 100 * total[name] / images for name in ("top1", "top5")}
        return {"loss": total["loss"] / images, **shares, "images": int(total["images"])}


class Ranks(Protocol):
    def sum_(self, tensor: Tensor) -> Tensor:
        """Over all ranks."""


class Sums:
    """A task's measures, added up."""

    def __init__(self, task: Classification):
        self.task = task
        self.sums = torch.zeros(len(task.measures), dtype=torch.float64, device=task.device)

    def add(self, model: nn.Module, batch: Batch) -> None:
        self.sums += self.task.measure(model, batch)

    def figures(self, world: Ranks) -> dict[str, Any]:
        return self.task.summarize(self.task.measures, world.sum_(self.sums).tolist())


def fit_channels(images: Tensor, channels: int) -> Tensor:
    """uint8 [B, C, H, W]: colour as grey, as PIL converts it, or grey in three channels."""
    if images.shape[1] == channels:
        return images
    if (images.shape[1], channels) == (1, 3):
        return images.expand(-1, 3, -1, -1)
    if (images.shape[1], channels) == (3, 1):
        shares = images.new_tensor(GREY, dtype=torch.float32).view(3, 1, 1)
        return (images * shares).sum(1, keepdim=True).round().byte()
    raise ValueError(
        f"images must have {channels} channels, as the network takes them, got {images.shape[1]}"
    )


def _correct(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How many targets are the class with the highest logit, and among the five highest."""
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    return hits[:, :1].sum().to(logits.dtype), hits.sum().to(logits.dtype)
