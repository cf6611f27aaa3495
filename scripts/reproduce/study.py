"""Train networks with equal seeds, several at once, and tabulate their results: for reproduce*.py.

Each run has a process of one thread. Finished runs are skipped, interrupted ones resumed.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from tqdm import tqdm

from dkcls.cli.compose import compose
from dkcls.data.loader import end_with_parent
from dkcls.engine.run import train
from dkcls.errors import UserError
from dkcls.files import write_atomically
from dkcls.report.tables import csv_table, markdown_table

ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
# Called with the folder of a finished run, and the CPU seconds that training took; None if part of
# it was done before.
Then = Callable[[Path, float | None], None]


@dataclass(frozen=True)
class Row:
    """A network, by what sets it apart from the others; `{seed}` in an override is the run's.

    `paper` is how its name ends in the paper's tables.
    """

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    paper: str | None = None


def check_known(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError with the first name that is not among the known ones."""
    known = list(known)
    for name in given:
        if name not in known:
            raise UserError(f"there is no {kind} {name!r}; there are {', '.join(known)}")


def jobs(
    experiment: str,
    out: Path,
    rows: Sequence[Row],
    seeds: Sequence[int],
    only: Sequence[str],
    more: Sequence[str],
) -> Iterator[list[str]]:
    """Yield the overrides of each run: each row with each seed.

    Seeds are the outer loop, so that rows can be compared whenever training stops.

    Args:
        only: names of rows; the others are left out, if any are given.
        more: overrides of every run.
    """
    for seed in seeds:
        for row in rows:
            if not only or row.name in only:
                own = [override.replace("{seed}", str(seed)) for override in row.overrides]
                yield [
                    f"experiment={experiment}",
                    f"name={row.name}-{seed}",
                    f"out={out}",
                    f"seed={seed}",
                    *own,
                    *more,
                ]


def train_all(jobs: Sequence[Sequence[str]], processes: int, then: Then | None = None) -> None:
    """Train each job, given by the overrides of a config, with a name among them.

    Args:
        processes: how many at once; 0: one per core.
        then: called in the run's own process.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # for the processes that are started here
    try:
        with ProcessPoolExecutor(
            processes or os.cpu_count(), get_context("spawn"), end_with_parent
        ) as pool:
            futures = [pool.submit(_train, job, then) for job in jobs]
            done = as_completed(futures)
            try:
                for future in tqdm(done, "runs", len(futures), unit="run", smoothing=0):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _train(job: Sequence[str], then: Then | None) -> None:
    logging.getLogger("dkcls.engine").addFilter(lambda record: record.levelno > logging.INFO)
    torch.set_num_threads(1)
    config = compose(*job)
    assert config.name is not None
    folder = Path(config.out) / config.name
    is_new, started = not folder.exists(), time.process_time()
    try:
        train(config)
        if then is not None:
            then(folder, time.process_time() - started if is_new else None)
    except UserError as error:
        raise UserError(f"{config.name}: {error}") from error


@dataclass(frozen=True)
class Measured:
    """A row's runs, by seed."""

    row: Row
    results: dict[int, dict[str, Any]]

    def of(self, metric: str) -> dict[int, Any]:
        """Return the metric by seed, without runs in which it is null."""
        found = {seed: result[metric] for seed, result in self.results.items()}
        return {seed: value for seed, value in found.items() if value is not None}

    def values(self, metric: str) -> list[Any]:
        return list(self.of(metric).values())


def measured(out: Path, rows: Sequence[Row], *files: str) -> dict[str, Measured]:
    """Return the rows with finished runs, in order: the metrics in all of these files of each run.

    A run without one of the files is left out.
    """
    found = {}
    for row in rows:
        results = {}
        for run in out.glob(f"{row.name}-*"):
            seed = run.name.rpartition("-")[2]
            if run.name == f"{row.name}-{seed}" and all((run / file).exists() for file in files):
                parts = [json.loads((run / file).read_text()) for file in files]
                results[int(seed)] = {k: v for part in parts for k, v in part.items()}
        if results:
            found[row.name] = Measured(row, dict(sorted(results.items())))
    return found


def mean_and_spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean, and the standard deviation under NAME_std, as a table's row has them."""
    return {name: fmean(values), f"{name}_std": stdev(values) if len(values) > 1 else None}


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as Markdown and CSV, and print them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path.with_suffix(".md"), markdown_table(rows).encode())
    write_atomically(path.with_suffix(".csv"), csv_table(rows).encode())
    print(f"\n{path.name}\n\n{markdown_table(rows)}")
