"""CPU kernels of the operator, compiled by numba for the machine they run on.

Tensors come as addresses of float32 numbers, channels last: x and grad_x [N, H, W, C], out and grad
[N, Ho, Wo, C], gradients of offsets [*, N, Ho, Wo, 2*Kh*Kw]. The weight has T = Sh*Sw entries of
the scope with kernel offsets, and T = Kh*Kw taps without. It comes as PyTorch has it, [*, C, T],
and is turned into `entries`, [*, T, C]; the backward makes its gradient in parts, [groups, T, C],
and turns their sum back. Offsets come in any layout. An argument that is None is compiled out, so
that local DK, DCN, both together and global DK are one source.

A position is done in two steps. `locate` lists the taps that touch the image, with the coordinates
and bilinear shares of each. Then the channels stream through that list, vector by vector.
"""

from typing import NamedTuple  # noqa: I001  (the constants below fill a screen if sorted)

import numpy as np
from llvmlite.binding import get_host_cpu_features
from numba import prange

from dkcls.ops.deform_kernel.cpu.locate import (
    CELL, COLUMNS, DOWN, GRID, IMAGE_FIRST_INSIDE, IMAGE_HIGH, IMAGE_LOW, IMAGE_SECOND_INSIDE,
    LAST, PIXEL, RIGHT, SCOPE_HIGH, SCOPE_INSIDE, SCOPE_LOW, TAP,
    driver, ends, f32, inlined, locate, offset_row, parallel_driver, scope_steps, scratch, shares,
    worker,
)  # fmt: skip
from dkcls.ops.deform_kernel.cpu.vector import (
    add,
    every,
    fma,
    leading,
    load,
    mul,
    pointer,
    splat,
    store,
    sub,
    totals,
)

# Channels that the forward takes at once. More channels mean fewer looks at a tap, and AVX-512 has
# registers for twice as many.
WIDE, MIDDLE = (64, 32) if get_host_cpu_features().get("avx512vl") else (32, 16)


class Sizes(NamedTuple):
    """Sizes and settings of a call, as numbers."""

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
    padded: int  # the same in whole vectors of 8


class Offsets(NamedTuple):
    """Offsets [N, 2*Kh*Kw, Ho, Wo], as an address and four strides in elements."""

    address: int
    image: int
    channel: int
    row: int
    column: int


class Split(NamedTuple):
    """Split of the backward into tasks: groups of images times blocks of channels.

    The weight gradients of the groups and the offset gradients of the blocks are summed afterwards.
    The split follows from shapes alone, so that the result does not depend on the number of
    threads.
    """

    groups: int
    blocks: int
    block: int  # channels in a block


@inlined
def corners(lanes, data, i, down, right):
    return (
        load(lanes, data, i),
        load(lanes, data, i + right),
        load(lanes, data, i + down),
        load(lanes, data, i + down + right),
    )


@inlined
def weighted(parts, values):
    return fma(
        parts[3],
        values[3],
        fma(parts[2], values[2], fma(parts[1], values[1], mul(parts[0], values[0]))),
    )


@inlined
def forward_chunk(
    lanes, c, sizes, x, weight, kernel_offset, image_offset, out, count, nan, fields, taps
):
    """Compute a few channels of one position: the sum over its taps."""
    size = sizes.padded
    scope_down, scope_right = scope_steps(sizes)
    result = splat(lanes, nan)
    for k in range(count):
        tap = pointer(taps, k * COLUMNS)
        i, pixel, cell = tap[TAP], tap[PIXEL] + c, tap[CELL] + c
        if image_offset is None:
            value = load(lanes, x, pixel)
        else:
            parts = shares(lanes, fields, IMAGE_LOW * size + i, IMAGE_HIGH * size + i)
            value = weighted(parts, corners(lanes, x, pixel, tap[DOWN], tap[RIGHT]))
        if kernel_offset is None:
            factor = load(lanes, weight, cell)
        else:
            parts = shares(lanes, fields, SCOPE_LOW * size + i, SCOPE_HIGH * size + i)
            factor = weighted(parts, corners(lanes, weight, cell, scope_down, scope_right))
        result = fma(value, factor, result)
    store(lanes, out, c, result)


