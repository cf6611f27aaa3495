"""A run from its config: build, resume, train, and return what came of it."""

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dkcls.config import Config, changed_keys
from dkcls.config.checks import check
from dkcls.data import DataIdentity, Loader, create_loader
from dkcls.engine import distributed
from dkcls.engine.checkpoint import Checkpoints, read
from dkcls.engine.distributed import World
from dkcls.engine.dry_run import dry_run
from dkcls.engine.heartbeat import PATIENCE
from dkcls.engine.log import Log
from dkcls.engine.optim import make_optimizer, make_schedule
from dkcls.engine.run_directory import RunDirectory
from dkcls.engine.task import TASKS, Card, Parts
from dkcls.engine.trainer import StopRequest, Trainer
from dkcls.errors import UserError
from dkcls.files import DamagedFile
from dkcls.models import count_macs, count_parameters

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def train(config: Config) -> dict[str, Any] | None:
    """Train, or resume, a run. Return rank 0's result; None on other ranks and after a dry run."""
    if config.name is None:
        raise UserError("name=NAME is needed: the run's directory is out/name")
    if config.train.deterministic:
        fix_cublas()
    with distributed.start(config.train.device, config.train.timeout) as world, listen() as stop:
        logging.getLogger("dkcls").setLevel(logging.INFO if world.is_main else logging.ERROR)
        if config.train.dry_run:
            with world.together():
                logger.info("dry run of %s: building it", config.name)
                dry_run(build_trainer(config, world))
            return None
        return _train(config, RunDirectory(Path(config.out) / config.name), world, stop)


def _train(
    config: Config, run: RunDirectory, world: World, stop: StopRequest
) -> dict[str, Any] | None:
    """Train, or resume, on a rank that has met the others. The trainer does not outlive it."""
    with ExitStack() as stack:
        with world.together():
            if world.is_main:
                stack.enter_context(run.hold())
                run.check_config(config)
        result: dict[str, Any] | None = world.from_main(
            run.finished(config) if world.is_main else None
        )
        if result is not None:
            return result if world.is_main else None
        with world.together():
            trainer = build_trainer(config, world)
        _resume(trainer, run, world)
        seconds = 0.0
        with world.together():
            if world.is_main:
                seconds = run.rewind(trainer.step, trainer.evaluation_due)
                run.write_config(config)
        log = None
        if world.is_main:
            log = Log(
                run.path,
                trainer.step,
                trainer.total_steps,
                config.log.to,
                shown=trainer.task.shown,
                seconds=seconds,
            )
            stack.enter_context(log)
            _introduce(trainer, log)
        result = dict(trainer.fit(run, log, stop))
        if log is None:
            return None
        result |= {"name": config.name, "parameters": count_parameters(trainer.model)}
        macs = count_macs(trainer.parts.counted, trainer.parts.input_size)
        result |= {"macs": macs, "seconds": log.seconds}
        run.finish(result)
        return result


@contextmanager
def listen() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a request to save and stop. A second SIGINT stops at once."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def build_trainer(config: Config, world: World) -> Trainer:
    """Return a trainer. UserError, on all ranks, where the config asks one of them for too much."""
    with world.together():  # before they meet in `wrap`
        torch.use_deterministic_algorithms(config.train.deterministic)
        if world.device.type == "cuda":
            torch.backends.cudnn.benchmark = not config.train.deterministic
        batch_size = world.batch_per_rank(config.train.batch_size, config.train.accumulation)
        parts = TASKS.find(config.task.name).build(config, world)
        config = parts.config
        model = parts.model.to(world.device)
        loaders = build_loaders(parts, batch_size, world)
        if config.train.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = make_optimizer(model, config.optim, config.learning_rate)
        schedule = make_schedule(optimizer, config.schedule, loaders[0].steps_per_epoch)
        identity = DataIdentity.of(parts.train_set, parts.val_set)
    wrapped = wrap(model, config, world)
    return Trainer(parts, identity, world, wrapped, optimizer, schedule, *loaders)


