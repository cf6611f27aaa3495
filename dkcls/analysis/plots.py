"""Figures of several networks side by side: over settings, over what was done to the objects, and their gains seed by seed."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dkcls.analysis.paired import compare
from dkcls.analysis.style import COLOURS, save, tidy


def plot_sweep(
    series: Mapping[str, Mapping[float, Sequence[float]]],
    picture: str | Path,
    *,
    xlabel: str,
    ylabel: str,
    baselines: Mapping[str, Sequence[float]] | None = None,
    logarithmic: bool = False,
) -> Path:
    """Accuracy over a setting: one dot per seed, mean and standard deviation. `baselines` are horizontal lines."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = itertools.cycle(COLOURS)
    for name, values in (baselines or {}).items():
        colour, mean, spread = next(colours), float(np.mean(values)), _spread(values)
        axes.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=name)
        axes.axhspan(mean - spread, mean + spread, color=colour, alpha=0.08, linewidth=0)
    for name, accuracies in series.items():
        colour, places = next(colours), sorted(accuracies)
        for x in places:
            axes.plot(
                [x] * len(accuracies[x]), accuracies[x], ".", color=colour, alpha=0.45, zorder=2
            )
        means, spreads = (
            [np.mean(accuracies[x]) for x in places],
            [_spread(accuracies[x]) for x in places],
        )
        axes.errorbar(
            places, means, spreads, fmt="-o", capsize=3, color=colour, label=name, zorder=3
        )
    ticks = sorted({x for accuracies in series.values() for x in accuracies})
    if logarithmic:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False, fontsize=9)
    tidy(axes)
    return save(figure, picture)


def _spread(values: Sequence[float]) -> float:
    """Standard deviation, zero of one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def plot_factors(
    edges: np.ndarray,
    curves: Mapping[str, Mapping[int, Sequence[float]]],
    trained: tuple[float, float],
    picture: str | Path,
    *,
    xlabel: str,
    logarithmic: bool = False,
) -> Path:
    """Accuracy in bins of a factor, on the left, and less the first network's with the same seed, on the right.

    curves: of each network, by seed, a figure for each bin. The range of training is shaded; lines are means over the seeds,
    bands their standard errors.
    """
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    centers = np.sqrt(edges[1:] * edges[:-1]) if logarithmic else (edges[1:] + edges[:-1]) / 2
    first = next(iter(curves.values()))
    for (name, seeds), colour in zip(curves.items(), itertools.cycle(COLOURS), strict=False):
        values = np.array(list(seeds.values()))
        gains = np.array(
            [np.subtract(bins, first[seed]) for seed, bins in seeds.items() if seed in first]
        )
        for axes, shown in ((left, values), (right, gains)):
            mean, error = (
                shown.mean(0),
                shown.std(0, ddof=1) / np.sqrt(len(shown)) if len(shown) > 1 else 0.0,
            )
            axes.plot(centers, mean, "-o", markersize=3.5, color=colour, label=name)
            axes.fill_between(
                centers, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0
            )
    for axes, label in (
        (left, "top-1, %"),
        (right, f"top-1 less that of {next(iter(curves))}, points"),
    ):
        axes.axvspan(*trained, color="0.93", zorder=0)
        if logarithmic:
            axes.set_xscale("log")
            ticks = [edge for edge in edges if edge > 0]
            axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks], fontsize=8)
            axes.minorticks_off()
        axes.set_xlabel(f"{xlabel} (grey: in training)")
        axes.set_ylabel(label)
    left.legend(frameon=False, fontsize=8)
    tidy(left)
    tidy(right)
    return save(figure, picture)


def plot_gains(
    gains: Mapping[str, Sequence[float]],
    picture: str | Path,
    *,
    xlabel: str,
    controls: Sequence[str] = (),
) -> Path:
    """One line per network: a dot for each seed, and the mean with its 95 % interval. `controls` are drawn in grey."""
    figure = Figure(figsize=(6.4, 0.9 + 0.3 * len(gains)), layout="constrained")
    axes = figure.subplots()
    for i, (name, values) in enumerate(gains.items()):
        colour = COLOURS[0] if name in controls else COLOURS[1]
        axes.plot(values, [i] * len(values), ".", color=colour, alpha=0.4, zorder=2)
        result = compare(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
        if result.low is not None and result.high is not None:
            axes.plot([result.low, result.high], [i, i], color=colour, linewidth=2)
        axes.plot(result.mean, i, "o", color=colour, zorder=3)
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set_yticks(range(len(gains)), list(gains))
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    tidy(axes)
    return save(figure, picture)
