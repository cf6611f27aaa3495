"""A run's metrics as curves."""

import json
from pathlib import Path

from matplotlib.figure import Figure


def read_metrics(path: str | Path) -> dict[str, list[dict]]:
    """Lines of metrics.jsonl by their kind: train, val."""
    kinds: dict[str, list[dict]] = {}
    for line in Path(path).read_text().splitlines():
        values = json.loads(line)
        kinds.setdefault(values.pop("kind"), []).append(values)
    return kinds


def plot_curves(metrics: str | Path, picture: str | Path) -> Path:
    """Loss, accuracy and learning rate over the steps. Returns the picture's path."""
    kinds = read_metrics(metrics)
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    detection = any("map" in line for line in kinds.get("val", []))
    accuracy = ("map", "AP, %", False) if detection else ("top1", "top-1, %", False)
    panels = [("loss", "loss", False), accuracy, ("lr_weights", "learning rate", True)]
    for axes, (key, label, only_train) in zip(figure.subplots(1, 3), panels, strict=True):
        for kind, colour, name in (
            ("train", "tab:blue", "training"),
            ("val", "tab:orange", "validation"),
        ):
            points = [(line["step"], line[key]) for line in kinds.get(kind, []) if key in line]
            if points and not (only_train and kind == "val"):
                axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    label=name,
                    marker="o" if kind == "val" else None,
                    markersize=4,
                )
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if not only_train and axes.lines:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=120)
    return Path(picture)
