"""Pictures of effective receptive fields: over their images, for several networks side by side, and their radius over scale."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dkcls.analysis.style import COLOURS, bare, tidy

POINT, OUTLINE = "#d55e00", "#0072b2"


def overlay(image: np.ndarray, field: np.ndarray) -> np.ndarray:
    """[H, W, 3] in 0 to 1: the image, pale, [H, W] or [H, W, 3] in 0 to 1, under the field in colour.

    The field is shown over its 99.5th percentile: a few single pixels would leave the rest in the dark.
    """
    light = (
        image if image.mean() > 0.5 or image.ndim == 3 else 1 - image
    )  # a grey object on black is shown on white
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
    """The overlay, the point (x, y) that the position looks at, and the outline of the object."""
    axes.imshow(overlay(image, field), interpolation="nearest")
    if mask is not None:
        axes.contour(mask, [0.5], colors=OUTLINE, linewidths=0.7)
    mark(axes, point)
    bare(axes)


def mark(axes: Axes, point: Sequence[float]) -> None:
    """A cross that can be seen on anything."""
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
    """A row for each image, a column for each network."""
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
    """A row for each depth, a panel for each network: a dot for each object, the mean of each tenth, and the correlation."""
    depths, names = list(radii), list(next(iter(radii.values())))
    figure = Figure(
        figsize=(1.75 * len(names) + 0.3, 2.0 * len(depths) + 0.2), layout="constrained"
    )
    panels = figure.subplots(len(depths), len(names), squeeze=False, sharex=True, sharey="row")
    order = np.array_split(np.argsort(scales), 10)
    for axes, depth in zip(panels, depths, strict=True):
        for panel, name, colour in zip(axes, names, COLOURS, strict=False):
            values = radii[depth][name]
            panel.plot(
                scales, values, ".", color=colour, markersize=2, alpha=0.25, markeredgewidth=0
            )
            means = [(np.exp(np.log(scales[part]).mean()), values[part].mean()) for part in order]
            panel.plot(*zip(*means, strict=True), "-o", color=colour, markersize=3, linewidth=1.2)
            panel.set_xscale("log")
            panel.set_xticks([0.4, 0.6, 0.8, 1.1], ["0.4", "0.6", "0.8", "1.1"])
            panel.minorticks_off()
            panel.text(
                0.05,
                0.95,
                f"r = {correlations[depth][name]:+.2f}",
                transform=panel.transAxes,
                va="top",
                fontsize=8,
            )
            tidy(panel)
        axes[0].set_ylabel(f"{depth}\nERF radius, pixels", fontsize=8)
    for panel, name in zip(panels[0], names, strict=True):
        panel.set_title(name, fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("object scale", fontsize=8)
    return figure
