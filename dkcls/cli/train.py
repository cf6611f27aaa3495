"""Train a network, or resume its training.

  dkcls train                                  the embedded data, in minutes on a CPU
  dkcls train experiment=resnet50_dw_local4 data.root=/data/imagenet
  torchrun --nproc_per_node=8 -m dkcls train experiment=resnet50_dw_local4 data.root=/data/imagenet
  dkcls train experiment=resnet50_dw_local4 recipe=coco data.root=/data/coco \\
      model.pretrained=runs/NAME/best.pt       a detector on that network
  dkcls train -m model.scope=3,4,5,9           one run for each value, then a table of them
  dkcls train ... train.dry_run=true           what would the whole run take?
  dkcls train --plugin my_module ...           with layers, data sets, tasks, loggers of your own
  dkcls train --config-dir my/configs experiment=mine

A run is kept in out/name; the same command resumes it. In a clone, `python train.py` is the same.
"""

import glob
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dkcls import cli
from dkcls.cli import command_line, help
from dkcls.cli.groups import groups
from dkcls.config import Config
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.words import label, metric, print_table

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
    runs: list[Path] = []
    launch("train", lambda config, hydra: runs.append(train(config, hydra)))
    finished = [run for run in runs if (run / "result.json").exists()]
    if len(finished) > 1:
        end_sweep(finished)


def train(config: Config, hydra: Any) -> Path:
    """Train what a config says, and print what came of it; return the run's directory."""
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
    return run.path


def end_sweep(runs: Sequence[Path]) -> None:
    """Print the table of a sweep's runs, and write it with its plot beside them."""
    with suppress(ModuleNotFoundError):  # without matplotlib there is no plot
        from dkcls.cli.report import write_table
        from dkcls.report.runs import find_runs, group_runs

        groups = group_runs(find_runs([glob.escape(str(run)) for run in runs]))
        write_table(groups, runs[0].parent / "sweep.md")


def best_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the best evaluation, with its step and epoch."""
    return {
        name.removeprefix("best_"): value
        for name, value in result.items()
        if name.startswith("best_") and name != "best_images"
    }


def show(result: dict[str, Any], run: Path) -> None:
    curves = run / "curves.png"
    if not curves.exists():
        with suppress(ModuleNotFoundError):  # without matplotlib there are no curves
            from dkcls.report.plots import plot_curves  # here, because it takes a second

            plot_curves(f"{run}/metrics.jsonl", str(curves))
    last = {name: value for name, value in result.items() if not name.startswith("best_")}
    seconds = last.pop("seconds")
    rows = [(label(name), metric(name, value)) for name, value in last.items() if name != "name"]
    if any(last.get(name, value) != value for name, value in best_of(result).items()):
        best = [f"{label(name)} {metric(name, value)}" for name, value in best_of(result).items()]
        rows.append(("best checkpoint", ", ".join(best)))
    rows.append(("wall time", metric("seconds", seconds)))
    rows.append(("checkpoints", f"{run}/best.pt, {run}/last.pt"))
    if curves.exists():
        rows.append(("curves", str(curves)))
    if (run / "tensorboard").is_dir():
        rows.append(("TensorBoard", f"tensorboard --logdir {run}"))
    rows.append(("evaluate", f"{cli.program('eval')} checkpoint={run}/best.pt"))
    print_table(result["name"], rows)
