"""Hydra's own section of a config may hold the table, and nothing beside it."""

import sys
from pathlib import Path

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.types import RunMode

from dkcls.cli.compose import compose, register
from dkcls.cli.groups import config_folder
from dkcls.cli.hydra_keys import KEYS, LAUNCHERS, SAMPLERS, SWEEPERS
from dkcls.errors import UserError
from tests.engine.common import ROOT, run_here

SLURM = {"defaults": [{"override /hydra/launcher": "submitit_slurm"}]}
BASIC = "hydra._internal.core_plugins.basic_{0}.Basic{1}"
LAUNCHER, SWEEPER = BASIC.format("launcher", "Launcher"), BASIC.format("sweeper", "Sweeper")
OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"


def composed(folder: Path, content: dict, *words: str):
    """Compose with an experiment of a stranger's folder, and with launchers and sweepers of it."""
    content = {"defaults": [], "hydra": {}, **content}
    for part, section in content["hydra"].items():
        if part in ("launcher", "sweeper") and "_target_" in section:
            (folder / f"hydra/{part}").mkdir(parents=True, exist_ok=True)
            (folder / f"hydra/{part}/theirs.yaml").write_text(yaml.safe_dump(section))
            content["defaults"] = [{f"override /hydra/{part}": "theirs"}]
            content["hydra"] = {}
    (folder / "experiment").mkdir(parents=True, exist_ok=True)
    text = "# @package _global_\n" + yaml.safe_dump(content)
    (folder / "experiment/theirs.yaml").write_text(text)
    return compose("experiment=theirs", "name=x", *words, config_dir=folder)


def launcher(**keys):
    return {**SLURM, "hydra": {"launcher": keys}}


def sampler(target, **keys):
    return {"sweeper": {"_target_": OPTUNA, "sampler": {"_target_": target, **keys}}}