@worker
def forward_row(row, sizes, constants, x, weight, kernel_offset, image_offset, out):
    """Compute row `row` of the N*Ho output rows."""
    n, oy = divmod(row, sizes.out_height)
    channels = sizes.channels
    own_taps, own_fields = scratch(sizes)
    constants = pointer(constants, 0)
    image = pointer(x, n * sizes.height * sizes.width * channels)
    weights = pointer(weight, (n if sizes.kernels > 1 else 0) * sizes.entries * channels)
    kernel_row, kernel_column = offset_row(kernel_offset, n, oy, sizes, own_fields, 0)
    image_row, image_column = offset_row(image_offset, n, oy, sizes, own_fields, 1)
    for ox in range(sizes.out_width):
        # Inside the loop, because numba frees an array after its last use.
        taps, fields = pointer(own_taps, 0), pointer(own_fields, 0)
        offset_k, offset_i = (
            pointer(kernel_row, ox * kernel_column),
            pointer(image_row, ox * image_column),
        )
        count, nan = locate(oy, ox, sizes, offset_k, offset_i, constants, fields, taps)
        result = pointer(out, (row * sizes.out_width + ox) * channels)
        c = 0
        while c + WIDE <= channels:
            forward_chunk(
                every(WIDE),
                c,
                sizes,
                image,
                weights,
                offset_k,
                offset_i,
                result,
                count,
                nan,
                fields,
                taps,
            )
            c += WIDE
        while c + MIDDLE <= channels:
            forward_chunk(
                every(MIDDLE),
                c,
                sizes,
                image,
                weights,
                offset_k,
                offset_i,
                result,
                count,
                nan,
                fields,
                taps,
            )
            c += MIDDLE
        while c + 8 <= channels:
            forward_chunk(
                every(8),
                c,
                sizes,
                image,
                weights,
                offset_k,
                offset_i,
                result,
                count,
                nan,
                fields,
                taps,
            )
            c += 8
        if c < channels:
            rest = leading(8, channels - c)
            forward_chunk(
                rest, c, sizes, image, weights, offset_k, offset_i, result, count, nan, fields, taps
            )


@worker
def turn(sizes, weight, entries):
    """Turn the weight from [*, C, T] to [*, T, C]."""
    channels, count = sizes.channels, sizes.entries
    for kernel in range(sizes.kernels):
        source, target = (
            pointer(weight, kernel * channels * count),
            pointer(entries, kernel * channels * count),
        )
        for c in range(channels):
            for entry in range(count):
                target[entry * channels + c] = source[c * count + entry]


@driver
def forward_serial(sizes, constants, x, weight, kernel_offset, image_offset, entries, out):
    turn(sizes, weight, entries)
    for row in range(sizes.images * sizes.out_height):
        forward_row(row, sizes, constants, x, entries, kernel_offset, image_offset, out)


@parallel_driver
def forward_parallel(sizes, constants, x, weight, kernel_offset, image_offset, entries, out):
    turn(sizes, weight, entries)
    for row in prange(sizes.images * sizes.out_height):
        forward_row(np.int64(row), sizes, constants, x, entries, kernel_offset, image_offset, out)


@inlined
def add_to(lanes, data, i, share, value):
    store(lanes, data, i, fma(share, value, load(lanes, data, i)))


@inlined
def add_to_corners(lanes, data, cell, c, value):
    i, down, right, parts = cell
    add_to(lanes, data, i + c, parts[0], value)
    add_to(lanes, data, i + c + right, parts[1], value)
    add_to(lanes, data, i + c + down, parts[2], value)
    add_to(lanes, data, i + c + down + right, parts[3], value)


@inlined
def add_products(sums, value, values):
    return (
        fma(value, values[0], sums[0]),
        fma(value, values[1], sums[1]),
        fma(value, values[2], sums[2]),
        fma(value, values[3], sums[3]),
    )


@inlined
def scatter(lanes, c, grad_x, image, grad_value, values, sums):
    """Add the gradient of what a tap reads from the image to its pixels.

    Returns `sums` plus the gradient of the pixels' shares.
    """
    if grad_x is not None:
        add_to_corners(lanes, grad_x, image, c, grad_value)
    return add_products(sums, grad_value, values)


@inlined
def scatter_chunk(lanes, c, x, grad_x, image, grad_values, sums):
    values = corners(lanes, x, image[0] + c, image[1], image[2])
    return scatter(lanes, c, grad_x, image, load(lanes, grad_values, c), values, sums)


