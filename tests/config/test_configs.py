"""Every config composes, and every experiment is the paper's row that it is named after."""

import re
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from dkcls.config import (
    FREE,
    Config,
    ScheduleConfig,
    TrainConfig,
    changed_keys,
    flat,
    register,
    run_name,
    to_config,
)
from dkcls.models import PAPER
from dkcls.models.zoo import PAPER_DETECTION
from tests.engine.common import ROOT, run_here

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def config_of(*overrides: str) -> Config:
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose("train", [*overrides]))


def test_there_is_one_for_each_row_of_the_paper():
    classifiers, detectors = (
        {row.name for row in PAPER},
        {f"det_{row.name}" for row in PAPER_DETECTION},
    )
    assert set(EXPERIMENTS) == classifiers | detectors | {
        "quickstart",
        "finetune",
        "reproduce",
        "det_quickstart",
    }


@pytest.mark.parametrize("row", PAPER, ids=lambda row: row.name)
def test_an_experiment_is_its_row(row):
    config = config_of(f"experiment={row.name}")
    assert config.model.name == row.base
    assert config.model.arguments() == row.arguments
    if row.arguments:
        assert config.optim.generator_lr == row.generator_lr_multiplier
    assert (config.schedule.epochs, config.schedule.warmup_epochs, config.train.batch_size) == (
        90,
        5,
        256,
    )
    assert (config.learning_rate, config.optim.momentum, config.optim.weight_decay) == (
        0.1,
        0.9,
        4e-5,
    )
    assert config.train.precision == "auto"


@pytest.mark.parametrize(
    "choice",
    sorted(
        f"{path.parent.name}={path.stem}"
        for path in CONFIGS.glob("*/*.yaml")
        if path.parent.name != "experiment"
    ),
)
def test_every_file_of_every_group_composes(choice):
    assert config_of(choice)


def composed_by_train(monkeypatch, folder, capsys, *words):
    """Return what train.py would train, as Hydra prints it, and what it says besides."""
    assert run_here(monkeypatch, folder, "--cfg", "job", *words, script=str(ROOT / "train.py")) == 0
    said = capsys.readouterr()
    return dict(flat(yaml.safe_load(said.out))), said.err


@pytest.mark.parametrize("words", [(), ("model.scope=5",), ("seed=3", "data.length=9")], ids=str)
def test_quickstart_is_trained_when_nothing_else_is_asked_for(words, monkeypatch, tmp_path, capsys):
    got, said = composed_by_train(monkeypatch, tmp_path, capsys, *words)
    expected = dict(flat(config_of("experiment=quickstart", *words).to_dict()))
    assert got == expected
    assert said.startswith("quickstart: ")
    assert expected["model.depthwise_gain"] == 0.03


@pytest.mark.parametrize(
    "ask", ["experiment", "model", "model.name", "model.pretrained", "data", "data.name", "task"]
)
def test_quickstart_leaks_into_nothing_else(ask, monkeypatch, tmp_path, capsys):
    """With any one of these keys the rest is ImageNet's recipe and the networks' own defaults."""
    value = {
        "experiment": "resnet50_dw",
        "model": "resnet50_dw",
        "data": "imagenet",
        "task": "classification",
    }.get(ask, "x")
    got, said = composed_by_train(monkeypatch, tmp_path, capsys, f"{ask}={value}")
    plain, quick = Config().to_dict(), dict(flat(config_of("experiment=quickstart").to_dict()))
    own = {"model": {"model.name"}, "data": {"data.name", "data.image_size"}}
    own["experiment"] = own["model"] | own["data"] | {"optim.generator_lr"}
    asked = own.get(ask, {ask})
    for key, default in flat(plain):
        if key not in asked | {"train.precision"} and quick[key] != default:
            assert got[key] == default, key
    assert (got["schedule.epochs"], got["train.batch_size"], got["optim.lr"]) == (90, 256, None)
    assert "quickstart" not in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("data=synthetic",), "model=NAME or model.name=NAME is needed"),
        (("model=resnet50_dw",), "data=NAME or data.name=NAME is needed"),
        (("task=detection",), "model=NAME or model.name=NAME is needed"),
    ],
)
def test_what_is_missing_is_asked_for(words, sentence, monkeypatch, tmp_path, capsys):
    assert run_here(monkeypatch, tmp_path, *words, script=str(ROOT / "train.py")) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: {sentence}")
    assert said.count("\n") == 1


def test_an_override_of_the_scope_means_what_it_says():
    assert config_of("experiment=resnet50_dw_local4", "model.scope=9").model.arguments() == {
        "spatial": "local_dk",
        "scope": 9,
    }


