"""What networks are trained and evaluated for: the one place that maps a task's name to what it is made of."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dkcls.config import Config, EvalConfig
from dkcls.engine import run
from dkcls.engine.distributed import World
from dkcls.engine.network import parse_facts
from dkcls.engine.weights import read_weights
from dkcls.tasks import classification, classification_eval, detection, detection_eval

BUILDERS = {"classification": classification.build, "detection": detection.build}
EVALUATIONS = {
    "classification": classification_eval.evaluate_checkpoint,
    "detection": detection_eval.evaluate_checkpoint,
}


def train(config: Config) -> dict[str, Any] | None:
    """Rank 0's result; None on other ranks and after a dry run."""
    return run.train(config, BUILDERS[config.task])


def evaluate_checkpoint(
    path: str | None, config: EvalConfig, overrides: Iterable[str], world: World
) -> dict[str, Any]:
    """The figures on the split, each image counted exactly once over all ranks.

    `path` None is config.model.pretrained; `overrides` are the command line's, which tell what was asked of the data.
    """
    config = replace(
        config, model=replace(config.model, pretrained=path or config.model.pretrained)
    )
    path = config.model.pretrained
    with world.together():
        weights = (
            read_weights(path, config.weights)
            if path is not None and not path.endswith(".onnx")
            else None
        )
        facts = weights.facts if weights is not None else None
        task = (
            parse_facts(facts, path)[0].task if facts is not None else "classification"
        )  # only ours say
    return EVALUATIONS[task](config, weights, overrides, world)
