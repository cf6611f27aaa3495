"""Batches from a data set: torch's DataLoader with our order, resumable at any step, and bad files reported."""

import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.sharedctypes import RawValue
from typing import Any, Generic

import torch
from torch.utils.data import DataLoader, Dataset

from dkcls.data.bad_files import BadFiles
from dkcls.data.base import B, BatchDataset, DataError, Loaded
from dkcls.data.sampler import EvalSampler, Request, TrainSampler

log = logging.getLogger(__name__)


class _Fetch(Dataset):
    """What the workers hold: hands a whole batch at once to the data set."""

    def __init__(self, dataset: BatchDataset):
        self.dataset = dataset

    def __getitems__(self, request: Request) -> Loaded | DataError:
        try:
            return self.dataset.load(request.indices, request.epoch)
        except (
            DataError
        ) as error:  # as a value: raised in a worker, it would come with the worker's stack trace
            return error


def as_it_is(batch: Any) -> Any:
    """Nothing to collate: a batch is loaded as a whole."""
    return batch


def _start_worker(worker: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes; the last batches are still wanted
    torch.set_num_threads(1)
    end_with_parent()


def end_with_parent() -> None:
    """This process ends when the one that started it does, even if that is killed.

    A worker's parent by the system's account is the fork server, and a pool's workers wait for work for ever.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Flag:
    """An event without a lock: a worker that is killed while it asks leaves nothing locked behind."""

    def __init__(self) -> None:
        self._value = RawValue("b", 0)

    def is_set(self) -> bool:
        return bool(self._value.value)

    def set(self) -> None:
        self._value.value = 1


class WorkerContext(ForkServerContext):
    """A fork server whose events are flags: all that the DataLoader does with them is to set and to ask."""

    def Event(self) -> Any:
        return Flag()


def start(loader: DataLoader, dataset: BatchDataset) -> Iterator[Any]:
    """Iterates over the loader; its workers do not import the program's main module, as Python would have them.

    They need nothing of it, unless the data set's class is there, and it may import a great deal.
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
    """Iterates from (epoch, position) to the end of that epoch; `set_state` chooses them. See `create_loader`."""

    def __init__(
        self,
        dataset: BatchDataset[B],
        sampler: TrainSampler | EvalSampler,
        bad_files: BadFiles,
        worker_restarts: int,
        **options: Any,
    ):
        self.dataset, self.sampler, self.bad_files, self.worker_restarts = (
            dataset,
            sampler,
            bad_files,
            worker_restarts,
        )
        self.steps_per_epoch = sampler.steps if isinstance(sampler, TrainSampler) else len(sampler)
        self._loader = DataLoader(
            _Fetch(dataset),
            batch_sampler=sampler,  # type: ignore[arg-type]  # its items go to __getitems__ as they are
            collate_fn=as_it_is,
            generator=torch.Generator(),  # else it draws from the global one, once per start: a resumed run would differ
            **options,
        )

    def __len__(self) -> int:
        return len(self.sampler)

    def set_state(self, epoch: int, position: int = 0) -> None:
        """`position`: optimiser steps already done in this epoch (evaluation: batches)."""
        if not 0 <= position <= self.steps_per_epoch or epoch < 0:
            raise ValueError(
                f"epoch must not be negative and position be from 0 to {self.steps_per_epoch}, got {epoch} and {position}"
            )
        self.sampler.epoch, self.sampler.position = epoch, position

    def __iter__(self) -> Iterator[B]:
        if self.sampler.position == 0:
            self.bad_files.start_epoch()
        position, done = self.sampler.position, 0
        while True:
            try:
                for loaded in itertools.islice(
                    start(self._loader, self.dataset), done % self.sampler.accumulation, None
                ):
                    if isinstance(loaded, DataError):
                        raise loaded
                    self.bad_files.add(loaded.bad)
                    done += 1
                    if len(loaded.batch.targets):  # an evaluation leaves bad files out
                        yield loaded.batch
                return
            except DataError:
                raise
            except (
                RuntimeError,
                OSError,
                EOFError,
            ) as error:  # what a dead worker leaves its readers with
                dead = self._dead_workers()
                if not dead:
                    raise
                self._restart_workers(dead, error)
                self.sampler.position = position + done // self.sampler.accumulation

    def _restart_workers(self, dead: str, error: Exception) -> None:
        sentence = f"a process that loads data died ({dead}), most often killed for want of memory"
        if self.worker_restarts == 0:
            raise DataError(f"{sentence}; use fewer workers or restart") from error
        self.worker_restarts -= 1
        log.warning(
            "%s; all are started again (%d more times, data.worker_restarts)",
            sentence,
            self.worker_restarts,
        )
        self._loader._iterator._shutdown_workers()  # type: ignore[union-attr]
        self._loader._iterator = None

    def _dead_workers(self) -> str:
        """The workers that ended, or do within a second."""
        workers = getattr(self._loader._iterator, "_workers", [])
        if not workers:
            return ""
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
        return ", ".join(
            f"pid {worker.pid}, exit code {worker.exitcode}"
            for worker in workers
            if worker.exitcode is not None
        )


def create_loader(
    dataset: BatchDataset[B],
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
) -> Loader[B]:
    """`batch_size` is per rank and accumulation step. Batches are the same for any number of workers.

    Workers that died are started again up to `worker_restarts` times, from the batch that was due; then DataError.

    Workers are started by a fork server and live as long as the loader: a fork of this process would copy the locks of threads
    that it does not have (numba's, CUDA's).
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
    options = {"pin_memory": pin_memory, **worker_options(workers, prefetch)}
    return Loader(
        dataset, sampler, BadFiles(images, bad_limit, dataset.notes), worker_restarts, **options
    )


def worker_options(workers: int, prefetch: int = 2) -> dict[str, Any]:
    """What a DataLoader is told of its workers."""
    if not workers:
        return {"num_workers": 0}
    context = WorkerContext()
    context.set_forkserver_preload(["dkcls.data"])  # imported once, not by every worker
    forkserver.ensure_running()  # and from now on, while this process does other things
    return {
        "num_workers": workers,
        "worker_init_fn": _start_worker,
        "multiprocessing_context": context,
        "prefetch_factor": prefetch,
        "persistent_workers": True,
    }
