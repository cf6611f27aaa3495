"""The processes of a run: who this one is, and how they agree. One process without torchrun is a world of one."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dkcls.engine.errors import UserError


@dataclass(frozen=True)
class World:
    """A rank among `size`, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

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

    @contextmanager
    def together(self) -> Iterator[None]:
        """If what is done here fails for the user on one rank, all ranks fail, with the first one's sentence."""
        error = ""
        try:
            yield
        except UserError as failure:
            error = str(failure)
        if self.size > 1:
            errors: list[str] = [""] * self.size
            dist.all_gather_object(errors, error)
            error = next((text for text in errors if text), "")
        if error:
            raise UserError(error)


def launched_by_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


@contextmanager
def start(device: str, timeout: float) -> Iterator[World]:
    """Joins the other processes, if torchrun started any, for as long as the context lasts."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device=cuda, but there is no CUDA device here; train.device=cpu or auto would run")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if not launched_by_torchrun():
        yield World(torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"))
        return
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    place = torch.device("cpu")
    if on_gpu:
        if local >= torch.cuda.device_count():
            raise UserError(f"torchrun started {local + 1} processes here, but there are {torch.cuda.device_count()} GPUs")
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield World(place, rank, size)
    finally:
        dist.destroy_process_group()
