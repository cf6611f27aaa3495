"""A run from its config: build, resume, train, and say what came of it."""

import itertools
import logging
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from dkcls.config import Config
from dkcls.engine import distributed
from dkcls.engine.build import build_trainer, milestones
from dkcls.engine.checkpoint import BadCheckpoint, Checkpoints, read
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.log import Log, peak_memory, reset_peak_memory
from dkcls.engine.run_directory import RunDirectory
from dkcls.engine.signals import listen
from dkcls.engine.task import Builder
from dkcls.engine.trainer import Trainer
from dkcls.models import count_macs, count_parameters

logger = logging.getLogger(__name__)

DRY_BATCHES = (2, 4)  # images, from which a dry run tells what a whole batch takes


def train(config: Config, build: Builder) -> dict[str, Any] | None:
    """Rank 0's result; None on other ranks and after a dry run."""
    assert config.name is not None
    if config.train.deterministic:
        fix_cublas()
    with distributed.start(config.train.device, config.train.timeout) as world, listen() as stop:
        logging.getLogger("dkcls").setLevel(logging.INFO if world.is_main else logging.ERROR)
        if config.train.dry_run:
            with world.together():
                logger.info("dry run of %s: building it", config.name)
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
                log = stack.enter_context(
                    Log(
                        run.path, trainer.step, trainer.total_steps, config.log.tensorboard, seconds
                    )
                )
                _introduce(trainer, log)
            result = dict(trainer.fit(run, log, stop))
            if log is None:
                return None
            result |= {"name": config.name, "parameters": count_parameters(trainer.model)}
            result |= {
                "macs": count_macs(trainer.parts.counted, trainer.parts.input_size),
                "seconds": log.seconds,
            }
            run.finish(result)
            return result


