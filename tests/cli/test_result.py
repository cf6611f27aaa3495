"""The table at the end of a run, and `dkcls` itself: commands, version, lists, arguments."""

import re
import sys
from dataclasses import dataclass, field

import pytest

from dkcls import cli
from dkcls.cli.train import show
from dkcls.errors import UserError
from dkcls.words import label, metric
from tests.engine.common import call

LAST = {"loss": 1.25, "top1": 70.456, "images": 4000, "seconds": 125.4, "name": "a"}


@pytest.fixture
def rows(tmp_path, capsys):
    """Return a function that shows a result, and returns the table's rows as a dictionary."""
    (tmp_path / "curves.png").touch()

    def shown(result):
        show(result, tmp_path)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "a"
        return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines[1:])

    return shown


def test_the_best_is_shown_only_where_it_is_not_the_last(rows):
    same = {"best_loss": 1.25, "best_top1": 70.456, "best_images": 4000, "best_step": 9}
    table = rows(LAST | same)
    assert [name for name in table if "best" in name] == []
    assert (table["loss"], table["top-1"], table["images"]) == ("1.2500", "70.46 %", "4,000")
    assert table["wall time"] == "2 min 5 s"
    other = rows(LAST | same | {"best_loss": 1.3, "best_top1": 71.0, "best_epoch": 4})
    assert other["best checkpoint"] == "loss 1.3000, top-1 71.00 %, step 9, epoch 4"


def test_what_a_run_has_not_is_not_named(rows, tmp_path):
    assert "TensorBoard" not in rows(dict(LAST))
    (tmp_path / "tensorboard").mkdir()
    assert rows(dict(LAST))["TensorBoard"] == f"tensorboard --logdir {tmp_path}"


@pytest.mark.parametrize(
    ("program", "words"), [("train.py", "python eval.py"), ("dkcls", "dkcls eval")]
)
def test_the_next_command_is_called_as_this_one_was(program, words, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"/anywhere/{program}"])
    assert rows(dict(LAST))["evaluate"] == f"{words} checkpoint={tmp_path}/best.pt"


def test_names_and_numbers_as_people_write_them():
    written = {name: label(name) for name in ("top1", "ap", "ap50", "ar_100", "macs", "loss")}
    assert list(written.values()) == ["top-1", "AP", "AP50", "AR 100", "multiply-adds", "loss"]
    assert metric("ap", 37.218) == "37.22 %"
    assert metric("seconds", 59.4) == "59 s"
    assert metric("images_per_s", 1234.56) == "1,234.6"
    assert metric("checkpoint", "a.pt") == "a.pt"


def test_help_lists_every_command_and_each_has_help(monkeypatch, capsys):
    assert call(monkeypatch, "--help") == 0
    listed = capsys.readouterr().out
    for command, about in cli.COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(about)}$", listed, re.MULTILINE), command
        assert call(monkeypatch, f"{command} --help") == 0
        said = capsys.readouterr().out
        assert f"  dkcls {command}" in said, command
        assert re.search(r"^  \w+\S*=\S+ +\S", said, re.MULTILINE), command
        for line in said.splitlines():
            if re.match(r"  \w+\S*=", line):
                assert len(line.split(maxsplit=1)) == 2 or len(line) > 33, line


def test_version_says_what_a_bug_report_needs(monkeypatch, capsys):
    assert call(monkeypatch, "--version") == 0
    said = capsys.readouterr().out
    for word in ("dkcls ", "Python ", "torch ", "triton ", "timm ", "driver ", "CPU: "):
        assert word in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("trian", "there is no command 'trian'; did you mean 'train'?; dkcls --help lists them"),
        ("list what=nothing", "what must be layers, data, tasks, loggers, models, "),
        ("list", "what=... is needed; --help lists the keys"),
        ("pack root=a outputs=b", "there is no key 'outputs'; did you mean 'output'?"),
        ("report runs=a,b", "a list is written [a,b], got runs=a,b"),
        ("report quickstart", "arguments are KEY=VALUE, got 'quickstart'; --help lists the keys"),
        ("report ++runs=a", "arguments are KEY=VALUE, got '++runs=a'; --help lists the keys"),
        ("pack root=a output=b shard=many", "shard"),
        ("export checkpoint=a.pt format=[onnx", "format=[onnx cannot be read: "),
    ],
)
def test_a_wrong_command_is_one_sentence(words, sentence, monkeypatch, capsys):
    assert call(monkeypatch, words) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert sentence in said


def test_lists(monkeypatch, capsys):
    def names(*words):
        assert call(monkeypatch, "list", *words) == 0
        return capsys.readouterr().out.splitlines()

    assert "local_dk: local DK" in names("layers")
    assert names("tasks") == ["classification", "detection"]
    assert names("loggers") == ["tensorboard"]
    assert {"folder", "imagenet", "deformed_fashion"} <= set(names("data"))
    assert names("recipes") == ["coco", "imagenet", "quick"]
    assert names("experiments", "match=*local9") == ["resnet50_dw_local9"]
    models = names("models")
    assert models[0] == "mobilenetv2_100_cond"
    assert "convnext_tiny" in models[100:]


@dataclass
class Values:
    """Arguments of every kind."""

    path: str = "???"  # needed
    many: list[float] = field(default_factory=list)  # numbers
    flag: bool = False  # yes or no


def test_values_have_hydras_grammar():
    words = ["path=runs/a b/*.pt", "many=[1,2.5]", "flag=true"]
    assert cli.parse(words, Values) == Values("runs/a b/*.pt", [1.0, 2.5], True)
    assert cli.parse(["path=-"], Values) == Values("-")
    assert cli.parse(["path='a,b'"], Values) == Values("a,b")
    with pytest.raises(UserError, match=r"path=\.\.\. is needed"):
        cli.parse(["flag=true"], Values)
