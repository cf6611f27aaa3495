"""Checkpoints: a good one is found, a bad one is named, and nothing of it is ever loaded."""

import os
import pickle
import random

import pytest
import torch

from dkcls.engine import checkpoint
from dkcls.engine.checkpoint import BadCheckpoint, Checkpoints, hash_path, read
from dkcls.engine.errors import UserError
from dkcls.engine.weights import read_weights


def state(step: int) -> dict:
    return {"step": step, "model": {"weight": torch.full((100,), float(step))}, "ema": None}


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        made.save(state(step), best=step == 2)
    return made


def newest(checkpoints):
    return next(checkpoints.load_newest(), (None, None))[1]


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


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "SHA-256"),
        (flip_a_bit, "SHA-256"),
        (lambda path: path.write_bytes(b""), "SHA-256"),
        (lambda path: hash_path(path).unlink(), "no step-00000003.pt.sha256"),
        (lambda path: hash_path(path).write_text(""), "SHA-256"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be read"),
    ],
)
def test_a_bad_one_is_named_and_the_one_before_is_used(checkpoints, caplog, damage, word):
    damage(checkpoints.newest_first()[0])
    assert newest(checkpoints)["step"] == 2
    assert "step-00000003.pt" in caplog.text
    assert word in caplog.text


def test_any_flipped_bit_is_found(checkpoints):
    path = checkpoints.newest_first()[0]
    whole = path.read_bytes()
    for place in random.Random(0).sample(range(8 * len(whole)), 200):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(BadCheckpoint):
            read(path)


def test_code_in_a_file_does_not_run(checkpoints, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    for save in (lambda: torch.save({"format": 1, "step": Evil()}, path), lambda: path.write_bytes(pickle.dumps(Evil(), 2))):
        save()
        with pytest.raises(BadCheckpoint, match="safe"):
            read(path, need_hash=False)
        with pytest.raises(UserError, match="safe"):
            read_weights(path)
    assert not (tmp_path / "evil").exists()


def test_a_full_disk_leaves_the_last_good_one(checkpoints, monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(state(4))
    assert newest(checkpoints)["step"] == 3
    assert not [path for path in tmp_path.rglob("*") if "tmp" in path.name]
