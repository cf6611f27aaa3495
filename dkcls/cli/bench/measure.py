"""Measures of calls on a device: seconds, medians of calls that take turns, peak memory."""

import ctypes
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

Timer = Callable[[], float]  # returns seconds


def describe(device: str) -> str:
    """Return the name of the GPU, or the number of CPU threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def seconds(function: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    function()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def medians(
    pairs: Sequence[tuple[Timer, Timer]], rounds: int, budget: float, bar: tqdm
) -> list[tuple[float, float]]:
    """Return the median seconds of both timers of every pair.

    All timers take turns in random order. A pair that has used its budget of seconds sits out the
    rest.
    """
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    turns = [
        (timer, times, own)
        for pair, own in zip(pairs, samples, strict=True)
        for timer, times in zip(pair, own, strict=True)
    ]
    order = random.Random(0)
    for _ in range(rounds):
        for timer, times, own in order.sample(turns, len(turns)):
            bar.update()
            if not times or sum(map(sum, own)) < budget:
                times.append(timer())
    return [(statistics.median(first), statistics.median(second)) for first, second in samples]


def peak_bytes(function: Callable[[], object], device: str) -> int:
    """Return the peak of PyTorch's allocations in a call, beyond what is allocated before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    assert profile.profiler is not None
    used = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            used += event.nbytes()
            peak = max(peak, used)
    return peak


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back to the system.

    Blocks up to its limit of 32 MB come from the heap, which is never trimmed.
    """
    mmap_threshold, trim_threshold = -3, -1
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)
