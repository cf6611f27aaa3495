"""Measure the trainer's steps per second over those of a bare PyTorch loop.

    python scripts/bench/trainer.py  # the embedded default
    python scripts/bench/trainer.py experiment=resnet50_dw_local4 data=synthetic train.batch_size=8

Both train the same network on the same pre-loaded batches of uint8 images. A round times one, then
the other, in alternating order. Run it on an idle machine.
"""

import argparse
import itertools
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from dkcls.cli.compose import compose
from dkcls.config import Config
from dkcls.engine import distributed
from dkcls.engine.run import build_trainer
from dkcls.engine.trainer import Trainer
from dkcls.tasks.classification import Classification


def bare_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    normalize: nn.Module,
    batches: list,
    steps: int,
) -> None:
    """Train with the ten lines that one would write by hand."""
    for images, targets in itertools.islice(itertools.cycle(batches), steps):
        loss = F.cross_entropy(model(normalize(images)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def seconds(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def trainer_loop(trainer: Trainer, batches: list, steps: int) -> None:
    source = itertools.cycle(batches)
    for _ in range(steps):
        trainer.train_step(source)


def build(config: Config, world: distributed.World) -> Trainer:
    trainer = build_trainer(config, world)
    trainer.set_train_mode()
    return trainer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", help="as train.py takes them")
    parser.add_argument("--steps", type=int, default=20, help="per round")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    config = compose(*arguments.overrides)
    with distributed.start(config.train.device, config.train.timeout) as world:
        trainer, bare = build(config, world), build(config, world)
        assert isinstance(bare.task, Classification)
        batches = list(itertools.islice(trainer.train_loader, 8))
        layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
        ready = [
            (b.images.to(world.device, memory_format=layout), b.targets.to(world.device))
            for b in batches
        ]
        loops = [(trainer_loop, (trainer, batches, arguments.steps))]
        loops += [
            (  # type: ignore
                bare_loop,
                (bare.model, bare.optimizer, bare.task.normalize, ready, arguments.steps),
            )
        ]
        for loop, given in loops:
            loop(*given)  # warm up
        ratios = []
        for turn in range(arguments.rounds):
            order = loops if turn % 2 else loops[::-1]
            times = {loop.__name__: seconds(loop, *given) for loop, given in order}
            ratios.append(times["bare_loop"] / times["trainer_loop"])
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    print(
        f"steps per second, trainer over bare loop: median {middle:.3f}, "
        f"from {low:.3f} to {high:.3f}, over {arguments.rounds} rounds of {arguments.steps} steps "
        f"({config.model.name}, batch {config.train.batch_size}, {world.device.type})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
