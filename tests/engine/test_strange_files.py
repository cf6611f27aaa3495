"""Strange things in a run's directory: one sentence or none, never a hang or a lost checkpoint."""

import json
import os
import shutil
import signal

import pytest

from dkcls.engine.checkpoint import Checkpoints
from dkcls.engine.run import train
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.files import hash_path, write_atomically
from dkcls.report.plots import plot_curves
from dkcls.report.runs import find_runs
from tests.engine.common import run_here, small_config

OPTIONS = ("data.options.length=16", "schedule.warmup_epochs=0", "train.checkpoint_every=1")


@pytest.fixture(autouse=True)
def no_hang():
    """End a test that waits for a pipe."""

    def stop(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that came to its end, without its result, and without its last checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    config = small_config(*OPTIONS, f"out={folder}", "train.keep=3")
    train(config)
    run = folder / "small"
    (run / "result.json").unlink()
    for path in (run / "checkpoints").glob("step-00000004*"):
        path.unlink()
    return run


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "runs/small", symlinks=True)


def again(run):
    return train(small_config(*OPTIONS, f"out={run.parent}", "train.keep=3", "resume=auto"))


WAITING = (  # names that a save needs for a moment
    *(".config.yaml.tmp", ".metrics.jsonl.tmp", ".result.json.tmp", ".last.pt.tmp", ".best.pt.tmp"),
    *("checkpoints/.step-00000004.pt.tmp", "checkpoints/.step-00000004.pt.sha256.tmp"),
    *("checkpoints/x.tmp", "checkpoints/x.sha256"),
)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_in_the_way_of_a_save_is_passed_by(run, make):
    for name in WAITING:
        make(run / name)
    assert again(run)["images"] == 16
    assert Checkpoints(run, 3).load_newest()[0].name == "step-00000004.pt"
    assert (run / "last.pt").resolve().name == "step-00000004.pt"


def test_a_link_in_the_way_of_a_save_is_not_followed(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".a.tmp").symlink_to(mine)
    write_atomically(tmp_path / "a", b"theirs")
    assert ((tmp_path / "a").read_bytes(), mine.read_text()) == (b"theirs", "mine")


def put(make, path):
    for each in (path, hash_path(path)):
        each.unlink(missing_ok=True)
        make(each)


def test_what_is_named_as_a_checkpoint_is_passed_by(run, caplog):
    put(os.mkfifo, run / "checkpoints/step-00000003.pt")
    put(os.mkdir, run / "checkpoints/step-00000008.pt")
    put(os.mkfifo, run / "checkpoints/step-00000009.pt")
    with (run / "checkpoints/step-00000007.pt").open("wb") as file:
        file.truncate(2**43)  # of holes alone
    assert again(run)["images"] == 16
    for step in (3, 7, 8, 9):
        assert f"step-0000000{step}.pt cannot be read" in caplog.text
    assert Checkpoints(run, 3).load_newest()[0].name == "step-00000004.pt"
    kept = [path for path in Checkpoints(run, 3).newest_first() if path.is_file()]
    assert len(kept) == 3


def test_a_folder_in_place_of_the_next_checkpoint_is_named(run):
    put(os.mkdir, run / "checkpoints/step-00000004-trained.pt")
    with pytest.raises(UserError, match=r"of step 4 could not be written \(Is a directory\)"):
        again(run)


def test_what_has_the_name_of_a_runs_file_is_named(run, monkeypatch, capsys):
    for name in ("config.yaml", "metrics.jsonl", "result.json", "bad_files.txt", ".lock"):
        for make in (os.mkdir, os.mkfifo):
            path = run / name
            kept = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            make(path)
            with pytest.raises(UserError, match=rf"{name} must be a plain file"):
                again(run)
            path.rmdir() if path.is_dir() else path.unlink()
            if kept is not None:
                path.write_bytes(kept)
    os.mkfifo(run / "result.json")
    assert run_here(monkeypatch, run.parents[1]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: runs/small/result.json must be a plain file")
    assert said.count("\n") == 1


def test_a_folder_in_place_of_a_link_and_a_file_in_place_of_a_folder_are_named(run):
    (run / "last.pt").unlink()
    (run / "last.pt").mkdir()
    with pytest.raises(UserError, match=r"last\.pt must be a plain file"):
        again(run)
    (run / "last.pt").rmdir()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"checkpoints must be a folder"):
        again(run)


def test_a_strange_result_is_named(run, monkeypatch, capsys):
    contents = [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 9999, b'{"name": "x"}']
    contents += [b'{"name": 3, "seconds": 1}', b'{"name": "x", "seconds": "long"}']
    contents += [b'{"name": "x", "seconds": 1, "top1": [2]}']
    for content in contents:
        (run / "result.json").write_bytes(content)
        for read in (RunDirectory(run).result, lambda: find_runs(str(run))):
            with pytest.raises(UserError, match=r"result\.json is damaged"):
                read()
    assert run_here(monkeypatch, run.parents[1]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: runs/small/result.json is damaged")
    assert said.count("\n") == 1


STRANGE = (
    {"kind": "train", "step": "one", "loss": 1.0},
    {"kind": "train", "step": 1, "epoch": 1, "seconds": "long", "loss": 1.0},
    {"kind": "train", "step": 1.5, "loss": 1.0},
    {"kind": ["train"], "step": 1, "seconds": 2.0},
    {"step": 1},
    [1],
    "text",
    None,
)


def test_strange_lines_of_metrics_are_left_out(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    text = {"kind": "train", "step": 1, "epoch": 1, "seconds": 2.0, "loss": "low", "lr_weights": []}
    strange = [*map(json.dumps, (*STRANGE, text)), "{", "[" * 9999, "\udcff"]
    content = "\n".join([*strange[:4], lines[0], *strange[4:]])
    (run / "metrics.jsonl").write_bytes(content.encode("utf-8", "surrogateescape"))
    plot_curves(run / "metrics.jsonl", tmp_path / "curves.png")
    assert RunDirectory(run).rewind(1, False) == 2.0
    kept = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kept == [json.loads(lines[0]), text] or kept == [text]
    assert again(run)["images"] == 16
