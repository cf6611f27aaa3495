"""Batches from a data set by torch's DataLoader, in our order.

A loader resumes at any step, and names the files that could not be read.
"""

import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import RawValue
from typing import Any, Generic

import torch
from torch.utils.data import DataLoader

from dkcls.data import watch
from dkcls.data.dataset import B, BadFile, Dataset, Loaded
from dkcls.data.sampler import EvalSampler, Request, TrainSampler
from dkcls.errors import DataError

log = logging.getLogger(__name__)


class BadFiles:
    """Record of the files that could not be read, kept in the main process.

    Workers send what they find along with the batch. `share` is the largest number of bad files met
    in one epoch, divided by the number of images that this rank reads per epoch. So `share` means
    the same for any number of ranks, and does not grow as a rank meets the same bad files in the
    parts of others.
    """

    def __init__(self, images_per_epoch: int, limit: float, notes: Iterable[str] = ()):
        if not 0 <= limit <= 1:
            raise ValueError(f"bad_limit must be a share from 0 to 1, got {limit}")
        self.limit, self._images_per_epoch = limit, max(images_per_epoch, 1)
        self._messages: dict[int, str] = {}
        self._notes = list(notes)
        self._in_epoch: set[int] = set()
        self._most = 0
        for note in self._notes:
            log.warning("%s", note)

    @property
    def names(self) -> list[str]:
        """Return one "path: reason" each, first for the whole set, then for bad files by index."""
        return [*self._notes, *(self._messages[index] for index in sorted(self._messages))]

    @property
    def count(self) -> int:
        return len(self._notes) + len(self._messages)

    @property
    def share(self) -> float:
        return self._most / self._images_per_epoch

    @property
    def exceeded(self) -> bool:
        return self.share > self.limit

    def start_epoch(self) -> None:
        self._in_epoch.clear()

    def add(self, bad: Iterable[BadFile]) -> None:
        for index, message in bad:
            if index not in self._messages:
                log.warning("bad file %s", message)
                self._messages[index] = message
            self._in_epoch.add(index)
        self._most = max(self._most, len(self._in_epoch))

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        A run resumed in the middle of an epoch does not meet the first files of that epoch again.
        """
        return {"messages": self._messages, "in_epoch": sorted(self._in_epoch), "most": self._most}

    def load_state(self, state: dict[str, Any]) -> None:
        self._messages, self._in_epoch, self._most = (
            dict(state["messages"]),
            set(state["in_epoch"]),
            state["most"],
        )


class _Fetch(torch.utils.data.Dataset):
    """Data set in a worker, which loads a whole batch at once."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitems__(self, request: Request) -> Loaded | DataError:
        try:
            loaded = self.dataset.load(request.indices, request.epoch)
            watch.at(watch.NOWHERE)
            return loaded
        except DataError as error:
            # Returned, because an error raised in a worker comes with the worker's stack trace.
            return error


def as_it_is(batch: Any) -> Any:
    """Return the batch as it is: a batch is loaded as a whole, so there is nothing to collate."""
    return batch


def _start_worker(places: Any, worker: int) -> None:
    watch.join(places, worker)
    # Ctrl-C reaches all processes, but the last batches are still wanted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    end_with_parent()


