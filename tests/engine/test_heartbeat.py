"""Which rank is silent, and what is said of it."""

import time

import pytest
from torch.distributed import HashStore

from dkcls.engine.heartbeat import Heartbeat


@pytest.mark.parametrize(
    ("ages", "silent", "words"),
    [
        ([0, 0, 0], [], ""),
        ([0, 50, 0], [], ""),
        ([0, 0, 80], [2], "rank 2 has not been heard of for 75 s (train.timeout=100)"),
        ([80, 0, 80], [0, 2], "ranks 0, 2 have not been heard of"),
        ([80, 80, 80], [0, 1, 2], "rank 1 cannot reach torchrun's store"),
    ],
)
def test_silence(ages, silent, words):
    beat = Heartbeat(HashStore(), rank=1, size=3, timeout=100)
    beat.heard = [time.monotonic() - age for age in ages]
    assert beat.silent() == silent
    assert not silent or words in beat.explain(silent)


def test_who_talks_is_heard():
    store = HashStore()
    beats = [Heartbeat(store, rank, 2, timeout=100) for rank in range(2)]
    for beat in beats:
        beat.heard = [0.0, 0.0]
        beat.interval = 0.0
        waits = iter([False, False, True])  # two rounds
        beat.done.wait = lambda seconds, waits=waits: next(waits)
    for beat in beats:
        beat.talk()
    assert beats[0].heard[1] == 0.0  # rank 1 began only after it
    assert min(beats[1].heard) > 0


class Ended(BaseException):
    """Instead of the end of the process."""


@pytest.mark.parametrize(
    ("rank", "ages", "words"),
    [
        (1, [80, 80, 80], "error: rank 1 cannot reach torchrun's store"),
        (1, [80, 0, 0], "error: rank 0 has not been heard of"),
        (2, [80, 0, 0], ""),  # rank 1 says it
        (0, [0, 0, 80], "error: rank 2 has not been heard of"),
        (1, [0, 0, 80], ""),
    ],
    ids=["store", "second", "third", "first", "other"],
)
def test_who_hears_nothing_ends_and_the_first_of_them_says_why(
    monkeypatch, capsys, rank, ages, words
):
    def end(code):
        raise Ended(code)

    monkeypatch.setattr("dkcls.engine.heartbeat.os._exit", end)
    beat = Heartbeat(HashStore(), rank=rank, size=3, timeout=100)
    beat.heard = [time.monotonic() - age for age in ages]
    beat.interval = 0.0
    with pytest.raises(Ended, match="1"):
        beat.listen()
    said = capsys.readouterr().err
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_a_store_that_fails_once_is_asked_again():
    class Failing(HashStore):
        calls = 0

        def add(self, key, amount):
            self.calls += 1
            if self.calls == 1:
                raise RuntimeError("Broken pipe")
            return super().add(key, amount)

    beat = Heartbeat(Failing(), 0, 1, timeout=100)
    beat.heard = [0.0]
    waits = iter([False, False, True])
    beat.done.wait = lambda seconds: next(waits)
    beat.talk()
    assert beat.heard[0] > 0


@pytest.mark.parametrize(("timeout", "interval"), [(20, 1), (100, 5), (600, 5)])
def test_beats_are_twenty_to_a_timeout_but_not_more_than_5_s_apart(timeout, interval):
    assert Heartbeat(HashStore(), 0, 1, timeout).interval == interval
