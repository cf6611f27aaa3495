"""Evaluates checkpoints: `python eval.py checkpoint=runs/NAME/best.pt`, or several, `checkpoint=[a.pt,b.pt]`.

Network, data set and transforms are in the checkpoint; `python eval.py --help` lists what can be changed.
"""

import json
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from dkcls.config import EvalConfig, register, to_config
from dkcls.engine import cli, distributed
from dkcls.engine.checkpoint_eval import evaluate_checkpoint

register()


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(composed: DictConfig) -> None:
    with cli.errors(EvalConfig):
        config = to_config(composed)
        paths = [config.checkpoint] if isinstance(config.checkpoint, str) else list(config.checkpoint)
        with distributed.start(config.device, config.timeout) as world:
            results = [evaluate_checkpoint(path, config, world) for path in paths]
            if not world.is_main:
                return
        print(f"| {' | '.join(results[0])} |\n|{'---|' * len(results[0])}")
        for result in results:
            print(f"| {' | '.join(f'{v:.4f}' if isinstance(v, float) else str(v) for v in result.values())} |")
        if config.json:
            Path(config.json).write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    sys.exit(cli.run(main, EvalConfig))
