"""Reports of evaluations, images in folders, and studies of many runs."""

import csv
import json
import logging
import math
from pathlib import Path

import matplotlib.figure
import pytest
import torch

from dkcls.engine.errors import UserError
from dkcls.tasks import parallel
from dkcls.tasks.eval_report import draw_confusion, table, write_per_class
from dkcls.tasks.predict import find_images
from dkcls.tasks.study import Row, check_known, jobs, mean_and_spread, measured

ROOT = Path(__file__).parents[2]
RESULT = {
    **{"checkpoint": "a.pt", "top1": 62.5, "classes": ["cat", "dog", "hat"]},
    "per_class": [[4, 4, 0], [3, 2, 0], [4, 3, 0]],
    "confusion": [[3, 1, 0], [1, 2, 1], [0, 0, 0]],
}


def test_the_picture_of_confusion_has_shares_of_the_true_class(monkeypatch, tmp_path):
    drawn = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure, *arguments, **options):
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    draw_confusion(str(tmp_path / "confusion.png"), RESULT)
    axes = drawn[0].axes[0]
    written = {text.get_position(): text.get_text() for text in axes.texts}  # (column, row)
    assert [[written[column, row] for column in range(3)] for row in range(3)] == [
        ["75", "25", "0"], ["25", "50", "25"], ["0", "0", "0"]
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == RESULT["classes"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("true", "predicted")
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_classes_in_percent_and_nothing_for_a_class_without_images(tmp_path):
    write_per_class(str(tmp_path / "new/classes.csv"), [RESULT])
    rows = list(csv.reader((tmp_path / "new/classes.csv").open()))
    assert rows[1:] == [
        ["a.pt", "cat", "4", "75.0000", "100.0000"],
        ["a.pt", "dog", "4", "50.0000", "75.0000"],
        ["a.pt", "hat", "0", "", ""],
    ]
    assert table([RESULT]).splitlines() == [
        "| checkpoint | top1 |",
        "|---|---|",
        "| a.pt | 62.5000 |",
    ]


def test_images_are_found_below_folders_by_name_whatever_their_case(tmp_path):
    for name in ("b/2.JPG", "b/1.png", "a.jpeg", "notes.txt", "c/B.Png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_images(["x.txt", str(tmp_path)])
    assert found == [
        "x.txt",
        *(str(tmp_path / name) for name in ("a.jpeg", "b/1.png", "b/2.JPG", "c/B.Png")),
    ]


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

    monkeypatch.setattr(parallel, "train", train)
    job = ["name=one", f"out={tmp_path}", "seed=3"]
    for _ in range(2):
        parallel._train(
            job, ROOT / "configs", lambda folder, seconds: told.append((folder, seconds))
        )
    assert trained == ["one", "one"]
    assert [folder for folder, _ in told] == [tmp_path / "one"] * 2
    assert told[0][1] >= 0
    assert told[1][1] is None


def test_an_error_names_its_run(own_process, monkeypatch, tmp_path):
    def fail(config):
        raise UserError("no data")

    monkeypatch.setattr(parallel, "train", fail)
    with pytest.raises(UserError, match="one: no data"):
        parallel._train(["name=one", f"out={tmp_path}"], ROOT / "configs", None)
