"""Every config composes, and every experiment is the paper's row that it is named after."""

import math
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from dkcls.cli.compose import compose, run_name
from dkcls.config import (
    Config,
    DetectionConfig,
    ScheduleConfig,
    TrainConfig,
    changed_keys,
    flat,
    free_keys,
    keys,
)
from dkcls.data import DATASETS
from dkcls.engine.optim import make_schedule
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.models import PAPER
from tests.engine.common import ROOT, run_here

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def config_of(*overrides: str) -> Config:
    """Return what `compose` returns, without the name that it gives a run."""
    config = compose(*overrides)
    named = any(word.startswith("name=") for word in overrides)
    return config if named else replace(config, name=None)


def test_there_is_one_for_each_row_of_the_paper():
    others = {"quickstart", "finetune", "reproduce", "det_quickstart"}
    assert set(EXPERIMENTS) == {row.name for row in PAPER} | others


@pytest.mark.parametrize("row", PAPER, ids=lambda row: row.name)
def test_an_experiment_is_its_row(row):
    config = config_of(f"experiment={row.name}")
    assert config.model.name == row.base
    assert config.model.arguments() == row.arguments
    if row.arguments:
        assert config.optim.generator_lr == row.generator_lr_multiplier
    plain = config_of("recipe=imagenet")
    for group in ("augment", "schedule", "train", "task", "data"):
        assert getattr(config, group) == getattr(plain, group)


# By hand: the paper's numbers, and what is usual where the paper is silent.
IMAGENET = {
    "data.name": "folder", "data.image_size": 224, "data.crop_ratio": 224 / 256,
    "data.interpolation": None, "augment.scale": [0.08, 1.0], "augment.ratio": [3 / 4, 4 / 3],
    "augment.hflip": 0.5, "augment.color_jitter": 0.4, "augment.rand_augment": None,
    "augment.erase_prob": 0.0, "augment.mixup": 0.0, "augment.cutmix": 0.0, "optim.lr": None,
    "optim.base_lr": 0.1, "optim.momentum": 0.9, "optim.nesterov": False,
    "optim.weight_decay": 0.00004, "optim.decay_norm": False, "optim.clip_grad": None,
    "schedule.name": "cosine", "schedule.epochs": 90, "schedule.warmup_epochs": 5,
    "schedule.warmup_steps": None, "train.batch_size": 256, "train.ema_decay": None,
    "train.precision": "auto",
}  # fmt: skip
COCO = {
    "data.name": "coco", "task.name": "detection", "task.min_size": 800, "task.max_size": 1333,
    "model.freeze": "stem", "augment.hflip": 0.5, "augment.mixup": 0.0, "augment.cutmix": 0.0,
    "optim.lr": None, "optim.base_lr": 0.02 * 256 / 16, "optim.momentum": 0.9,
    "optim.nesterov": False, "optim.weight_decay": 0.0001, "optim.decay_norm": False,
    "optim.clip_grad": None, "schedule.name": "drops", "schedule.epochs": 12,
    "schedule.warmup_steps": 500, "schedule.drop_epochs": [8, 11], "schedule.gamma": 0.1,
    "train.batch_size": 16, "train.freeze_bn": True, "train.ema_decay": None,
    "train.precision": "auto",
}  # fmt: skip
QUICK = IMAGENET | {
    "schedule.epochs": 5, "schedule.warmup_epochs": 0.5, "train.batch_size": 64,
    "train.precision": "fp32",
}  # fmt: skip
del QUICK["data.name"], QUICK["data.image_size"]


@pytest.mark.parametrize(
    ("name", "numbers"), [("imagenet", IMAGENET), ("coco", COCO), ("quick", QUICK)]
)
def test_every_number_of_a_recipe(name, numbers):
    """The file says each of them, and nothing else; and that is what a run has."""
    content = yaml.safe_load((CONFIGS / f"recipe/{name}.yaml").read_text())
    chosen = [line for line in content.pop("defaults", []) if "override /optim" in line]
    assert not chosen  # another optimiser is chosen on the command line, on top of the recipe
    said = {key: float(v) if v == "1e-4" or v == "4e-5" else v for key, v in flat(content)}
    groups = {"data.name", "task.name"}  # chosen by the file's defaults
    assert said == {key: value for key, value in numbers.items() if key not in groups}
    composed = dict(flat(config_of(f"recipe={name}").to_dict()))
    assert {key: composed[key] for key in numbers} == numbers


