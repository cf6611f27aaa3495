"""A run from its config: build, resume, train, and say what came of it."""

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from dkcls.config import Config
from dkcls.engine import distributed
from dkcls.engine.build import build_trainer, milestones
from dkcls.engine.checkpoint import BadCheckpoint, Checkpoints, read
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.log import Log, peak_memory
from dkcls.engine.run_directory import RunDirectory
from dkcls.engine.signals import listen
from dkcls.engine.task import Builder
from dkcls.engine.trainer import Trainer
from dkcls.models import count_macs, count_parameters

logger = logging.getLogger(__name__)

DRY_STEPS = 3


def train(config: Config, build: Builder) -> dict[str, Any] | None:
    """Rank 0's result; None on other ranks and after a dry run."""
    assert config.name is not None
    with distributed.start(config.train.device, config.train.timeout) as world, listen() as stop:
        logging.getLogger("dkcls").setLevel(logging.INFO if world.is_main else logging.ERROR)
        if config.train.dry_run:
            with world.together():
                dry_run(build_trainer(config, world, build))
            return None
        run = RunDirectory(Path(config.out) / config.name)
        with ExitStack() as stack:
            with world.together():
                if world.is_main:
                    stack.enter_context(run.hold())
                    run.check_config(config)
            result: dict[str, Any] | None = world.from_main(run.result() if world.is_main else None)
            if result is not None:
                logger.info("%s is finished; give another name=... to train again", run.path)
                return result if world.is_main else None
            with world.together():
                trainer = build_trainer(config, world, build)
            _resume(trainer, run, world)
            seconds = 0.0
            with world.together():
                if world.is_main:
                    seconds = run.rewind(trainer.step, trainer.evaluation_due)
                    run.write_config(config)
            log = None
            if world.is_main:
                log = stack.enter_context(Log(run.path, trainer.step, trainer.total_steps, config.log.tensorboard, seconds))
                _introduce(trainer, log)
            result = dict(trainer.fit(run, log, stop))
            if log is None:
                return None
            result |= {"name": config.name, "parameters": count_parameters(trainer.model)}
            result |= {"macs": count_macs(trainer.parts.counted, trainer.parts.input_size), "seconds": log.seconds}
            run.finish(result)
            return result


def _resume(trainer: Trainer, run: RunDirectory, world: World) -> None:
    """All ranks from the checkpoint that rank 0 found to be good."""
    checkpoints = Checkpoints(run.path, trainer.config.train.keep)
    found = checkpoints.load_newest() if world.is_main else None
    path: Path | None = world.from_main(found and found[0])
    if path is None:
        if run.metrics.exists():
            logger.info("%s: there is no good checkpoint yet, starting from the beginning", run.path)
        return
    with world.together():
        try:
            trainer.load_state(found[1] if found else read(path))
            if world.is_main:
                checkpoints.link(path, best=trainer.best.get("step") == trainer.step and not trainer.evaluation_due)
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not a checkpoint of this network: {error}") from error
        except (BadCheckpoint, OSError) as error:
            raise UserError(str(error)) from error
    logger.info("%s: going on from %s, step %d of %d", run.path, path.name, trainer.step, trainer.total_steps)


def _introduce(trainer: Trainer, log: Log) -> None:
    config = trainer.config
    logger.info(
        "%s: %s, %s parameters, %d training images, %d steps, batch %d on %d %s",
        config.name,
        config.model.name,
        f"{count_parameters(trainer.model):,}",
        len(trainer.train_loader.dataset),
        trainer.total_steps,
        config.train.batch_size,
        trainer.world.size,
        trainer.world.device.type,
    )
    if trainer.step == 0:
        log.text("config", yaml.safe_dump(config.to_dict(), sort_keys=False))
        if log.board is not None and config.log.images:
            log.images("train", trainer.first_batch(trainer.train_loader).images[: config.log.images])


def dry_run(trainer: Trainer) -> None:
    """One step to see that all fits together, a few more to time it; nothing is written."""
    config, loader, world = trainer.config, trainer.train_loader, trainer.world
    seconds = []
    trainer.set_train_mode()
    loader.set_state(0, 0)
    batches = iter(loader)
    for _ in range(min(DRY_STEPS, loader.steps_per_epoch)):
        started = time.perf_counter()
        trainer.train_step(batches)
        seconds.append(time.perf_counter() - started)
    dataset, size = loader.dataset, trainer.parts.input_size
    if not world.is_main:
        return
    hours = min(seconds) * trainer.total_steps / 3600
    rows = [
        ("network", f"{config.model.name} {' '.join(f'{k}={v}' for k, v in config.model.arguments().items())}"),
        ("parameters", f"{count_parameters(trainer.model):,}"),
        ("multiply-adds per image", f"{count_macs(trainer.parts.counted, size) / 1e9:.4f} G at {size[1]} x {size[2]}"),
        (
            "images",
            f"{len(dataset):,} to train, {len(trainer.val_loader.dataset):,} to validate, {dataset.num_classes} classes",
        ),
        (
            "batch",
            f"{config.train.batch_size} = {world.size} ranks x {config.train.accumulation} steps x {loader.sampler.batch_size}",
        ),  # type: ignore[union-attr]
        ("peak memory", f"{peak_memory(world.device):.0f} MiB on {world.device}"),
        ("time", f"{min(seconds):.3f} s per step, {hours:.2f} h for {trainer.total_steps:,} steps, evaluations aside"),
    ]
    rows += [
        (f"learning rate, {what}", f"{lr:.6g} at step {step:,}")
        for what, step, lr in milestones(loader.steps_per_epoch, config)
    ]
    print_table("dry run", rows)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)]))
