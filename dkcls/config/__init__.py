"""Every key of the project: a dataclass per group, whose comments are the help.

A misspelt key or a wrong type fails when a config is composed, a value out of range when it is
turned into objects. Keys in a dataclass's `FREE` may change when a run is resumed; all others make
another run. Nothing here imports more than omegaconf.
"""

from dkcls.config.augment import AugmentConfig
from dkcls.config.checks import PRECISIONS, check_device, check_precision, check_weights
from dkcls.config.data import DataConfig
from dkcls.config.evaluation import EvalConfig
from dkcls.config.keys import changed_keys, flat, free_keys, keys, unknown_key, valid_keys
from dkcls.config.log import LogConfig
from dkcls.config.model import ModelConfig
from dkcls.config.optim import OptimConfig
from dkcls.config.run import Config
from dkcls.config.schedule import ScheduleConfig
from dkcls.config.task import (
    TASK_CONFIGS,
    ClassificationConfig,
    DetectionConfig,
    TaskConfig,
    task_config,
)
from dkcls.config.train import TrainConfig

__all__ = [
    "PRECISIONS",
    "TASK_CONFIGS",
    "AugmentConfig",
    "ClassificationConfig",
    "Config",
    "DataConfig",
    "DetectionConfig",
    "EvalConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ScheduleConfig",
    "TaskConfig",
    "TrainConfig",
    "changed_keys",
    "check_device",
    "check_precision",
    "check_weights",
    "flat",
    "free_keys",
    "keys",
    "task_config",
    "unknown_key",
    "valid_keys",
]
