"""Sections of a page that look into networks: curves, ERFs and dynamics, each explained."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from dkcls.analysis import erf
from dkcls.analysis.dynamics import (
    beside,
    collect_dynamics,
    explain,
    explain_control,
    moves,
    read_scopes,
)
from dkcls.analysis.probes import Look, first_of_classes, middle, place
from dkcls.data import ImageDataset, Normalize
from dkcls.data.sets.deformed_fashion import DeformedFashion
from dkcls.report.network_plots import mark, scope_row, show_field
from dkcls.report.page import Section, chart, heading, paragraph, table, tiles
from dkcls.report.plots import read_metrics
from dkcls.report.style import COLOURS, tidy

SIZES = {"A small object": 0.42, "An object of medium size": 0.7, "A large object": 1.05}
IMAGES = 400  # for metrics of dynamics
MOST_SCOPES = 6  # of a network that are shown

LOSSES = """How training went, step by step: the loss on training images should fall."""
ACCURACIES = """The share of validation images that the network gets right, measured every so often,
should rise."""
FIELDS = """A network's last feature map has a grid of positions. Which pixels of the image does the
middle one depend on? Dark pixels count most, pale ones hardly: this is its effective receptive
field (ERF). The cross marks the pixel that the position looks at."""
OUTLINES = """The blue line is the object's outline. The radius is the ERF's root mean square width
in pixels; inside is the share of it on the object. A network that adapts has a wider ERF on a
larger object. Rigid networks do so too, because other units are active on other images: compare
with one before saying that deformable kernels did it."""
TAPS = """A deformable kernel keeps a larger square of weights, its scope, and reads its small
kernel from places in it that the image decides. Each colour is one of the kernel's taps, each dot a
place that it read for some image and position; crosses are where it started in training. A cloud
away from its cross has moved for all images; a wide cloud moves with the image."""
EXPLAINED = """How much of what the last such layer decides per image follows the object's class,
and how much its scale? Shares of the variance, and what linear models read from it on images that
they were not fitted on. In brackets the control, random mixtures of the features that the layer
sees: only what exceeds the control has been learnt."""


@dataclass
class Subject:
    """A setting, with the trained network of one of its runs and that run's metrics.jsonl."""

    label: str
    model: nn.Module
    dataset: ImageDataset
    metrics: Path

    def normalized(self, images: Tensor) -> Tensor:
        """Return uint8 images [N, C, H, W] as the network takes them."""
        return Normalize(self.dataset.mean, self.dataset.std)(images)

    def batch(self, count: int) -> tuple[np.ndarray, Tensor]:
        """Return the indices and images of the first `count` samples."""
        indices = np.arange(min(count, len(self.dataset)))
        return indices, self.normalized(self.dataset.load(indices).batch.images)


