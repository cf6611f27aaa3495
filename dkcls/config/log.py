"""The group `log`: what is written while a run goes on."""

from dataclasses import dataclass, field
from typing import ClassVar

from dkcls.config.checks import check_least


@dataclass
class LogConfig:
    """What is written besides metrics.jsonl."""

    FREE: ClassVar[tuple[str, ...]] = ("every", "to", "images")

    every: int = 50  # steps between lines of metrics
    # where metrics go besides metrics.jsonl: [tensorboard], a logger of a plug-in, [] for none
    to: list[str] = field(default_factory=lambda: ["tensorboard"])
    images: int = 32  # training images that the loggers show, once; 0: none

    def __post_init__(self) -> None:
        check_least("log.every", self.every, 1)
        check_least("log.images", self.images, 0)
