"""Finished runs, grouped and summarised; the chain from training to tables and plots."""

import csv
import json

import pytest
import yaml
from PIL import Image

from dkcls.config import Config, ModelConfig
from dkcls.engine.errors import UserError
from dkcls.engine.runs import Group, find_runs, group_runs, over_scopes, summarize
from tests.engine.common import SMALL, run_here

TOY = ("data.length=64", "train.batch_size=32", "schedule.epochs=1", "schedule.warmup_epochs=0")


def make_run(folder, top1, **config):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(Config(**config).to_dict()))
    (folder / "result.json").write_text(
        json.dumps({"top1": top1, "loss": 1.0, "seconds": 2.0, "parameters": 10})
    )


def test_runs_are_grouped_by_what_differs_but_the_seed(tmp_path):
    for scope, seed, top1 in ((9, 0, 70.0), (4, 1, 73.0), (4, 0, 71.0)):
        make_run(
            tmp_path / f"runs/{scope}-{seed}",
            top1,
            seed=seed,
            name=f"{scope}-{seed}",
            model=ModelConfig(scope=scope),
        )
    (tmp_path / "runs/unfinished").mkdir()
    four, nine = summarize(group_runs(find_runs(str(tmp_path / "runs"))))
    assert four["model.scope"] == 4
    assert four["seeds"] == "0 1"
    assert four["top1"] == 72.0
    assert four["top1_std"] == pytest.approx(2**0.5)
    assert (nine["model.scope"], nine["top1"], nine["top1_std"]) == (9, 70.0, None)
    assert len(find_runs(str(tmp_path / "runs/4-*"))) == 2


def test_groups_stand_in_the_order_of_their_numbers(tmp_path):
    for scope in (16, 4, 9):
        make_run(tmp_path / f"runs/{scope}", 70.0, name=str(scope), model=ModelConfig(scope=scope))
    groups = group_runs(find_runs(str(tmp_path / "runs")))
    assert [group.settings["model.scope"] for group in groups] == [4, 9, 16]


def test_a_run_that_two_patterns_match_counts_once(tmp_path):
    make_run(tmp_path / "runs/a", 70.0, name="a")
    assert len(find_runs([str(tmp_path / "runs"), str(tmp_path / "runs/*")])) == 1


def test_networks_without_a_scope_are_no_points_over_it(tmp_path):
    """Whatever model.scope says in their config."""
    for spatial in ("rigid", "dcn", "cond", "local_dk", "static"):
        make_run(
            tmp_path / f"runs/{spatial}",
            70.0,
            name=spatial,
            model=ModelConfig(spatial=spatial, scope=5),
        )
    series, baselines = over_scopes(group_runs(find_runs(str(tmp_path / "runs"))), Group.label)
    assert sorted(baselines) == ["spatial cond", "spatial dcn", "spatial rigid"]
    assert series == {"spatial local_dk": {5: [70.0]}, "spatial static": {5: [70.0]}}


def test_no_runs_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="there is nothing at"):
        find_runs(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no finished run"):
        find_runs(str(tmp_path))
    make_run(tmp_path / "bad", 1.0)
    (tmp_path / "bad/result.json").write_text("{")
    with pytest.raises(UserError, match="not a run that can be read"):
        find_runs(str(tmp_path))


def test_a_sweep_becomes_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
    sweep = [override for override in SMALL if not override.startswith("name=")]
    for scope in (3, 4):
        assert (
            run_here(
                monkeypatch,
                tmp_path,
                *sweep,
                f"model.scope={scope}",
                f"name=s{scope}",
                "model.spatial=local_dk",
            )
            == 0
        )
    capsys.readouterr()
    assert run_here(monkeypatch, tmp_path, "runs=runs", script="scripts/summarize_runs.py") == 0
    assert capsys.readouterr().out.startswith(
        "| model.scope | seeds | parameters | macs | top1 | top5 | loss | seconds |"
    )
    rows = list(csv.DictReader((tmp_path / "runs/summary.csv").open()))
    assert [row["model.scope"] for row in rows] == ["3", "4"]
    result = json.loads((tmp_path / "runs/s4/result.json").read_text())
    assert float(rows[1]["top1"]) == result["top1"]
    assert int(rows[1]["macs"]) == result["macs"] > 1e6
    with Image.open(
        tmp_path / "runs/scope.png"
    ) as plot:  # two points and their axes, not an empty canvas
        assert len(plot.convert("RGB").getcolors(plot.width * plot.height)) > 50


@pytest.mark.slow
def test_reproduce_from_training_to_plots(tmp_path, monkeypatch):
    arguments = (
        "studies=[main]",
        "rows=[rigid,local4]",
        "seeds=[0,1]",
        "jobs=1",
        f"overrides=[{','.join(TOY)}]",
    )
    assert run_here(monkeypatch, tmp_path, *arguments, script="scripts/reproduce.py") == 0
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
    assert run_here(monkeypatch, tmp_path, *arguments, script="scripts/reproduce.py") == 0
    assert {name: (out / f"{name}/test.json").stat().st_mtime_ns for name in test} == times
