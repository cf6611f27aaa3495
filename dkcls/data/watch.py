"""Where the loading processes are, so that a read that does not end is named.

A file system that does not answer holds a process within the read, where nothing interrupts it. So
each loading process notes in shared memory which file it is at, and the process that waits for
batches looks there.
"""

import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from typing import Any, TypeVar

from dkcls.errors import DataError, Interrupted

T = TypeVar("T")
POLL = 5.0  # seconds without a batch after which the waiting process looks around
PATIENCE = 450.0  # seconds for one file, unless a command says otherwise
NOWHERE = -1
_places: Any = None  # of all loading processes, if this is one of them
_own = 0


def make_places(workers: int) -> Any:
    """Return shared memory for the index of the file that each loading process is at."""
    return RawArray("q", [NOWHERE] * workers)


def join(places: Any, worker: int) -> None:
    """Let this process note its place in the `worker`-th of `places`."""
    global _places, _own
    _places, _own = places, worker


def at(index: int) -> None:
    """Note that this process begins to read a file, or is done with all of its batch (NOWHERE)."""
    if _places is not None:
        _places[_own] = index


def patiently(
    batches: Iterator[T],
    places: Any,
    name: Callable[[int], str],
    patience: float,
    stopped: Callable[[], str] = str,
) -> Iterator[T]:
    """Yield what a DataLoader that `loader.start` started gives.

    DataError if no loading process has moved for `patience` seconds, and some are at files: it
    gives their names. Interrupted if a batch does not come and `stopped` returns a signal's name.
    """
    while True:
        seen, since = None, 0.0
        while True:
            try:
                batch = next(batches)
                break
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):
                    raise
            found = places[:]
            names = ", ".join(name(index) for index in found if index != NOWHERE)
            if signal := stopped():
                raise Interrupted(f"stopped by {signal} while waiting for {names or 'data'}")
            if found != seen:
                seen, since = found, time.monotonic()
            elif time.monotonic() > since + patience and names:
                raise DataError(
                    f"reading {names} has not ended in {patience:g} s: "
                    "the file system does not answer"
                )
        yield batch
