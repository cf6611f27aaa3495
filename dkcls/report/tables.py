"""Tables of metrics as Markdown and CSV, and differences between networks with equal seeds."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as Markdown, with a column NAME_std joined to NAME as "mean ± std"."""
    names = [name for name in _columns(rows) if not name.endswith("_std")]
    lines = [names, ["---"] * len(names), *([_cell(row, name) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, a column for each name that any row has."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(row: Mapping[str, Any], name: str) -> str:
    value, spread = row.get(name), row.get(f"{name}_std")
    if value is None:
        return ""
    if isinstance(value, float):
        text = f"{value:.2f}"
    elif isinstance(value, int):
        text = f"{value:,}"
    else:
        text = str(value)
    return text if spread is None else f"{text} ± {spread:.2f}"


@dataclass(frozen=True)
class Paired:
    """Differences between two networks' metrics, seed by seed.

    `low` and `high` are the ends of the 95 % interval of the mean, `p` is the two-sided p-value of
    no difference. All three are by Student's t over the seeds, and None with one seed or if all
    differences are the same.
    """

    differences: list[float]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], p = {self.p:.2g}"


def compare(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Subtract `b` from `a`, both {seed: metric}, over the seeds that both have."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"there is no seed that both have: {sorted(a)} and {sorted(b)}")
    differences = [a[seed] - b[seed] for seed in seeds]
    if len(set(differences)) == 1:
        return Paired(differences, differences[0])
    from scipy import stats  # here, because it takes longer than the rest of a table

    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval(0.95)
    return Paired(
        differences,
        fmean(differences),
        float(interval.low),
        float(interval.high),
        float(test.pvalue),
    )
