"""Command lines: what is answered before anything heavy is imported, and what is refused."""

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from dkcls.cli import command_line, help
from dkcls.cli.groups import groups
from dkcls.config import ClassificationConfig, Config, EvalConfig, TaskConfig, keys
from dkcls.errors import UserError
from tests.engine.common import ROOT, run_here


@dataclass
class Example(ClassificationConfig):
    """A config of a test."""

    name: str = "example"  # one word of it
    # two lines of comment
    # above it
    long: int = 3
    pair: list[int] = field(
        default_factory=lambda: [1, 2],
    )  # after a field of several lines


HEAVY = ("torch", "timm", "numpy", "matplotlib")


def imported_by(code: str, *arguments: str) -> set[str]:
    """Return which heavy packages a fresh process has imported once it has run the code."""
    tail = "\nimport sys\nprint(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split()) & {*HEAVY, "hydra", "omegaconf"}


def test_help_and_a_misspelt_key_need_neither_torch_nor_hydra():
    help_of = "from dkcls.cli.train import main; import sys; sys.argv[1:] = ['--help']; main()"
    assert imported_by(help_of) == set()
    wrong = (
        "from dkcls.cli.train import main; import sys; sys.argv[1:] = ['model.scop=3']\n"
        "try: main()\nexcept SystemExit as end: assert end.code == 1"
    )
    assert imported_by(wrong) == set()


def test_composing_a_config_needs_no_torch():
    code = (
        "import dkcls; config = dkcls.compose('experiment=resnet50_dw_local4', 'recipe=coco')\n"
        "assert config.task.name == 'detection'; dkcls.Config(); dkcls.EvalConfig()"
    )
    assert imported_by(code) == {"hydra", "omegaconf"}


@pytest.mark.parametrize("kind", [Config, EvalConfig])
def test_no_key_is_without_help(kind):
    assert [key.name for key in keys(kind) if len(key.help) < 3] == []


def test_help_says_default_and_meaning_of_every_key():
    text = help.page("About.", Config, groups())
    lines = text.splitlines()
    assert max(map(len, lines)) <= help.WIDTH
    for key in keys():
        [line] = [line for line in lines if line.startswith(f"  {key.name}=")]
        if key.default is None or isinstance(key.default, bool):
            word = {None: "null", True: "true", False: "false"}[key.default]
            assert line.split()[0] == f"{key.name}={word}"
        assert " ".join(text.split()).count(" ".join(key.help.split())) >= 1, key.name
    [epochs] = [line for line in lines if line.startswith("  schedule.epochs=")]
    assert epochs.split() == ["schedule.epochs=90", "passes", "over", "the", "training", "images"]
    [scale] = [line for line in lines if line.startswith("  augment.scale=")]
    assert scale.split()[0] == "augment.scale=[0.08,1]"


def test_comments_are_found_above_a_field_and_after_it():
    assert {key.name: (key.default, key.help) for key in keys(Example)} == {
        "name": ("example", "one word of it"),
        "label_smoothing": (0.0, "share of a target that goes to all classes alike"),
        "long": (3, "two lines of comment above it"),
        "pair": ([1, 2], "after a field of several lines"),
    }


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_help_for_a_reader_of_one_line_ends_quietly(script):
    """As `train.py --help | head -1` does: the pipe is closed before all of it is written."""
    process = subprocess.Popen(
        [sys.executable, script, "--help"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.scop=3"], "there is no key 'model.scop'; did you mean 'model.scope'?"),
        (["model=resnet50"], "model is a group of keys, such as model.name; --help lists them"),
        (["+augment.mixupp=3"], "there is no key 'augment.mixupp'; did you mean 'augment.mixup'?"),
        (["~schedule.epoch=3"], "did you mean 'schedule.epochs'?"),
        (["min_size=3"], "did you mean 'task.min_size'?"),
        (["qqqq=3"], "there is no key 'qqqq'"),
    ],
)
def test_a_key_that_there_is_not_is_refused_with_the_nearest(words, sentence):
    with pytest.raises(UserError) as refused:
        command_line.check_words(words)
    assert str(refused.value).endswith(sentence)


def test_what_is_checked_later_is_let_through():
    words = ["-m", "--config-dir", "x=y", "hydra/launcher=joblib", "hydra.sweep.dir=x"]
    words = [word for word in words if word != "x=y"]
    words += ["experiment=x", "data.options.any=1", "model.kwargs.any=1", "+model.options.any=1"]
    command_line.check_words(words, groups=["experiment"])


def test_free_content_needs_no_plus():
    words = ["data.options.noise=0", "+data.options.x=1", "model.scope=3", "model.kwargs.a=b"]
    assert command_line.with_plus(words) == [
        "++data.options.noise=0",
        "+data.options.x=1",
        "model.scope=3",
        "++model.kwargs.a=b",
    ]
    assert command_line.with_plus(["data.root=/x", "split=test"], EvalConfig) == [
        "++data.root=/x",
        "split=test",
    ]


def test_plugins_are_imported_and_taken_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(command_line, "imported", [])
    for name in ("first_plugin", "second_plugin"):
        (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}\n")
    words = ["--plugin", "first_plugin", "seed=3", "--plugin=second_plugin", "-m"]
    try:
        assert command_line.take_plugins(words) == ["seed=3", "-m"]
        assert [sys.modules[name].NAME for name in command_line.imported] == [
            "first_plugin",
            "second_plugin",
        ]
    finally:
        for name in ("first_plugin", "second_plugin"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--plugin"], "--plugin needs the name of a module"),
        (["--plugin", "nowhere_to_be_found"], "there is no module nowhere_to_be_found in this"),
    ],
)
def test_a_plugin_that_there_is_not_is_named(words, sentence, tmp_path, monkeypatch, capsys):
    assert run_here(monkeypatch, tmp_path, *words, script=str(ROOT / "train.py")) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert sentence in said
    assert said.count("\n") == 1


def test_a_config_dir_of_ones_own_is_listed_in_the_help(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").touch()
    for words in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        assert "mine" in groups(words)["experiment"]
    assert "mine" not in groups()["experiment"]


def test_a_task_must_have_the_name_of_its_config():
    from dkcls.engine.task import register_task

    with pytest.raises(ValueError, match="with name = 'counting'"):
        register_task("counting", TaskConfig)
