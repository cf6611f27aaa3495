"""Evaluate checkpoints.

    python eval.py checkpoint=runs/NAME/best.pt
    python eval.py checkpoint=[a.pt,b.pt] split=test

Network, data set and transforms are in the checkpoint; `--help` lists what can be changed.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dkcls.cli import eval as output
from dkcls.config import EvalConfig, register, to_config
from dkcls.engine import cli, distributed
from dkcls.engine.evaluate import evaluate

register()


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(composed: DictConfig) -> None:
    with cli.errors(EvalConfig):
        config, overrides = to_config(composed), HydraConfig.get().overrides.task
        paths = config.checkpoint if isinstance(config.checkpoint, list) else [config.checkpoint]
        output.check_confusion(config.confusion, len(paths))
        with distributed.start(config.device, config.timeout) as world:
            results = [evaluate(path, config, world, overrides) for path in paths]
            if not world.is_main:
                return
        print(output.table(results))
        if config.json:
            output.write_json(config.json, results)
        if config.per_class:
            output.write_per_class(config.per_class, results)
        if config.confusion:
            output.draw_confusion(config.confusion, results[0])


if __name__ == "__main__":
    sys.exit(cli.run(main, EvalConfig))
