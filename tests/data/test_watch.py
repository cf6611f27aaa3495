"""A read that does not end is named; slow ones are waited for."""

import time

import pytest

from dkcls.data import create_loader, watch
from dkcls.data.check import check
from dkcls.data.sets.folder import ImageFolder
from dkcls.data.transforms import EvalTransform
from dkcls.errors import DataError, Interrupted
from tests.data.test_loader import Numbers


class Slow(ImageFolder):
    """Image files on a file system that answers late, for one of them never."""

    stuck = ""
    seconds = 0.0

    def read(self, index):
        time.sleep(1000 if self.name(index).endswith(self.stuck or "?") else self.seconds)
        return super().read(index)


@pytest.fixture
def slow(shared_folder, monkeypatch):
    monkeypatch.setattr(watch, "POLL", 0.1)
    return Slow(shared_folder, "train", EvalTransform(16), 16)


def loader_of(dataset, **options):
    return create_loader(dataset, 4, training=False, workers=2, **options)


def test_a_read_that_does_not_end_is_named(slow):
    slow.stuck = "class1/007.jpg"
    loader = loader_of(slow, patience=0.5)
    with pytest.raises(DataError, match=r"/train/class1/007.jpg has not ended in 0.5 s") as error:
        list(loader)
    assert str(error.value).count(".jpg") == 1
    end(loader._loader)


def end(loader):
    """End workers that wait within a read, for which torch would wait for 5 seconds."""
    for worker in loader._iterator._workers:
        worker.kill()


def test_batches_that_are_slow_but_come_are_waited_for(slow):
    slow.seconds = 0.15  # so a batch takes 0.6
    assert len(list(loader_of(slow, patience=0.5))) == 6


class SlowNumbers(Numbers):
    def load(self, indices, epoch=0):
        time.sleep(0.8)
        return super().load(indices)


@pytest.mark.usefixtures("slow")
def test_what_is_no_file_is_waited_for():
    assert len(list(loader_of(SlowNumbers(8), patience=0.2))) == 2


def test_workers_that_take_long_to_get_ready_are_waited_for(slow):
    slow.seconds = 0.1
    loader = loader_of(slow)
    next(iter(loader))  # and the workers have more to do
    assert len(list(loader)) == 6


def test_check_names_it_too(slow, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE", 0.5)
    kept = []
    monkeypatch.setattr(
        "dkcls.data.check.DataLoader",
        lambda *a, make=check.__globals__["DataLoader"], **k: kept.append(make(*a, **k)) or kept[0],
    )
    slow.stuck = "class2/011.jpg"
    with pytest.raises(DataError, match=r"/train/class2/011.jpg has not ended in 0.5 s"):
        check(slow, 1)
    end(kept[0])


def test_the_wait_ends_with_a_signal(slow):
    slow.stuck = "class0/000.jpg"
    loader = loader_of(slow)
    loader.stopped = lambda: "SIGTERM" if max(loader._places) != watch.NOWHERE else ""
    with pytest.raises(Interrupted, match=r"stopped by SIGTERM while waiting for .*[.]jpg$"):
        next(iter(loader))
    end(loader._loader)
