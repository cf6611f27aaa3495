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
