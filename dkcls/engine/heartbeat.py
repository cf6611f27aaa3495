"""Heartbeats that find the rank that hangs.

If a process is stopped, or its host is gone, the others wait for it within an all-reduce that
nothing interrupts, and that ends without a name. So each rank beats through the store, and a
thread of each rank listens: it names the silent one and ends its own process.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

INTERVALS = 20  # between two beats there is this part of the timeout, but not more than 5 s
# The part of the timeout after which a rank is silent. After all of it gloo and NCCL give up,
# without a name.
PATIENCE = 0.75


class Heartbeat:
    """`heard` is when, by this process's clock, each rank was last heard of."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        self.store, self.rank, self.timeout = store, rank, timeout
        self.interval = min(timeout / INTERVALS, 5.0)
        self.heard = [time.monotonic()] * size
        self.done = threading.Event()

    def talk(self) -> None:
        """Beat until the end.

        A store that does not answer blocks: then nobody is heard of, this rank included.
        """
        last = [0] * len(self.heard)
        while not self.done.wait(self.interval):
            try:
                self.store.add(str(self.rank), 1)
                beats = [self.store.add(str(rank), 0) for rank in range(len(last))]
            except RuntimeError:
                continue  # the store is gone; `listen` sees to it
            now = time.monotonic()
            self.heard = [
                now if new != old else at
                for new, old, at in zip(beats, last, self.heard, strict=True)
            ]
            last = beats

    def listen(self) -> None:
        while not self.done.wait(self.interval):
            silent = self.silent()
            if silent:
                if self.rank in silent or self.rank == min(
                    set(range(len(self.heard))) - set(silent)
                ):
                    print(f"error: {self.explain(silent)}", file=sys.stderr, flush=True)
                os._exit(1)

    def silent(self) -> list[int]:
        limit = time.monotonic() - PATIENCE * self.timeout
        return [rank for rank, at in enumerate(self.heard) if at < limit]

    def explain(self, silent: list[int]) -> str:
        seconds = f"for {PATIENCE * self.timeout:.0f} s (train.timeout={self.timeout:g})"
        if self.rank in silent:
            return (
                f"rank {self.rank} cannot reach torchrun's store {seconds}: "
                "the host that keeps it hangs or is gone"
            )
        names = (
            f"rank {silent[0]} has"
            if len(silent) == 1
            else f"ranks {', '.join(map(str, silent))} have"
        )
        return (
            f"{names} not been heard of {seconds}: stopped, or the host is gone; "
            "the other ranks end"
        )


@contextmanager
def heartbeat(store: Store, rank: int, size: int, timeout: float) -> Iterator[None]:
    beat = Heartbeat(store, rank, size, timeout)
    for work in (beat.talk, beat.listen):
        threading.Thread(target=work, daemon=True).start()
    try:
        yield
    finally:
        beat.done.set()
