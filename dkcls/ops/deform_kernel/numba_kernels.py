"""The operator's CPU kernels, compiled by numba for the machine they run on.

Tensors come as addresses of float32 numbers, channels last: x and grad_x [N, H, W, C], out and grad [N, Ho, Wo, C], weight
and grad_weight [*, T, C], gradients of offsets [N, Ho, Wo, 2*Kh*Kw]. With kernel offsets, T = Sh*Sw entries of the scope;
without, T = Kh*Kw taps. Offsets come in any layout. What is None is compiled out: local DK, DCN, both together and global
DK are one source.

A position is done in two steps. `locate` lists the taps that touch the image: where each reads, and the bilinear shares.
Then the channels stream through that list.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from dkcls.ops.deform_kernel.numba_vector import (
    add, alternate, clamp, equal, every, floor, fma, leading, load, mul, pointer, splat, store, sub, totals,
)  # fmt: skip

f32 = np.float32

# NaN and infinity keep their meaning ("nnan" and "ninf" are missing), and sums their order ("reassoc" is).
_OPTIONS = {"fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy", "boundscheck": False, "no_cfunc_wrapper": True}
driver = njit(cache=True, **_OPTIONS)
parallel_driver = njit(cache=True, parallel=True, **_OPTIONS)
worker = njit(cache=True, no_cpython_wrapper=True, **_OPTIONS)
inlined = njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)

# Columns of `taps`, the list of what touches the image. PIXEL and CELL, the first corners, count numbers from the start of
# the image and of the weights; DOWN and RIGHT lead to the other corners of the image.
TAP, PIXEL, DOWN, RIGHT, CELL = range(5)
# Rows of `fields`, numbers for the y and the x of every tap: how much the cell's two ends count, and whether they are inside.
SCOPE_LOW, SCOPE_HIGH, SCOPE_CELL, SCOPE_INSIDE = range(4)
IMAGE_LOW, IMAGE_HIGH, IMAGE_FIRST, IMAGE_SECOND, IMAGE_INSIDE_FIRST, IMAGE_INSIDE_SECOND = range(4, 10)
FIELDS = 10


class Sizes(NamedTuple):
    """The numbers of a call."""

    images: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel_y: int
    kernel_x: int
    stride_y: int
    stride_x: int
    padding_y: int
    padding_x: int
    dilation_y: int
    dilation_x: int
    scope_y: int
    scope_x: int
    kernels: int  # 1, or one per image
    entries: int  # T
    offsets: int  # 2 * Kh * Kw
    padded: int  # the same, rounded up to whole vectors


class Offsets(NamedTuple):
    """Offsets [N, 2*Kh*Kw, Ho, Wo]: an address and four strides."""

    address: int
    image: int
    channel: int
    row: int
    column: int


class Split(NamedTuple):
    """How backward is cut into tasks: groups of images, whose weight gradients are summed afterwards, times blocks of
    channels, whose offset gradients are. By shape alone, so that the result does not depend on the number of threads."""

    groups: int
    blocks: int
    block: int  # channels in a block


@inlined
def scratch(sizes):
    """The list of taps and the fields of one position, and after these room for a row of each kind of offsets."""
    fields = np.empty(FIELDS * sizes.padded + 2 * sizes.out_width * sizes.offsets, np.float32)
    return np.empty((sizes.offsets // 2 + 1, 5), np.int64), fields  # one more, for a tap that is written and not counted


def offset_row(offset, n, oy, sizes, fields, kind):
    """A row of offsets with the channels next to each other: pointer, and distance between positions."""


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
                    copy[ox * sizes.offsets + channel] = row[channel * offset.channel + ox * offset.column]
            row, column = copy, sizes.offsets
        return row, column

    return absent if isinstance(offset, types.NoneType) else present


@inlined
def locate_in_scope(offset, constants, sizes, fields):
    """Offsets of all taps of a position -> the cell of the scope that each reads, along y and x."""
    all8, size, result = every(8), sizes.padded, pointer(fields, 0)
    zero, one = splat(all8, f32(0)), splat(all8, f32(1))
    for i in range(0, size, 8):
        u = add(load(leading(8, sizes.offsets - i), offset, i), load(all8, constants, i))
        inside = clamp(u, zero, load(all8, constants, size + i))
        cell = clamp(floor(inside), zero, load(all8, constants, 2 * size + i))
        fraction = sub(inside, cell)
        store(all8, result, SCOPE_LOW * size + i, sub(one, fraction))
        store(all8, result, SCOPE_HIGH * size + i, fraction)
        store(all8, result, SCOPE_CELL * size + i, cell)
        store(all8, result, SCOPE_INSIDE * size + i, equal(u, inside))


@inlined
def locate_in_image(offset, y, x, constants, sizes, fields):
    """Offsets of all taps of a position, whose first reads (y, x) -> the cell of the image that each reads."""
    all8, size, result = every(8), sizes.padded, pointer(fields, 0)
    zero, one, two = splat(all8, f32(0)), splat(all8, f32(1)), splat(all8, f32(2))
    corner, extent = alternate(all8, f32(y), f32(x)), alternate(all8, f32(sizes.height), f32(sizes.width))
    for i in range(0, size, 8):
        u = add(load(leading(8, sizes.offsets - i), offset, i), add(corner, load(all8, constants, 3 * size + i)))
        u = clamp(u, sub(zero, two), add(extent, one))
        cell = floor(u)
        fraction = sub(u, cell)
        first_inside = mul(clamp(add(cell, one), zero, one), clamp(sub(extent, cell), zero, one))
        second_inside = mul(clamp(add(cell, two), zero, one), clamp(sub(sub(extent, one), cell), zero, one))
        store(all8, result, IMAGE_LOW * size + i, mul(sub(one, fraction), first_inside))
        store(all8, result, IMAGE_HIGH * size + i, mul(fraction, second_inside))
        store(all8, result, IMAGE_INSIDE_FIRST * size + i, first_inside)
        store(all8, result, IMAGE_INSIDE_SECOND * size + i, second_inside)
        # A corner outside is read as its neighbour inside, times 0: no branch where the channels are.
        store(all8, result, IMAGE_FIRST * size + i, clamp(cell, zero, sub(extent, one)))
        store(all8, result, IMAGE_SECOND * size + i, clamp(add(cell, one), zero, sub(extent, one)))


@worker
def locate(oy, ox, sizes, kernel_offset, image_offset, constants, fields, taps):
    """List the taps of a position that touch the image.

    Returns their number and a NaN if an offset of the others is one, which must show all the same, or else 0.
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
            if image_offset is None:
                inside = 0 <= y < height and 0 <= x < width
                taps[count, PIXEL] = (y * width + x) * channels
            else:
                at = IMAGE_FIRST * size + i
                top, left = int(fields[at]), int(fields[at + 1])
                taps[count, PIXEL] = (top * width + left) * channels
                at = IMAGE_SECOND * size + i
                taps[count, DOWN] = (int(fields[at]) - top) * width * channels
                taps[count, RIGHT] = (int(fields[at + 1]) - left) * channels
                first, second = IMAGE_INSIDE_FIRST * size + i, IMAGE_INSIDE_SECOND * size + i
                inside = fields[first] + fields[second] > 0 and fields[first + 1] + fields[second + 1] > 0
                if not inside:
                    nan += f32(0) * fields[IMAGE_LOW * size + i] + f32(0) * fields[IMAGE_LOW * size + i + 1]
            taps[count, TAP] = i
            if kernel_offset is None:
                taps[count, CELL] = (i // 2) * channels
            else:
                at = SCOPE_CELL * size + i
                taps[count, CELL] = (int(fields[at]) * sizes.scope_x + int(fields[at + 1])) * channels
                if not inside:
                    nan += f32(0) * fields[SCOPE_LOW * size + i] + f32(0) * fields[SCOPE_LOW * size + i + 1]
            count += inside
            i += 2
    return count, nan


@inlined
def corners(lanes, data, i, down, right):
    return load(lanes, data, i), load(lanes, data, i + right), load(lanes, data, i + down), load(lanes, data, i + down + right)


@inlined
def shares(lanes, fields, low, high):
    """How much each corner of a tap's cell counts."""
    y0, y1, x0, x1 = fields[low], fields[high], fields[low + 1], fields[high + 1]
    return splat(lanes, y0 * x0), splat(lanes, y0 * x1), splat(lanes, y1 * x0), splat(lanes, y1 * x1)


@inlined
def weighted(parts, values):
    return fma(parts[3], values[3], fma(parts[2], values[2], fma(parts[1], values[1], mul(parts[0], values[0]))))


@inlined
def scope_steps(sizes):
    """From a stored weight to the one below and to the one on the right, which for a scope of 1 is itself."""
    down = sizes.scope_x * sizes.channels if sizes.scope_y > 1 else 0
    return down, sizes.channels if sizes.scope_x > 1 else 0


@inlined
def forward_chunk(lanes, c, sizes, x, weight, kernel_offset, image_offset, out, count, nan, fields, taps):
    """A few channels of one position: the sum over its taps."""
    size = sizes.padded
    scope_down, scope_right = scope_steps(sizes)
    result = splat(lanes, nan)
    for k in range(count):
        tap, pixel, cell = taps[k, TAP], taps[k, PIXEL] + c, taps[k, CELL] + c
        if image_offset is None:
            value = load(lanes, x, pixel)
        else:
            parts = shares(lanes, fields, IMAGE_LOW * size + tap, IMAGE_HIGH * size + tap)
            value = weighted(parts, corners(lanes, x, pixel, taps[k, DOWN], taps[k, RIGHT]))
        if kernel_offset is None:
            factor = load(lanes, weight, cell)
        else:
            parts = shares(lanes, fields, SCOPE_LOW * size + tap, SCOPE_HIGH * size + tap)
            factor = weighted(parts, corners(lanes, weight, cell, scope_down, scope_right))
        result = fma(value, factor, result)
    store(lanes, out, c, result)


@worker
def forward_row(row, sizes, x, weight, kernel_offset, image_offset, constants, out):
    """Row `row` of the N*Ho output rows."""
    n, oy = divmod(row, sizes.out_height)
    channels = sizes.channels
    taps, fields = scratch(sizes)
    constants = pointer(constants, 0)
    image = pointer(x, n * sizes.height * sizes.width * channels)
    weights = pointer(weight, (n if sizes.kernels > 1 else 0) * sizes.entries * channels)
    kernel_row, kernel_column = offset_row(kernel_offset, n, oy, sizes, fields, 0)
    image_row, image_column = offset_row(image_offset, n, oy, sizes, fields, 1)
    for ox in range(sizes.out_width):
        kernel_here, image_here = pointer(kernel_row, ox * kernel_column), pointer(image_row, ox * image_column)
        count, nan = locate(oy, ox, sizes, kernel_here, image_here, constants, fields, taps)
        result = pointer(out, (row * sizes.out_width + ox) * channels)
        c = 0
        while c + 32 <= channels:
            forward_chunk(every(32), c, sizes, image, weights, kernel_here, image_here, result, count, nan, fields, taps)
            c += 32
        while c + 8 <= channels:
            forward_chunk(every(8), c, sizes, image, weights, kernel_here, image_here, result, count, nan, fields, taps)
            c += 8
        if c < channels:
            rest = leading(8, channels - c)
            forward_chunk(rest, c, sizes, image, weights, kernel_here, image_here, result, count, nan, fields, taps)


@driver
def forward_serial(sizes, x, weight, kernel_offset, image_offset, constants, out):
    for row in range(sizes.images * sizes.out_height):
        forward_row(row, sizes, x, weight, kernel_offset, image_offset, constants, out)


@parallel_driver
def forward_parallel(sizes, x, weight, kernel_offset, image_offset, constants, out):
    for row in prange(sizes.images * sizes.out_height):
        forward_row(np.int64(row), sizes, x, weight, kernel_offset, image_offset, constants, out)


@inlined
def add_to(lanes, data, i, share, value):
    store(lanes, data, i, fma(share, value, load(lanes, data, i)))


@inlined
def add_to_corners(lanes, data, i, down, right, parts, value):
    add_to(lanes, data, i, parts[0], value)
    add_to(lanes, data, i + right, parts[1], value)
    add_to(lanes, data, i + down, parts[2], value)
    add_to(lanes, data, i + down + right, parts[3], value)


@inlined
def add_products(sums, value, values):
    return (
        fma(value, values[0], sums[0]),
        fma(value, values[1], sums[1]),
        fma(value, values[2], sums[2]),
        fma(value, values[3], sums[3]),
    )


@inlined
def backward_chunk(lanes, c, grad, x, weight, grad_x, grad_weight, grad_image, grad_kernel, image, scope, sums):
    """A few channels of one tap at one position. `image` and `scope` are a cell: index, steps down and right, four shares.

    Adds to the gradients of x and of the weights; returns, added to `sums`, the gradients of the shares of image and scope.
    """
    g = load(lanes, grad, c)
    i, j = image[0] + c, scope[0] + c
    if grad_image is None:
        value = load(lanes, x, i)
        values = value, value, value, value
    else:
        values = corners(lanes, x, i, image[1], image[2])
        value = weighted(image[3], values)
    if grad_kernel is None:
        factor = load(lanes, weight, j)
        factors = factor, factor, factor, factor
    else:
        factors = corners(lanes, weight, j, scope[1], scope[2])
        factor = weighted(scope[3], factors)

    image_sums, scope_sums = sums
    if grad_image is None:
        if grad_x is not None:
            add_to(lanes, grad_x, i, g, factor)
    else:
        grad_value = mul(g, factor)
        image_sums = add_products(image_sums, grad_value, values)
        if grad_x is not None:
            add_to_corners(lanes, grad_x, i, image[1], image[2], image[3], grad_value)
    if grad_kernel is None:
        add_to(lanes, grad_weight, j, g, value)
    else:
        grad_factor = mul(g, value)
        scope_sums = add_products(scope_sums, grad_factor, factors)
        add_to_corners(lanes, grad_weight, j, scope[1], scope[2], scope[3], grad_factor)
    return image_sums, scope_sums


@inlined
def zeros(lanes):
    zero = splat(lanes, f32(0))
    return zero, zero, zero, zero


@inlined
def clear(data, count):
    for i in range(count):
        data[i] = f32(0)


@worker
def backward_position(sizes, c0, c1, projected, grad, x, weight, grad_x, grad_weight, grad_kernel, grad_image, count, fields, taps):
    """All taps of one output position, channels c0 to c1. grad and the offsets' gradients start there, x at the image."""
    size = sizes.padded
    scope_down, scope_right = scope_steps(sizes)
    lanes = every(8)
    if grad_kernel is not None:
        clear(grad_kernel, sizes.offsets)
    if grad_image is not None:
        clear(grad_image, sizes.offsets)
    for k in range(count):
        tap = taps[k, TAP]
        parts = shares(lanes, fields, IMAGE_LOW * size + tap, IMAGE_HIGH * size + tap)
        image = taps[k, PIXEL], taps[k, DOWN], taps[k, RIGHT], parts
        parts = shares(lanes, fields, SCOPE_LOW * size + tap, SCOPE_HIGH * size + tap)
        scope = taps[k, CELL], scope_down, scope_right, parts
        sums = zeros(lanes), zeros(lanes)
        c = c0
        while c + 8 <= c1:
            sums = backward_chunk(lanes, c, grad, x, weight, grad_x, grad_weight, grad_image, grad_kernel, image, scope, sums)
            c += 8
        if c < c1:
            rest = leading(8, c1 - c)
            sums = backward_chunk(rest, c, grad, x, weight, grad_x, grad_weight, grad_image, grad_kernel, image, scope, sums)

        if grad_image is not None:
            s00, s01, s10, s11 = sums[0]
            low, high, first, second = (
                IMAGE_LOW * size + tap,
                IMAGE_HIGH * size + tap,
                IMAGE_INSIDE_FIRST * size + tap,
                IMAGE_INSIDE_SECOND * size + tap,
            )
            y0, y1, x0, x1 = (
                splat(lanes, fields[low]),
                splat(lanes, fields[high]),
                splat(lanes, fields[low + 1]),
                splat(lanes, fields[high + 1]),
            )
            iy0, iy1, ix0, ix1 = (
                splat(lanes, fields[first]),
                splat(lanes, fields[second]),
                splat(lanes, fields[first + 1]),
                splat(lanes, fields[second + 1]),
            )
            row0, row1 = fma(x0, s00, mul(x1, s01)), fma(x0, s10, mul(x1, s11))
            col0, col1 = fma(y0, s00, mul(y1, s10)), fma(y0, s01, mul(y1, s11))
            grad_image[tap], grad_image[tap + 1] = totals(
                sub(mul(iy1, row1), mul(iy0, row0)), sub(mul(ix1, col1), mul(ix0, col0))
            )
        if grad_kernel is not None:
            s00, s01, s10, s11 = sums[1]
            low, high = SCOPE_LOW * size + tap, SCOPE_HIGH * size + tap
            y0, y1, x0, x1 = (
                splat(lanes, fields[low]),
                splat(lanes, fields[high]),
                splat(lanes, fields[low + 1]),
                splat(lanes, fields[high + 1]),
            )
            gy, gx = totals(fma(x0, sub(s10, s00), mul(x1, sub(s11, s01))), fma(y0, sub(s01, s00), mul(y1, sub(s11, s10))))
            inside = SCOPE_INSIDE * size + tap
            grad_kernel[tap] = gy if projected or fields[inside] else f32(0)
            grad_kernel[tap + 1] = gx if projected or fields[inside + 1] else f32(0)


@worker
def project_row(row, sizes, kernel_offset, constants, grad_kernel):
    """Zero the gradients of row `row` of the N*Ho where the coordinate is outside the scope and descent leads no way back."""
    n, oy = divmod(row, sizes.out_height)
    offset = pointer(kernel_offset.address, n * kernel_offset.image + oy * kernel_offset.row)
    grad = pointer(grad_kernel, row * sizes.out_width * sizes.offsets)
    for ox in range(sizes.out_width):
        for i in range(sizes.offsets):
            u = offset[ox * kernel_offset.column + i * kernel_offset.channel] + constants[i]
            g = grad[ox * sizes.offsets + i]
            if (u < 0 and g >= 0) or (u > constants[sizes.padded + i] and g <= 0):
                grad[ox * sizes.offsets + i] = f32(0)


@worker
def backward_task(
    task, sizes, split, projected, x, weight, kernel_offset, image_offset, constants,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    """The images of one group, the channels of one block."""
    group, block = divmod(task, split.blocks)
    channels = sizes.channels
    c0 = block * split.block
    c1 = min(c0 + split.block, channels)
    taps, fields = scratch(sizes)
    constants = pointer(constants, 0)
    grad_weights = pointer(grad_weight, group * sizes.entries * channels)
    for entry in range(sizes.entries):
        clear(pointer(grad_weights, entry * channels + c0), c1 - c0)

    for n in range(group * sizes.images // split.groups, (group + 1) * sizes.images // split.groups):
        start = n * sizes.height * sizes.width * channels
        image, grad_pixels = pointer(x, start), pointer(grad_x, start)
        weights = pointer(weight, (n if sizes.kernels > 1 else 0) * sizes.entries * channels)
        cleared = 0
        for oy in range(sizes.out_height):
            if grad_x is not None:
                # Rows are cleared just before they are first added to, so that they are still in the cache then.
                last = sizes.height
                if image_offset is None and oy + 1 < sizes.out_height:
                    reach = oy * sizes.stride_y - sizes.padding_y + (sizes.kernel_y - 1) * sizes.dilation_y + 1
                    last = max(cleared, min(reach, sizes.height))
                for pixel in range(cleared * sizes.width, last * sizes.width):
                    clear(pointer(grad_pixels, pixel * channels + c0), c1 - c0)
                cleared = last
            kernel_row, kernel_column = offset_row(kernel_offset, n, oy, sizes, fields, 0)
            image_row, image_column = offset_row(image_offset, n, oy, sizes, fields, 1)
            for ox in range(sizes.out_width):
                kernel_here, image_here = pointer(kernel_row, ox * kernel_column), pointer(image_row, ox * image_column)
                count, _ = locate(oy, ox, sizes, kernel_here, image_here, constants, fields, taps)
                position = (n * sizes.out_height + oy) * sizes.out_width + ox
                at = (block * sizes.images * sizes.out_height * sizes.out_width + position) * sizes.offsets
                backward_position(
                    sizes, c0, c1, projected, pointer(grad, position * channels), image, weights, grad_pixels, grad_weights,
                    pointer(grad_kernel, at), pointer(grad_image, at), count, fields, taps,
                )  # fmt: skip


@driver
def backward_serial(
    sizes, split, projected, x, weight, kernel_offset, image_offset, constants,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    for task in range(split.groups * split.blocks):
        backward_task(
            task, sizes, split, projected, x, weight, kernel_offset, image_offset, constants,
            grad, grad_x, grad_weight, grad_kernel, grad_image,
        )  # fmt: skip


@parallel_driver
def backward_parallel(
    sizes, split, projected, x, weight, kernel_offset, image_offset, constants,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    for task in prange(split.groups * split.blocks):
        backward_task(
            np.int64(task), sizes, split, projected, x, weight, kernel_offset, image_offset, constants,
            grad, grad_x, grad_weight, grad_kernel, grad_image,
        )  # fmt: skip
