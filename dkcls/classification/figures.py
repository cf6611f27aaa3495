"""Everything that eval.py tells of a network, from sums over images, so that any number of ranks gives the same figures."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkcls.classification import Classification
from dkcls.data import Batch

BINS = 15  # of confidence, for the calibration error
FEW_CLASSES = 100  # up to which there is a confusion matrix


class Figures(Classification):
    """Top-1, top-5 and loss; the expected calibration error; the same per class; and what is taken for what.

    Args:
        outputs: of the network for each class of the data, in its order; other outputs are left out.
        flip: take the mean of the probabilities of an image and its mirror image.
    """

    def __init__(self, *arguments: Any, outputs: Sequence[int], flip: bool = False, **options: Any):
        super().__init__(*arguments, **options)
        self.classes, self.flip = len(outputs), flip
        self.outputs = torch.tensor(outputs, device=self.device)
        self.sizes = {
            "totals": len(Classification.measures),
            "bins": 3 * BINS,
            "per_class": 3 * self.classes,
        }
        if self.classes <= FEW_CLASSES:
            self.sizes["confusion"] = self.classes**2
        self.measures = tuple(
            f"{name} {i}" for name, size in self.sizes.items() for i in range(size)
        )

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """float32, of the data's classes; with `flip` the logarithms of probabilities."""
        logits = model(images).float()[:, self.outputs]
        if not self.flip:
            return logits
        mirrored = model(images.flip(-1)).float()[:, self.outputs]
        return torch.logaddexp(logits.log_softmax(1), mirrored.log_softmax(1)) - math.log(2)

    def measure(self, model: nn.Module, batch: Batch) -> Tensor:
        targets = batch.targets.to(self.device, non_blocking=True)
        logits = self.logits(model, self.images(batch))
        guesses = logits.topk(min(5, self.classes), dim=1).indices
        hits = (guesses == targets[:, None]).double()
        top1, top5 = hits[:, 0], hits.sum(1)
        confidence = logits.double().softmax(1).amax(1)
        bins = F.one_hot((confidence * BINS).long().clamp(max=BINS - 1), BINS).double()
        members = F.one_hot(targets, self.classes).double()
        ones = torch.ones_like(top1)
        parts = [self.measure_logits(logits, targets)]
        parts += [
            torch.stack([ones, confidence, top1]) @ bins,
            torch.stack([ones, top1, top5]) @ members,
        ]
        if "confusion" in self.sizes:
            parts.append(members.t() @ F.one_hot(guesses[:, 0], self.classes).double())
        return torch.cat([part.flatten() for part in parts])

    def summarize(self, names: tuple[str, ...], sums: list[float]) -> dict[str, Any]:
        """Totals as the trainer's; ece15 in percent; per_class [3][C]: images, top-1 and top-5 hits; confusion [C][C]."""
        parts = dict(
            zip(
                self.sizes,
                torch.tensor(sums, dtype=torch.float64).split(list(self.sizes.values())),
                strict=True,
            )
        )
        figures: dict[str, Any] = super().summarize(
            Classification.measures, parts["totals"].tolist()
        )
        _, confidence, correct = parts["bins"].view(3, BINS)
        images = figures.pop("images")
        figures |= {
            "ece15": 100 * (confidence - correct).abs().sum().item() / max(images, 1),
            "images": images,
        }
        figures["per_class"] = parts["per_class"].view(3, self.classes).long().tolist()
        if "confusion" in parts:
            figures["confusion"] = (
                parts["confusion"].view(self.classes, self.classes).long().tolist()
            )
        return figures