def test_the_learning_rate_follows_the_batch_unless_it_is_set():
    assert config_of("experiment=resnet50", "train.batch_size=1024").learning_rate == pytest.approx(
        0.4
    )
    assert (
        config_of("experiment=resnet50", "train.batch_size=1024", "optim.lr=0.3").learning_rate
        == 0.3
    )


def test_what_may_change_when_a_run_goes_on():
    """Change where a run is, and how it is fed, watched and guarded: its metrics stay the same."""
    free = (
        "name=x", "out=x", "resume=never", "data.root=x", "data.workers=9", "data.prefetch=9",
        "data.download=true", "data.bad_limit=0.5", "data.worker_restarts=9", "train.device=cpu",
        "train.dry_run=true", "train.timeout=9", "train.max_bad_steps=9",
        "train.on_save_error=continue", "train.checkpoint_every=9", "train.keep=9", "log.every=9",
        "log.tensorboard=false", "log.images=9",
    )  # fmt: skip
    before, after = config_of().to_dict(), config_of(*free).to_dict()
    assert changed_keys(before, after) == []
    assert {key for key, value in flat(after) if dict(flat(before))[key] != value} == FREE


def test_a_key_that_is_newer_than_a_run_was_at_its_default():
    old = Config().to_dict()
    del old["train"]["ema_decay"], old["detector"]
    assert changed_keys(old, Config().to_dict()) == []
    changed = Config(train=TrainConfig(ema_decay=0.5), seed=3).to_dict()
    assert changed_keys(old, changed) == ["seed: 0 -> 3", "train.ema_decay: None -> 0.5"]


def test_warm_up_ends_before_a_short_run_does():
    assert ScheduleConfig(2, 0.5).steps(10) == (20, 5)
    assert ScheduleConfig(2, 0.5, warmup_steps=7).steps(10) == (20, 7)
    assert ScheduleConfig(2, 0.5, warmup_steps=500).steps(10) == (20, 19)
    assert ScheduleConfig(2, 0.0, warmup_steps=0).steps(10) == (20, 0)


def test_names():
    overrides = [
        "experiment=resnet50_dw",
        "model.scope=5",
        "data.root=/x",
        "optim.lr=1e-2",
        "name=null",
    ]
    assert run_name("resnet50_dw", overrides) == "resnet50_dw-model.scope-5-optim.lr-1e_2"
    assert run_name("resnet50_dw", overrides[::-1]) == "resnet50_dw-model.scope-5-optim.lr-1e_2"
    assert (
        run_name(None, ["model=resnet50_dw", "data=imagenet"]) == "data-imagenet-model-resnet50_dw"
    )


@pytest.mark.slow
@pytest.mark.parametrize(  # finetune needs a checkpoint; detectors: tests/tasks/detection
    "experiment",
    [
        # The largest networks take a step in tests/models as well.
        pytest.param(name, marks=[pytest.mark.long] if "point2" in name or "cond" in name else [])
        for name in EXPERIMENTS
        if name != "finetune" and not name.startswith("det_")
    ],
)
def test_dry_run(experiment, monkeypatch, tmp_path, capsys):
    """Build all, run a step on tiny images, report parameters and milestones, and write nothing."""
    tiny = [
        "data=synthetic",
        "data.image_size=32",
        "data.length=4",
        "data.num_classes=1000",
        "train.batch_size=2",
    ]
    overrides = [f"experiment={experiment}", *tiny, "train.dry_run=true"]
    assert run_here(monkeypatch, tmp_path, *overrides) == 0
    said = capsys.readouterr().out
    rows = {row.name: row for row in PAPER}
    if experiment in rows:
        assert f"{rows[experiment].parameters:,}\n" in said
    assert "end of warm-up" in said
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "data.mean=[0.5,0.5]",
            "data.mean must be one number or three, from 0 to 1, or null, got [0.5, 0.5]",
        ),
        (
            "data.mean=[123.7]",
            "data.mean must be one number or three, from 0 to 1, or null, got [123.7]",
        ),
        ("data.mean=[]", "data.mean must be one number or three, from 0 to 1, or null, got []"),
        ("data.std=[0.2,0.2,0]", "data.std must be above 0, got [0.2, 0.2, 0.0]"),
        (
            "data.interpolation=nearest",
            "data.interpolation must be bilinear, bicubic or null, got 'nearest'",
        ),
        ("data.bad_rows=keep", "data.bad_rows must be stop, skip or null, got 'keep'"),
    ],
)
def test_wrong_values_of_the_data_are_named(override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        config_of(override)
