"""Studies of many runs: which are trained, what came of them, and processes of their own."""

import json
import logging
import math
from pathlib import Path

import pytest
import study
import torch
from study import Row, check_known, jobs, mean_and_spread, measured

from dkcls.errors import UserError

ROOT = Path(__file__).parents[2]
ROWS = [
    Row("local", "local"),
    Row("local-4", "local 4", ("model.scope=4", "model.pretrained=c-{seed}.pt")),
]


def test_a_run_belongs_to_one_row_and_counts_when_all_its_files_are_there(tmp_path):
    for run, files in {
        "local-0": {"result.json": {"top1": 1.0, "best": None}, "test.json": {"test": 5}},
        "local-10": {"result.json": {"top1": 2.0, "best": 4}, "test.json": {"test": 6}},
        "local-3": {"result.json": {"top1": 3.0, "best": 4}},
        "local-4-1": {"result.json": {"top1": 7.0, "best": 4}, "test.json": {"test": 8}},
    }.items():
        (tmp_path / run).mkdir()
        for file, content in files.items():
            (tmp_path / run / file).write_text(json.dumps(content))
    found = measured(tmp_path, ROWS, "result.json", "test.json")
    assert {name: each.of("top1") for name, each in found.items()} == {
        "local": {0: 1.0, 10: 2.0},
        "local-4": {1: 7.0},
    }
    assert found["local"].values("test") == [5, 6]
    assert found["local"].of("best") == {10: 4}
    assert list(measured(tmp_path, ROWS, "result.json")["local"].results) == [0, 3, 10]
    assert list(measured(tmp_path, [Row("dcn", "DCN"), *ROWS], "result.json")) == [
        "local",
        "local-4",
    ]


def test_jobs_go_seed_by_seed():
    made = list(jobs("quick", Path("out"), ROWS, [0, 7], [], ["log.every=1"]))
    assert [job[1] for job in made] == [
        "name=local-0",
        "name=local-4-0",
        "name=local-7",
        "name=local-4-7",
    ]
    assert made[3] == [
        *("experiment=quick", "name=local-4-7", "out=out", "seed=7"),
        *("model.scope=4", "model.pretrained=c-7.pt", "log.every=1"),
    ]
    assert [job[1] for job in jobs("quick", Path("out"), ROWS, [0], ["local-4"], [])] == [
        "name=local-4-0"
    ]
    with pytest.raises(UserError, match="there is no row 'dcn'; there are local, local-4"):
        check_known("row", ["local", "dcn"], [row.name for row in ROWS])


def test_mean_and_standard_deviation_over_seeds():
    assert mean_and_spread("top1", [1.0, 2.0, 6.0]) == {
        "top1": 3.0,
        "top1_std": pytest.approx(math.sqrt(7)),
    }
    assert mean_and_spread("top1", [4.0]) == {"top1": 4.0, "top1_std": None}


@pytest.fixture
def own_process(monkeypatch):
    """What a process of its own may change is as it was afterwards."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(logging.getLogger("dkcls.engine"), "filters", [])
    yield
    torch.set_num_threads(threads)


def test_the_seconds_of_a_run_are_told_if_all_of_it_was_done_now(
    own_process, monkeypatch, tmp_path
):
    """A run that went on has used others before."""
    trained, told = [], []

    def train(config):
        trained.append(config.name)
        (Path(config.out) / config.name).mkdir(exist_ok=True)

    monkeypatch.setattr(study, "train", train)
    job = ["name=one", f"out={tmp_path}", "seed=3"]
    for _ in range(2):
        study._train(job, lambda folder, seconds: told.append((folder, seconds)))
    assert trained == ["one", "one"]
    assert [folder for folder, _ in told] == [tmp_path / "one"] * 2
    assert told[0][1] >= 0
    assert told[1][1] is None


def test_an_error_names_its_run(own_process, monkeypatch, tmp_path):
    def fail(config):
        raise UserError("no data")

    monkeypatch.setattr(study, "train", fail)
    with pytest.raises(UserError, match="one: no data"):
        study._train(["name=one", f"out={tmp_path}"], None)
