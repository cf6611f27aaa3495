"""Coordinates at which the taps of a position read, and compiler options of all CPU kernels.

This is the first half of the CPU kernels. In the offsets, the y and the x of a tap are next to each
other, so that both axes of several taps are done at once.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from dkcls.ops.deform_kernel.cpu.vector import (
    add,
    alternate,
    clamp,
    equal,
    every,
    floor,
    leading,
    load,
    mul,
    pointer,
    splat,
    store,
    sub,
)

# NaN and infinity keep their meaning (no "nnan", no "ninf"), and sums their order (no "reassoc").
_OPTIONS: Any = {
    "fastmath": {"contract", "nsz", "arcp"},
    "error_model": "numpy",
    "boundscheck": False,
    "no_cfunc_wrapper": True,
}
_SOURCES = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("[!_]*.py")))
_STAMP = hashlib.sha256(_SOURCES).hexdigest()


def _can_cache() -> bool:
    """Return whether numba can cache: without a writable package or home directory, it raises."""
    try:
        njit(cache=True)(lambda: None)
    except RuntimeError:
        return False
    return True


_CACHE = _can_cache()


def compiled(**options):
    """Return `njit` with a cache on disk that is valid while all our numba sources are the same.

    Numba itself looks only at the file of a function, and would miss a change in another function
    that it calls.
    """

    def decorate(function):
        dispatcher = njit(cache=_CACHE, **_OPTIONS, **options)(function)
        if _CACHE:
            dispatcher._cache._cache_file._source_stamp = _STAMP
        return dispatcher

    return decorate


_INLINED: Any = {"forceinline": True, "no_cpython_wrapper": True}
# Parallel and serial functions have different names, because the cache does not tell them apart.
driver, parallel_driver, worker = (
    compiled(),
    compiled(parallel=True),
    compiled(no_cpython_wrapper=True),
)
inlined = njit(**_OPTIONS, **_INLINED)

f32 = np.float32

# Rows of the constants, for y and x of every tap: scope coordinate, limits, shift in the image.
GRID, LAST, LAST_CELL, DISPLACEMENT = range(4)
# Rows of a position's fields, likewise: shares of the cell's two ends, their index, whether inside.
SCOPE_LOW, SCOPE_HIGH, SCOPE_CELL, SCOPE_INSIDE = range(4)
IMAGE_LOW, IMAGE_HIGH, IMAGE_FIRST, IMAGE_SECOND, IMAGE_FIRST_INSIDE, IMAGE_SECOND_INSIDE = range(
    4, 10
)
FIELDS = 10
# Columns of the list of taps. PIXEL and CELL index the first corners in the image and the weights,
# DOWN and RIGHT lead from PIXEL to the other corners of the image.
TAP, PIXEL, DOWN, RIGHT, CELL = range(5)
COLUMNS = 5


@inlined
def scratch(sizes):
    """Return memory for the taps of a position and for its fields.

    Behind the fields there is room for a row of each kind of offsets.
    """
    # One tap more, because `locate` writes before it counts.
    taps = np.empty((sizes.offsets // 2 + 1) * COLUMNS, np.int64)
    return taps, np.empty(FIELDS * sizes.padded + 2 * sizes.out_width * sizes.offsets, np.float32)


def offset_row(offset, n, oy, sizes, fields, kind):
    """Return a row of offsets with adjacent channels: pointer, and step between positions."""


@overload(offset_row, jit_options=_OPTIONS)
def _offset_row(offset, n, oy, sizes, fields, kind):
    def absent(offset, n, oy, sizes, fields, kind):
        return None, 0

    def present(offset, n, oy, sizes, fields, kind):
        row, column = pointer(offset.address, n * offset.image + oy * offset.row), offset.column
        if offset.channel != 1:
            copy = pointer(fields, FIELDS * sizes.padded + kind * sizes.out_width * sizes.offsets)
            for channel in range(sizes.offsets):
                for ox in range(sizes.out_width):
                    copy[ox * sizes.offsets + channel] = row[
                        channel * offset.channel + ox * offset.column
                    ]
            row, column = copy, sizes.offsets
        return row, column

    return absent if isinstance(offset, types.NoneType) else present


@inlined
def locate_in_scope(offset, constants, sizes, fields):
    """Find the cell of the scope that each tap of a position reads, from the taps' offsets."""
    lanes, size = every(8), sizes.padded
    zero, one = splat(lanes, f32(0)), splat(lanes, f32(1))
    for i in range(0, size, 8):
        u = add(
            load(leading(8, sizes.offsets - i), offset, i), load(lanes, constants, GRID * size + i)
        )
        inside = clamp(u, zero, load(lanes, constants, LAST * size + i))
        cell = clamp(floor(inside), zero, load(lanes, constants, LAST_CELL * size + i))
        fraction = sub(inside, cell)
        store(lanes, fields, SCOPE_LOW * size + i, sub(one, fraction))
        store(lanes, fields, SCOPE_HIGH * size + i, fraction)
        store(lanes, fields, SCOPE_CELL * size + i, cell)
        store(lanes, fields, SCOPE_INSIDE * size + i, equal(u, inside))


