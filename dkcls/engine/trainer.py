"""The training loop: batches, steps, evaluations, checkpoints, over built objects and a task.

Everything random in a step is a function of (seed, step, rank), and all totals are in the
checkpoint: a run that was killed and started again ends with the same bits.
"""

import errno
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dkcls.data import DataIdentity, Loader
from dkcls.engine.check_state import check_state
from dkcls.engine.checkpoint import Checkpoints
from dkcls.engine.distributed import World, autocast, choose_precision
from dkcls.engine.evaluate import measure
from dkcls.engine.log import Log, peak_memory
from dkcls.engine.run_directory import RunDirectory
from dkcls.engine.task import Parts
from dkcls.errors import Interrupted, UserError
from dkcls.layers import record_offsets

logger = logging.getLogger(__name__)


class StopRequest:
    """Whether, and by which signal, this process was asked to stop."""

    def __init__(self) -> None:
        self.signal = ""

    def __bool__(self) -> bool:
        return bool(self.signal)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take note of a signal. A second Ctrl-C stops at once."""
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name


class Trainer:
    """The state of a run. `fit` runs it to its end, from wherever `load_state` left it.

    `wrapped` is the network as training calls it: compiled, distributed, or as it is.
    """

    def __init__(
        self,
        parts: Parts,
        identity: DataIdentity,
        world: World,
        wrapped: nn.Module,
        optimizer: Optimizer,
        schedule: Scheduler,
        train_loader: Loader,
        val_loader: Loader,
    ):
        config, task, model = parts.config, parts.task, parts.model
        self.parts = parts
        self.identity = identity
        self.config = config
        self.task = task
        self.model = model
        self.world = world
        self.wrapped = wrapped
        self.optimizer = optimizer
        self.schedule = schedule
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.loaders = train_loader, val_loader
        self.precision = choose_precision(config.train.precision, world)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        self.ema = ModelEmaV3(model, config.train.ema_decay) if config.train.ema_decay else None
        self.steps_per_epoch = train_loader.steps_per_epoch
        self.total_steps, _ = config.schedule.steps(self.steps_per_epoch)
        self.step = self.bad_steps = self.skipped = 0
        self.evaluation_due = False
        self.result: dict[str, float] = {}  # metrics of the last evaluation
        self.best: dict[str, float] = {}
        # Totals since the last line of metrics.
        self.sums = torch.zeros(len(task.sums), dtype=torch.float64, device=world.device)
        self.gradient_norm = torch.zeros((), device=world.device)
        self.buffers = list(model.buffers())
        self.buffers_before = [buffer.clone() for buffer in self.buffers]
        self.run: RunDirectory | None = None  # until `fit`
        self._start_clock()

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, from 0."""
        return self.step // self.steps_per_epoch

    def fit(self, run: RunDirectory, log: Log | None, stop: StopRequest) -> dict[str, float]:
        """Train to the end. Return the last evaluation's metrics, and the best's as best_*."""
        self.run = run
        self.log = log
        self.stop = stop
        self.checkpoints = Checkpoints(run.path, self.config.train.keep)
        if self.world.size == 1:  # else the others wait for this rank, within a step
            self.train_loader.stopped = self.val_loader.stopped = lambda: stop.signal
        self._start_clock()
        if self.evaluation_due:
            self._finish_epoch()
        while self.step < self.total_steps:
            self._train_epoch()
            self._end_epoch()
        return self.result | {f"best_{name}": value for name, value in self.best.items()}

    def _start_clock(self) -> None:
        """Start the clock of the steps up to the next line of metrics."""
        self.logged_at = time.perf_counter()
        self.logged_step = self.step
        self.waited = 0.0

    def _train_epoch(self) -> None:
        self.train_loader.set_state(*divmod(self.step, self.steps_per_epoch))
        self.set_train_mode()
        batches = iter(self.train_loader)
        for _ in range(self.step % self.steps_per_epoch, self.steps_per_epoch):
            self.train_step(batches)
            if self.log:
                self.log.step()
            if self.step % self.config.log.every == 0:
                self._log_training()
            if self.step % self.steps_per_epoch:
                self._check_flags()
                every = self.config.train.checkpoint_every
                if every and self.step % every == 0:
                    self._save()

    def train_step(self, batches: Iterator[Any]) -> None:
        """Take one optimiser step, from as many batches as it accumulates."""
        self._seed()
        self.schedule.step_update(self.step)
        _copy(self.buffers, self.buffers_before)
        sums = torch.zeros_like(self.sums)
        accumulation = self.config.train.accumulation
        for i in range(accumulation):
            started = time.perf_counter()
            try:
                batch = next(batches)
            except Interrupted:  # it may never come
                _copy(self.buffers_before, self.buffers)
                self._save()
                raise
            self.waited += time.perf_counter() - started
            # DDP averages gradients on the last accumulation step only.
            skip_sync = isinstance(self.wrapped, DistributedDataParallel) and i + 1 < accumulation
            with self.wrapped.no_sync() if skip_sync else nullcontext():  # type: ignore[operator]
                with autocast(self.world.device, self.precision):
                    loss, batch_sums = self.task.loss(self.wrapped, batch)
                self.scaler.scale(loss / accumulation).backward()
            sums += batch_sums
        self._update(sums)
        self.step += 1

    def _update(self, sums: Tensor) -> None:
        """Move the weights if loss and gradient are finite on all ranks, else change nothing."""
        self.scaler.unscale_(self.optimizer)
        parameters = [
            p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self.gradient_norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if self.config.optim.clip_grad:
            nn.utils.clip_grads_with_norm_(
                parameters, self.config.optim.clip_grad, self.gradient_norm
            )
        good = bool(self.gradient_norm.isfinite() & sums.isfinite().all())
        if self.world.any(not good)[0]:
            self._skip()
        else:
            self.scaler.step(self.optimizer)
            self.bad_steps = 0
            self.sums += sums
            if self.ema is not None:
                self.ema.update(self.model, self.step)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _skip(self) -> None:
        _copy(self.buffers_before, self.buffers)
        self.bad_steps += 1
        self.skipped += 1
        limit = self.config.train.max_bad_steps
        logger.warning(
            "step %d: loss or gradient is not finite, step skipped (%d in a row, %d allowed)",
            self.step,
            self.bad_steps,
            limit,
        )
        if self.bad_steps > limit:
            raise UserError(
                f"loss or gradient was not finite in {self.bad_steps} steps in a row, "
                f"up to step {self.step}; the last good checkpoint is {self._last_checkpoint()}"
            )

    def _last_checkpoint(self) -> str:
        link = self.run and self.run.path / "last.pt"
        return str(link.resolve()) if link and link.exists() else "none yet"

    def _end_epoch(self) -> None:
        every = self.config.train.eval_every
        self.evaluation_due = self.epoch % every == 0 or self.step == self.total_steps
        if self.evaluation_due:
            self._save(trained=True)
        self._finish_epoch()

    def _finish_epoch(self) -> None:
        """Evaluate between two checkpoints: a machine that dies in it costs no training."""
        self._check_flags(saved=self.evaluation_due)
        best = self._evaluate() if self.evaluation_due else False
        self._write_bad_files()
        self._save(best=best)
        self._check_flags(saved=True)

    def _evaluate(self) -> bool:
        """Evaluate, and return whether the result is the best so far."""
        self.evaluation_due = False
        model = self.ema.module if self.ema is not None else self.model
        self.world.broadcast_(model.buffers())
        self.val_loader.set_state(0, 0)
        evaluation = self.task.evaluation()
        self.result = measure(evaluation, model, self.val_loader, self.world, self.precision)
        metric = self.task.best
        better = not self.best or self.result[metric] > self.best[metric]
        if better:
            self.best = {**self.result, "step": self.step, "epoch": self.epoch}
        if self.log:
            self.log.metrics("val", self.step, self.epoch, self.result)
            self._log_offsets(model)
        self._start_clock()
        return better

    def _check_flags(self, saved: bool = False) -> None:
        """Act, on all ranks, on a signal or on bad files that one rank knows of."""
        stop, *exceeded = self.world.any(
            bool(self.stop), *(loader.bad_files.exceeded for loader in self.loaders)
        )
        if any(exceeded):
            which, limit = "training" if exceeded[0] else "validation", self.config.data.bad_limit
            self._write_bad_files()
            raise UserError(
                f"more than {limit:.2%} of the {which} files are bad (data.bad_limit); "
                f"their names are in {self.bad_files}"
            )
        if stop:
            if not saved:
                self._save()
            cause = self.stop.signal or "a signal to another rank"
            raise Interrupted(f"stopped by {cause} after step {self.step}")

    @property
    def bad_files(self) -> Path:
        assert self.run is not None
        return self.run.path / "bad_files.txt"

    def _write_bad_files(self) -> None:
        """Write the names of the bad files that any rank has found."""
        own = [name for loader in self.loaders for name in loader.bad_files.names]
        found = sorted(set(itertools.chain(*self.world.gather(own))))
        if self.world.is_main and found:
            with suppress(OSError):  # they are in the log as well
                self.bad_files.write_bytes(b"".join(os.fsencode(f"{name}\n") for name in found))

    def _log_training(self) -> None:
        sums = self.world.sum_(self.sums.clone()).tolist()
        self.sums.zero_()
        if self.log:
            values = self.task.metrics(sums)
            now = time.perf_counter()
            values.pop("images")
            values |= {f"lr_{group['name']}": group["lr"] for group in self.optimizer.param_groups}
            values |= {"gradient_norm": self.gradient_norm.item(), "skipped": self.skipped}
            if self.scaler.is_enabled():
                values["loss_scale"] = self.scaler.get_scale()
            seconds = max(now - self.logged_at, 1e-9)
            speed = self.config.train.batch_size * (self.step - self.logged_step) / seconds
            values |= {
                "images_per_s": speed,
                "data_wait": self.waited / seconds,
                "memory_mib": peak_memory(self.world.device),
            }
            epoch = (self.step - 1) // self.steps_per_epoch + 1
            self.log.metrics("train", self.step, epoch, values)
        self._start_clock()

    def _log_offsets(self, model: nn.Module) -> None:
        """Log how far offsets reach, and how many leave their scope, on the first val images."""
        if self.log is None or not self.log.loggers:
            return
        batch = self.first_batch(self.val_loader)
        if batch is None:
            return
        model.eval()
        with record_offsets(model) as records, torch.inference_mode():
            self.task.evaluation().add(model, batch)
        self.log.offsets(self.step, records)

    @staticmethod
    def first_batch(loader: Loader) -> Any:
        """Return the first batch, loaded without the loader's workers; None if there is none."""
        requests = itertools.islice(iter(loader.sampler), 1)
        return next(
            (loader.dataset.load(request.indices, request.epoch).batch for request in requests),
            None,
        )

    def set_train_mode(self) -> None:
        self.wrapped.train()
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                frozen = any(not p.requires_grad for p in module.parameters())  # by model.freeze
                module.train(not (frozen or self.config.train.freeze_bn))

    def describe_precision(self) -> str:
        """Return the precision, and what was asked for if that is not the same."""
        asked = self.config.train.precision
        same = asked == self.precision
        return self.precision if same else f"{self.precision} (train.precision={asked})"

    def _seed(self) -> None:
        """Seed what is random in a step: dropout, drop path, mixup."""
        sequence = np.random.SeedSequence([self.config.seed, self.step, self.world.rank])
        seed = sequence.generate_state(1)[0]
        np.random.seed(seed)
        # torch.manual_seed takes a millisecond on a machine without CUDA.
        torch.default_generator.manual_seed(int(seed))
        if self.world.device.type == "cuda":
            torch.cuda.manual_seed(int(seed))

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume. Equal on all ranks; `sums` has one row per rank."""
        sums = self.sums.new_zeros(self.world.size, len(self.sums))
        sums[self.world.rank] = self.sums
        return {
            **self.parts.card.to_dict(),
            "data": self.identity.to_dict(),
            "step": self.step,
            "evaluation_due": self.evaluation_due,
            "precision": self.precision,
            "bad_steps": self.bad_steps,
            "skipped": self.skipped,
            "result": self.result,
            "best": self.best,
            "sums": self.world.sum_(sums).tolist(),
            "bad_files": self.world.gather([loader.bad_files.state() for loader in self.loaders]),
            **self.learned(),
        }

    def learned(self) -> dict[str, Any]:
        """Return the part of the state that steps change, without asking other ranks."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema is not None else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take a state that `state` returned; ValueError, and no change, for any other."""
        check_state(state, self)
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.evaluation_due = state["step"], state["evaluation_due"]
        self.precision = state[
            "precision"
        ]  # what "auto" chose when the run began, on whatever device
        self.bad_steps, self.skipped = state["bad_steps"], state["skipped"]
        self.result, self.best = state["result"], state["best"]
        bad_files = state["bad_files"]
        if len(bad_files) == self.world.size:  # else its files are found again, by other ranks
            for loader, found in zip(self.loaders, bad_files[self.world.rank], strict=True):
                loader.bad_files.load_state(found)
        sums = self.sums.new_tensor(state["sums"])
        if len(sums) == self.world.size:
            self.sums = sums[self.world.rank]
        else:
            self.sums = sums.sum(0) if self.world.is_main else torch.zeros_like(self.sums)

    def _save(self, *, best: bool = False, trained: bool = False) -> None:
        state, error = self.state(), ""
        if self.world.is_main:
            try:
                if self.log:
                    self.log.sync()
                self.checkpoints.save(state, best=best, trained=trained)
            except OSError as failure:
                reason = (
                    "the disk is full"
                    if failure.errno in (errno.ENOSPC, errno.EDQUOT)
                    else failure.strerror
                )
                error = f"the checkpoint of step {self.step} could not be written ({reason})"
        if self.world.any(bool(error))[0]:
            error = self.world.from_main(error)
            if self.config.train.on_save_error == "stop":
                raise UserError(f"{error}; the last good one is {self._last_checkpoint()}")
            logger.warning("%s; training goes on", error)


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:  # a network of layer norms has no buffers
        torch._foreach_copy_(target, source)
