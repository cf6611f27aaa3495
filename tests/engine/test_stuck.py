"""A run whose data does not come stops when it is asked to, and says what it waits for."""

import os
import signal
import threading
import time

import pytest
import torch

from dkcls.data import watch
from dkcls.data.dataset import DATASETS, register_dataset
from dkcls.engine.run import listen
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import DataError, Interrupted
from scripts.drill.stuck import Stuck
from tests.data.common import make_folder
from tests.engine.common import same_bits, small_trainer


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Return a folder of images of which one cannot be read, as long as there is a file `stuck`."""
    monkeypatch.setattr(watch, "POLL", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    register_dataset("stuck")(Stuck)
    yield make_folder(tmp_path / "photos", 24, 4)
    unregister()


def unregister():
    """Leave the data sets to other tests as they were."""
    for known in (DATASETS._things, DATASETS._labels):
        known.pop("stuck", None)


unregister()


def trainer_of(photos, **keys):
    words = {
        "data.name": "stuck",
        "data.root": photos,
        "data.image_size": 16,
        "data.workers": 1,
    }
    words |= {f"data.options.{key}": "null" for key in ("length", "num_classes")}
    words |= {"train.batch_size": 8, "train.accumulation": 2, **keys}
    return small_trainer(*(f"{key}={value}" for key, value in words.items()))


def fit(folder, trainer):
    """Train, and end the loading processes, for which torch may wait for 5 seconds."""
    folder.mkdir(exist_ok=True)
    try:
        with listen() as stop:
            trainer.fit(RunDirectory(folder), None, stop)
    finally:
        for loader in trainer.loaders:
            for worker in getattr(loader._loader._iterator, "_workers", []):
                worker.kill()
    return state_of(folder)


def state_of(folder):
    return torch.load(folder / "last.pt", weights_only=True)


@pytest.mark.parametrize("name", ["train/class1/010.jpg", "val/class0/000.jpg"])
def test_a_signal_is_honoured_while_a_read_hangs(tmp_path, photos, name):
    """All is saved, as the same bits at the end show."""
    whole, asked = tmp_path / "whole", tmp_path / "asked"
    expected = fit(whole, trainer_of(photos))
    (photos / "stuck").write_text(name)

    def ask():
        while not (photos / "reading").exists():
            time.sleep(0.05)
        time.sleep(0.3)  # until the steps before it are done
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    with pytest.raises(Interrupted, match=f"stopped by SIGTERM while waiting for .*{name}$"):
        fit(asked, trainer_of(photos))
    assert 0 < state_of(asked)["step"] < expected["step"]
    (photos / "stuck").unlink()
    trainer = trainer_of(photos)
    trainer.load_state(state_of(asked))
    assert same_bits(fit(asked, trainer), expected)


def test_what_a_run_waits_for_is_named(tmp_path, photos):
    (photos / "stuck").write_text("train/class1/010.jpg")
    trainer = trainer_of(photos, **{"train.timeout": 1})
    message = r"reading .*/train/class1/010.jpg has not ended in 0.75 s: the file system does not"
    with pytest.raises(DataError, match=message):
        fit(tmp_path / "run", trainer)