def end_with_parent() -> None:
    """End this process when the process that started it ends, even if that one is killed.

    To the operating system a worker's parent is the fork server, and the workers of a pool wait for
    work for ever.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Flag:
    """Event without a lock: a worker that is killed while it asks leaves nothing locked behind."""

    def __init__(self) -> None:
        self._value = RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1


class WorkerContext(ForkServerContext):
    """Fork server whose events are flags, as the DataLoader only sets and asks them."""

    def Event(self) -> Any:
        return Flag()


def start(loader: DataLoader, dataset: Dataset) -> Iterator[Any]:
    """Start to iterate, with `watch.POLL` as the timeout.

    torch has one timeout for batches and for workers that get ready, which take as long as they do.
    """
    if loader._iterator is not None:
        loader._iterator._timeout = 0
    batches: Any = _start_workers(loader, dataset)
    if loader.num_workers:
        batches._timeout = watch.POLL
    return batches


def _start_workers(loader: DataLoader, dataset: Dataset) -> Iterator[Any]:
    """Start to iterate; the workers do not import the program's main module.

    Python would have the workers import the main module, which may import a great deal. Workers
    need it only if the data set's class is defined there.
    """
    main = sys.modules["__main__"]
    if type(dataset).__module__ == "__main__":
        return iter(loader)
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    try:
        return iter(loader)
    finally:
        main.__dict__.update(hidden)


class Loader(Generic[B]):
    """Batches from (epoch, position) to the end of that epoch; see `create_loader`.

    `set_state` chooses epoch and position. When `stopped` returns the name of a signal while no
    batch comes, the wait ends with Interrupted.
    """

    stopped: Callable[[], str] = staticmethod(str)

    def __init__(
        self,
        dataset: Dataset[B],
        sampler: TrainSampler | EvalSampler,
        bad_files: BadFiles,
        worker_restarts: int,
        workers: int,
        prefetch: int,
        patience: float,
        pin_memory: bool,
    ):
        self.dataset, self.sampler, self.bad_files, self.worker_restarts = (
            dataset,
            sampler,
            bad_files,
            worker_restarts,
        )
        self.patience = patience
        self._places = watch.make_places(workers)
        self.steps_per_epoch = sampler.steps if isinstance(sampler, TrainSampler) else len(sampler)
        self._loader = DataLoader(
            _Fetch(dataset),
            # The sampler's items go to __getitems__ as they are.
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=as_it_is,
            # Without a generator here, each start would draw from the global one, and a resumed run
            # would differ.
            generator=torch.Generator(),
            pin_memory=pin_memory,
            **worker_options(workers, self._places, prefetch),
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def set_state(self, epoch: int, position: int = 0) -> None:
        """Set where the next iteration starts.

        `position` is the number of optimiser steps (in evaluation: batches) already done in this
        epoch.
        """
        if not 0 <= position <= self.steps_per_epoch or epoch < 0:
            raise ValueError(
                f"epoch must not be negative and position be from 0 to {self.steps_per_epoch}, "
                f"got {epoch} and {position}"
            )
        self.sampler.epoch, self.sampler.position = epoch, position

    def __iter__(self) -> Iterator[B]:
        if self.sampler.position == 0:
            self.bad_files.start_epoch()
        position, done = self.sampler.position, 0
        while True:
            try:
                batches = watch.patiently(
                    start(self._loader, self.dataset),
                    self._places,
                    self._name,
                    self.patience,
                    self.stopped,
                )
                for loaded in itertools.islice(batches, done % self.sampler.accumulation, None):
                    if isinstance(loaded, DataError):
                        raise loaded
                    self.bad_files.add(loaded.bad)
                    done += 1
                    if len(loaded.batch.targets):  # an evaluation leaves bad files out
                        yield loaded.batch
                return
            except DataError:
                raise
            except (RuntimeError, OSError, EOFError) as error:
                # Any of these may come from reading what a dead worker sent.
                dead = self._dead_workers()
                if not dead:
                    raise
                self._restart_workers(dead, error)
                self.sampler.position = position + done // self.sampler.accumulation

    def _name(self, index: int) -> str:
        return self.dataset.name(index)  # type: ignore[attr-defined]  # only files have a place

    def _restart_workers(self, dead: str, error: Exception) -> None:
        sentence = f"a process that loads data died ({dead})"
        if self.worker_restarts == 0:
            raise DataError(sentence) from error
        self.worker_restarts -= 1
        log.warning(
            "%s; all are started again (%d more times, data.worker_restarts)",
            sentence,
            self.worker_restarts,
        )
        self._loader._iterator._shutdown_workers()  # type: ignore[union-attr]
        self._loader._iterator = None

    def _dead_workers(self) -> str:
        """Return a description of the workers that have ended, or end within a second."""
        workers = getattr(self._loader._iterator, "_workers", [])
        if not workers:
            return ""
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
        dead = {worker.pid: worker.exitcode for worker in workers if worker.exitcode is not None}
        return ", ".join(f"pid {pid}, {_how_it_ended(code)}" for pid, code in dead.items())


def _how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "SIGKILL, most often for want of memory: use fewer workers"
    return f"signal {-code}" if code < 0 else f"exit code {code}, its own error is above"


def create_loader(
    dataset: Dataset[B],
    batch_size: int,
    *,
    training: bool,
    rank: int = 0,
    world_size: int = 1,
    accumulation: int = 1,
    seed: int = 0,
    workers: int = 0,
    prefetch: int = 2,
    pin_memory: bool = False,
    bad_limit: float = 0.001,
    worker_restarts: int = 0,
    patience: float = watch.PATIENCE,
) -> Loader[B]:
    """Return a loader, whose batches are the same for any number of workers.

    `batch_size` is per rank and accumulation step. Workers that died are started again up to
    `worker_restarts` times, from the batch that was due; then DataError is raised. So it is when
    workers have read at the same files for `patience` seconds.

    A fork server starts the workers, which live as long as the loader: a fork of this process would
    copy the locks of threads (numba's, CUDA's) but not the threads.
    """
    if batch_size < 1 or accumulation < 1 or workers < 0 or prefetch < 1:
        raise ValueError(
            "batch_size, accumulation and prefetch must be positive and workers not negative, got "
            f"{batch_size}, {accumulation}, {prefetch} and {workers}"
        )
    if worker_restarts < 0:
        raise ValueError(f"worker_restarts must not be negative, got {worker_restarts}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    sampler: TrainSampler | EvalSampler
    if training:
        sampler = TrainSampler(
            len(dataset), batch_size, accumulation, rank, world_size, seed, dataset.groups()
        )
        images = len(sampler) * batch_size
    else:
        sampler = EvalSampler(len(dataset), batch_size, rank, world_size)
        images = sampler.last - sampler.first
    bad_files = BadFiles(images, bad_limit, dataset.notes)
    return Loader(
        dataset, sampler, bad_files, worker_restarts, workers, prefetch, patience, pin_memory
    )


def worker_options(workers: int, places: Any, prefetch: int = 2) -> dict[str, Any]:
    """Return the DataLoader's arguments that concern its workers."""
    if not workers:
        return {"num_workers": 0}
    context = WorkerContext()
    # Imported once, not by every worker.
    context.set_forkserver_preload(["dkcls.data", "dkcls.data.encoded"])
    forkserver.ensure_running()  # and from now on, while this process does other things
    return {
        "num_workers": workers,
        "worker_init_fn": partial(_start_worker, places),
        "multiprocessing_context": context,
        "prefetch_factor": prefetch,
        "persistent_workers": True,
    }
