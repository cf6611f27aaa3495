"""eval.py on the checkpoints that train.py makes."""

import json

import pytest
import torch

from tests.engine.common import metric_lines, run_here


@pytest.fixture
def run(tmp_path, monkeypatch):
    assert run_here(monkeypatch, tmp_path, "train.ema_decay=0.5") == 0
    return tmp_path / "runs/small"


def test_figures_are_those_of_the_training_run(run, tmp_path, monkeypatch, capsys):
    arguments = ("checkpoint=[runs/small/last.pt,runs/small/best.pt]", "json=out.json", "batch_size=7")
    assert run_here(monkeypatch, tmp_path, *arguments, script="eval.py") == 0
    last, best = json.loads((tmp_path / "out.json").read_text())
    expected = metric_lines(tmp_path)[-1]
    assert {name: last[name] for name in ("top1", "top5", "images")} == {n: expected[n] for n in ("top1", "top5", "images")}
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert best["top1"] >= last["top1"]
    assert "| runs/small/last.pt | val |" in capsys.readouterr().out


def test_raw_weights_and_the_moving_average_differ(run, tmp_path, monkeypatch):
    losses = []
    for weights in ("auto", "ema", "model"):
        arguments = ("checkpoint=runs/small/last.pt", f"weights={weights}", "json=out.json")
        assert run_here(monkeypatch, tmp_path, *arguments, script="eval.py") == 0
        losses.append(json.loads((tmp_path / "out.json").read_text())[0]["loss"])
    assert losses[0] == losses[1] != losses[2]


def test_bad_input(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "copy.pt").write_bytes((run / "last.pt").read_bytes()[:-1000])
    state = torch.load(run / "last.pt", weights_only=True)
    torch.save(state | {"classes": ["cat", "dog"]}, tmp_path / "other.pt")
    for arguments, sentence in (
        (("checkpoint=nowhere.pt",), "cannot be read: No such file"),
        (("checkpoint=copy.pt",), "not a checkpoint that is safe to load"),
        (("checkpoint=other.pt",), "trained for 2 classes (cat, dog, ...), the data has 10"),
        (("checkpoint=runs/small/last.pt", "splitt=val"), "did you mean 'split'?"),
        (("checkpoint=runs/small/last.pt", "split=tset"), "split must be one of"),
        ((), "checkpoint"),
    ):
        assert run_here(monkeypatch, tmp_path, *arguments, script="eval.py") == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert sentence in said
