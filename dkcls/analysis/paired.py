"""Differences between networks that were trained with the same seeds."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from scipy import stats


@dataclass(frozen=True)
class Paired:
    """What one network has over another, seed by seed.

    `low` and `high` are the ends of the 95 % interval of the mean, and `p` the two-sided p-value of no difference, both by
    Student's t over the seeds; None with one seed, or if all differences are the same.
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
    """`a` less `b`, both {seed: figure}, over the seeds that both have."""
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        raise ValueError(f"there is no seed that both have: {sorted(a)} and {sorted(b)}")
    differences = [a[seed] - b[seed] for seed in seeds]
    if len(set(differences)) == 1:
        return Paired(differences, differences[0])
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval(0.95)
    return Paired(
        differences,
        fmean(differences),
        float(interval.low),
        float(interval.high),
        float(test.pvalue),
    )
