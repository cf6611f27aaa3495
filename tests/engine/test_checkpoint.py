"""Checkpoints and other files of a run: a good checkpoint is found, a bad one never loaded."""

import fcntl
import json
import os
import platform
import random
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dkcls import cli
from dkcls.engine import checkpoint
from dkcls.engine.checkpoint import Checkpoints
from dkcls.engine.log import Log
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.files import DamagedFile, hash_path
from dkcls.layers import OffsetRecord


def state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((100,), float(step))}, "ema": None}


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        made.save(state(step), best=step == 2)
    return made


def newest(checkpoints):
    return checkpoints.load_newest()[1]


def test_newest_is_loaded_and_plain_torch_loads_it_too(checkpoints, tmp_path):
    assert newest(checkpoints)["step"] == 3
    assert torch.load(tmp_path / "last.pt", weights_only=True)["step"] == 3
    assert torch.load(tmp_path / "best.pt", weights_only=True)["step"] == 2


def test_old_ones_go_but_the_best_stays(checkpoints, tmp_path):
    for step in range(4, 8):
        checkpoints.save(state(step))
    assert [path.name for path in checkpoints.newest_first()] == [
        f"step-{step:08d}.pt" for step in (7, 6, 5, 2)
    ]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 8


def test_evaluated_follows_trained(checkpoints):
    checkpoints.save(state(4), trained=True)
    assert newest(checkpoints)["step"] == 4
    checkpoints.save(state(4) | {"evaluated": True})
    assert newest(checkpoints)["evaluated"]
    assert not [path for path in checkpoints.newest_first() if "trained" in path.name]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    place = random.Random(0).randrange(8 * len(data))
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "SHA-256"),
        (flip_a_bit, "SHA-256"),
        (lambda path: path.write_bytes(b""), "SHA-256"),
        (lambda path: hash_path(path).unlink(), "no step-00000003.pt.sha256"),
        (lambda path: hash_path(path).write_text(""), "SHA-256"),
        (lambda path: hash_path(path).write_bytes(b"\xff\xfe"), "SHA-256"),
        (lambda path: (path.unlink(), path.symlink_to(path)), "cannot be read"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
def test_a_bad_one_is_named_and_the_one_before_is_used(checkpoints, caplog, damage, word):
    damage(checkpoints.newest_first()[0])
    assert newest(checkpoints)["step"] == 2
    assert "step-00000003.pt" in caplog.text
    assert word in caplog.text


def test_a_full_disk_leaves_the_last_good_one(checkpoints, monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(state(4))
    assert newest(checkpoints)["step"] == 3
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]


def record_disk_calls(monkeypatch):
    """[(call, file name), ...] of what reaches the disk, in its order."""
    calls, fsync, replace = [], os.fsync, Path.replace

    def record_fsync(descriptor):
        calls.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def record_replace(path, target):
        calls.append(("rename", Path(target).name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    return calls


def test_a_file_is_on_the_disk_before_its_name_and_its_hash_before_it(tmp_path, monkeypatch):
    calls = record_disk_calls(monkeypatch)
    checkpoint.write(tmp_path / "run/a.pt", state(1))
    assert calls == [
        ("fsync", ".a.pt.sha256.tmp"),
        ("rename", "a.pt.sha256"),
        ("fsync", "run"),
        ("fsync", ".a.pt.tmp"),
        ("rename", "a.pt"),
        ("fsync", "run"),
    ]


def test_lines_of_metrics_are_on_the_disk_before_a_checkpoint(tmp_path, monkeypatch):
    calls = record_disk_calls(monkeypatch)
    with Log(tmp_path, 0, 10, to=[]) as log:
        log.metrics("train", 1, 0, {})
        log.sync()
    assert calls == [("fsync", "metrics.jsonl")]


def test_a_run_can_be_moved(checkpoints, tmp_path):
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert torch.load(moved / "best.pt", weights_only=True)["step"] == 2
    assert torch.load(moved / "last.pt", weights_only=True)["step"] == 3


def test_a_copy_needs_no_hash_but_a_hash_must_be_its_own(checkpoints):
    path = checkpoints.newest_first()[0]
    data = hash_path(path).read_bytes()
    hash_path(path).write_bytes(b"0" + data[1:] if data[:1] != b"0" else b"1" + data[1:])
    with pytest.raises(DamagedFile, match="SHA-256"):
        checkpoint.read(path, need_hash=False)
    hash_path(path).unlink()
    assert checkpoint.read(path, need_hash=False)["step"] == 3


def test_what_a_killed_process_left_goes(checkpoints, tmp_path):
    for name in (".step-00000009.pt.tmp", "step-00000009.pt.sha256"):
        (tmp_path / "checkpoints" / name).write_bytes(b"x")
    checkpoints.save(state(4))
    assert (
        len(list((tmp_path / "checkpoints").iterdir())) == 2 * len(checkpoints.newest_first()) == 6
    )


def test_a_folder_in_a_checkpoints_place_is_left_alone(checkpoints, tmp_path, caplog):
    (tmp_path / "checkpoints/step-00000000.pt").mkdir()
    for step in range(4, 8):
        checkpoints.save(state(step))
    assert (tmp_path / "checkpoints/step-00000000.pt").is_dir()
    (tmp_path / "checkpoints/step-00000009.pt").mkdir()
    assert newest(checkpoints)["step"] == 7
    assert "step-00000009.pt cannot be read: Is a directory" in caplog.text


def line(kind, step):
    return (
        json.dumps({"kind": kind, "step": step, "epoch": 0, "seconds": step + (kind == "val") / 2})
        + "\n"
    )


@pytest.mark.parametrize(("evaluation_due", "kept"), [(True, 3), (False, 4)])
def test_metrics_that_will_be_made_again_are_forgotten(tmp_path, evaluation_due, kept):
    lines = [
        line("train", 2),
        line("val", 2),
        line("train", 4),
        line("val", 4),
        line("train", 6),
        line("train", 8)[:9],
    ]
    run = RunDirectory(tmp_path)
    run.metrics.write_text("".join(lines))
    assert run.rewind(4, evaluation_due) == (4 if evaluation_due else 4.5)
    assert run.metrics.read_text() == "".join(lines[:kept])


def test_the_seconds_of_a_run_go_on(tmp_path):
    with Log(tmp_path, 4, 10, to=[], seconds=100.0) as log:
        log.metrics("train", 5, 0, {})
    written = json.loads((tmp_path / "metrics.jsonl").read_text())["seconds"]
    assert 100 <= written <= log.seconds + 0.0005  # it is rounded to a thousandth
    assert log.seconds < 200
    assert RunDirectory(tmp_path).rewind(5, evaluation_due=False) >= 100
    assert RunDirectory(tmp_path).rewind(4, evaluation_due=False) == 0


class FullFor:
    """A file on a disk that is full for some calls, and then takes five bytes at a time."""

    def __init__(self, file, calls):
        self.file, self.calls = file, calls

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.calls -= 1
        if self.calls >= 0:
            raise OSError(28, "No space left on device")
        return self.file.write(data[:5])


def test_metrics_wait_for_a_full_disk(tmp_path, caplog, monkeypatch):
    with Log(tmp_path, 0, 10, to=[]) as log:
        log.file = FullFor(log.file, 2)
        monkeypatch.setattr(Log, "seconds", 1.0)
        log.metrics("train", 1, 0, {})
        with pytest.raises(OSError, match="No space"):
            log.sync()
        monkeypatch.setattr(Log, "seconds", 2.0)
        log.metrics("train", 2, 0, {})
        log.sync()
    assert "its lines are kept until it can" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text() == line("train", 1) + line("train", 2)


def test_a_resumed_run_has_every_step_once_in_tensorboard(tmp_path):
    """The second start makes step 3 again: the first one's is forgotten."""
    for start, steps, loss in ((0, (1, 2, 3), 1.0), (3, (3, 4), 2.0)):
        with Log(tmp_path, start, 10, to=["tensorboard"]) as log:
            for step in steps:
                log.metrics("train", step, 0, {"loss": loss})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
    ]


def test_the_reach_of_offsets_does_not_cancel(tmp_path):
    offset = torch.tensor([[[[-2.0, 1.0]]]])
    with Log(tmp_path, 0, 10, to=["tensorboard"]) as log:
        log.offsets(4, {"a": OffsetRecord(kernel_offset=offset, clipped=torch.tensor(0.25))})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]} == {
        "kernel_offset/a": 1.5,
        "clipped/a": 0.25,
    }


