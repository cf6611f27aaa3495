"""The whole config of a run."""

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from dkcls.config.augment import AugmentConfig
from dkcls.config.checks import check, check_choice
from dkcls.config.data import DataConfig
from dkcls.config.log import LogConfig
from dkcls.config.model import ModelConfig
from dkcls.config.optim import OptimConfig
from dkcls.config.schedule import ScheduleConfig
from dkcls.config.task import ClassificationConfig, TaskConfig, task_config
from dkcls.config.train import TrainConfig


@dataclass
class Config:
    """A run. Its directory is out/name, and the same command resumes it."""

    FREE: ClassVar[tuple[str, ...]] = ("name", "out", "resume")

    # null: the experiment's name, with what else was given on the command line
    name: str | None = None
    out: str = "runs"  # the folder of all runs
    seed: int = 0  # of initial weights, order of images, augmentation and dropout
    # auto: resume what out/name holds; never: stop if it holds anything; changed_data: resume it
    # even if classes or numbers of images are not those that it was trained on
    resume: str = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    task: TaskConfig = field(default_factory=ClassificationConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        kind = task_config(self.task.name)
        if not isinstance(self.task, kind):
            raise ValueError(
                f"task.name={self.task.name} needs a {kind.__name__}, got a "
                f"{type(self.task).__name__}; task={self.task.name} chooses both"
            )
        check_choice("resume", self.resume, ("auto", "never", "changed_data"))
        check("seed", self.seed, 0 <= self.seed < 2**31, "from 0 to 2147483647")
        if self.name is not None:
            good = bool(self.name) and not set(self.name) & set("=/\\ ")
            check("name", self.name, good, "without '=', '/', '\\' or spaces")

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate of weights that have no factor."""
        if self.optim.lr is not None:
            return self.optim.lr
        return self.optim.base_lr * self.train.batch_size / 256

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
