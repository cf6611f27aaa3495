"""Assignment of images to batches.

Batches depend on (seed, epoch, position) and on the rank, never on the number of workers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch


class Request(NamedTuple):
    """Request to a worker for one batch."""

    epoch: int
    indices: np.ndarray


class TrainSampler:
    """Order in which each image comes at most once per epoch over all ranks.

    Images that do not fill a global batch are dropped. Global batch t is
    permutation(seed, epoch)[t*G:(t+1)*G] with G = batch_size * accumulation * world_size, whatever
    the factors of G are. A rank takes a contiguous piece of it, one batch per accumulation step.

    `groups`, integers [length]: a batch holds images of one group as long as there are enough, and
    the rests of all groups share the other batches. An epoch has the same images as without groups.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        accumulation: int,
        rank: int,
        world_size: int,
        seed: int,
        groups: np.ndarray | None = None,
    ):
        self.length, self.batch_size, self.accumulation = length, batch_size, accumulation
        self.rank, self.world_size, self.seed, self.groups = rank, world_size, seed, groups
        self.epoch = self.position = 0
        self.steps = length // (batch_size * accumulation * world_size)
        if self.steps == 0:
            raise ValueError(
                f"the global batch {batch_size} x {accumulation} x {world_size} must not exceed "
                f"the {length} training images"
            )
        if groups is not None and groups.shape != (length,):
            raise ValueError(f"groups must be one per image, [{length}], got {list(groups.shape)}")

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __iter__(self) -> Iterator[Request]:
        # Neighbouring seeds must not share the orders of neighbouring epochs.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.length, generator=generator).numpy()
        if self.groups is not None:
            order = self._grouped(order[: len(self) * self.batch_size * self.world_size], generator)
        piece = self.batch_size * self.accumulation
        for step in range(self.position, self.steps):
            start = (step * self.world_size + self.rank) * piece
            for first in range(start, start + piece, self.batch_size):
                yield Request(self.epoch, order[first : first + self.batch_size])

    def _grouped(self, order: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Return the images of `order` in another order, batch by batch."""
        assert self.groups is not None
        groups = self.groups[order]
        whole, rests = [], []
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            filled = len(members) // self.batch_size * self.batch_size
            whole.append(members[:filled])
            rests.append(members[filled:])
        batches = np.concatenate(whole + rests).reshape(-1, self.batch_size)
        return order[batches[torch.randperm(len(batches), generator=generator).numpy()]].ravel()


class EvalSampler:
    """Order in which each image comes exactly once over all ranks.

    A rank takes a contiguous part, and parts differ by at most one image.
    """

    accumulation = 1

    def __init__(self, length: int, batch_size: int, rank: int, world_size: int):
        self.batch_size = batch_size
        self.first, self.last = length * rank // world_size, length * (rank + 1) // world_size
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.batch_size)

    def __iter__(self) -> Iterator[Request]:
        for start in range(
            self.first + self.position * self.batch_size, self.last, self.batch_size
        ):
            yield Request(self.epoch, np.arange(start, min(start + self.batch_size, self.last)))
