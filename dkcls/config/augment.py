"""The group `augment`: what training does to its images, which evaluation does not."""

from dataclasses import dataclass, field
from typing import ClassVar

from dkcls.config.checks import check, check_least, check_range


@dataclass
class AugmentConfig:
    """Augmentation of training images. The embedded sets have one of their own instead."""

    FREE: ClassVar[tuple[str, ...]] = ()

    # share of the image's area that a random crop has, from and to
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    # aspect ratio of a random crop, width over height, from and to
    ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    hflip: float = 0.5  # probability of a mirror image
    color_jitter: float = 0.4  # brightness, contrast and saturation change by up to this share
    # timm's RandAugment in timm's notation, such as rand-m9-mstd0.5, instead of the colour jitter
    rand_augment: str | None = None
    erase_prob: float = 0.0  # probability that timm's random erasing covers a rectangle
    mixup: float = 0.0  # alpha of timm's mixup; 0: off
    cutmix: float = 0.0  # alpha of timm's cutmix; 0: off

    def __post_init__(self) -> None:
        for key in ("mixup", "cutmix"):
            check_least(f"augment.{key}", getattr(self, key), 0)
        for key in ("hflip", "color_jitter", "erase_prob"):
            value = getattr(self, key)
            check(f"augment.{key}", value, 0 <= value <= 1, "from 0 to 1")
        check_range("augment.scale", self.scale, 1)
        check_range("augment.ratio", self.ratio)
