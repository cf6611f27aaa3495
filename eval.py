"""Evaluates checkpoints: `python eval.py checkpoint=runs/NAME/best.pt`, or several, `checkpoint=[a.pt,b.pt]`.

Network, data set and transforms are in the checkpoint; `python eval.py --help` lists what can be changed.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dkcls.config import EvalConfig, register, to_config
from dkcls.engine import cli, distributed
from dkcls.tasks import eval_report, evaluate_checkpoint

register()


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(composed: DictConfig) -> None:
    with cli.errors(EvalConfig):
        config, overrides = to_config(composed), HydraConfig.get().overrides.task
        paths = config.checkpoint if isinstance(config.checkpoint, list) else [config.checkpoint]
        eval_report.check_confusion(config.confusion, len(paths))
        with distributed.start(config.device, config.timeout) as world:
            results = [evaluate_checkpoint(path, config, overrides, world) for path in paths]
            if not world.is_main:
                return
        print(eval_report.table(results))
        if config.json:
            eval_report.write_json(config.json, results)
        if config.per_class:
            eval_report.write_per_class(config.per_class, results)
        if config.confusion:
            eval_report.draw_confusion(config.confusion, results[0])


if __name__ == "__main__":
    sys.exit(cli.run(main, EvalConfig))