def test_a_held_run_says_by_whom(tmp_path):
    run = RunDirectory(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.lock").write_text("process 1 on a machine that is gone and has a long name")
    with run.hold(), pytest.raises(UserError) as refused, RunDirectory(tmp_path / "run").hold():
        pass
    who = f"process {os.getpid()} on {platform.node()}"
    assert (
        str(refused.value)
        == f"{run.path} is in use by {who}; wait for it, or give another name=..."
    )


def test_a_lock_whose_file_is_gone_holds_nothing(tmp_path, monkeypatch):
    """Remove the lock file between opening and locking it, and create another.

    The holder ends and removes its file; a third process makes the new one.
    """
    flock, run = fcntl.flock, RunDirectory(tmp_path / "run")
    locked = []

    def late(file, how):
        if not locked:
            (tmp_path / "run/.lock").unlink()
            (tmp_path / "run/.lock").touch()
        locked.append(os.fstat(file.fileno()).st_ino)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with run.hold():
        assert len(locked) == 2
        assert locked[1] == (tmp_path / "run/.lock").stat().st_ino


@pytest.mark.parametrize(
    ("rank", "error", "said"),
    [
        ("0", UserError("a\n b"), "error: a; b\n"),
        ("1", UserError("a"), ""),
        ("1", cli.RankError("a"), "error: rank 1: a\n"),
        ("1", cli.DataError("a"), "error: rank 1: a\n"),
    ],
)
def test_what_all_ranks_know_is_said_once(monkeypatch, capsys, rank, error, said):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as exit, cli.errors():
        raise error
    assert (exit.value.code, capsys.readouterr().err) == (1, said)
