"""Evaluate checkpoints and exports.

  dkcls eval checkpoint=runs/quickstart/best.pt                      network and data are in it
  dkcls eval checkpoint=[runs/A/best.pt,runs/B/best.pt] split=test   one table
  dkcls eval checkpoint=w.safetensors model.name=resnet50 data=imagenet data.root=/data/imagenet
  torchrun --nproc_per_node=8 -m dkcls eval checkpoint=... data.root=...       on 8 GPUs
  dkcls eval --plugin my_module ...                                  with what it registers

In a clone, `python eval.py` is the same.
"""

import csv
import io
import json
import sys
from collections.abc import Sequence
from typing import Any

from dkcls import cli
from dkcls.cli import command_line, help
from dkcls.cli.groups import groups
from dkcls.config import EvalConfig
from dkcls.errors import UserError
from dkcls.files import write_output
from dkcls.words import label, metric

TABLES = ("classes", "per_class", "confusion")  # of a result, besides its metrics


def main() -> int:
    """Run `python eval.py ...`, whose words are in sys.argv; return the exit code."""
    return cli.run(command, EvalConfig)


def command() -> None:
    words = command_line.take_plugins(sys.argv[1:])
    choices = {"data": groups(words)["data"]}
    if {"-h", "--help"} & set(words):
        print(help.page(__doc__ or "", EvalConfig, choices))
        return
    command_line.check_words(words, EvalConfig, choices)
    from dkcls.cli.compose import launch  # here, because Hydra takes longer than an answer

    sys.argv[1:] = command_line.with_plus(words, EvalConfig)
    launch("eval", evaluate)


def evaluate(config: EvalConfig, hydra: Any) -> None:
    """Evaluate the checkpoints of a config, and print and write what came of it."""
    with cli.importing_torch():
        from dkcls.engine import distributed, evaluate

    paths = config.checkpoint if isinstance(config.checkpoint, list) else [config.checkpoint]
    check_confusion(config.confusion, len(paths))
    with distributed.start(config.device, config.timeout) as world:
        results = [evaluate.evaluate(path, config, world) for path in paths]
        if not world.is_main:
            return
    print(table(results))
    if config.output:
        write_json(config.output, results)
    if config.per_class:
        write_per_class(config.per_class, results)
    if config.confusion:
        draw_confusion(config.confusion, results[0])


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with a line per checkpoint."""
    rows = metrics(results)
    lines = [f"| {' | '.join(map(label, rows[0]))} |", f"|{'---|' * len(rows[0])}"]
    for row in rows:
        lines.append(f"| {' | '.join(metric(name, value) for name, value in row.items())} |")
    return "\n".join(lines)


def metrics(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results without their tables."""
    return [{k: v for k, v in result.items() if k not in TABLES} for result in results]


def write_json(path: str, results: Sequence[dict[str, Any]]) -> None:
    write_output(path, f"{json.dumps(metrics(results), indent=2)}\n".encode())


def write_per_class(path: str, results: Sequence[dict[str, Any]]) -> None:
    """Write a line per checkpoint and class: percentages, empty for a class without images."""
    for result in results:
        if "per_class" not in result:
            raise UserError(
                f"per_class={path} is for classification, {result['checkpoint']} is not"
            )
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
    from dkcls.report.plots import plot_confusion  # here, because matplotlib takes a second
    from dkcls.report.style import png
    from dkcls.tasks.classification.metrics import FEW_CLASSES

    if "classes" not in result:
        raise UserError(f"confusion={path} is for classification, {result['checkpoint']} is not")
    if "confusion" not in result:
        raise UserError(
            f"confusion=FILE.png is for at most {FEW_CLASSES} classes, got {len(result['classes'])}"
        )

    title = f"{result['checkpoint']}: top-1 {result['top1']:.2f} %"
    figure = plot_confusion(result["confusion"], result["classes"], title)
    write_output(path, png(figure, dpi=120))
