"""Checkpoints: a good one is found, a bad one is named, and nothing of it is ever loaded."""

import json
import random

import pytest
import torch

from dkcls.engine import checkpoint
from dkcls.engine.checkpoint import Checkpoints, hash_path
from dkcls.engine.log import Log
from dkcls.engine.run_directory import RunDirectory


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
    assert [path.name for path in checkpoints.newest_first()] == [f"step-{step:08d}.pt" for step in (7, 6, 5, 2)]
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

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(state(4))
    assert newest(checkpoints)["step"] == 3
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]


def test_what_a_killed_process_left_goes(checkpoints, tmp_path):
    for name in (".step-00000009.pt.tmp", "step-00000009.pt.sha256"):
        (tmp_path / "checkpoints" / name).write_bytes(b"x")
    checkpoints.save(state(4))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2 * len(checkpoints.newest_first()) == 6


def test_a_folder_in_a_checkpoints_place_is_left_alone(checkpoints, tmp_path, caplog):
    (tmp_path / "checkpoints/step-00000000.pt").mkdir()
    for step in range(4, 8):
        checkpoints.save(state(step))
    assert (tmp_path / "checkpoints/step-00000000.pt").is_dir()
    (tmp_path / "checkpoints/step-00000009.pt").mkdir()
    assert newest(checkpoints)["step"] == 7
    assert "step-00000009.pt cannot be read: Is a directory" in caplog.text


def line(kind, step):
    return json.dumps({"kind": kind, "step": step, "epoch": 0, "seconds": step + (kind == "val") / 2}) + "\n"


@pytest.mark.parametrize(("evaluation_due", "kept"), [(True, 3), (False, 4)])
def test_metrics_that_will_be_made_again_are_forgotten(tmp_path, evaluation_due, kept):
    lines = [line("train", 2), line("val", 2), line("train", 4), line("val", 4), line("train", 6), line("train", 8)[:9]]
    run = RunDirectory(tmp_path)
    run.metrics.write_text("".join(lines))
    assert run.rewind(4, evaluation_due) == (4 if evaluation_due else 4.5)
    assert run.metrics.read_text() == "".join(lines[:kept])


def test_the_seconds_of_a_run_go_on(tmp_path):
    with Log(tmp_path, 4, 10, tensorboard=False, seconds=100.0) as log:
        log.metrics("train", 5, 0, {})
    assert 100 <= json.loads((tmp_path / "metrics.jsonl").read_text())["seconds"] <= log.seconds < 200
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
    with Log(tmp_path, 0, 10, tensorboard=False) as log:
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
