"""Pictures of metrics and predictions: curves, sweeps, gains, confusion matrices and boxes."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from dkcls.engine import run_directory
from dkcls.report.style import COLOURS, save, tidy
from dkcls.report.tables import compare

LINES = (  # kind, colour, name, marker
    ("train", "tab:blue", "training", None),
    ("val", "tab:orange", "validation", "o"),
)


def read_metrics(path: str | Path) -> dict[str, list[dict]]:
    """Return the numbers of metrics.jsonl's lines by the lines' kind: train, val."""
    kinds: dict[str, list[dict]] = {}
    for line in run_directory.read_metrics(path):
        numbers = {name: value for name, value in line.items() if type(value) in (int, float)}
        kinds.setdefault(line["kind"], []).append(numbers)
    return kinds


def plot_curves(metrics: str | Path, picture: str | Path) -> Path:
    """Draw loss, accuracy and learning rate over the steps. Return the picture's path."""
    kinds = read_metrics(metrics)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    detection = any("ap" in line for line in kinds.get("val", []))
    accuracy = ("ap", "AP, %", False) if detection else ("top1", "top-1, %", False)
    panels = [("loss", "loss", False), accuracy, ("lr_weights", "learning rate", True)]
    for axes, (key, label, only_train) in zip(figure.subplots(1, 3), panels, strict=True):
        for kind, colour, name, marker in LINES:
            points = [(line["step"], line[key]) for line in kinds.get(kind, []) if key in line]
            if points and not (only_train and kind == "val"):
                x, y = zip(*points, strict=True)
                axes.plot(x, y, color=colour, label=name, marker=marker, markersize=4)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if not only_train and axes.lines:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
    return Path(picture)


def plot_sweep(
    series: Mapping[str, Mapping[float, Sequence[float]]],
    picture: str | Path,
    *,
    xlabel: str,
    ylabel: str,
    baselines: Mapping[str, Sequence[float]] | None = None,
    logarithmic: bool = False,
) -> Path:
    """Draw accuracy over a setting: a dot per seed, the mean and the standard deviation.

    `baselines` are drawn as horizontal lines.
    """
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = itertools.cycle(COLOURS)
    for name, values in (baselines or {}).items():
        colour = next(colours)
        mean, spread = float(np.mean(values)), _spread(values)
        axes.axhline(mean, color=colour, linestyle="--", linewidth=1.2, label=name)
        axes.axhspan(mean - spread, mean + spread, color=colour, alpha=0.08, linewidth=0)
    for name, accuracies in series.items():
        colour, settings = next(colours), sorted(accuracies)
        for x in settings:
            values = accuracies[x]
            axes.plot([x] * len(values), values, ".", color=colour, alpha=0.45, zorder=2)
        means = [np.mean(accuracies[x]) for x in settings]
        spreads = [_spread(accuracies[x]) for x in settings]
        axes.errorbar(
            settings, means, spreads, fmt="-o", capsize=3, color=colour, label=name, zorder=3
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
    """Return the standard deviation, zero for a single value."""
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
    """Draw accuracy in bins of a factor on the left, and gains over the first network on the right.

    `curves` has one accuracy per bin for each network and seed; gains are between equal seeds. The
    range of training is shaded. Lines are means over the seeds, bands their standard errors.
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
            mean = shown.mean(0)
            error = shown.std(0, ddof=1) / np.sqrt(len(shown)) if len(shown) > 1 else 0.0
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
    """Draw a line per network: a dot for each seed, and the mean with its 95 % interval.

    `controls` are drawn in grey.
    """
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


def plot_confusion(
    confusion: Sequence[Sequence[int]], classes: Sequence[str], title: str
) -> Figure:
    """Draw a matrix with a row for each true class; the numbers are percent of the row."""
    images = np.array(confusion, float)
    shares = 100 * images / images.sum(1, keepdims=True).clip(min=1)
    side = 2.5 + 0.45 * min(len(classes), 40)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    colours = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    axes.set(xlabel="predicted", ylabel="true", title=title)
    axes.set_xticks(range(len(classes)), classes, rotation=90)
    axes.set_yticks(range(len(classes)), classes)
    if len(classes) <= 20:  # else the numbers would not fit
        for row, column in np.ndindex(*shares.shape):
            share = shares[row, column]
            colour = "white" if share > 50 else "black"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour)
    figure.colorbar(colours, label="% of the true class", shrink=0.7)
    return figure


class Shown(NamedTuple):
    """An image, uint8 [C, H, W], what a detector found in it, and its true boxes if known.

    `found` has boxes, labels and scores; `target` has boxes and labels.
    """

    image: Tensor
    found: Mapping[str, Tensor]
    target: Mapping[str, Tensor] | None = None


def draw_detections(
    rows: Mapping[str, Sequence[Shown]],
    class_names: Sequence[str],
    picture: str | Path,
    threshold: float = 0.5,
) -> Path:
    """Draw one row per detector: true boxes dashed in white, found boxes in colour by class.

    Only found boxes with a score of at least `threshold` are drawn. The picture is saved to
    `picture`.
    """
    columns = max(len(row) for row in rows.values())
    figure = Figure(figsize=(2.6 * columns, 2.75 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, row) in zip(panels, rows.items(), strict=True):
        for axes in line:
            axes.set_axis_off()
        for axes, shown in zip(line, row, strict=False):
            _draw_boxes(axes, shown, class_names, threshold)
        line[0].set_title(name, loc="left", fontsize=8)
    return save(figure, picture)


def _draw_boxes(axes: Axes, shown: Shown, class_names: Sequence[str], threshold: float) -> None:
    pixels = shown.image.permute(1, 2, 0).numpy()
    axes.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
    for box in [] if shown.target is None else shown.target["boxes"].tolist():
        axes.add_patch(_rectangle(box, "white", linestyle="--", linewidth=0.9))
    found = (shown.found[key].tolist() for key in ("boxes", "labels", "scores"))
    for box, label, score in zip(*found, strict=True):
        if score >= threshold:
            colour = COLOURS[1 + (label - 1) % (len(COLOURS) - 1)]  # the first is dark
            axes.add_patch(_rectangle(box, colour, linewidth=1.5))
            words = f"{class_names[label - 1]} {score:.2f}"
            tag = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            at = box[0], box[1] - 1
            axes.text(*at, words, color="white", fontsize=6, va="bottom", bbox=tag, clip_on=True)


def _rectangle(box: Sequence[float], colour: str, **style: object) -> Rectangle:
    """Return the frame of a box (x1, y1, x2, y2); the first pixel's middle is at 0 in a picture."""
    x1, y1, x2, y2 = box
    corner = (x1 - 0.5, y1 - 0.5)
    style |= {"fill": False, "edgecolor": colour}
    return Rectangle(corner, x2 - x1, y2 - y1, **style)  # type: ignore[arg-type]