def _resume(trainer: Trainer, run: RunDirectory, world: World) -> None:
    """All ranks from the checkpoint that rank 0 found to be good."""
    checkpoints = Checkpoints(run.path, trainer.config.train.keep)
    found = checkpoints.load_newest() if world.is_main else None
    path: Path | None = world.from_main(found and found[0])
    if path is None:
        if run.metrics.exists():
            logger.info(
                "%s: there is no good checkpoint yet, starting from the beginning", run.path
            )
        return
    with world.together():
        try:
            trainer.load_state(found[1] if found else read(path))
            if world.is_main:
                checkpoints.link(
                    path,
                    best=trainer.best.get("step") == trainer.step and not trainer.evaluation_due,
                )
        except (KeyError, RuntimeError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not a checkpoint of this network: {error}") from error
        except (BadCheckpoint, OSError) as error:
            raise UserError(str(error)) from error
    logger.info(
        "%s: going on from %s, step %d of %d",
        run.path,
        path.name,
        trainer.step,
        trainer.total_steps,
    )


def fix_cublas() -> None:
    """Set what cuBLAS reads as CUDA starts, without which it is not deterministic."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UserError(
            "train.deterministic=true needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before CUDA starts, "
            "and CUDA has been started in this process"
        )


def _introduce(trainer: Trainer, log: Log) -> None:
    config = trainer.config
    logger.info(
        "%s: %s, %s parameters, %d training images, %d steps, batch %d on %d %s, precision %s",
        config.name,
        config.model.name,
        f"{count_parameters(trainer.model):,}",
        len(trainer.train_loader.dataset),
        trainer.total_steps,
        config.train.batch_size,
        trainer.world.size,
        trainer.world.device.type,
        _precision(trainer),
    )
    if trainer.step == 0:
        log.text("config", yaml.safe_dump(config.to_dict(), sort_keys=False))
        if log.board is not None and config.log.images:
            log.images(
                "train", trainer.first_batch(trainer.train_loader).images[: config.log.images]
            )


def _precision(trainer: Trainer) -> str:
    asked = trainer.config.train.precision
    return (
        trainer.precision
        if asked == trainer.precision
        else f"{trainer.precision} (train.precision={asked})"
    )


def dry_run(trainer: Trainer) -> None:
    """Say what the run is; then, from steps of few images, what its own take. Nothing is written."""
    config, loader, world = trainer.config, trainer.train_loader, trainer.world
    dataset, size, batch = loader.dataset, trainer.parts.input_size, loader.sampler.batch_size
    network = (
        f"{config.model.name} {' '.join(f'{k}={v}' for k, v in config.model.arguments().items())}"
    )
    images = f"{len(dataset):,} to train, {len(trainer.val_loader.dataset):,} to validate, {dataset.num_classes} classes"
    rows = [
        ("network", network),
        ("parameters", f"{count_parameters(trainer.model):,}"),
        (
            "multiply-adds per image",
            f"{count_macs(trainer.parts.counted, size) / 1e9:.4f} G at {size[1]} x {size[2]}",
        ),
        ("images", images),
        (
            "batch",
            f"{config.train.batch_size} = {world.size} ranks x {config.train.accumulation} steps x {batch}",
        ),
        ("precision", _precision(trainer)),
    ]
    rows += [
        (f"learning rate, {what}", f"{lr:.6g} at step {step:,}")
        for what, step, lr in milestones(loader.steps_per_epoch, config)
    ]
    if world.is_main:
        print_table("dry run", rows)
        logger.info("measuring steps of %s images", " and ".join(map(str, DRY_BATCHES)))
    cost = measure_step(trainer, batch)
    if world.is_main:
        print_table("a step", cost.rows(trainer))


class StepCost(NamedTuple):
    """Cost of a step of the whole batch on a rank: seconds, seconds of loading in one process, bytes of memory."""

    seconds: float
    loading: float
    memory: float

    def rows(self, trainer: Trainer) -> list[tuple[str, str]]:
        there, hours = (
            machine_memory(trainer.world.device),
            self.seconds * trainer.total_steps / 3600,
        )
        ranks = (
            1
            if trainer.world.device.type == "cuda"
            else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        )
        needed = f"{self.memory * ranks / 2**30:.1f} GiB of the {there / 2**30:.1f} GiB of {trainer.world.device}"
        if self.memory * ranks > there:
            needed += (
                ": too much; take a smaller train.batch_size, or train.accumulation, which cuts it"
            )
        workers = max(trainer.config.data.workers, 1)
        waits = (
            "keeps up" if self.loading / workers < self.seconds else "is slower than the network"
        )
        return [
            ("peak memory", needed),
            (
                "time",
                f"{self.seconds:.3f} s per step, {hours:.2f} h for {trainer.total_steps:,} steps, evaluations aside",
            ),
            (
                "loading",
                f"{self.loading:.3f} s per step in one process; with data.workers={workers} it {waits}",
            ),
        ]


def measure_step(trainer: Trainer, batch: int) -> StepCost:
    """Run steps of few images, and go on in a straight line from the two sizes to `batch`."""
    sizes = sorted({min(size, batch) for size in DRY_BATCHES})
    trainer.set_train_mode()
    loading, seconds, memory = [], [], []
    for size in sizes:
        started = time.perf_counter()
        images = trainer.train_loader.dataset.load(np.arange(size)).batch
        loading.append((time.perf_counter() - started) / size)
        reset_peak_memory(trainer.world.device)
        times = []
        for _ in range(2):  # the first one may compile, or choose algorithms
            started = time.perf_counter()
            trainer.train_step(itertools.repeat(images))
            synchronize(trainer.world.device)
            times.append(time.perf_counter() - started)
        seconds.append(min(times))
        memory.append(peak_memory(trainer.world.device) * 2**20)
    if trainer.skipped:
        raise UserError("dry run: loss or gradient is not finite at the initial weights")
    accumulation = trainer.config.train.accumulation
    whole = [max(_line(sizes, values, batch), values[-1]) for values in (seconds, memory)]
    return StepCost(whole[0], min(loading) * batch * accumulation, whole[1])


def _line(sizes: list[int], values: list[float], at: int) -> float:
    """The value at a size, on the line through the first and last."""
    if len(sizes) == 1:
        return values[0]
    return values[-1] + (values[-1] - values[0]) / (sizes[-1] - sizes[0]) * (at - sizes[-1])


def machine_memory(device: torch.device) -> int:
    """Bytes: of the device, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)]))
