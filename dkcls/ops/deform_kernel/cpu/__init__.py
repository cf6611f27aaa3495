"""Backend "cpu": numba kernels over channels_last, in float32 inside; they do not take float64.

This module allocates, describes a call to the kernels in numbers and addresses, and chooses the
number of threads.
"""

import logging
import os
import time
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dkcls.ops.deform_kernel.backend import Call
from dkcls.ops.geometry import Geometry, tap_grid

# The backward is cut into groups of images, at most MAX_GROUPS; together, the groups' weight
# gradients take at most 1 / GROUP_MEMORY of an input. If there are fewer groups than TASKS, it is
# also cut into blocks of at least MIN_BLOCK channels, because narrower blocks cost more.
TASKS, MAX_GROUPS, GROUP_MEMORY, MIN_BLOCK = 4, 64, 4, 64

logger = logging.getLogger("dkcls")
_forked = False
# numba's workqueue layer aborts on a second launch from another Python thread.
_one_launch = Lock()


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def forward(call: Call) -> Tensor:
    plan = _plan(call)
    sizes = plan.sizes
    dense = _densify(*call[:4])
    entries = _empty(*call.weight.shape)
    out = _empty_channels_last(sizes.images, sizes.channels, sizes.out_height, sizes.out_width)
    addresses = entries.data_ptr(), out.data_ptr()
    _launch("forward", sizes, plan.address, *_arguments(*dense), *addresses)
    return out.to(call.x.dtype)


