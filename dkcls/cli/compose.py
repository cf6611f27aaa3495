"""Configs from configs/ and overrides, by Hydra, which may run nothing that a config names."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from dkcls import cli
from dkcls.cli import command_line, hydra_keys
from dkcls.cli.groups import config_folder, groups, registered_datasets
from dkcls.config import TASK_CONFIGS, Config, EvalConfig, TaskConfig, free_keys
from dkcls.config.convert import to_config
from dkcls.errors import UserError

LAUNCHERS = ("submitit", "joblib")  # packages that Hydra's launchers start jobs with
SCHEMAS = {"train": Config, "eval": EvalConfig}

_load = ConfigLoaderImpl.load_configuration
_initialize = ConfigRepository.initialize_sources
_ours = False  # while `guarded` runs
_defaults: dict[str, DictConfig] = {}  # Hydra's own section, of an empty command line


def register() -> None:
    """Tell Hydra of the schemas, and of tasks and data sets that plug-ins have registered."""
    store = ConfigStore.instance()
    schema = Config()
    schema.task = TaskConfig()  # in whose place any task's can be
    store.store(name="schema", node=schema)
    store.store(name="eval_schema", node=EvalConfig)
    for name, kind in TASK_CONFIGS.items():
        store.store(group="task", name=name, node=kind)
    files = {path.stem for path in (config_folder() / "data").glob("*.yaml")}
    for name in registered_datasets():
        if name not in files:
            store.store(group="data", name=name, node={"name": name})


def compose(*overrides: str, config_dir: str | Path | None = None) -> Config:
    """Return the config that `train.py` would have with these overrides, its name included.

    `config_dir` is a folder of configs of one's own, as --config-dir names it.

    compose("experiment=resnet50_dw_local4", "data.root=/data/imagenet")
    """
    words = command_line.with_plus(overrides)
    own = [] if config_dir is None else [f"--config-dir={config_dir}"]
    command_line.check_words(words, groups=groups(own))
    if config_dir is not None:
        words.append(f"hydra.searchpath=['file://{Path(config_dir).absolute()}']")
    register()
    try:
        with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"), guarded():
            config = to_config(hydra.compose("train", words))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(cli.explain(error, Config)) from error
    if config.name is None:
        chosen = [word for word in words if command_line.key_of(word) == "experiment"]
        experiment = chosen[-1].partition("=")[2] if chosen else None
        config.name = run_name(experiment, words) or None
    return config


def launch(name: str, job: Callable[[Any, Any], None]) -> None:
    """Call `job` with the config of the command line, or once for each of a sweep.

    The second argument is Hydra's own config. `name` is that of a file in configs/.
    """
    kind, plugins = SCHEMAS[name], list(command_line.imported)

    def task(composed: DictConfig) -> None:  # in another process, if a launcher starts one
        cli.log_to_stderr()
        with cli.errors(kind):
            command_line.import_plugins(plugins)
            job(to_config(composed), HydraConfig.get())

    register()
    main = hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=name)(task)
    try:
        with guarded():
            main()
    except (UserError, HydraException, OmegaConfBaseException):
        raise
    # Not from a run in this process, which has `errors` of its own.
    except Exception as error:
        if type(error).__module__.split(".")[0] in LAUNCHERS:
            last = str(error).strip().splitlines()[-1]
            raise UserError(f"a job failed: {last.removeprefix('error: ')}") from error
        sweep = {"-m", "--multirun"} & set(sys.argv)
        what = "the sweep cannot be started" if sweep else "the config cannot be composed"
        raise UserError(f"{what}: {cli.explain(error, kind)}") from error


def run_name(experiment: str | None, overrides: Iterable[str]) -> str:
    """Return the experiment, and those overrides that make it another run.

    quickstart-model.scope-5 is an example.
    """
    parts, free = [experiment] if experiment is not None else [], free_keys()
    for override in sorted(word.lstrip("+~") for word in overrides):
        key, _, value = override.partition("=")
        if key not in free and key != "experiment" and not key.startswith("hydra"):
            parts.append(f"{key}-{''.join(c if c.isalnum() or c in '._' else '_' for c in value)}")
    return "-".join(parts)


@contextmanager
def guarded() -> Iterator[None]:
    """Mark what Hydra composes in here as ours, so that its own section is checked."""
    global _ours
    before, _ours = _ours, True
    try:
        yield
    finally:
        _ours = before


def _is_ours(paths: ConfigSearchPath) -> bool:
    """Return whether a config is composed for us; in a launcher's process our folder tells it."""
    found = [str(element.path).removeprefix("file://") for element in paths.get_path()]
    return _ours or str(config_folder()) in found


def _load_checked(
    self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
) -> DictConfig:
    config = _load(self, config_name, overrides, *args, **kwargs)
    if _is_ours(self.config_search_path):
        base = config_name if config_name in SCHEMAS else "train"
        if base not in _defaults:
            _defaults[base] = _load(self, base, [], RunMode.RUN).hydra
        hydra_keys.check_section(config.hydra, _defaults[base], overrides)
    return config


def _initialize_checked(self: ConfigRepository, paths: ConfigSearchPath) -> None:
    if _is_ours(paths):
        found = [(str(element.provider), str(element.path)) for element in paths.get_path()]
        hydra_keys.check_search_path(found)
    _initialize(self, paths)


# Set as this module is imported, which a launcher's process does before it composes a job's config.
setattr(ConfigLoaderImpl, "load_configuration", _load_checked)  # noqa: B010
setattr(ConfigRepository, "initialize_sources", _initialize_checked)  # noqa: B010
