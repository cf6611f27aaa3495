"""dkcls: image classification with deformable kernels.

What is here is imported when it is first asked for:

    config = dkcls.compose("experiment=quickstart", "schedule.epochs=1")
    dkcls.train(config)
    network = dkcls.load("runs/quickstart-schedule.epochs-1/best.pt")
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that has it, under the same name.
_HOMES = {
    "Config": "dkcls.config",
    "EvalConfig": "dkcls.config",
    "compose": "dkcls.cli.compose",
    "evaluate": "dkcls.engine.evaluate",
    "load": "dkcls.engine.network",
    "predict": "dkcls.tasks.classification.predict",
    "register_dataset": "dkcls.data.dataset",
    "register_layer": "dkcls.layers.base",
    "register_logger": "dkcls.engine.log",
    "register_task": "dkcls.engine.task",
    "train": "dkcls.engine.run",
}

if TYPE_CHECKING:
    from dkcls.cli.compose import compose
    from dkcls.config import Config, EvalConfig
    from dkcls.data.dataset import register_dataset
    from dkcls.engine.evaluate import evaluate
    from dkcls.engine.log import register_logger
    from dkcls.engine.network import load
    from dkcls.engine.run import train
    from dkcls.engine.task import register_task
    from dkcls.layers.base import register_layer
    from dkcls.tasks.classification.predict import predict

__all__ = [
    "Config",
    "EvalConfig",
    "__version__",
    "compose",
    "evaluate",
    "load",
    "predict",
    "register_dataset",
    "register_layer",
    "register_logger",
    "register_task",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dkcls' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