def build_loaders(parts: Parts, batch_size: int, world: World) -> tuple[Loader, Loader]:
    """Return the loaders of the training and of the validation images."""
    config = parts.config
    common: dict[str, Any] = {
        "rank": world.rank,
        "world_size": world.size,
        "seed": config.seed,
        "workers": config.data.workers,
        "prefetch": config.data.prefetch,
        "pin_memory": world.device.type == "cuda",
        "bad_limit": config.data.bad_limit,
        "worker_restarts": config.data.worker_restarts,
        "patience": PATIENCE * config.train.timeout,
    }
    eval_batch_size = config.train.eval_batch_size or batch_size
    accumulation = config.train.accumulation
    try:
        train = create_loader(
            parts.train_set, batch_size, training=True, accumulation=accumulation, **common
        )
        val = create_loader(parts.val_set, eval_batch_size, training=False, **common)
    except ValueError as error:
        raise UserError(str(error)) from error
    return train, val


def wrap(model: nn.Module, config: Config, world: World) -> nn.Module:
    """Return what training calls. The network's own names stay as they are."""
    wrapped = model
    if config.train.sync_bn:
        if world.device.type != "cuda":
            raise UserError(
                "train.sync_bn=true needs CUDA: PyTorch has no synchronised batch norm on the CPU"
            )
        wrapped = nn.SyncBatchNorm.convert_sync_batchnorm(wrapped)
    if config.train.compile:
        wrapped = torch.compile(wrapped)  # type: ignore[assignment]
    if world.size > 1:
        devices = [world.device] if world.device.type == "cuda" else None
        wrapped = DistributedDataParallel(wrapped, devices, gradient_as_bucket_view=True)
    return wrapped


def _resume(trainer: Trainer, run: RunDirectory, world: World) -> None:
    """Load, on all ranks, the checkpoint that rank 0 found to be good."""
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
            state = found[1] if found else read(path)
            name = checkpoints.step_of(path)
            check("step", state.get("step"), state.get("step") == name, f"{name}, as its name says")
            check_same(state, trainer, path)
            trainer.load_state(state)
            if world.is_main:
                is_best = trainer.best.get("step") == trainer.step and not trainer.evaluation_due
                checkpoints.link(path, best=is_best)
        except ValueError as error:
            raise UserError(
                f"{path} is not a checkpoint of this run: {error}; remove it to resume from the "
                "one before it, or give another name=..."
            ) from error
        except (DamagedFile, OSError) as error:
            raise UserError(str(error)) from error
    steps = f"step {trainer.step} of {trainer.total_steps}"
    logger.info("%s: resuming from %s, %s", run.path, path.name, steps)


def check_same(state: dict[str, Any], trainer: Trainer, path: Path) -> None:
    """Raise UserError if a checkpoint is of another config or of other data than the trainer.

    With resume=changed_data other data is allowed, if network and schedule have room for it.
    """
    config, card = trainer.config, Card.parse(state, str(path))
    if changed := changed_keys(card.config.to_dict(), config.to_dict()):
        raise UserError(
            f"{path} is of a run with another config ({'; '.join(changed)}); "
            "give another name=... or the old values"
        )
    changed = DataIdentity.parse(state.get("data")).differences(trainer.identity)
    if not changed:
        return
    outputs, needed = len(card.classes), len(trainer.parts.card.classes)
    step, total = state["step"], trainer.total_steps
    if outputs != needed:
        advice = f"the network has {outputs} outputs, and {needed} are needed"
    elif step > total:
        advice = f"it has taken {step} steps, and with this data there are {total} in all"
    elif config.resume != "changed_data":
        advice = "resume=changed_data goes on with what there is"
    else:
        logger.warning("%s: going on with other data (%s)", path, "; ".join(changed))
        state["bad_files"] = []  # known by their indices, which mean other files now
        return
    raise UserError(
        f"{path} was trained on other data than there is now ({'; '.join(changed)}): restore the "
        f"data, or give another name=...; {advice}"
    )


def fix_cublas() -> None:
    """Set what cuBLAS reads as CUDA starts, without which it is not deterministic."""
    if not torch.cuda.is_initialized():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        raise UserError(
            "train.deterministic=true needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment "
            "before CUDA starts, and CUDA has been started in this process"
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
        trainer.describe_precision(),
    )
    if trainer.step == 0:
        log.text("config", yaml.safe_dump(config.to_dict(), sort_keys=False))
        if log.loggers and config.log.images:
            first = trainer.first_batch(trainer.train_loader)
            log.images("train", first.images[: config.log.images])