@inlined
def backward_chunk(
    lanes,
    c,
    grad,
    x,
    weight,
    grad_x,
    grad_weight,
    grad_kernel,
    grad_image,
    scope,
    image,
    grad_values,
    sums,
):
    """Add a few channels of one tap at one position to the gradients of x and of the weights.

    `scope` and `image` are a cell each: index, steps down and right, four shares. Returns `sums`
    plus the gradients of the shares of scope and image. With both kinds of offsets, the gradient
    for the image is left in grad_values, because one loop would have too many streams of data.
    """
    g = load(lanes, grad, c)
    if grad_kernel is None:
        factor = load(lanes, weight, scope[0] + c)
        factors = factor, factor, factor, factor
    else:
        factors = corners(lanes, weight, scope[0] + c, scope[1], scope[2])
        factor = weighted(scope[3], factors)
    if grad_image is None:
        value = load(lanes, x, image[0] + c)
        values = value, value, value, value
    else:
        values = corners(lanes, x, image[0] + c, image[1], image[2])
        value = weighted(image[3], values)

    scope_sums, image_sums = sums
    if grad_kernel is None:
        add_to(lanes, grad_weight, scope[0] + c, g, value)
    else:
        grad_factor = mul(g, value)
        scope_sums = add_products(scope_sums, grad_factor, factors)
        add_to_corners(lanes, grad_weight, scope, c, grad_factor)
    if grad_image is None:
        if grad_x is not None:
            add_to(lanes, grad_x, image[0] + c, g, factor)
    else:
        grad_value = mul(g, factor)
        if grad_kernel is None:
            image_sums = scatter(lanes, c, grad_x, image, grad_value, values, image_sums)
        else:
            store(lanes, grad_values, c, grad_value)
    return scope_sums, image_sums


@inlined
def zeros(lanes):
    zero = splat(lanes, f32(0))
    return zero, zero, zero, zero


@inlined
def clear(data, count):
    for i in range(count):
        data[i] = f32(0)


@inlined
def backward_position(
    sizes, c0, c1, projected, grad, x, weight, grad_x, grad_weight, grad_kernel, grad_image,
    count, fields, taps, grad_values,
):  # fmt: skip
    """Add all taps of one position, for channels c0 to c1, to every gradient.

    grad, grad_kernel and grad_image start at the position.
    """
    lanes, size = every(8), sizes.padded
    scope_down, scope_right = scope_steps(sizes)
    if grad_kernel is not None:
        clear(grad_kernel, sizes.offsets)
    if grad_image is not None:
        clear(grad_image, sizes.offsets)
    for k in range(count):
        tap = pointer(taps, k * COLUMNS)
        i = tap[TAP]
        scope = (
            tap[CELL],
            scope_down,
            scope_right,
            shares(lanes, fields, SCOPE_LOW * size + i, SCOPE_HIGH * size + i),
        )
        image = (
            tap[PIXEL],
            tap[DOWN],
            tap[RIGHT],
            shares(lanes, fields, IMAGE_LOW * size + i, IMAGE_HIGH * size + i),
        )
        sums = zeros(lanes), zeros(lanes)
        c = c0
        while c + 8 <= c1:
            sums = backward_chunk(
                lanes,
                c,
                grad,
                x,
                weight,
                grad_x,
                grad_weight,
                grad_kernel,
                grad_image,
                scope,
                image,
                grad_values,
                sums,
            )
            c += 8
        if c < c1:
            rest = leading(8, c1 - c)
            sums = backward_chunk(
                rest,
                c,
                grad,
                x,
                weight,
                grad_x,
                grad_weight,
                grad_kernel,
                grad_image,
                scope,
                image,
                grad_values,
                sums,
            )
        scope_sums, image_sums = sums
        if grad_kernel is not None:  # noqa: SIM102  (numba leaves out a branch on None alone)
            if grad_image is not None:
                c = c0
                while c + 8 <= c1:
                    image_sums = scatter_chunk(lanes, c, x, grad_x, image, grad_values, image_sums)
                    c += 8
                if c < c1:
                    image_sums = scatter_chunk(
                        leading(8, c1 - c), c, x, grad_x, image, grad_values, image_sums
                    )

        if grad_kernel is not None:
            s00, s01, s10, s11 = scope_sums
            y0, y1, x0, x1 = ends(lanes, fields, SCOPE_LOW * size + i, SCOPE_HIGH * size + i)
            along_y = fma(x0, sub(s10, s00), mul(x1, sub(s11, s01)))
            along_x = fma(y0, sub(s01, s00), mul(y1, sub(s11, s10)))
            gy, gx = totals(along_y, along_x)
            inside = pointer(fields, SCOPE_INSIDE * size + i)
            grad_kernel[i] = gy if projected or inside[0] else f32(0)
            grad_kernel[i + 1] = gx if projected or inside[1] else f32(0)
        if grad_image is not None:
            s00, s01, s10, s11 = image_sums
            y0, y1, x0, x1 = ends(lanes, fields, IMAGE_LOW * size + i, IMAGE_HIGH * size + i)
            in_y0, in_y1, in_x0, in_x1 = ends(
                lanes, fields, IMAGE_FIRST_INSIDE * size + i, IMAGE_SECOND_INSIDE * size + i
            )
            along_y = sub(
                mul(in_y1, fma(x0, s10, mul(x1, s11))), mul(in_y0, fma(x0, s00, mul(x1, s01)))
            )
            along_x = sub(
                mul(in_x1, fma(y0, s01, mul(y1, s11))), mul(in_x0, fma(y0, s00, mul(y1, s10)))
            )
            grad_image[i], grad_image[i + 1] = totals(along_y, along_x)


