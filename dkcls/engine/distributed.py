"""The processes of a run: who this one is, how they agree, and the precision they compute in.

One process without torchrun is a world of one.
"""

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from dkcls.engine.heartbeat import heartbeat
from dkcls.errors import RankError, UserError


@dataclass(frozen=True)
class World:
    """A rank among `size`, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def batch_per_rank(self, batch_size: int, accumulation: int = 1) -> int:
        """Return the images per rank and accumulation step of a global batch."""
        batch, rest = divmod(batch_size, self.size * accumulation)
        if rest or not batch:
            raise UserError(
                "train.batch_size is over all ranks and accumulation steps: "
                f"{batch_size} does not divide by {self.size} x {accumulation}"
            )
        return batch

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place, the same to the bit on each."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self.size == 1:
            return list(flags)
        return [bool(count) for count in self.sum_(torch.tensor(flags, dtype=torch.int32))]

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values everywhere."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, any plain object."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, any plain object."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make a UserError on one rank one on all ranks, with the first one's sentence."""
        error = ""
        try:
            yield
        except UserError as failure:
            error = str(failure)
        first = next((text for text in self.gather(error) if text), "")
        if first:
            raise UserError(first)


def choose_precision(asked: str, world: World) -> str:
    """Return the precision meant: "auto" is bf16 if every rank's device has it, else fp32."""
    if asked != "auto":
        return asked
    has = False
    if world.device.type == "cuda":
        with torch.cuda.device(world.device):
            has = torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp32" if world.any(not has)[0] else "bf16"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def launched_by_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


@contextmanager
def start(device: str, timeout: float) -> Iterator[World]:
    """Join the other processes, if torchrun started any, for as long as the context lasts."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "device=cuda was asked for, but there is no CUDA device here; cpu or auto would run"
        )
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if not launched_by_torchrun():
        yield World(
            torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        )
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    place = torch.device("cpu")
    if on_gpu:
        if local >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise UserError(
                f"torchrun started {local + 1} processes here, but there are {gpus} GPUs"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    limit = timedelta(seconds=timeout)
    store = _store(limit)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
    )
    try:
        with heartbeat(dist.PrefixStore("heartbeat", store.clone()), rank, size, timeout):
            yield World(place, rank, size)
    except RuntimeError as error:
        if "gloo" in str(error).lower() or isinstance(error, dist.DistError):
            # Without gloo's own source line and advice.
            reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
            raise RankError(f"lost the connection to another rank ({reason})") from error
        raise
    finally:
        _forget_models()
        dist.destroy_process_group()


def _forget_models() -> None:
    """Let go of every DistributedDataParallel, also of those in the frames of an error.

    One that outlives the process group ends it, and waits for gloo's threads while it holds the
    GIL, which they may be waiting for.
    """
    error = sys.exc_info()[1]
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _store(timeout: timedelta) -> dist.Store:
    """Return torchrun's store, in a part that is new at every restart.

    The store keeps the addresses of processes that are gone.
    """
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