def backward(grad: Tensor, call: Call, needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients; only the input's is left out where nobody needs it."""
    x, weight, kernel_offset, image_offset, geometry = call
    plan = _plan(call)
    sizes, split, constants = plan.sizes, plan.split, plan.address
    projected = geometry.clip == "projected"
    dense = _densify(*call[:4])
    arguments = _arguments(*dense)
    entries = _empty(*weight.shape)
    grad = grad.float().contiguous(memory_format=torch.channels_last)
    grad_x = _empty_channels_last(*x.shape) if needs[0] else None
    parts, grad_weight = _empty(split.groups, sizes.entries, sizes.channels), _empty(*weight.shape)
    grad_kernel, grad_image = (
        None
        if offset is None
        else _empty(split.blocks, sizes.images, sizes.out_height, sizes.out_width, sizes.offsets)
        for offset in (kernel_offset, image_offset)
    )
    results = (grad_x, parts, grad_weight, grad_kernel, grad_image)
    addresses = (None if t is None else t.data_ptr() for t in results)
    _launch(
        "backward",
        sizes,
        split,
        projected,
        constants,
        *arguments,
        entries.data_ptr(),
        grad.data_ptr(),
        *addresses,
    )

    if split.blocks > 1:
        grad_kernel, grad_image = (
            None if g is None else _add_up(g).clone() for g in (grad_kernel, grad_image)
        )
        if grad_kernel is not None and projected:
            _kernels().project(sizes, constants, arguments[2], grad_kernel.data_ptr())
    grad_offsets = (
        None if g is None else g[0].permute(0, 3, 1, 2) for g in (grad_kernel, grad_image)
    )
    return [grad_x, grad_weight, *grad_offsets]


def _add_up(copies: Tensor) -> Tensor:
    """Sum over the first axis, in place, and return the sum with that axis.

    The order is fixed, unlike that of `torch.sum`.
    """
    _launch("add_up", copies.data_ptr(), copies.shape[0], copies[0].numel())
    return copies[:1]


class _Plan(NamedTuple):
    """Numbers that the kernels of a call take besides addresses."""

    sizes: Any
    split: Any
    constants: np.ndarray
    address: int  # of the constants


def _plan(call: Call) -> _Plan:
    local = call.kernel_offset is not None
    return _plan_shapes(call.x.shape, call.weight.shape, local, call.geometry.static())


@lru_cache(maxsize=1024)
def _plan_shapes(
    x_shape: Sequence[int], weight_shape: Sequence[int], local: bool, geometry: Geometry
) -> _Plan:
    """Return the plan of a call, which follows from its shapes."""
    n, c, height, width = x_shape
    count, scope = (1, tuple(weight_shape[2:])) if local else (weight_shape[0], (1, 1))
    entries = scope[0] * scope[1] if local else geometry.taps
    padded = (2 * geometry.taps + 7) // 8 * 8

    groups = (
        n
        if count > 1
        else max(1, min(n, MAX_GROUPS, n * height * width // (GROUP_MEMORY * entries)))
    )
    blocks = max(1, min(-(-TASKS // groups), c // MIN_BLOCK))
    block = (-(-c // blocks) + 7) // 8 * 8

    constants = np.zeros((4, padded), np.float32)  # rows: GRID, LAST, LAST_CELL, DISPLACEMENT
    for axis in (0, 1):
        grid = tap_grid(geometry.kernel_size[axis], scope[axis], geometry.step[axis])
        for tap in range(geometry.taps):
            k = divmod(tap, geometry.kernel_size[1])[axis]
            constants[:, 2 * tap + axis] = (
                grid[k],
                scope[axis] - 1,
                max(scope[axis] - 2, 0),
                k * geometry.dilation[axis],
            )
    sizes = _kernels().Sizes(
        n,
        c,
        height,
        width,
        *geometry.output_size(height, width),
        *geometry.kernel_size,
        *geometry.stride,
        *geometry.padding,
        *geometry.dilation,
        *scope,
        count,
        entries,
        2 * geometry.taps,
        padded,
    )
    split = _kernels().Split(groups, -(-c // block), block)
    return _Plan(sizes, split, constants, constants.ctypes.data)


def _densify(x: Tensor, weight: Tensor, *offsets: Tensor | None) -> list[Any]:
    """Return float32 tensors: x channels_last, the weight contiguous, the offsets as they are."""
    x = x.float().contiguous(memory_format=torch.channels_last)
    return [x, weight.float().contiguous(), *(None if o is None else o.float() for o in offsets)]


def _arguments(x: Tensor, weight: Tensor, *offsets: Tensor | None) -> list[Any]:
    """Return the arguments of a kernel: addresses, and the strides of offsets."""
    views = (None if o is None else _kernels().Offsets(o.data_ptr(), *o.stride()) for o in offsets)
    return [x.data_ptr(), weight.data_ptr(), *views]


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _empty_channels_last(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu", memory_format=torch.channels_last)


def _launch(name: str, *arguments: Any) -> None:
    """Run a kernel on as many threads as PyTorch uses, or on one thread in a forked process.

    GNU OpenMP ends a forked process that uses it again.
    """
    threads = 1 if _forked else min(torch.get_num_threads(), _config().NUMBA_NUM_THREADS)
    if threads == 1 or not _threads_work():
        getattr(_kernels(), f"{name}_serial")(*arguments)
        return
    import numba

    with _one_launch:
        before = numba.get_num_threads()
        if before != threads:
            numba.set_num_threads(threads)
        try:
            getattr(_kernels(), f"{name}_parallel")(*arguments)
        finally:
            if before != threads:
                numba.set_num_threads(before)


def available() -> bool:
    """Return whether there is numba to compile the kernels."""
    return _kernels() is not None


@cache
def _config() -> Any:
    """Return numba's settings; no type checker knows them, since the environment makes them."""
    import numba

    return numba.config


@cache
def _kernels() -> Any:
    """Return the module of compiled functions, or None where numba cannot compile them.

    A missing numba is logged once.
    """
    try:
        from numba.core import event
    except ImportError as error:
        logger.warning(
            "without numba (%s), deform_kernel2d is about ten times slower on the CPU", error
        )
        return None
    if _config().DISABLE_JIT:
        return None

    class Announce(event.Listener):
        """Says of each kernel that is compiled how long that took, and where it is kept."""

        def __init__(self) -> None:
            self.under_way: list[float] = []  # when each began; a kernel compiles what it calls

        def on_start(self, occurrence: Any) -> None:
            if self.kernel(occurrence):
                self.under_way.append(time.perf_counter())

        def on_end(self, occurrence: Any) -> None:
            name = self.kernel(occurrence)
            if not name or not self.under_way:
                return
            seconds = time.perf_counter() - self.under_way.pop()
            if not self.under_way:
                kept = occurrence.data["dispatcher"].stats.cache_path
                where = f"once; kept in {kept}" if kept else "in every process: no cache folder"
                logger.warning("compiled the CPU kernel %s in %.1f s, %s", name, seconds, where)

        @staticmethod
        def kernel(occurrence: Any) -> str:
            """Return the name of one of our kernels, "" for any other function."""
            function = occurrence.data["dispatcher"].py_func
            ours = function.__module__.startswith(f"{__name__}.kernels")
            return function.__name__ if ours else ""

    event.register("numba:compile", Announce())  # heard only where the cache has no such code
    return import_module("dkcls.ops.deform_kernel.cpu.kernels")


@cache
def _threads_work() -> bool:
    """Start numba's threads; return whether there are any.

    OpenMP comes first unless the user has chosen a layer, because PyTorch uses OpenMP too.
    """
    import numba

    if not {"NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY"} & os.environ.keys():
        _config().THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]
    try:
        numba.get_num_threads()
    except (ValueError, ImportError) as error:
        logger.warning("numba has no threads to offer (%s): deform_kernel2d runs on one", error)
        return False
    return True
