"""The group `schedule`: how long is trained, and the learning rate of every step."""

from dataclasses import dataclass, field
from typing import ClassVar

from dkcls.config.checks import check, check_choice, check_least


@dataclass
class ScheduleConfig:
    """Per step: linear warm-up from zero, then a cosine to zero, or the same rate with drops."""

    FREE: ClassVar[tuple[str, ...]] = ()

    name: str = "cosine"  # cosine, drops
    epochs: int = 90  # passes over the training images
    warmup_epochs: float = 5.0  # epochs of linear warm-up, of all
    warmup_steps: int | None = None  # steps of warm-up, instead of warmup_epochs
    drop_epochs: list[int] = field(default_factory=lambda: [8, 11])  # drops: after so many epochs
    gamma: float = 0.1  # drops: factor of the learning rate at each

    def __post_init__(self) -> None:
        check_choice("schedule.name", self.name, ("cosine", "drops"))
        check_least("schedule.epochs", self.epochs, 1)
        check(
            "schedule.warmup_epochs",
            self.warmup_epochs,
            self.warmup_steps is not None or 0 <= self.warmup_epochs < self.epochs,
            "from 0 to below epochs",
        )
        check_least("schedule.warmup_steps", self.warmup_steps, 0)
        ordered = self.drop_epochs == sorted(self.drop_epochs)
        check("schedule.drop_epochs", self.drop_epochs, ordered, "in their order")

    def steps(self, per_epoch: int) -> tuple[int, int]:
        """Return the number of steps in all, and of those that warm up."""
        total = self.epochs * per_epoch
        if self.warmup_steps is None:
            return total, round(self.warmup_epochs * per_epoch)
        return total, min(self.warmup_steps, total - 1)

    def drops(self, per_epoch: int) -> list[int] | None:
        """Return the steps of the drops; None if there are none by design."""
        return [epoch * per_epoch for epoch in self.drop_epochs] if self.name == "drops" else None
