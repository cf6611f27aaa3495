"""The group `optim`: the optimiser and its learning rates."""

from dataclasses import dataclass
from typing import ClassVar

from dkcls.config.checks import check, check_above_zero, check_least


@dataclass
class OptimConfig:
    """SGD with momentum. The learning rate is lr, or base_lr per 256 images of the global batch."""

    FREE: ClassVar[tuple[str, ...]] = ()

    lr: float | None = None  # learning rate; null: base_lr * train.batch_size / 256
    base_lr: float = 0.1  # learning rate per 256 images of the global batch
    # factor of the learning rate of all offset generators, DK's and DCN's
    generator_lr: float = 0.01
    # factor of the learning rate of all but the classifier, the generators among them
    backbone_lr: float = 1.0
    momentum: float = 0.9  # share of the last step that the next one keeps
    nesterov: bool = False  # whether the momentum is Nesterov's
    weight_decay: float = 4e-5  # of all weights but the scale and shift of normalisation
    decay_norm: bool = False  # weight decay on the scale and shift of normalisation as well
    clip_grad: float | None = None  # largest norm of the gradient; null: no limit

    def __post_init__(self) -> None:
        for key in ("lr", "base_lr", "clip_grad"):
            check_above_zero(f"optim.{key}", getattr(self, key))
        for key in ("generator_lr", "backbone_lr", "weight_decay"):
            check_least(f"optim.{key}", getattr(self, key), 0)
        check("optim.momentum", self.momentum, 0 <= self.momentum < 1, "from 0 to below 1")