def test_the_papers_learning_rate_to_the_last_digit():
    """Per step t, w = 5 * 5004 steps of warm-up, T = 90 * 5004 of 1,281,167 images."""
    config = config_of("recipe=imagenet")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = make_schedule(optimizer, config.schedule, 1_281_167 // config.train.batch_size)
    w, total = 25_020, 450_360
    for t in (0, 1, 2_502, 25_019, 25_020, 25_021, 100_000, 237_690, 450_000, 450_359):
        expected = 0.1 * t / w if t < w else 0.05 * (1 + math.cos(math.pi * (t - w) / (total - w)))
        schedule.step_update(t)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_the_defaults_of_the_dataclasses_are_the_papers_recipe():
    """From Python, `Config(...)` trains as the paper does."""
    plain = dict(flat(Config().to_dict()))
    for key, value in IMAGENET.items():
        if key not in ("data.name", "data.image_size"):  # which images is for the caller to say
            assert (
                plain[key] == pytest.approx(value)
                if key == "augment.ratio"
                else (plain[key] == value)
            ), key


def test_a_recipe_on_the_command_line_wins_over_the_experiments():
    config = config_of("experiment=resnet50_dw_local4", "recipe=coco")
    assert (config.data.name, config.task.name, config.schedule.epochs) == ("coco", "detection", 12)
    assert isinstance(config.task, DetectionConfig)
    own = {key: value for key, value in vars(config.model).items() if value}
    assert own == {"name": "resnet50_dw", "spatial": "local_dk", "scope": 4, "freeze": "stem"}
    again = config_of("experiment=resnet50_dw_local4", "recipe=quick", "data=synthetic")
    assert (again.data.name, again.schedule.epochs) == ("synthetic", 5)


def test_an_optimiser_on_the_command_line_wins_over_the_recipes():
    """Its numbers are the paper's, whatever the recipe's are."""
    config = config_of("recipe=coco", "optim=sgd")
    papers = {key: value for key, value in IMAGENET.items() if key.startswith("optim.")}
    assert papers == {key: dict(flat(config.to_dict()))[key] for key in papers}


def test_another_recipe_holds_no_number_of_quickstart():
    plain, quick = Config().to_dict(), dict(flat(config_of("experiment=quickstart").to_dict()))
    got = dict(flat(config_of("recipe=imagenet", "model.name=resnet18").to_dict()))
    for key, default in flat(plain):
        if quick[key] != default and key not in IMAGENET:
            assert got[key] == (default if key != "model.name" else "resnet18"), key
    assert {key: got[key] for key in IMAGENET} == IMAGENET


def test_every_data_set_has_a_file_by_its_name():
    assert set(DATASETS) <= {path.stem for path in (CONFIGS / "data").glob("*.yaml")}
    for name in DATASETS:
        assert config_of(f"data={name}", "model.name=resnet18").data.name == name


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


@pytest.mark.parametrize(
    "words", [(), ("model.scope=5",), ("seed=3", "data.options.length=9")], ids=str
)
def test_quickstart_is_trained_when_nothing_else_is_asked_for(words, monkeypatch, tmp_path, capsys):
    got, said = composed_by_train(monkeypatch, tmp_path, capsys, *words)
    expected = dict(flat(config_of("experiment=quickstart", *words).to_dict()))
    assert got == expected
    assert said.startswith("quickstart: ")
    assert expected["model.depthwise_gain"] == 0.03


@pytest.mark.parametrize(
    "ask", ["experiment", "recipe", "model.name", "model.pretrained", "data", "data.name", "task"]
)
def test_quickstart_leaks_into_nothing_else(ask, monkeypatch, tmp_path, capsys):
    """With any one of these keys the rest is ImageNet's recipe and the networks' own defaults."""
    value = {
        "experiment": "resnet50_dw",
        "recipe": "imagenet",
        "data": "imagenet",
        "task": "classification",
    }.get(ask, "x")
    got, said = composed_by_train(monkeypatch, tmp_path, capsys, f"{ask}={value}")
    plain, quick = Config().to_dict(), dict(flat(config_of("experiment=quickstart").to_dict()))
    asked = {"experiment": "model.name"}.get(ask, ask)
    for key, default in flat(plain):
        if key != asked and key not in IMAGENET and quick[key] != default:
            assert got[key] == default, key
    assert {key: got[key] for key in IMAGENET if key != asked} == {
        key: value for key, value in IMAGENET.items() if key != asked
    }
    assert "quickstart" not in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("data=synthetic",), "model.name=NAME is needed"),
        (("model.name=resnet50_dw",), "data: data set 'folder' needs data.root=FOLDER"),
        (("model.name=resnet50_dw", "data.name=null"), "data=NAME is needed"),
        (("task=detection",), "model.name=NAME is needed"),
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
        "log.to=[]", "log.images=9",
    )  # fmt: skip
    before, after = config_of().to_dict(), config_of(*free).to_dict()
    assert changed_keys(before, after) == []
    changed = {key for key, value in flat(after) if dict(flat(before))[key] != value}
    assert changed == free_keys()


