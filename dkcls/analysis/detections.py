"""Pictures of images with the boxes that are in them and those that a detector finds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from dkcls.analysis.style import COLOURS, save


class Shown(NamedTuple):
    """An image, uint8 [C, H, W], its boxes and labels, and the boxes, labels and scores that were found in it."""

    image: Tensor
    target: Mapping[str, Tensor]
    found: Mapping[str, Tensor]


def draw_detections(
    rows: Mapping[str, Sequence[Shown]],
    class_names: Sequence[str],
    picture: str | Path,
    threshold: float = 0.5,
) -> Path:
    """A row per detector: true boxes dashed in white, found ones of at least `threshold` in colour, by class."""
    columns = max(len(row) for row in rows.values())
    figure = Figure(figsize=(2.6 * columns, 2.75 * len(rows)), layout="constrained")
    for line, (name, row) in zip(
        figure.subplots(len(rows), columns, squeeze=False), rows.items(), strict=True
    ):
        for axes in line:
            axes.set_axis_off()
        for axes, shown in zip(line, row, strict=False):
            _draw(axes, shown, class_names, threshold)
        line[0].set_title(name, loc="left", fontsize=8)
    return save(figure, picture)


def _draw(axes: Axes, shown: Shown, class_names: Sequence[str], threshold: float) -> None:
    pixels = shown.image.permute(1, 2, 0).numpy()
    axes.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
    for box in shown.target["boxes"].tolist():
        axes.add_patch(_rectangle(box, "white", linestyle="--", linewidth=0.9))
    for box, label, score in zip(
        *(shown.found[key].tolist() for key in ("boxes", "labels", "scores")), strict=True
    ):
        if score >= threshold:
            colour = COLOURS[1 + (label - 1) % (len(COLOURS) - 1)]  # the first is dark
            axes.add_patch(_rectangle(box, colour, linewidth=1.5))
            words = f"{class_names[label - 1]} {score:.2f}"
            tag = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            axes.text(
                box[0],
                box[1] - 1,
                words,
                color="white",
                fontsize=6,
                va="bottom",
                bbox=tag,
                clip_on=True,
            )


def _rectangle(box: Sequence[float], colour: str, **style: object) -> Rectangle:
    x1, y1, x2, y2 = box
    return Rectangle((x1 - 0.5, y1 - 0.5), x2 - x1, y2 - y1, fill=False, edgecolor=colour, **style)  # type: ignore[arg-type]
