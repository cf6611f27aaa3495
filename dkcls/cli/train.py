"""Train a network, or resume its training.

  python train.py                              the embedded data, in minutes on a CPU
  python train.py experiment=resnet50_dw_local4 data.root=/data/imagenet
  torchrun --nproc_per_node=8 train.py experiment=resnet50_dw_local4 data.root=/data/imagenet
  python train.py experiment=resnet50_dw_local4 recipe=coco data.root=/data/coco \\
      model.pretrained=runs/NAME/best.pt       a detector on that network
  python train.py -m model.scope=3,4,5,9       one run for each value
  python train.py ... train.dry_run=true       what would the whole run take?
  python train.py --plugin my_module ...       with layers, data sets, tasks, loggers of your own
  python train.py --config-dir my/configs experiment=mine

A run is kept in out/name; the same command resumes it.
"""

import logging
import sys
from pathlib import Path
from typing import Any

from dkcls import cli
from dkcls.cli import command_line, help
from dkcls.cli.groups import groups
from dkcls.config import Config
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.words import print_table

# Without any of these on the command line, the quickstart is trained.
ASKS = (
    "experiment",
    "recipe",
    "model.name",
    "model.pretrained",
    "data",
    "data.name",
    "task",
)
QUICKSTART = (
    "quickstart: a small network on the embedded data, since no experiment=, recipe=, model.name=, "
    "model.pretrained=, data= or task= is given"
)


def main() -> int:
    """Run `python train.py ...`, whose words are in sys.argv; return the exit code."""
    return cli.run(command)


def command() -> None:
    words = command_line.take_plugins(sys.argv[1:])
    if {"-h", "--help"} & set(words):
        print(help.page(__doc__ or "", Config, groups(words)))
        return
    command_line.check_words(words, groups=groups(words))
    if {"-m", "--multirun"} & set(words) and cli.launched_by_torchrun():
        raise UserError(
            "a sweep (-m) does not run under torchrun; start torchrun once for each value: "
            "for s in 3 4 5 9; do torchrun ... train.py model.scope=$s; done"
        )
    if not any(command_line.key_of(word) in ASKS for word in command_line.overrides(words)):
        words.append("experiment=quickstart")
        if cli.is_main_rank():
            print(QUICKSTART, file=sys.stderr, flush=True)
    from dkcls.cli.compose import launch  # here, because Hydra takes longer than an answer

    sys.argv[1:] = command_line.with_plus(words)
    launch("train", train)


def train(config: Config, hydra: Any) -> None:
    """Train what a config says, and print what came of it."""
    if config.name is None:
        from dkcls.cli.compose import run_name

        config.name = run_name(hydra.runtime.choices["experiment"], hydra.overrides.task)
    logging.getLogger("dkcls").setLevel(logging.INFO if cli.is_main_rank() else logging.ERROR)
    run = RunDirectory(Path(config.out) / config.name)
    result = None if config.train.dry_run else run.finished(config)
    if result is None:
        with cli.importing_torch():  # here, because a finished run needs none
            from dkcls.engine import run as engine

        result = engine.train(config)
    if result is not None and cli.is_main_rank():
        show(result, run.path)


def show(result: dict[str, Any], run: Path) -> None:
    curves = run / "curves.png"
    if not curves.exists():
        from dkcls.report.plots import plot_curves  # here, because it takes a second

        plot_curves(f"{run}/metrics.jsonl", str(curves))
    metrics = {name.replace("_", " "): value for name, value in result.items() if name != "name"}
    rows = [
        (name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
        for name, value in metrics.items()
    ]
    rows += [("checkpoints", f"{run}/best.pt, {run}/last.pt"), ("curves", str(curves))]
    if (run / "tensorboard").is_dir():
        rows.append(("TensorBoard", f"tensorboard --logdir {run}"))
    rows.append(("evaluate", f"python eval.py checkpoint={run}/best.pt"))
    print_table(result["name"], rows)
