"""The group `task`: what a network is trained for, with a dataclass for each task."""

from dataclasses import dataclass, field
from typing import ClassVar

from dkcls.config.checks import check, check_least


@dataclass
class TaskConfig:
    """What every task has. A task's own dataclass adds its keys; its default name finds it."""

    FREE: ClassVar[tuple[str, ...]] = ()

    name: str = "classification"  # classification, detection, or a task of a plug-in


@dataclass
class ClassificationConfig(TaskConfig):
    """Classes of images, by cross-entropy."""

    label_smoothing: float = 0.0  # share of a target that goes to all classes alike

    def __post_init__(self) -> None:
        smoothing = self.label_smoothing
        check("task.label_smoothing", smoothing, 0 <= smoothing < 1, "from 0 to below 1")


@dataclass
class DetectionConfig(TaskConfig):
    """Boxes of objects, by Faster R-CNN with a feature pyramid over the network of `model`."""

    name: str = "detection"  # classification, detection, or a task of a plug-in
    min_size: int = 800  # pixels: images are resized to this shorter side
    max_size: int = 1333  # pixels: but to no longer side than this
    # which of the network's feature maps, finest first; null: those of strides 4 to 32
    levels: list[int] | None = None
    fpn_channels: int = 256  # channels of the feature pyramid
    box_channels: int = 1024  # channels of the box head's hidden layers
    # pixels: one per feature map, and one for the pool of the last
    anchor_sizes: list[float] = field(default_factory=lambda: [32, 64, 128, 256, 512])
    # per image and level before suppression, and per image after it, in training; in evaluation
    # half of it
    proposals: int = 2000
    box_samples: int = 512  # proposals per image that the box head trains on
    anchor_samples: int = 256  # anchors per image that the proposals train on
    score_threshold: float = 0.05  # least score of a detection
    nms_threshold: float = 0.5  # overlap above which the lower score is suppressed
    detections: int = 100  # detections per image, at most

    def __post_init__(self) -> None:
        good = 0 < self.min_size <= self.max_size
        check("task.min_size", self.min_size, good, "above 0 and at most max_size")
        check("task.max_size", self.max_size, self.max_size <= 8192, "at most 8192")
        for key in (
            "fpn_channels",
            "box_channels",
            "proposals",
            "box_samples",
            "anchor_samples",
            "detections",
        ):
            check_least(f"task.{key}", getattr(self, key), 1)
        for key in ("score_threshold", "nms_threshold"):
            value = getattr(self, key)
            check(f"task.{key}", value, 0 <= value <= 1, "from 0 to 1")


# A task's name -> its dataclass; `register_task` adds those of plug-ins.
TASK_CONFIGS: dict[str, type[TaskConfig]] = {
    "classification": ClassificationConfig,
    "detection": DetectionConfig,
}


def task_config(name: str) -> type[TaskConfig]:
    """Return the dataclass of a task's keys."""
    if name not in TASK_CONFIGS:
        raise ValueError(
            f"task must be one of {', '.join(TASK_CONFIGS)}, got {name!r}; "
            "--plugin MODULE adds those of a module"
        )
    return TASK_CONFIGS[name]
