"""Pictures of what a network decides per image: where taps read their scopes, and offsets and routing by class and scale."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dkcls.analysis.style import COLOURS, bare
from dkcls.analysis.taps import Scope

TAPS = (*COLOURS, "#8c6d31", "#7a5195")  # nine, in row-major order
FEW = 8  # positions along an axis, at most, that are drawn over an image


def taps_over_images(
    images: Mapping[str, np.ndarray], shown: Sequence[Scope], scopes: Sequence[Scope]
) -> Figure:
    """Above, a row for each image, [H, W] in 0 to 1: a small scope at each position, as `shown` has them. Below, over many
    images, the density of the taps in each layer's scope."""
    figure = Figure(figsize=(7.2, 2.45 * len(images) + 1.75), layout="constrained")
    above, below = np.ravel(figure.subfigures(2, 1, height_ratios=[2.45 * len(images), 1.75]))  # type: ignore[arg-type]
    for row, (axes, (title, image)) in enumerate(
        zip(above.subplots(len(images), len(shown), squeeze=False), images.items(), strict=True)
    ):
        for panel, scope in zip(axes, shown, strict=True):
            _draw_scopes(panel, image, scope, row)
        axes[0].set_ylabel(title, fontsize=9)
        if row == 0:
            for panel, scope in zip(axes, shown, strict=True):
                height, width = scope.places.shape[-2:]
                panel.set_title(f"{scope.name}: {height} x {width} positions", fontsize=8.5)
    for panel, scope in zip(below.subplots(1, len(scopes), squeeze=False)[0], scopes, strict=True):
        draw_scope(panel, scope)
    return figure


def _draw_scopes(axes: Axes, image: np.ndarray, scope: Scope, row: int) -> None:
    """Each position's scope in its place over the image, with the taps in it."""
    height, width = image.shape
    rows, columns = scope.places.shape[-2:]
    axes.imshow(
        image,
        cmap="gray_r",
        vmin=0,
        vmax=2.5,
        extent=(0, width, height, 0),
        interpolation="nearest",
    )
    step = max(1, -(-rows // FEW)), max(1, -(-columns // FEW))
    cell = height / rows * step[0], width / columns * step[1]
    for r in range(0, rows, step[0]):
        for c in range(0, columns, step[1]):
            at = (
                scope.places[row, :, :, r, c] / np.maximum(np.array(scope.sides) - 1, 1) * 0.76
                + 0.12
            )
            corner = r * height / rows, c * width / columns
            points = corner[0] + at[:, 0] * cell[0], corner[1] + at[:, 1] * cell[1]
            axes.scatter(
                points[1],
                points[0],
                s=2.2 * (FEW / (rows / step[0])),
                c=TAPS[: len(at)],
                linewidths=0,
            )
    axes.set_xticks(np.arange(0, width + 1, cell[1]), [])
    axes.set_yticks(np.arange(0, height + 1, cell[0]), [])
    axes.grid(color="0.75", linewidth=0.4)
    axes.tick_params(length=0)
    axes.spines[:].set(color="0.6", linewidth=0.6)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def scope_row(scopes: Sequence[Scope]) -> Figure:
    """The layers' scopes side by side."""
    figure = Figure(figsize=(1.5 * len(scopes), 1.75), layout="constrained")
    for panel, scope in zip(figure.subplots(1, len(scopes), squeeze=False)[0], scopes, strict=True):
        draw_scope(panel, scope)
    return figure


def draw_scope(axes: Axes, scope: Scope, most: int = 600) -> None:
    """Dots where each tap reads, at up to `most` random positions of the images; a cross where it rests."""
    places = np.moveaxis(scope.places, (1, 2), (-2, -1)).reshape(-1, scope.places.shape[1], 2)
    places = places[np.random.default_rng(0).permutation(len(places))[:most]]
    for tap in range(places.shape[1]):
        axes.plot(
            places[:, tap, 1],
            places[:, tap, 0],
            ".",
            color=TAPS[tap % len(TAPS)],
            markersize=1.6,
            alpha=0.35,
            mew=0,
        )
    axes.plot(
        scope.rest[:, 1], scope.rest[:, 0], "x", color="black", markersize=4, markeredgewidth=0.9
    )
    height, width = scope.sides
    axes.set(xlim=(-0.25, width - 0.75), ylim=(height - 0.75, -0.25), aspect="equal")
    axes.set_xticks(range(width), [])
    axes.set_yticks(range(height), [])
    axes.grid(alpha=0.4, linewidth=0.5)
    axes.tick_params(length=0)
    axes.spines[:].set(color="0.6", linewidth=0.6)
    axes.set_title(scope.name, fontsize=8)


class Cloud(NamedTuple):
    title: str
    points: np.ndarray  # [N, 2]
    by_class: str  # a few words under the panel that is coloured by class
    by_scale: str


def clouds(
    panels: Sequence[Cloud], classes: np.ndarray, scales: np.ndarray, class_names: Sequence[str]
) -> Figure:
    """A column for each t-SNE, coloured by class above and by scale below."""
    figure = Figure(figsize=(1.85 * len(panels) + 1.2, 4.3), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False)
    deciles = np.argsort(np.argsort(scales)) * 10 // len(scales)
    for column, cloud in zip(axes.T, panels, strict=True):
        above = column[0].scatter(
            *cloud.points.T, c=classes, s=3, cmap="tab10", vmin=-0.5, vmax=9.5, linewidths=0
        )
        below = column[1].scatter(*cloud.points.T, c=deciles, s=3, cmap="viridis", linewidths=0)
        column[0].set_title(cloud.title, fontsize=9)
        for panel, words in zip(column, (cloud.by_class, cloud.by_scale), strict=True):
            bare(panel)
            panel.set_xlabel(words, fontsize=7.5)
    axes[0, 0].set_ylabel("by class", fontsize=9)
    axes[1, 0].set_ylabel("by object scale", fontsize=9)
    bar = figure.colorbar(above, ax=axes[0], ticks=range(len(class_names)))
    bar.ax.set_yticklabels(class_names, fontsize=6.5)
    bar = figure.colorbar(below, ax=axes[1], ticks=[0, 9])
    bar.ax.set_yticklabels(["smallest\ntenth", "largest\ntenth"], fontsize=6.5)
    return figure
