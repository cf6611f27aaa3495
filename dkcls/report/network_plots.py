"""Pictures of receptive fields, of taps in their scopes, and of dynamics by class and scale."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dkcls.analysis.dynamics import Scope
from dkcls.report.style import COLOURS, bare, tidy

POINT = "#d55e00"
OUTLINE = "#0072b2"
TAPS = (*COLOURS, "#8c6d31", "#7a5195")  # nine, in row-major order
FEW = 8  # positions along an axis, at most, that are drawn over an image


def overlay(image: np.ndarray, field: np.ndarray) -> np.ndarray:
    """Return the image, made pale, under the field in colour, [H, W, 3] in 0 to 1.

    The image is [H, W] or [H, W, 3] in 0 to 1. The field is shown over its 99.5th percentile,
    because a few single pixels would otherwise make the rest too faint.
    """
    # A grey object on black is shown on white.
    light = image if image.mean() > 0.5 or image.ndim == 3 else 1 - image
    pale = 1 - 0.35 * (1 - (light if light.ndim == 3 else np.repeat(light[..., None], 3, -1)))
    strength = np.clip(field / (np.percentile(field, 99.5) or field.max() or 1), 0, 1)[..., None]
    return (
        pale * (1 - strength**0.7)
        + colormaps["magma_r"](0.85 * strength[..., 0])[..., :3] * strength**0.7
    )


def show_field(
    axes: Axes,
    image: np.ndarray,
    field: np.ndarray,
    point: Sequence[float],
    mask: np.ndarray | None = None,
) -> None:
    """Draw the overlay, the point (x, y) that the position looks at, and the object's outline."""
    axes.imshow(overlay(image, field), interpolation="nearest")
    if mask is not None:
        axes.contour(mask, [0.5], colors=OUTLINE, linewidths=0.7)
    mark(axes, point)
    bare(axes)


def mark(axes: Axes, point: Sequence[float]) -> None:
    """Draw a cross that is visible on any background."""
    axes.plot(*point, marker="+", color="white", markersize=9, markeredgewidth=3.4)
    axes.plot(*point, marker="+", color=POINT, markersize=7.5, markeredgewidth=1.6)


class FieldRow(NamedTuple):
    """An image, [H, W] in 0 to 1, its object's mask, and the ERF of each network, [H, W]."""

    title: str
    image: np.ndarray
    mask: np.ndarray
    fields: Mapping[str, np.ndarray]
    note: Mapping[str, str]  # a few words under each field


