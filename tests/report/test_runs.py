"""Finished runs, grouped and summarised."""

import json

import pytest
import yaml

from dkcls.config import Config, ModelConfig
from dkcls.errors import UserError
from dkcls.report.runs import Group, find_runs, group_runs, over_scopes, summarize


def make_run(folder, top1, **config):
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(Config(**config).to_dict()))
    (folder / "result.json").write_text(
        json.dumps(
            {"name": folder.name, "top1": top1, "loss": 1.0, "seconds": 2.0, "parameters": 10}
        )
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
    with pytest.raises(UserError, match=r"result\.json is damaged"):
        find_runs(str(tmp_path))