def test_free_keys_are_fields():
    for kind in {key.group for key in keys()}:
        assert set(kind.FREE) <= {field.name for field in fields(kind)}, kind


def test_what_changed_is_named():
    old = Config().to_dict()
    assert changed_keys(old, Config().to_dict()) == []
    changed = Config(train=TrainConfig(ema_decay=0.5), seed=3).to_dict()
    assert changed_keys(old, changed) == ["seed: 0 -> 3", "train.ema_decay: None -> 0.5"]
    detector = Config(task=DetectionConfig()).to_dict()
    names = [line.split(":")[0] for line in changed_keys(old, detector)]
    assert {"task.name", "task.min_size", "task.label_smoothing"} <= set(names)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda old: old["train"].pop("ema_decay"), "train.ema_decay"),
        (lambda old: old.update(detector={"levels": None}), "detector.levels"),
        (lambda old: old.update(task="classification"), ""),
    ],
)
def test_a_run_with_the_keys_of_another_version_is_refused(change, sentence, tmp_path):
    old = Config(name="a").to_dict()
    change(old)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(UserError, match="another version of dkcls") as refused:
        RunDirectory(tmp_path).check_config(Config(name="a"))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_warm_up_ends_before_a_short_run_does():
    assert ScheduleConfig(epochs=2, warmup_epochs=0.5).steps(10) == (20, 5)
    assert ScheduleConfig(epochs=2, warmup_epochs=0.5, warmup_steps=7).steps(10) == (20, 7)
    assert ScheduleConfig(epochs=2, warmup_epochs=0.5, warmup_steps=500).steps(10) == (20, 19)
    assert ScheduleConfig(epochs=2, warmup_epochs=0.0, warmup_steps=0).steps(10) == (20, 0)


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
    assert run_name(None, ["task=detection", "data=imagenet"]) == "data-imagenet-task-detection"


@pytest.mark.slow
@pytest.mark.parametrize(  # finetune needs a checkpoint; detectors: tests/tasks/detection
    "experiment",
    [
        # The largest networks take a step in tests/models as well.
        pytest.param(name, marks=[pytest.mark.long] if "point2" in name or "cond" in name else [])
        for name in EXPERIMENTS
        if name != "finetune" and name != "det_quickstart"
    ],
)
def test_dry_run(experiment, monkeypatch, tmp_path, capsys):
    """Build all, run a step on tiny images, report parameters and milestones, and write nothing."""
    tiny = [
        "data=synthetic",
        "data.image_size=32",
        "data.options.length=4",
        "data.options.num_classes=1000",
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
        ("augment.hflip=2", "augment.hflip must be from 0 to 1, got 2.0"),
        (
            "augment.scale=[0.5,2]",
            "augment.scale must be two numbers, [low,high], above 0 and at most 1, got [0.5, 2.0]",
        ),
        ("data.workers=-1", "data.workers must be from 0 to 1024, got -1"),
        ("train.eval_batch_size=0", "train.eval_batch_size must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_named(override, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        config_of(override)
