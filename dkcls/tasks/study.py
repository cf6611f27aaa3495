"""Networks trained with the same seeds, to be compared: what is trained, what came of it, and tables of that."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dkcls.analysis.tables import csv_table, markdown_table
from dkcls.engine.checkpoint import write_atomically
from dkcls.engine.errors import UserError


@dataclass(frozen=True)
class Row:
    """A network, by what sets it apart from the others; `{seed}` in an override is the run's.

    `paper`: how its name ends in the paper's tables.
    """

    name: str
    label: str
    overrides: tuple[str, ...] = ()
    paper: str | None = None


def check_known(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """UserError names the first that is not there."""
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
    """What `train_all` takes: each row with each seed; seed by seed, so that whenever it stops rows can be compared.

    `only` these rows, if any are named; `more` overrides of every run.
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


@dataclass(frozen=True)
class Measured:
    """A row's runs, by seed."""

    row: Row
    results: dict[int, dict[str, Any]]

    def of(self, figure: str) -> dict[int, Any]:
        return {
            seed: result[figure]
            for seed, result in self.results.items()
            if result[figure] is not None
        }

    def values(self, figure: str) -> list[Any]:
        return list(self.of(figure).values())


def measured(out: Path, rows: Sequence[Row], *files: str) -> dict[str, Measured]:
    """What is there, in the order of the rows: the figures of all of these files of each run."""
    found = {}
    for row in rows:
        results = {}
        for run in out.glob(f"{row.name}-*"):
            seed = run.name.rpartition("-")[2]
            if run.name == f"{row.name}-{seed}" and all((run / file).exists() for file in files):
                results[int(seed)] = {
                    k: v for file in files for k, v in json.loads((run / file).read_text()).items()
                }
        if results:
            found[row.name] = Measured(row, dict(sorted(results.items())))
    return found


def mean_and_spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Of a table's row."""
    return {name: fmean(values), f"{name}_std": stdev(values) if len(values) > 1 else None}


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """As Markdown and CSV, and to whoever watches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path.with_suffix(".md"), markdown_table(rows).encode())
    write_atomically(path.with_suffix(".csv"), csv_table(rows).encode())
    print(f"\n{path.name}\n\n{markdown_table(rows)}")
