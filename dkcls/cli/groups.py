"""Groups of configs/: which there are, and the names that each of them has."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import dkcls
from dkcls.config import TASK_CONFIGS

FLAGS = ("--config-dir", "-cd")  # Hydra's, for a folder of one's own


def config_folder() -> Path:
    """Return the folder of the configs: beside the package in a clone, in it when installed."""
    package = Path(dkcls.__file__).resolve().parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def groups(words: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the names of every group, with those of plug-ins and of the command line's folders."""
    found: dict[str, set[str]] = {"task": set(TASK_CONFIGS), "data": set(registered_datasets())}
    for folder in (config_folder(), *own_folders(words)):
        for path in folder.glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    first = ("experiment", "recipe", "data", "task", "optim")
    order = [*first, *sorted(found.keys() - set(first))]
    return {group: sorted(found[group]) for group in order if group in found}


def registered_datasets() -> list[str]:
    """Return the names of data sets that are registered by now; nothing is imported for it."""
    module = sys.modules.get("dkcls.data.dataset")
    return [] if module is None else module.DATASETS.registered()


def own_folders(words: Sequence[str]) -> list[Path]:
    """Return the folders that `--config-dir` names."""
    folders = [Path(word.partition("=")[2]) for word in words if word.startswith(f"{FLAGS[0]}=")]
    after = pairwise(words)
    return folders + [Path(folder) for flag, folder in after if flag in FLAGS]