def field_table(rows: Sequence[FieldRow], point: Sequence[float]) -> Figure:
    """Draw a row for each image and a column for each network."""
    names = list(rows[0].fields)
    figure = Figure(figsize=(1.42 * (1 + len(names)), 1.6 * len(rows) + 0.2), layout="constrained")
    panels = figure.subplots(len(rows), 1 + len(names), squeeze=False)
    for row, axes in zip(rows, panels, strict=True):
        axes[0].imshow(row.image, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
        mark(axes[0], point)
        bare(axes[0])
        axes[0].set_ylabel(row.title, fontsize=9)
        for panel, name in zip(axes[1:], names, strict=True):
            show_field(panel, row.image, row.fields[name], point, row.mask)
            panel.set_xlabel(row.note[name], fontsize=7.5, labelpad=2)
    for panel, name in zip(panels[0], ["image", *names], strict=True):
        panel.set_title(name, fontsize=9)
    return figure


def radius_over_scale(
    scales: np.ndarray,
    radii: Mapping[str, Mapping[str, np.ndarray]],
    correlations: Mapping[str, Mapping[str, float]],
) -> Figure:
    """Draw a row for each depth and a panel for each network, ERF radius over object scale.

    A panel has a dot for each object, the mean of each tenth of the objects, and the correlation.
    """
    depths, names = list(radii), list(next(iter(radii.values())))
    size = (1.75 * len(names) + 0.3, 2.0 * len(depths) + 0.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(depths), len(names), squeeze=False, sharex=True, sharey="row")
    order = np.array_split(np.argsort(scales), 10)
    for axes, depth in zip(panels, depths, strict=True):
        for panel, name, colour in zip(axes, names, COLOURS, strict=False):
            values = radii[depth][name]
            panel.plot(scales, values, ".", color=colour, markersize=2, alpha=0.25, mew=0)
            means = [(np.exp(np.log(scales[part]).mean()), values[part].mean()) for part in order]
            panel.plot(*zip(*means, strict=True), "-o", color=colour, markersize=3, linewidth=1.2)
            panel.set_xscale("log")
            panel.set_xticks([0.4, 0.6, 0.8, 1.1], ["0.4", "0.6", "0.8", "1.1"])
            panel.minorticks_off()
            words = f"r = {correlations[depth][name]:+.2f}"
            panel.text(0.05, 0.95, words, transform=panel.transAxes, va="top", fontsize=8)
            tidy(panel)
        axes[0].set_ylabel(f"{depth}\nERF radius, pixels", fontsize=8)
    for panel, name in zip(panels[0], names, strict=True):
        panel.set_title(name, fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("object scale", fontsize=8)
    return figure


def taps_over_images(
    images: Mapping[str, np.ndarray], shown: Sequence[Scope], scopes: Sequence[Scope]
) -> Figure:
    """Draw where taps read their scopes, position by position and over many images.

    Above, there is a row for each image, [H, W] in 0 to 1, with a small scope of `shown` at each
    position. Below, there is the density of the taps in each layer's scope, `scopes`, over many
    images.
    """
    heights = [2.45 * len(images), 1.75]
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=heights)
    above, below = np.ravel(parts)  # type: ignore[arg-type]
    panels = above.subplots(len(images), len(shown), squeeze=False)
    for row, (axes, (title, image)) in enumerate(zip(panels, images.items(), strict=True)):
        for panel, scope in zip(axes, shown, strict=True):
            _draw_scopes(panel, image, scope, row)
        axes[0].set_ylabel(title, fontsize=9)
        if row == 0:
            for panel, scope in zip(axes, shown, strict=True):
                height, width = scope.coordinates.shape[-2:]
                panel.set_title(f"{scope.name}: {height} x {width} positions", fontsize=8.5)
    for panel, scope in zip(below.subplots(1, len(scopes), squeeze=False)[0], scopes, strict=True):
        draw_scope(panel, scope)
    return figure


def _draw_scopes(axes: Axes, image: np.ndarray, scope: Scope, row: int) -> None:
    """Draw each position's scope over its part of the image, with the taps in the scope."""
    height, width = image.shape
    rows, columns = scope.coordinates.shape[-2:]
    extent = (0, width, height, 0)
    axes.imshow(image, cmap="gray_r", vmin=0, vmax=2.5, extent=extent, interpolation="nearest")
    step = max(1, -(-rows // FEW)), max(1, -(-columns // FEW))
    cell = height / rows * step[0], width / columns * step[1]
    last = np.maximum(np.array(scope.sides) - 1, 1)
    size = 2.2 * (FEW / (rows / step[0]))
    for r in range(0, rows, step[0]):
        for c in range(0, columns, step[1]):
            at = scope.coordinates[row, :, :, r, c] / last * 0.76 + 0.12  # of the cell's sides
            corner = r * height / rows, c * width / columns
            points = corner[0] + at[:, 0] * cell[0], corner[1] + at[:, 1] * cell[1]
            axes.scatter(points[1], points[0], s=size, c=TAPS[: len(at)], linewidths=0)
    axes.set_xticks(np.arange(0, width + 1, cell[1]), [])
    axes.set_yticks(np.arange(0, height + 1, cell[0]), [])
    axes.grid(color="0.75", linewidth=0.4)
    axes.tick_params(length=0)
    axes.spines[:].set(color="0.6", linewidth=0.6)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def scope_row(scopes: Sequence[Scope]) -> Figure:
    """Draw the layers' scopes side by side."""
    figure = Figure(figsize=(1.5 * len(scopes), 1.75), layout="constrained")
    for panel, scope in zip(figure.subplots(1, len(scopes), squeeze=False)[0], scopes, strict=True):
        draw_scope(panel, scope)
    return figure


def draw_scope(axes: Axes, scope: Scope, most: int = 600) -> None:
    """Draw dots where each tap reads, at up to `most` random positions, and a cross at rest."""
    taps = scope.coordinates.shape[1]
    points = np.moveaxis(scope.coordinates, (1, 2), (-2, -1)).reshape(-1, taps, 2)
    points = points[np.random.default_rng(0).permutation(len(points))[:most]]
    for tap in range(taps):
        y, x = points[:, tap].T
        axes.plot(x, y, ".", color=TAPS[tap % len(TAPS)], markersize=1.6, alpha=0.35, mew=0)
    y, x = scope.rest.T
    axes.plot(x, y, "x", color="black", markersize=4, markeredgewidth=0.9)
    height, width = scope.sides
    axes.set(xlim=(-0.25, width - 0.75), ylim=(height - 0.75, -0.25), aspect="equal")
    axes.set_xticks(range(width), [])
    axes.set_yticks(range(height), [])
    axes.grid(alpha=0.4, linewidth=0.5)
    axes.tick_params(length=0)
    axes.spines[:].set(color="0.6", linewidth=0.6)
    axes.set_title(scope.name, fontsize=8)


class Cloud(NamedTuple):
    """Points of N images, [N, 2], with a few words under each of their two panels."""

    title: str
    points: np.ndarray
    by_class: str
    by_scale: str


def clouds(
    panels: Sequence[Cloud], classes: np.ndarray, scales: np.ndarray, class_names: Sequence[str]
) -> Figure:
    """Draw a column for each t-SNE, coloured by class above and by scale below."""
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


def plot_over_images(
    rows: Sequence[tuple[np.ndarray, np.ndarray, tuple[float, float]]],
) -> Figure:
    """Draw each image, [C, H, W] in 0 to 1, with its field [H, W] beside it, and a point (x, y)."""
    heights = [3.6 * found.shape[0] / found.shape[1] for _, found, _ in rows]
    figure = Figure(figsize=(7.2, sum(heights)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False, height_ratios=heights)
    for (left, right), (image, found, at) in zip(panels, rows, strict=True):
        shown = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        left.imshow(shown, cmap="gray", vmin=0, vmax=1)
        mark(left, at)
        bare(left)
        show_field(right, shown, found, at)
    return figure
