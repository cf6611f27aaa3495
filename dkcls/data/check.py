"""Check of a whole set: every image is read once, in parallel, to find bad files and sizes."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from dkcls.data import watch
from dkcls.data.dataset import BadFile
from dkcls.data.encoded import EncodedFiles
from dkcls.data.loader import as_it_is, start, worker_options

_CHUNK = 64


class Report(NamedTuple):
    """Result of a check, with zeros for bad files.

    `bytes` int64 [N] are the sizes of the files and `sides` int64 [N, 2] heights and widths in
    pixels. `counts` int64 [classes] are the images, or objects, of each class in good files.
    """

    bad: list[BadFile]
    bytes: np.ndarray
    sides: np.ndarray
    counts: np.ndarray


class _Inspect(torch.utils.data.Dataset):
    def __init__(self, dataset: EncodedFiles):
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[BadFile | tuple[int, int, int]]:
        found = [self.inspect(index) for index in indices]
        watch.at(watch.NOWHERE)
        return found

    def inspect(self, index: int) -> BadFile | tuple[int, int, int]:
        return self.dataset.attempt(
            index, lambda image: (len(image.data), *self.dataset.decode(index, image).shape[1:])
        )


def check(
    dataset: EncodedFiles, workers: int, progress: Callable[[int], None] = lambda count: None
) -> Report:
    """Read every image; call `progress` with the number of images just done."""
    total = len(dataset)
    chunks = [range(first, min(first + _CHUNK, total)) for first in range(0, total, _CHUNK)]
    places = watch.make_places(workers)
    loader = DataLoader(
        _Inspect(dataset),
        batch_sampler=chunks,  # type: ignore[arg-type]
        collate_fn=as_it_is,
        **worker_options(workers, places),
    )
    report = Report(
        [],
        np.zeros(total, np.int64),
        np.zeros((total, 2), np.int64),
        np.zeros(dataset.num_classes, np.int64),
    )
    batches = watch.patiently(start(loader, dataset), places, dataset.name, watch.PATIENCE)
    for chunk, found in zip(chunks, batches, strict=True):
        for index, result in zip(chunk, found, strict=True):
            if isinstance(result, BadFile):
                report.bad.append(result)
            else:
                report.bytes[index], *report.sides[index] = result
                np.add.at(report.counts, dataset.classes_in(index), 1)
        progress(len(chunk))
    return report
