"""Every config composes, and every experiment is the paper's row that it is named after."""

import inspect
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from dkcls.config import Config, register, run_name, to_config, valid_keys
from dkcls.detection.detector import Detector
from dkcls.models import PAPER
from dkcls.models.paper import PAPER_DETECTION
from tests.engine.common import ROOT, run_here

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def config_of(*overrides: str) -> Config:
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose("train", [*overrides]))


def test_there_is_one_for_each_row_of_the_paper():
    classifiers, detectors = {row.name for row in PAPER}, {f"det_{row.name}" for row in PAPER_DETECTION}
    assert set(EXPERIMENTS) == classifiers | detectors | {"quickstart", "finetune", "reproduce", "det_quickstart"}


@pytest.mark.parametrize("row", PAPER, ids=lambda row: row.name)
def test_an_experiment_is_its_row(row):
    config = config_of(f"experiment={row.name}")
    assert config.model.name == row.base
    assert config.model.arguments() == row.arguments
    if row.arguments:
        assert config.optim.generator_lr == row.generator_lr_multiplier
    assert (config.schedule.epochs, config.schedule.warmup_epochs, config.train.batch_size) == (90, 5, 256)
    assert (config.learning_rate, config.optim.momentum, config.optim.weight_decay) == (0.1, 0.9, 4e-5)


@pytest.mark.parametrize(
    "choice",
    sorted(f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "experiment"),
)
def test_every_file_of_every_group_composes(choice):
    assert config_of(choice)


def test_an_override_of_the_scope_means_what_it_says():
    assert config_of("experiment=resnet50_dw_local4", "model.scope=9").model.arguments() == {"spatial": "local_dk", "scope": 9}


def test_the_learning_rate_follows_the_batch_unless_it_is_set():
    assert config_of("experiment=resnet50", "train.batch_size=1024").learning_rate == pytest.approx(0.4)
    assert config_of("experiment=resnet50", "train.batch_size=1024", "optim.lr=0.3").learning_rate == 0.3


def test_every_key_is_read_somewhere():
    source = "".join(path.read_text() for path in (ROOT / "dkcls").rglob("*.py") if path.name != "config.py")
    own = (ROOT / "dkcls/config.py").read_text()
    detector = inspect.signature(Detector).parameters  # they are passed on as they are
    for key in valid_keys():
        name = key.split(".")[-1]
        if key.startswith("detector.") and name in detector:
            continue
        read = f".{name}" in source or key.startswith("model.") or own.count(f'"{name}"') + own.count(f"self.{name}") > 0
        assert read, key


def test_names():
    overrides = ["experiment=resnet50_dw", "model.scope=5", "data.root=/x", "optim.lr=1e-2", "name=null"]
    assert run_name("resnet50_dw", overrides) == "resnet50_dw-model.scope-5-optim.lr-1e_2"


@pytest.mark.parametrize(  # finetune needs a checkpoint, detectors need boxes: tests/detection
    "experiment", [name for name in EXPERIMENTS if name != "finetune" and not name.startswith("det_")]
)
def test_dry_run(experiment, monkeypatch, tmp_path, capsys):
    """Builds all, runs a step on tiny images, tells parameters and milestones, and writes nothing."""
    tiny = ["data=synthetic", "data.image_size=32", "data.length=4", "data.num_classes=1000", "train.batch_size=2"]
    overrides = [f"experiment={experiment}", *tiny, "train.dry_run=true"]
    assert run_here(monkeypatch, tmp_path, *overrides) == 0
    said = capsys.readouterr().out
    rows = {row.name: row for row in PAPER}
    if experiment in rows:
        assert f"{rows[experiment].parameters:,}\n" in said
    assert "end of warm-up" in said
    assert list(Path(tmp_path).iterdir()) == []
