"""The group `train`: batches, precision, device, evaluations and checkpoints."""

from dataclasses import dataclass
from typing import ClassVar

from dkcls.config.checks import (
    PRECISIONS,
    check,
    check_above_zero,
    check_choice,
    check_device,
    check_least,
)


@dataclass
class TrainConfig:
    """How training runs."""

    FREE: ClassVar[tuple[str, ...]] = (
        "device",
        "dry_run",
        "timeout",
        "max_bad_steps",
        "on_save_error",
        "checkpoint_every",
        "keep",
    )

    batch_size: int = 256  # images per step, over all ranks and accumulation steps
    accumulation: int = 1  # forward and backward passes per optimiser step
    # images per evaluation batch and rank; null: as many as a training step has on a rank
    eval_batch_size: int | None = None
    eval_every: int = 1  # epochs from one evaluation to the next
    # decay of an exponential moving average (EMA) of the weights, such as 0.9999; null: no EMA
    ema_decay: float | None = None
    # fp32, bf16, fp16 (with loss scaling); auto: bf16 where the device has it, else fp32
    precision: str = "auto"
    channels_last: bool = True  # memory layout of images and weights
    compile: bool = False  # torch.compile
    sync_bn: bool = False  # batch statistics over all ranks; CUDA only
    freeze_bn: bool = False  # batch normalisation in evaluation mode throughout
    # only deterministic algorithms, on CUDA too; on a CPU runs repeat to the bit anyway
    deterministic: bool = False
    device: str = "auto"  # auto, cpu, cuda
    # steps between checkpoints, besides those at the end of every epoch; 0: none
    checkpoint_every: int = 0
    keep: int = 2  # how many of the newest checkpoints are kept, besides the best
    # steps in a row that may be skipped because loss or gradient is not finite
    max_bad_steps: int = 20
    on_save_error: str = "stop"  # when a checkpoint cannot be written (full disk): stop, continue
    timeout: float = 600.0  # seconds that a rank waits for the others, or for a file
    dry_run: bool = False  # build everything, take few steps, say what the run would take, stop

    def __post_init__(self) -> None:
        for key in ("batch_size", "accumulation", "eval_batch_size", "eval_every", "keep"):
            check_least(f"train.{key}", getattr(self, key), 1)
        check_least("train.checkpoint_every", self.checkpoint_every, 0)
        check_device("train.device", self.device)
        check_choice("train.precision", self.precision, (*PRECISIONS, "auto"))
        check_choice("train.on_save_error", self.on_save_error, ("stop", "continue"))
        decay = self.ema_decay
        check("train.ema_decay", decay, decay is None or 0 < decay < 1, "between 0 and 1")
        check_above_zero("train.timeout", self.timeout)
