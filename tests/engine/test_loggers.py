"""Loggers: what each is told, and a run that goes on without one that cannot be written."""

import pytest
import torch

from dkcls.engine.log import LOGGERS, Log, Logger, register_logger
from dkcls.errors import UserError


class Kept(Logger):
    """Keeps what it is told."""

    def __init__(self, run, step):
        self.told = [(run.name, step)]

    def scalars(self, values, step):
        self.told.append((values, step))

    def text(self, name, text):
        self.told.append((name, text))

    def image(self, name, image):
        self.told.append((name, image.dtype, list(image.shape)))

    def close(self):
        self.told.append("closed")


class Full(Logger):
    """Stands on a disk that is full after a first line."""

    def __init__(self, run, step):
        self.lines = 0

    def scalars(self, values, step):
        self.lines += 1
        if self.lines > 1:
            raise OSError(28, "No space left on device")


class FullAtOnce(Logger):
    def __init__(self, run, step):
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(LOGGERS, "_things", {name: LOGGERS[name] for name in LOGGERS})
    for kind in (Kept, Full, FullAtOnce):
        register_logger(kind.__name__.lower())(kind)


def test_a_logger_is_told_of_metrics_texts_and_images(tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    with Log(run, 3, 10, ["kept"]) as log:
        kept = log.loggers["kept"]
        log.metrics("train", 4, 1, {"loss": 2.0})
        log.text("config", "seed: 3")
        images = [torch.zeros(1, 6, 6, dtype=torch.uint8)] * 4
        log.images("train", [*images, torch.zeros(1, 9, 9, dtype=torch.uint8)])
    assert kept.told == [
        ("a", 3),
        ({"train/loss": 2.0}, 4),
        ("config", "seed: 3"),
        ("train", torch.uint8, [3, 18, 18]),  # 2 x 2 images of 6 pixels, with 2 between them
        "closed",
    ]


def test_a_run_goes_on_without_a_logger_that_cannot_be_written(tmp_path, caplog):
    with Log(tmp_path, 0, 10, ["full", "kept", "fullatonce"]) as log:
        kept = log.loggers["kept"]
        for step in range(3):
            log.metrics("val", step, 0, {"top1": 50.0})
        assert list(log.loggers) == ["kept"]
    assert [step for _, step in kept.told[1:-1]] == [0, 1, 2]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.getMessage() for record in warnings] == [
        f"{name} cannot be written (No space left on device): the run goes on without it"
        for name in ("fullatonce", "full")
    ]


def test_a_logger_that_there_is_not_is_named(tmp_path):
    with pytest.raises(UserError, match=r"log\.to: logger must be one of .*tensorboard, got 'tb'"):
        Log(tmp_path, 0, 10, ["tb"])
    assert not (tmp_path / "metrics.jsonl").exists()
