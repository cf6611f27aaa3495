"""What eval.py writes: a table, JSON, a CSV of the classes, and a picture of the confusion matrix."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dkcls.classification.figures import FEW_CLASSES
from dkcls.engine.checkpoint import write_atomically
from dkcls.engine.errors import UserError

TABLES = ("classes", "per_class", "confusion")  # of a result, besides its figures


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line per checkpoint."""
    rows = figures(results)
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    lines += [
        f"| {' | '.join(f'{v:.4f}' if isinstance(v, float) else str(v) for v in row.values())} |"
        for row in rows
    ]
    return "\n".join(lines)


def figures(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in result.items() if key not in TABLES} for result in results
    ]


def write_json(path: str, results: Sequence[dict[str, Any]]) -> None:
    write(path, f"{json.dumps(figures(results), indent=2)}\n".encode())


def write_per_class(path: str, results: Sequence[dict[str, Any]]) -> None:
    """A line per checkpoint and class; shares in percent, empty for a class without images."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["checkpoint", "class", "images", "top1", "top5"])
    for result in results:
        for name, images, *hits in zip(result["classes"], *result["per_class"], strict=True):
            shares = [f"{100 * count / images:.4f}" if images else "" for count in hits]
            writer.writerow([result["checkpoint"], name, images, *shares])
    write(path, text.getvalue().encode())


def check_confusion(path: str | None, checkpoints: int) -> None:
    if path is not None and (checkpoints != 1 or not path.endswith(".png")):
        raise UserError(f"confusion=FILE.png draws one checkpoint, got {path} for {checkpoints}")


def draw_confusion(path: str, result: dict[str, Any]) -> None:
    """Rows are the true classes; the numbers are percent of the row."""
    if "confusion" not in result:
        raise UserError(
            f"confusion=FILE.png is for at most {FEW_CLASSES} classes, got {len(result['classes'])}"
        )
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    counts, names = np.array(result["confusion"], float), result["classes"]
    shares = 100 * counts / counts.sum(1, keepdims=True).clip(min=1)
    side = 2.5 + 0.45 * min(len(names), 40)
    figure, axes = plt.subplots(figsize=(side, side), layout="constrained")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    axes.set(
        xlabel="predicted",
        ylabel="true",
        title=f"{result['checkpoint']}: top-1 {result['top1']:.2f} %",
    )
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(names) <= 20:
        for row, column in np.ndindex(*shares.shape):
            dark = shares[row, column] > 50
            axes.text(
                column,
                row,
                f"{shares[row, column]:.0f}",
                ha="center",
                va="center",
                color="white" if dark else "black",
            )
    figure.colorbar(image, label="% of the true class", shrink=0.7)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    plt.close(figure)
    write(path, picture.getvalue())


def write(path: str, data: bytes) -> None:
    """All or nothing."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(path), data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
