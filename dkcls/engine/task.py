"""Tasks: what a network is trained for, and everything that the engine has to be told of it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dkcls.config import (
    TASK_CONFIGS,
    Config,
    DataConfig,
    EvalConfig,
    ModelConfig,
    TaskConfig,
)
from dkcls.config.checks import check, check_choice, check_plain, is_number
from dkcls.config.convert import from_dict
from dkcls.data import Dataset, for_channels
from dkcls.engine.distributed import World
from dkcls.errors import UserError
from dkcls.registry import Registry

if TYPE_CHECKING:
    from dkcls.engine.network import Network, Weights


LARGEST = 4096  # pixels of an image's side that a network takes


@dataclass(frozen=True)
class Input:
    """The images that a network takes: size, resizing, and normalisation of the channels.

    A shorter side of image_size / crop_ratio pixels, of which the centre is cut out.
    """

    channels: int
    image_size: int
    crop_ratio: float
    interpolation: str  # of resizing: bilinear, bicubic
    mean: list[float]
    std: list[float]

    def __post_init__(self) -> None:
        size, ratio = self.image_size, self.crop_ratio
        check("input.channels", self.channels, self.channels in (1, 3), "1 or 3")
        good = type(size) is int and 1 <= size <= LARGEST
        check("input.image_size", size, good, f"a whole number from 1 to {LARGEST}")
        check("input.crop_ratio", ratio, is_number(ratio) and 0 < ratio <= 1, "above 0, at most 1")
        check_choice("input.interpolation", self.interpolation, ("bilinear", "bicubic"))
        for key, values, least in (("mean", self.mean, 0), ("std", self.std, 1e-6)):
            good = (
                isinstance(values, list) and len(values) in (1, 3) and all(map(is_number, values))
            )
            good = good and all(least <= value <= 1 for value in values)
            check(f"input.{key}", values, good, f"one number or three, from {least} to 1")

    def with_channels(self, channels: int) -> "Input":
        """Return the same for grey images instead of colour, or the other way round."""
        mean, std = (for_channels(values, channels) for values in (self.mean, self.std))
        return replace(self, channels=channels, mean=mean, std=std)

    def __str__(self) -> str:
        size = f"{self.channels} x {self.image_size} x {self.image_size}"
        how = f"crop_ratio {self.crop_ratio}, {self.interpolation}"
        return f"{size}, {how}, mean {self.mean}, std {self.std}"


@dataclass(frozen=True)
class Card:
    """What a checkpoint or an export says of its network; `classes` are in the order of outputs."""

    KEYS = ("config", "classes", "input")

    config: Config
    classes: list[str]
    input: Input

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "classes": list(self.classes),
            "input": asdict(self.input),
        }

    @classmethod
    def parse(cls, values: Mapping[str, Any], path: str) -> "Card":
        """Return the card that `to_dict` wrote into the file at `path`."""
        if not all(key in values for key in cls.KEYS):
            raise UserError(
                f"{path} must say what its network is by {', '.join(cls.KEYS)}, "
                f"got {', '.join(key for key in cls.KEYS if key in values) or 'none'}"
            )
        try:
            classes = values["classes"]
            good = isinstance(classes, list) and classes and all(type(n) is str for n in classes)
            check("classes", classes, bool(good), "a list of names")
            config = from_dict(values["config"])
            data = replace(config.data, download=False)  # a file fetches nothing
            model = replace(config.model, pretrained=None)  # nor does it choose other files
            check_plain("config.model", asdict(model))
            config = replace(config, data=data, model=model)
            return cls(config, list(classes), Input(**values["input"]))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} does not say what its network is: {error}") from error


class Evaluation(Protocol):
    """Metrics of a network, added up batch by batch."""

    def add(self, model: nn.Module, batch: Any) -> None: ...

    def metrics(self, world: World) -> dict[str, Any]:
        """Return the metrics over all batches of all ranks, the same on each rank."""


@dataclass(frozen=True)
class Parts:
    """What a task builds from a config: all that the engine needs to train for it.

    `counted` is the network whose multiply-adds are reported, for an image of [C, H, W] =
    `input_size`.
    """

    config: Config  # with what it left open
    task: "Task"
    model: nn.Module
    train_set: Any
    val_set: Any
    card: Card
    counted: nn.Module
    input_size: tuple[int, int, int]


class Task(ABC):
    """What a network is trained for. The engine moves batches through a task and knows no more."""

    best: str  # the metric by which a checkpoint is best, higher is better
    shown: tuple[str, ...]  # the metrics that a log line shows
    sums: tuple[str, ...]  # the names of what `loss` sums, "images" among them
    input_keys: tuple[str, ...]  # the fields of Input that are keys of `data` too

    @classmethod
    @abstractmethod
    def build(cls, config: Config, world: World) -> Parts:
        """Return the parts of a run. UserError where the config asks for what cannot be."""

    @classmethod
    @abstractmethod
    def load(cls, config: ModelConfig, weights: "Weights", path: str) -> "Network":
        """Return the whole network of a file. UserError where file and network do not fit."""

    @classmethod
    @abstractmethod
    def evaluation_of(
        cls,
        network: "Network",
        dataset: Dataset[Any],
        data: DataConfig,
        config: EvalConfig,
        device: torch.device,
    ) -> Evaluation:
        """Return everything that `eval.py` measures of a network on a data set made from `data`."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the mean loss of a training batch, and its `sums`, a detached vector."""

    @abstractmethod
    def metrics(self, sums: list[float]) -> dict[str, Any]:
        """Return the metrics that totals of `sums` give, "images" among them."""

    @abstractmethod
    def evaluation(self) -> Evaluation:
        """Return a fresh evaluation, as the trainer runs it."""


TASKS: Registry[type[Task]] = Registry("task", "dkcls.tasks")


def register_task(name: str, config: type[TaskConfig]) -> Callable[[Any], Any]:
    """Return a decorator that makes a subclass of Task a value of task=.

    `config` is the dataclass of the task's keys, whose default for `name` is this name.
    """
    if not issubclass(config, TaskConfig) or config().name != name:
        raise ValueError(
            f"the config of task {name!r} must be a dataclass derived from TaskConfig "
            f"with name = {name!r}"
        )
    TASK_CONFIGS[name] = config
    return TASKS.register(name)
