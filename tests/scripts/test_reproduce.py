"""Studies, from training to tables and pictures."""

import json

import pytest

from tests.engine.common import run_here

SCRIPT = "scripts/reproduce/classification.py"
TOY = (
    "data.options.length=64",
    "train.batch_size=32",
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
)


@pytest.mark.slow
def test_reproduce_from_training_to_plots(tmp_path, monkeypatch):
    arguments = (
        "studies=[main]",
        "rows=[rigid,local4]",
        "seeds=[0,1]",
        "jobs=1",
        f"overrides=[{','.join(map(repr, TOY))}]",
    )
    assert run_here(monkeypatch, tmp_path, *arguments, script=SCRIPT) == 0
    out = tmp_path / "runs/reproduce"
    files = [
        f"report/{name}"
        for name in (
            "main.md",
            "questions.csv",
            "outside.csv",
            "gains.png",
            "scope.png",
            "by_scale.png",
            "by_rotation.png",
        )
    ]
    assert [name for name in files if not (out / name).is_file()] == []
    test = {
        name: json.loads((out / f"{name}/test.json").read_text())
        for name in ("rigid-0", "local4-0", "rigid-1", "local4-1")
    }
    gain = (
        sum(test[f"local4-{seed}"]["test"] - test[f"rigid-{seed}"]["test"] for seed in (0, 1)) / 2
    )
    assert (
        f"| Does local DK beat rigid? | local 4 - rigid | {gain:+.2f}"
        in (out / "report/questions.md").read_text()
    )
    assert len(test["rigid-0"]["by_scale"]) == 10
    times = {name: (out / f"{name}/test.json").stat().st_mtime_ns for name in test}
    assert run_here(monkeypatch, tmp_path, *arguments, script=SCRIPT) == 0
    assert {name: (out / f"{name}/test.json").stat().st_mtime_ns for name in test} == times
