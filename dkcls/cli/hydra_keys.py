"""The table of what Hydra's own section of a config may hold; all else is refused by name.

Configs come from anybody, and Hydra would import, call and pass on what its section names. So its
resolved values are checked as soon as they are composed, before Hydra acts on any of them.
docs/reliability.md shows the table.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dkcls.errors import UserError

WORD = re.compile(r"[\w .,:@%+=/*&|\[\]-]*")  # no shell, and no second line
FOLDER = re.compile(r"[\w .,:@%+=/~-]*")

Check = Callable[[Any], bool]


def is_plain(value: Any) -> bool:
    """Return whether a value is null, a number or a word."""
    return value is None or isinstance(value, (bool, int, float)) or is_word(value)


def is_word(value: Any) -> bool:
    return isinstance(value, str) and WORD.fullmatch(value) is not None


def is_folder(value: Any) -> bool:
    return value is None or (isinstance(value, str) and FOLDER.fullmatch(value) is not None)


def is_any_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def is_plain_tree(value: Any) -> bool:
    """Return whether a value is plain, or made of such ones; a key with _ is an order to Hydra."""
    if isinstance(value, Mapping):
        return all(not str(k).startswith("_") and is_plain_tree(v) for k, v in value.items())
    return all(map(is_plain, value)) if isinstance(value, list) else is_plain(value)


def is_sampler(value: Any) -> bool:
    if value is None or value == "???":
        return True
    rest = {k: v for k, v in value.items() if k != "_target_"} if isinstance(value, dict) else None
    own = rest is not None and value.get("_target_") in {f"optuna.samplers.{n}" for n in SAMPLERS}
    return own and is_plain_tree(rest)


def is_sweep(value: Any) -> bool:
    """Return whether a value is the words of a sweep, none of them for Hydra itself."""
    if not isinstance(value, Mapping):
        return value is None
    keys = [str(key).lstrip("+~").replace("/", ".") for key in value]
    texts = all(isinstance(text, (str, bool, int, float)) for text in value.values())
    return texts and not any(key.startswith("_") or key.split(".")[0] == "hydra" for key in keys)


def is_pre_dispatch(value: Any) -> bool:
    """Return whether joblib can compute a value without running more than a product."""
    return re.fullmatch(r"all|\d+(\s*\*\s*n_jobs)?", str(value)) is not None


def never(value: Any) -> bool:
    return not value


def _plain(*keys: str) -> dict[str, Check]:
    return dict.fromkeys(keys, is_plain)


# Folders may depend on what is known later, such as ${hydra.job.num}; Hydra only makes them.
KEYS: dict[str, Check] = {
    "run.dir": is_any_text,
    "sweep.dir": is_any_text,
    "sweep.subdir": is_any_text,
    "output_subdir": is_any_text,
    "searchpath": lambda value: True,  # checked by `check_search_path`, as composing acts on it
    "mode": is_plain,
}
SUBMITIT: dict[str, Check] = {
    "submitit_folder": is_folder,
    **_plain("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes"),
    **_plain("name", "stderr_to_stdout"),
}
LAUNCHERS: dict[str, dict[str, Check]] = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": {},
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": {
        **_plain("n_jobs", "backend", "prefer", "require", "verbose", "timeout", "batch_size"),
        **_plain("max_nbytes", "mmap_mode"),
        "pre_dispatch": is_pre_dispatch,
        "temp_folder": is_folder,
    },
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher": SUBMITIT,
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher": {
        **SUBMITIT,
        **_plain("partition", "qos", "comment", "constraint", "exclude", "gres", "account"),
        **_plain("cpus_per_gpu", "gpus_per_task", "mem_per_gpu", "mem_per_cpu"),
        **_plain("signal_delay_s", "max_num_timeout", "array_parallelism"),
        "setup": never,
        "additional_parameters": never,
    },
}
SAMPLERS = (
    *("TPESampler", "RandomSampler", "CmaEsSampler", "NSGAIISampler", "NSGAIIISampler"),
    *("MOTPESampler", "GridSampler", "QMCSampler", "BruteForceSampler"),
)
SWEEPERS: dict[str, dict[str, Check]] = {
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper": {
        "max_batch_size": is_plain,
        "params": is_sweep,
    },
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper": {
        **_plain("study_name", "n_trials", "n_jobs", "max_failure_rate"),
        "direction": is_plain_tree,
        "search_space": is_plain_tree,
        "params": is_sweep,
        "sampler": is_sampler,
        "storage": never,
    },
}
PARTS = {"launcher": LAUNCHERS, "sweeper": SWEEPERS}
# What is shell, or an address: taken as the command line has it, and never from a file.
ONLY_TYPED = ("launcher.setup", "launcher.additional_parameters", "sweeper.storage")
# What Hydra itself writes as it composes.
WRITTEN = (
    *("runtime.choices", "runtime.config_sources", "runtime.cwd"),
    *("job.override_dirname", "job.config_name"),
)


def check_section(section: DictConfig, default: DictConfig, words: Iterable[str]) -> None:
    """Raise UserError for the first value that is not in the table.

    Args:
        section: Hydra's, as composed.
        default: the same for an empty command line.
        words: the overrides of the command line.
    """
    words = list(words)
    given: Any = OmegaConf.to_container(section.overrides)  # as words, which may look like ${...}
    if sorted([*given["hydra"], *given["task"]]) != sorted(words):
        _refuse("overrides")
    for part, table in PARTS.items():
        _check_part(part, section[part], table, _typed(words))
    before, after = _leaves(default), _leaves(section)
    for key in sorted({*before, *after}):
        if before.get(key) == after.get(key) or key.startswith((*WRITTEN, *PARTS, "overrides")):
            continue
        known = next((name for name in KEYS if f"{key}.".startswith(f"{name}.")), None)
        if known is None or not KEYS[known](after.get(key)):
            _refuse(key)


def _check_part(part: str, config: DictConfig, table: Mapping[str, Any], typed: Any) -> None:
    try:
        values: Any = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.{part}: {str(error).splitlines()[0]}") from error
    target = str(values.pop("_target_", None) if isinstance(values, dict) else None)
    if target not in table:
        _refuse(part)
    for key, value in values.items():
        name = f"{part}.{key}"
        if key not in table[target]:
            _refuse(name)
        elif name in ONLY_TYPED and value:
            raw = OmegaConf.to_container(config)[key]  # type: ignore[index, call-overload]
            if raw != value or value != OmegaConf.select(typed, f"hydra.{name}"):
                raise UserError(
                    f"hydra.{name} must be given on the command line, word for word, "
                    "and not by a file (docs/reliability.md)"
                )
        elif not table[target][key](value):
            _refuse(name, value)


def _typed(words: Iterable[str]) -> DictConfig:
    """Return what the command line alone gives of `ONLY_TYPED`."""
    config = OmegaConf.create()
    for override in OverridesParser.create().parse_overrides(list(words)):
        key = override.key_or_group
        if f"{key}.".startswith(tuple(f"hydra.{name}." for name in ONLY_TYPED)):
            OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
    return config


def _leaves(section: DictConfig) -> dict[str, Any]:
    """Return the values by their dotted keys, unresolved; a list is one value."""
    return dict(_flat(OmegaConf.to_container(section, enum_to_str=True), ""))


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else str(name))
    elif value != {}:
        yield key, value


def _refuse(key: str, *value: Any) -> None:
    got = f", got {value[0]!r}" if value else ""
    raise UserError(
        f"hydra.{key} must be left out, or as docs/reliability.md lists it{got}: "
        "a config may not name code to run"
    )


def check_search_path(paths: Iterable[tuple[str, str]]) -> None:
    """Raise UserError unless a config's folders, of (provider, path), are plain ones.

    Hydra would import the module of pkg://MODULE.
    """
    for provider, path in paths:
        if provider.startswith(("hydra.searchpath", "main", "command-line")):
            folder = path.removeprefix("file://")
            if "://" in folder or not Path(folder).is_dir():
                raise UserError(f"hydra.searchpath must hold plain folders, got {path!r}")