REFUSED = {
    "hydra.job.env_set": {"job": {"env_set": {"BROWSER": "touch evil"}}},
    "hydra.job.env_copy": {"job": {"env_copy": ["PATH"]}},
    "hydra.job.chdir": {"job": {"chdir": True}},
    "hydra.help.template": {"help": {"template": "other"}},
    "hydra.callbacks.x": {"callbacks": {"x": {"_target_": "os.getcwd"}}},
    "hydra.job_logging.handlers.x": {"job_logging": {"handlers": {"x": {"class": "os.getcwd"}}}},
    "hydra.hydra_logging.root": {"hydra_logging": {"root": {"level": "INFO"}}},
    "hydra.verbose": {"verbose": True},
    "hydra.overrides": {"overrides": {"hydra": ["hydra.launcher.setup=[evil]"]}},
    "hydra.runtime.output_dir": {"runtime": {"output_dir": "/"}},
    "hydra.launcher": {"launcher": {"_target_": "os.getcwd"}},
    "hydra.launcher.x": {"launcher": {"_target_": LAUNCHER, "x": {"_target_": "os.getcwd"}}},
    "hydra.sweeper": {"sweeper": {"_target_": "${model.kwargs.evil._target_}"}},
    "hydra.sweeper.x": {"sweeper": {"_target_": SWEEPER, "x": "${model.kwargs.evil}"}},
    "hydra.sweeper.params": {"sweeper": {"params": {"+hydra.job.env_set.X": "1"}}},
    "hydra.sweeper.sampler": sampler("os.getcwd"),
    "hydra.sweeper.sampler must": sampler(
        "optuna.samplers.TPESampler", x={"_target_": "os.getcwd"}
    ),
    "hydra.sweeper.custom_search_space": {
        "sweeper": {"_target_": OPTUNA, "custom_search_space": "os.getcwd"}
    },
    "hydra.sweeper.storage": {"sweeper": {"_target_": OPTUNA, "storage": "mysql://host/x"}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_in_the_table_is_refused_by_name(tmp_path, key):
    content = {"hydra": REFUSED[key], "model": {"kwargs": {"evil": {"_target_": "os.getcwd"}}}}
    with pytest.raises(UserError, match=rf"^{key}\b.*docs/reliability.md"):
        composed(tmp_path, content)


def test_an_interpolation_does_not_get_past_the_check(tmp_path):
    content = {"model": {"kwargs": {"evil": {"_target_": "os.getcwd"}}}}
    for word in ("+hydra.sweeper.x", "hydra.sweeper.params", "hydra.launcher"):
        with pytest.raises(UserError, match=r"^hydra\."):
            composed(tmp_path, content, f"{word}=${{model.kwargs.evil}}")


@pytest.mark.parametrize(
    "keys",
    [
        {"setup": ["rm -r x"]},
        {"additional_parameters": {"wrap": "rm -r x"}},
        {"comment": "x\nrm -r x"},
        {"submitit_folder": "x;rm -r x"},
        {"name": "${model.kwargs.evil}"},
    ],
    ids=str,
)
def test_a_file_gives_a_launcher_no_shell(tmp_path, keys):
    content = {**launcher(**keys), "model": {"kwargs": {"evil": "$(rm -r x)"}}}
    with pytest.raises(UserError, match=rf"^hydra\.launcher\.{next(iter(keys))} "):
        composed(tmp_path, content)


def test_the_command_line_gives_a_launcher_shell(tmp_path):
    words = ("hydra.launcher.setup=[module load cuda]", "hydra.launcher.timeout_min=600")
    words += ("+hydra.launcher.additional_parameters.mail=me",)
    composed(tmp_path, launcher(partition="gpu", mem_gb=4, constraint="a100|h100"), *words)
    with pytest.raises(UserError, match=r"^hydra\.launcher\.additional_parameters "):
        composed(tmp_path, launcher(additional_parameters={"wrap": "rm"}), *words)
    evil = {**SLURM, "model": {"kwargs": {"evil": ["rm"]}}}
    with pytest.raises(UserError, match=r"^hydra\.launcher\.setup "):
        composed(tmp_path, evil, "hydra.launcher.setup=${model.kwargs.evil}")


def test_what_is_in_the_table_is_taken(tmp_path):
    folders = {"run": {"dir": "a"}, "sweep": {"dir": "b/${name}", "subdir": "${hydra.job.num}"}}
    optuna = {"n_trials": 3, "direction": "maximize", "params": {"optim.lr": "interval(0.1, 1)"}}
    for section in (
        folders,
        {"output_subdir": "c", "mode": "MULTIRUN"},
        {"sweeper": {"max_batch_size": 2, "params": {"model.scope": "3,4"}}},
        {"sweeper": sampler("optuna.samplers.TPESampler", seed=1)["sweeper"] | optuna},
    ):
        assert composed(tmp_path, {"hydra": section}).name == "x"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that makes a file when it is imported."""
    (tmp_path / "their_module").mkdir()
    code = f"open({str(tmp_path / 'evil')!r}, 'w')"
    (tmp_path / "their_module/__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "their_module"
    sys.modules.pop("their_module", None)


def test_a_search_path_imports_no_module(tmp_path, module, monkeypatch, capsys):
    (tmp_path / "own").mkdir()
    (tmp_path / "own/theirs.yaml").write_text(f"hydra: {{searchpath: ['pkg://{module}']}}")
    commands = (
        (f"hydra.searchpath=[pkg://{module}]",),
        (f"hydra.searchpath=['file://{tmp_path}','pkg://{module}']",),
        ("--config-dir=own", "--config-name=theirs"),
        ("hydra.searchpath=[nowhere]",),
    )
    for words in commands:
        assert run_here(monkeypatch, tmp_path, *words) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: hydra.searchpath must hold plain folders, got ")
        assert not (tmp_path / "evil").exists()


def test_a_variable_of_the_environment_stays_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("BROWSER", raising=False)
    words = ("+hydra.job.env_set.BROWSER=x", "train.dry_run=true", "data.options.x=1")
    assert run_here(monkeypatch, tmp_path, *words) == 1
    assert capsys.readouterr().err.startswith("error: hydra.job.env_set.BROWSER must be left out")


def test_a_job_in_another_process_is_checked_too():
    """A launcher composes it there, outside of dkcls' own functions."""
    register()
    Plugins.instance()  # which knows pkg://
    for folder in (str(config_folder()), f"file://{config_folder()}"):
        paths = ConfigSearchPathImpl()
        paths.append("hydra", "pkg://hydra.conf")
        paths.append("main", folder)
        paths.append("schema", "structured://")
        loader = ConfigLoaderImpl(paths)
        with pytest.raises(UserError, match=r"^hydra\.job\.env_set\.X "):
            loader.load_configuration("train", ["+hydra.job.env_set.X=1"], RunMode.RUN)


def test_the_table_is_in_the_docs():
    text = (ROOT / "docs/reliability.md").read_text()
    tables = [*LAUNCHERS.values(), *SWEEPERS.values()]
    for key in (*KEYS, *(key for table in tables for key in table), *SAMPLERS):
        assert f"`{key}`" in text, key
