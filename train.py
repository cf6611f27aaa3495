"""Train a network.

    python train.py
    python train.py experiment=resnet50_dw_local4 data.root=/data/imagenet
    torchrun --nproc_per_node=8 train.py experiment=resnet50_dw_local4 data.root=/data/imagenet

Overrides are Hydra's; `python train.py --help` lists them.
"""

import os
import sys
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dkcls.config import asks_for_nothing, register, run_name, to_config
from dkcls.engine import cli
from dkcls.engine.log import print_table
from dkcls.engine.run import train

register()


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(composed: DictConfig) -> None:
    with cli.errors():
        config = to_config(composed)
        if config.name is None:
            chosen = HydraConfig.get()
            config.name = run_name(chosen.runtime.choices["experiment"], chosen.overrides.task)
        result = train(config)
        if result is not None:
            show(result, f"{config.out}/{config.name}")


def show(result: dict[str, Any], run: str) -> None:
    from dkcls.report.plots import plot_curves  # here, because it takes a second

    curves = plot_curves(f"{run}/metrics.jsonl", f"{run}/curves.png")
    figures = {name.replace("_", " "): value for name, value in result.items() if name != "name"}
    rows = [
        (name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
        for name, value in figures.items()
    ]
    rows += [("checkpoints", f"{run}/best.pt, {run}/last.pt"), ("curves", str(curves))]
    rows += [
        ("TensorBoard", f"tensorboard --logdir {run}"),
        ("evaluate", f"python eval.py checkpoint={run}/best.pt"),
    ]
    print_table(result["name"], rows)


def use_quickstart() -> None:
    sys.argv.append("experiment=quickstart")
    if os.environ.get("RANK", "0") == "0" and not {"-h", "--help"} & set(sys.argv):
        asks = "experiment=, model= or data="
        print(
            f"quickstart: a small network on the embedded data, since no {asks} is given",
            file=sys.stderr,
        )


if __name__ == "__main__":
    if asks_for_nothing(sys.argv[1:]):
        use_quickstart()
    sys.exit(cli.run(main))
