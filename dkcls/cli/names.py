"""Print the names that keys can have.

  dkcls list layers                values of model.spatial
  dkcls list data                  of data; also tasks, loggers (of log.to), experiments, recipes
  dkcls list models                of model.name
  dkcls list models match=convnext*
  dkcls --plugin my_module list layers

Networks of dkcls come first, then timm's.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch

from dkcls import cli
from dkcls.cli.arguments import REQUIRED
from dkcls.cli.groups import groups
from dkcls.config.checks import check_choice


@dataclass
class Arguments:
    """The list to print."""

    what: str = REQUIRED  # layers, data, tasks, loggers, models, experiments, recipes
    match: str = "*"  # a pattern of the names, such as resnet*

    def __post_init__(self) -> None:
        check_choice("what", self.what, tuple(LISTS))


def main() -> int:
    if sys.argv[1:] and sys.argv[1].isalpha():
        sys.argv[1] = f"what={sys.argv[1]}"
    return cli.script(Arguments, print_names, __doc__)


def print_names(arguments: Arguments) -> None:
    for name in LISTS[arguments.what]():
        if fnmatch(name.split(":")[0], arguments.match):
            print(name)


def layers() -> list[str]:
    from dkcls.layers import LAYERS

    return [f"{name}: {LAYERS.label(name)}" for name in LAYERS]


def data() -> list[str]:
    from dkcls.data import DATASETS

    return sorted({*DATASETS, *groups()["data"]})


def tasks() -> Iterable[str]:
    from dkcls.engine.task import TASKS

    return TASKS


def loggers() -> Iterable[str]:
    from dkcls.engine.log import LOGGERS

    return LOGGERS


def models() -> list[str]:
    import timm

    import dkcls.models

    names = timm.list_models()
    entry = {name: timm.models.model_entrypoint(name).__module__ for name in names}
    own = [name for name in names if entry[name].startswith(dkcls.models.__name__)]
    return [*own, *(name for name in names if name not in set(own))]


LISTS: dict[str, Callable[[], Iterable[str]]] = {
    "layers": layers,
    "data": data,
    "tasks": tasks,
    "loggers": loggers,
    "models": models,
    "experiments": lambda: groups()["experiment"],
    "recipes": lambda: groups()["recipe"],
}
