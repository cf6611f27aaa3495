"""The group `data`: which images, at which size, and how they are loaded."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from dkcls.config.checks import check, check_choice, check_least


@dataclass
class DataConfig:
    """A data set, the evaluation's view of its images, and the processes that load them."""

    FREE: ClassVar[tuple[str, ...]] = (
        "root",
        "download",
        "workers",
        "prefetch",
        "bad_limit",
        "worker_restarts",
    )

    # folder, tar, coco, synthetic, deformed_fashion, deformed_detection, cifar10, cifar100,
    # fashion_mnist, or a data set of a plug-in
    name: str | None = None
    root: str | None = None  # the folder with the files; the embedded sets have none
    image_size: int | None = None  # pixels; null: the set's own, 224 for folders of images
    crop_ratio: float = 0.875  # evaluation: share of the shorter side that the centre crop keeps
    # of resizing: bilinear, bicubic; null: as the pretrained weights have it, else bilinear
    interpolation: str | None = None
    # of the channels, from 0 to 1; null: the pretrained weights', else the data set's
    mean: list[float] | None = None
    std: list[float] | None = None  # standard deviation of the channels; null: likewise
    # what this data set alone takes, as data.options.NAME=VALUE; docs/data.md has each set's
    options: dict[str, Any] = field(default_factory=dict)
    download: bool = False  # whether one of torchvision's sets may be downloaded
    workers: int = 4  # loading processes per rank; 0: load in the training process
    prefetch: int = 2  # batches that each loading process holds ready
    bad_limit: float = 0.001  # the run stops when more than this share of the files is bad
    # an image file with more pixels is a bad file; the default is where Pillow begins to warn
    max_pixels: int = 89_478_485
    # how often loading processes that died are started again; 0: the run stops
    worker_restarts: int = 3

    def __post_init__(self) -> None:
        check("data.workers", self.workers, 0 <= self.workers <= 1024, "from 0 to 1024")
        check("data.prefetch", self.prefetch, 1 <= self.prefetch <= 1024, "from 1 to 1024")
        check_least("data.worker_restarts", self.worker_restarts, 0)
        check_least("data.max_pixels", self.max_pixels, 1)
        check("data.crop_ratio", self.crop_ratio, 0 < self.crop_ratio <= 1, "above 0 and at most 1")
        check_choice("data.interpolation", self.interpolation, ("bilinear", "bicubic", None))
        for key, values in (("mean", self.mean), ("std", self.std)):
            good = values is None or (
                len(values) in (1, 3) and min(values) >= 0 and max(values) <= 1
            )
            check(f"data.{key}", values, good, "one number or three, from 0 to 1, or null")
        check("data.std", self.std, self.std is None or min(self.std) > 0, "above 0")