@worker
def project_row(row, sizes, constants, kernel_offset, grad_kernel):
    """Zero a gradient outside the scope unless descent leads back inside (clip="projected").

    `row` is one of the N*Ho rows. The gradient must be the sum over all channels, since the sign
    of that sum decides.
    """
    n, oy = divmod(row, sizes.out_height)
    offset = pointer(kernel_offset.address, n * kernel_offset.image + oy * kernel_offset.row)
    grid, last = pointer(constants, GRID * sizes.padded), pointer(constants, LAST * sizes.padded)
    for ox in range(sizes.out_width):
        grad = pointer(grad_kernel, (row * sizes.out_width + ox) * sizes.offsets)
        for i in range(sizes.offsets):
            u = offset[ox * kernel_offset.column + i * kernel_offset.channel] + grid[i]
            if (u < 0 and grad[i] >= 0) or (u > last[i] and grad[i] <= 0):
                grad[i] = f32(0)


@worker
def backward_task(
    task, sizes, split, projected, constants, x, weight, kernel_offset, image_offset,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    """Compute the backward for the images of one group and the channels of one block."""
    group, block = divmod(task, split.blocks)
    channels = sizes.channels
    c0 = block * split.block
    c1 = min(c0 + split.block, channels)
    own_taps, own_fields = scratch(sizes)
    own_values = np.empty(channels, np.float32)
    grad_weights = pointer(grad_weight, group * sizes.entries * channels)
    for entry in range(sizes.entries):
        clear(pointer(grad_weights, entry * channels + c0), c1 - c0)

    for n in range(
        group * sizes.images // split.groups, (group + 1) * sizes.images // split.groups
    ):
        first = n * sizes.height * sizes.width * channels
        image, grad_pixels = pointer(x, first), pointer(grad_x, first)
        weights = pointer(weight, (n if sizes.kernels > 1 else 0) * sizes.entries * channels)
        cleared = 0
        for oy in range(sizes.out_height):
            if grad_x is not None:
                # Rows are cleared just before they are first added to, to be in the cache then.
                reach = sizes.height
                if image_offset is None and oy + 1 < sizes.out_height:
                    below = (
                        oy * sizes.stride_y
                        - sizes.padding_y
                        + (sizes.kernel_y - 1) * sizes.dilation_y
                        + 1
                    )
                    reach = max(cleared, min(below, sizes.height))
                for pixel in range(cleared * sizes.width, reach * sizes.width):
                    clear(pointer(grad_pixels, pixel * channels + c0), c1 - c0)
                cleared = reach
            kernel_row, kernel_column = offset_row(kernel_offset, n, oy, sizes, own_fields, 0)
            image_row, image_column = offset_row(image_offset, n, oy, sizes, own_fields, 1)
            for ox in range(sizes.out_width):
                taps, fields = pointer(own_taps, 0), pointer(own_fields, 0)
                offset_k, offset_i = (
                    pointer(kernel_row, ox * kernel_column),
                    pointer(image_row, ox * image_column),
                )
                count, _ = locate(
                    oy, ox, sizes, offset_k, offset_i, pointer(constants, 0), fields, taps
                )
                position = (n * sizes.out_height + oy) * sizes.out_width + ox
                at = (
                    block * sizes.images * sizes.out_height * sizes.out_width + position
                ) * sizes.offsets
                backward_position(
                    sizes, c0, c1, projected, pointer(grad, position * channels), image, weights,
                    grad_pixels, grad_weights, pointer(grad_kernel, at), pointer(grad_image, at),
                    count, fields, taps, pointer(own_values, 0),
                )  # fmt: skip
            if kernel_offset is not None:  # noqa: SIM102  (numba leaves out a branch on None alone)
                if projected and split.blocks == 1:
                    project_row(
                        n * sizes.out_height + oy, sizes, constants, kernel_offset, grad_kernel
                    )


COLLECTED = 64  # channels


@worker
def collect(task, sizes, split, parts, grad_weight):
    """Sum the parts of the weight's gradient for some channels, in order.

    The sum is turned from [T, C] to [C, T].
    """
    channels, entries = sizes.channels, sizes.entries
    kernel, block = divmod(task, (channels + COLLECTED - 1) // COLLECTED)
    copies = split.groups // sizes.kernels
    first = pointer(parts, kernel * copies * entries * channels)
    result = pointer(grad_weight, kernel * channels * entries)
    end = min((block + 1) * COLLECTED, channels)
    for entry in range(entries):
        for c in range(block * COLLECTED, end, 8):
            lanes, at = leading(8, end - c), entry * channels + c
            total = load(lanes, first, at)
            for copy in range(1, copies):
                total = add(total, load(lanes, first, copy * entries * channels + at))
            store(lanes, first, at, total)
        for c in range(block * COLLECTED, end):
            result[c * entries + entry] = first[entry * channels + c]


@driver
def backward_serial(
    sizes, split, projected, constants, x, weight, kernel_offset, image_offset, entries,
    grad, grad_x, parts, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    turn(sizes, weight, entries)
    for task in range(split.groups * split.blocks):
        backward_task(
            task, sizes, split, projected, constants, x, entries, kernel_offset, image_offset,
            grad, grad_x, parts, grad_kernel, grad_image,
        )  # fmt: skip
    for task in range(sizes.kernels * ((sizes.channels + COLLECTED - 1) // COLLECTED)):
        collect(task, sizes, split, parts, grad_weight)


@parallel_driver
def backward_parallel(
    sizes, split, projected, constants, x, weight, kernel_offset, image_offset, entries,
    grad, grad_x, parts, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    turn(sizes, weight, entries)
    for task in prange(split.groups * split.blocks):
        backward_task(
            np.int64(task), sizes, split, projected, constants, x, entries,
            kernel_offset, image_offset, grad, grad_x, parts, grad_kernel, grad_image,
        )  # fmt: skip
    for task in prange(sizes.kernels * ((sizes.channels + COLLECTED - 1) // COLLECTED)):
        collect(np.int64(task), sizes, split, parts, grad_weight)


@driver
def project(sizes, constants, kernel_offset, grad_kernel):
    """Project a gradient that is complete only after the blocks have been summed."""
    for row in range(sizes.images * sizes.out_height):
        project_row(row, sizes, constants, kernel_offset, grad_kernel)


CHUNK = 4096


@worker
def add_up(chunk, data, copies, size):
    """Add the other `copies` of `size` numbers to the first one, in order, in one chunk of them."""
    numbers = pointer(data, 0)
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size), 8):
        lanes = leading(8, size - i)
        result = load(lanes, numbers, i)
        for copy in range(1, copies):
            result = add(result, load(lanes, numbers, copy * size + i))
        store(lanes, numbers, i, result)


@driver
def add_up_serial(data, copies, size):
    for chunk in range((size + CHUNK - 1) // CHUNK):
        add_up(chunk, data, copies, size)


@parallel_driver
def add_up_parallel(data, copies, size):
    for chunk in prange((size + CHUNK - 1) // CHUNK):
        add_up(np.int64(chunk), data, copies, size)
