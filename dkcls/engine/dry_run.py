"""A dry run: everything is built, and steps of a few images tell what the whole run would take."""

import itertools
import logging
import os
import time
from typing import NamedTuple

import numpy as np
import torch

from dkcls.engine.log import peak_memory, reset_peak_memory
from dkcls.engine.optim import milestones
from dkcls.engine.trainer import Trainer
from dkcls.errors import UserError
from dkcls.models import count_macs, count_parameters
from dkcls.words import print_table

logger = logging.getLogger(__name__)

DRY_BATCHES = (2, 4)  # images of the steps from which the cost of a whole batch is told


def dry_run(trainer: Trainer) -> None:
    """Print what the run is, and what its steps would take. Nothing is written."""
    config, loader, world = trainer.config, trainer.train_loader, trainer.world
    dataset, batch = loader.dataset, loader.sampler.batch_size
    size = trainer.parts.input_size
    arguments = " ".join(f"{key}={value}" for key, value in config.model.arguments().items())
    macs = count_macs(trainer.parts.counted, size)
    counts = f"{len(dataset):,} to train, {len(trainer.val_loader.dataset):,} to validate"
    shares = f"{world.size} ranks x {config.train.accumulation} steps x {batch}"
    rows = [
        ("network", f"{config.model.name} {arguments}"),
        ("parameters", f"{count_parameters(trainer.model):,}"),
        ("multiply-adds per image", f"{macs / 1e9:.4f} G at {size[1]} x {size[2]}"),
        ("images", f"{counts}, {dataset.num_classes} classes"),
        ("batch", f"{config.train.batch_size} = {shares}"),
        ("precision", trainer.describe_precision()),
    ]
    for what, step, lr in milestones(trainer.schedule, config, loader.steps_per_epoch):
        rows.append((f"learning rate, {what}", f"{lr:.6g} at step {step:,}"))
    if world.is_main:
        print_table("dry run", rows)
        logger.info("measuring steps of %s images", " and ".join(map(str, DRY_BATCHES)))
    cost = measure_step(trainer, batch)
    if world.is_main:
        print_table("a step", cost.rows(trainer))


class StepCost(NamedTuple):
    """Cost of a step of the whole batch on a rank.

    `loading` is the seconds that one process takes to load the step's images.
    """

    seconds: float
    loading: float
    memory: float  # bytes

    def rows(self, trainer: Trainer) -> list[tuple[str, str]]:
        device = trainer.world.device
        available = machine_memory(device)
        ranks = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed = self.memory * ranks
        memory = f"{needed / 2**30:.1f} GiB of the {available / 2**30:.1f} GiB of {device}"
        if needed > available:
            memory += ": too much; take a smaller train.batch_size, or train.accumulation, "
            memory += "which cuts it"
        hours = self.seconds * trainer.total_steps / 3600
        steps = f"{trainer.total_steps:,} steps, evaluations aside"
        workers = max(trainer.config.data.workers, 1)
        keeps_up = self.loading / workers < self.seconds
        speed = "keeps up" if keeps_up else "is slower than the network"
        loading = f"{self.loading:.3f} s per step in one process"
        return [
            ("peak memory", memory),
            ("time", f"{self.seconds:.3f} s per step, {hours:.2f} h for {steps}"),
            ("loading", f"{loading}; with data.workers={workers} it {speed}"),
        ]


def measure_step(trainer: Trainer, batch: int) -> StepCost:
    """Run steps of few images, and extrapolate in a straight line from two sizes to `batch`."""
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
    whole = [max(_line(sizes, values, batch), values[-1]) for values in (seconds, memory)]
    return StepCost(whole[0], min(loading) * batch * trainer.config.train.accumulation, whole[1])


def _line(sizes: list[int], values: list[float], at: int) -> float:
    """Return the value at a size, on the line through the first and last."""
    if len(sizes) == 1:
        return values[0]
    return values[-1] + (values[-1] - values[0]) / (sizes[-1] - sizes[0]) * (at - sizes[-1])


def machine_memory(device: torch.device) -> int:
    """Return the bytes of memory of the device, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