@inlined
def locate_in_image(offset, y, x, constants, sizes, fields):
    """Find the cell of the image that each tap of a position reads, from the taps' offsets.

    (y, x) is the coordinate of the first tap before any offset.
    """
    lanes, size = every(8), sizes.padded
    zero, one, two = splat(lanes, f32(0)), splat(lanes, f32(1)), splat(lanes, f32(2))
    first_tap, extent = (
        alternate(lanes, f32(y), f32(x)),
        alternate(lanes, f32(sizes.height), f32(sizes.width)),
    )
    last = sub(extent, one)
    for i in range(0, size, 8):
        place = add(first_tap, load(lanes, constants, DISPLACEMENT * size + i))
        u = clamp(
            add(load(leading(8, sizes.offsets - i), offset, i), place),
            sub(zero, two),
            add(extent, one),
        )
        cell = floor(u)
        fraction = sub(u, cell)
        first_inside = mul(clamp(add(cell, one), zero, one), clamp(sub(extent, cell), zero, one))
        second_inside = mul(clamp(add(cell, two), zero, one), clamp(sub(last, cell), zero, one))
        store(lanes, fields, IMAGE_LOW * size + i, mul(sub(one, fraction), first_inside))
        store(lanes, fields, IMAGE_HIGH * size + i, mul(fraction, second_inside))
        # A corner outside is read as its neighbour inside, times 0, to spare channels a branch.
        store(lanes, fields, IMAGE_FIRST * size + i, clamp(cell, zero, last))
        store(lanes, fields, IMAGE_SECOND * size + i, clamp(add(cell, one), zero, last))
        store(lanes, fields, IMAGE_FIRST_INSIDE * size + i, first_inside)
        store(lanes, fields, IMAGE_SECOND_INSIDE * size + i, second_inside)


@inlined
def lost(pair):
    """Return 0, or NaN if one of two numbers is NaN.

    A NaN offset thus shows in the output even where its tap reads nothing.
    """
    return f32(0) * pair[0] + f32(0) * pair[1]


@inlined
def locate(oy, ox, sizes, kernel_offset, image_offset, constants, fields, taps):
    """List the taps of a position that touch the image; return their number, and NaN or 0.

    NaN means that a tap that does not touch the image has a NaN offset.
    """
    size, channels, height, width = sizes.padded, sizes.channels, sizes.height, sizes.width
    y0, x0 = oy * sizes.stride_y - sizes.padding_y, ox * sizes.stride_x - sizes.padding_x
    if kernel_offset is not None:
        locate_in_scope(kernel_offset, constants, sizes, fields)
    if image_offset is not None:
        locate_in_image(image_offset, y0, x0, constants, sizes, fields)
    count, nan, i = 0, f32(0), 0
    for ky in range(sizes.kernel_y):
        y = y0 + ky * sizes.dilation_y
        for kx in range(sizes.kernel_x):
            x = x0 + kx * sizes.dilation_x
            tap = pointer(taps, count * COLUMNS)
            tap[TAP] = i
            if image_offset is None:
                inside = 0 <= y < height and 0 <= x < width
                tap[PIXEL] = (y * width + x) * channels
            else:
                first, first_inside = (
                    pointer(fields, IMAGE_FIRST * size + i),
                    pointer(fields, IMAGE_FIRST_INSIDE * size + i),
                )
                second, second_inside = (
                    pointer(fields, IMAGE_SECOND * size + i),
                    pointer(fields, IMAGE_SECOND_INSIDE * size + i),
                )
                inside = (
                    first_inside[0] + second_inside[0] > 0
                    and first_inside[1] + second_inside[1] > 0
                )
                top, left = int(first[0]), int(first[1])
                tap[PIXEL] = (top * width + left) * channels
                tap[DOWN] = (int(second[0]) - top) * width * channels
                tap[RIGHT] = (int(second[1]) - left) * channels
                if not inside:
                    nan += lost(pointer(fields, IMAGE_LOW * size + i))
            if kernel_offset is None:
                tap[CELL] = i // 2 * channels
            else:
                cell = pointer(fields, SCOPE_CELL * size + i)
                tap[CELL] = (int(cell[0]) * sizes.scope_x + int(cell[1])) * channels
                if not inside:
                    nan += lost(pointer(fields, SCOPE_LOW * size + i))
            count += inside
            i += 2
    return count, nan


@inlined
def ends(lanes, fields, low, high):
    """Return two fields of a tap, for its y and for its x: y0, y1, x0, x1."""
    first, second = pointer(fields, low), pointer(fields, high)
    return (
        splat(lanes, first[0]),
        splat(lanes, second[0]),
        splat(lanes, first[1]),
        splat(lanes, second[1]),
    )


@inlined
def shares(lanes, fields, low, high):
    """Return the shares of the corners of a tap's cell: 00, 01, 10, 11."""
    first, second = pointer(fields, low), pointer(fields, high)
    y0, y1, x0, x1 = first[0], second[0], first[1], second[1]
    return (
        splat(lanes, y0 * x0),
        splat(lanes, y0 * x1),
        splat(lanes, y1 * x0),
        splat(lanes, y1 * x1),
    )


@inlined
def scope_steps(sizes):
    """Return the steps from a stored weight to the one below and to the one on the right.

    Along an axis with one entry the step is 0.
    """
    down = sizes.scope_x * sizes.channels if sizes.scope_y > 1 else 0
    return down, sizes.channels if sizes.scope_x > 1 else 0