def curves_section(subjects: Sequence[Subject]) -> Section:
    """Draw loss in training and accuracy in validation, a line for each setting."""
    lines = [read_metrics(subject.metrics) for subject in subjects]
    shown = [("train", "loss", "training loss"), ("val", "top1", "validation top-1, %")]
    if max(len(each.get("val", [])) for each in lines) < 2:
        del shown[1]  # the result is in the table
    words = f"{LOSSES} {ACCURACIES}" if len(shown) > 1 else LOSSES
    what = " and ".join(label.split(",")[0] for *_, label in shown)
    figure = Figure(figsize=(10 if len(shown) > 1 else 6.4, 3.6), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (kind, key, label) in zip(panels, shown, strict=True):
        for subject, colour, each in zip(subjects, COLOURS, lines, strict=False):
            points = [(line["step"], line[key]) for line in each.get(kind, []) if key in line]
            marker = "o" if kind == "val" else None
            x, y = np.reshape(points, (-1, 2)).T
            axes.plot(x, y, color=colour, marker=marker, markersize=4, label=subject.label)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        tidy(axes)
    if len(subjects) > 1:
        panels[0].legend(frameon=False, fontsize=8, loc="upper right")
    return Section("Learning curves", paragraph(words) + chart(figure, f"{what} over the steps"))


def fields_section(subjects: Sequence[Subject]) -> Section:
    """Draw the ERFs of the middle of the last feature map, over three images."""
    content = paragraph(FIELDS)
    dataset = subjects[0].dataset
    look = middle(subjects[0].model, dataset)
    if isinstance(dataset, DeformedFashion):
        content += paragraph(OUTLINES)
        boot = dataset.class_names.index("Ankle boot")
        shown = boot if (dataset.targets == boot).any() else dataset.targets[0]
        index = first_of_classes(dataset, [shown])
        for title, scale in SIZES.items():
            probe = place(look, dataset, index, scale, 20.0)
            content += heading(title) + _field_tiles(subjects, look, probe.images, probe.masks[0])
    else:
        first = np.arange(min(3, len(dataset)))
        for number, image in enumerate(dataset.load(first).batch.images, 1):
            content += heading(f"Validation image {number}")
            content += _field_tiles(subjects, look, image[None], None)
    return Section("What the network looks at", content)


def _field_tiles(
    subjects: Sequence[Subject], look: Look, images: Tensor, mask: Tensor | None
) -> str:
    picture = images[0].movedim(0, -1).numpy().squeeze(-1 if images.shape[1] == 1 else ()) / 255
    shown = [(_tile(picture, None, look.point), "the image")]
    for subject in subjects:
        field = erf.effective_receptive_field(
            subject.model, subject.normalized(images), look.position, projections=32
        )[0]
        words = f"{subject.label}: radius {erf.radius(field):.1f}"
        if mask is not None:
            words += f", {100 * erf.share_inside(field, mask):.0f} % inside"
        outline = None if mask is None else mask.numpy()
        shown.append((_tile(picture, field.numpy(), look.point, outline), words))
    return tiles(shown)


def _tile(
    image: np.ndarray,
    field: np.ndarray | None,
    point: tuple[float, float],
    mask: np.ndarray | None = None,
) -> Figure:
    figure = Figure(figsize=(2, 2 * image.shape[0] / image.shape[1]))
    axes = figure.add_axes((0, 0, 1, 1))
    if field is None:
        axes.imshow(image, cmap="gray", vmin=0, vmax=1)
        mark(axes, point)
    else:
        show_field(axes, image, field, point, mask)
    axes.set_axis_off()
    return figure


def dynamics_section(subjects: Sequence[Subject]) -> Section | None:
    """Draw where taps read their scopes, and list what offsets and routing follow.

    Returns None if no network decides anything per image.
    """
    content = ""
    for subject in subjects:
        if scopes := read_scopes(subject.model, subject.batch(100)[1]):
            some = np.linspace(0, len(scopes) - 1, min(MOST_SCOPES, len(scopes))).astype(int)
            scopes = [scopes[i] for i in some]
            far = ", ".join(f"{moves(scope)['from rest']:.2f}" for scope in scopes)
            words = f"Distance from rest, root mean square, in entries of the scope: {far}."
            content += heading(subject.label)
            content += chart(scope_row(scopes), f"taps in the scopes of {subject.label}")
            content += paragraph(words, quiet=True)
    if content:
        content = paragraph(TAPS) + content
    if rows := _explained(subjects):
        content += heading("What it follows") + paragraph(EXPLAINED) + table(rows)
    return Section("How the kernels adapt", content) if content else None


def _explained(subjects: Sequence[Subject]) -> list[dict[str, str]]:
    """Return table rows for each network's last dynamic layer, where object scales are known."""
    rows = []
    for subject in subjects:
        if isinstance(subject.dataset, DeformedFashion):
            indices, images = subject.batch(IMAGES)
            if found := collect_dynamics(subject.model, images.split(100)):
                last = list(found.values())[-1]
                about = subject.dataset.targets[indices], subject.dataset.factors(indices).scale
                cells = beside(explain(last.values, *about), explain_control(last, *about))
                rows.append({"setting": subject.label} | cells)
    return rows
