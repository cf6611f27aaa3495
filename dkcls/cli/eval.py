"""The output of eval.py: a table, JSON, a CSV of the classes, a picture of the confusion matrix."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from dkcls.errors import UserError
from dkcls.files import write_output
from dkcls.tasks.classification.metrics import FEW_CLASSES

TABLES = ("classes", "per_class", "confusion")  # of a result, besides its metrics


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with a line per checkpoint."""
    rows = metrics(results)
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    for row in rows:
        cells = (f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def metrics(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results without their tables."""
    return [{k: v for k, v in result.items() if k not in TABLES} for result in results]


def write_json(path: str, results: Sequence[dict[str, Any]]) -> None:
    write_output(path, f"{json.dumps(metrics(results), indent=2)}\n".encode())


def write_per_class(path: str, results: Sequence[dict[str, Any]]) -> None:
    """Write a line per checkpoint and class: percentages, empty for a class without images."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["checkpoint", "class", "images", "top1", "top5"])
    for result in results:
        for name, images, *hits in zip(result["classes"], *result["per_class"], strict=True):
            shares = [f"{100 * count / images:.4f}" if images else "" for count in hits]
            writer.writerow([result["checkpoint"], name, images, *shares])
    write_output(path, text.getvalue().encode())


def check_confusion(path: str | None, checkpoints: int) -> None:
    """Refuse a picture of anything but one checkpoint."""
    if path is not None and (checkpoints != 1 or not path.endswith(".png")):
        raise UserError(f"confusion=FILE.png draws one checkpoint, got {path} for {checkpoints}")


def draw_confusion(path: str, result: dict[str, Any]) -> None:
    """Write the picture of a result's confusion matrix."""
    if "confusion" not in result:
        raise UserError(
            f"confusion=FILE.png is for at most {FEW_CLASSES} classes, got {len(result['classes'])}"
        )
    from dkcls.report.plots import plot_confusion  # here, because matplotlib takes a second
    from dkcls.report.style import png

    title = f"{result['checkpoint']}: top-1 {result['top1']:.2f} %"
    figure = plot_confusion(result["confusion"], result["classes"], title)
    write_output(path, png(figure, dpi=120))
