"""The operator's CPU kernels, compiled by numba for the machine they run on.

Tensors come as addresses of float32 numbers, channels last: x and grad_x [N, H, W, C], out and grad [N, Ho, Wo, C], weight
and grad_weight [*, T, C]. With kernel offsets T = Sh*Sw entries of the scope, without T = Kh*Kw taps; offsets come in any
layout. Whatever is None is compiled out: local DK, DCN, both together and global DK are one source.

An output row is done in two steps. `locate_row` lists, for each position, the taps that touch the image: where they read,
and with which bilinear shares. Then the channels stream through that list, and no scalar arithmetic is left in the way.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from dkcls.ops.deform_kernel.numba_vector import every, fma, leading, load, mul, pointer, splat, store, sub, totals

f32 = np.float32

# NaN and infinity keep their meaning ("nnan" and "ninf" are missing), and sums their order ("reassoc" is).
_OPTIONS = {"fastmath": {"contract", "nsz", "arcp"}, "error_model": "numpy", "boundscheck": False}
kernel = njit(cache=True, no_cfunc_wrapper=True, **_OPTIONS)
inlined = njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)
parallel_driver = njit(cache=True, parallel=True, **_OPTIONS)

# Columns of the tables that locate_row fills, one line per tap that touches the image.
TAP, PIXEL, DOWN, RIGHT, CELL = range(5)  # in numbers: PIXEL within the image, CELL within the weights
SCOPE, KEEP, IMAGE, INSIDE = 0, 4, 6, 10


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
    entries: int  # T, numbers per channel of a kernel

    @property
    def rows(self):  # for Python only
        return self.images * self.out_height


class Offsets(NamedTuple):
    """Offsets [N, 2*Kh*Kw, Ho, Wo], or their gradient: an address and four strides."""

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
def clamp(number, low, high):
    """Within [low, high], NaN stays NaN."""
    number = low if number < low else number
    return high if number > high else number


@inlined
def image_axis(place, offset, size):
    """Where a tap reads along one axis: clamped coordinate, its cell, and whether the cell's two ends are inside (1 or 0)."""
    u = clamp(f32(place) + offset, f32(-2), f32(size + 1))
    cell = int(np.floor(u if u == u else f32(0)))
    return u, cell, f32(0 <= cell < size), f32(0 <= cell + 1 < size)


@inlined
def scope_axis(u, size):
    """Coordinate in the scope -> its cell, the fraction within, and whether it is inside (1 or 0)."""
    inside = clamp(u, f32(0), f32(size - 1))
    cell = max(0, min(int(inside if inside > 0 else f32(0)), size - 2))  # the condition turns a NaN to 0
    return cell, inside - f32(cell), f32(u == inside)


@inlined
def put(table, line, column, y0, y1, x0, x1):
    table[line, column] = y0
    table[line, column + 1] = y1
    table[line, column + 2] = x0
    table[line, column + 3] = x1


@kernel
def locate_row(n, oy, sizes, kernel_offset, image_offset, grid_y, grid_x, first, nan, place, hats):
    """List the taps of an output row that touch the image; position ox has lines first[ox] to first[ox + 1].

    A NaN offset of a tap that is not listed must show all the same: nan[ox] holds it, and 0 otherwise.
    """
    one, zero = f32(1), f32(0)
    channels, height, width = sizes.channels, sizes.height, sizes.width
    if kernel_offset is not None:
        kernel_data = pointer(kernel_offset.address, n * kernel_offset.image + oy * kernel_offset.row)
    if image_offset is not None:
        image_data = pointer(image_offset.address, n * image_offset.image + oy * image_offset.row)
    line = 0
    for ox in range(sizes.out_width):
        first[ox] = line
        nan[ox] = zero
        for ky in range(sizes.kernel_y):
            y = oy * sizes.stride_y - sizes.padding_y + ky * sizes.dilation_y
            for kx in range(sizes.kernel_x):
                x = ox * sizes.stride_x - sizes.padding_x + kx * sizes.dilation_x
                tap = ky * sizes.kernel_x + kx
                place[line, TAP] = tap
                if image_offset is None:
                    inside = 0 <= y < height and 0 <= x < width
                    place[line, PIXEL] = (y * width + x) * channels
                else:
                    i = 2 * tap * image_offset.channel + ox * image_offset.column
                    uy, iy, in_y0, in_y1 = image_axis(y, image_data[i], height)
                    ux, ix, in_x0, in_x1 = image_axis(x, image_data[i + image_offset.channel], width)
                    inside = -1 <= iy < height and -1 <= ix < width
                    # A corner outside is read as its neighbour inside, times 0: no branch where the channels are.
                    y0, y1, x0, x1 = max(iy, 0), min(iy + 1, height - 1), max(ix, 0), min(ix + 1, width - 1)
                    place[line, PIXEL] = (y0 * width + x0) * channels
                    place[line, DOWN] = (y1 - y0) * width * channels
                    place[line, RIGHT] = (x1 - x0) * channels
                    gy, gx = uy - f32(iy), ux - f32(ix)
                    put(hats, line, IMAGE, (one - gy) * in_y0, gy * in_y1, (one - gx) * in_x0, gx * in_x1)
                    put(hats, line, INSIDE, in_y0, in_y1, in_x0, in_x1)
                    if not inside:
                        nan[ox] += zero * uy + zero * ux
                if kernel_offset is None:
                    place[line, CELL] = tap * channels
                else:
                    i = 2 * tap * kernel_offset.channel + ox * kernel_offset.column
                    cell_y, fy, keep_y = scope_axis(kernel_data[i] + grid_y[ky], sizes.scope_y)
                    cell_x, fx, keep_x = scope_axis(kernel_data[i + kernel_offset.channel] + grid_x[kx], sizes.scope_x)
                    place[line, CELL] = (cell_y * sizes.scope_x + cell_x) * channels
                    put(hats, line, SCOPE, one - fy, fy, one - fx, fx)
                    hats[line, KEEP] = keep_y
                    hats[line, KEEP + 1] = keep_x
                    if not inside:
                        nan[ox] += zero * fy + zero * fx
                line += inside
    first[sizes.out_width] = line


@inlined
def shares1(lanes, hats, line, column):
    y0, y1, x0, x1 = hats[line, column], hats[line, column + 1], hats[line, column + 2], hats[line, column + 3]
    return splat(lanes, y0), splat(lanes, y1), splat(lanes, x0), splat(lanes, x1)


@inlined
def shares(lanes, hats, line, column):
    """How much each corner of a cell counts: 00, 01, 10, 11."""
    y0, y1, x0, x1 = hats[line, column], hats[line, column + 1], hats[line, column + 2], hats[line, column + 3]
    return splat(lanes, y0 * x0), splat(lanes, y0 * x1), splat(lanes, y1 * x0), splat(lanes, y1 * x1)


@inlined
def corners(lanes, data, i, down, right):
    return load(lanes, data, i), load(lanes, data, i + right), load(lanes, data, i + down), load(lanes, data, i + down + right)


@inlined
def weighted(parts, values):
    return fma(parts[3], values[3], fma(parts[2], values[2], fma(parts[1], values[1], mul(parts[0], values[0]))))


@inlined
def scope_steps(sizes):
    """From a stored weight to the one below and to the one on the right, which for a scope of 1 is itself."""
    down = sizes.scope_x * sizes.channels if sizes.scope_y > 1 else 0
    return down, sizes.channels if sizes.scope_x > 1 else 0


@inlined
def forward_chunk(lanes, c, sizes, x, weight, kernel_offset, image_offset, out, start, stop, nan, place, hats):
    """A few channels of one position: the sum over its taps."""
    scope_down, scope_right = scope_steps(sizes)
    result = splat(lanes, nan)
    for line in range(start, stop):
        pixel, cell = place[line, PIXEL] + c, place[line, CELL] + c
        if image_offset is None:
            value = load(lanes, x, pixel)
        else:
            values = corners(lanes, x, pixel, place[line, DOWN], place[line, RIGHT])
            value = weighted(shares(lanes, hats, line, IMAGE), values)
        if kernel_offset is None:
            factor = load(lanes, weight, cell)
        else:
            factor = weighted(shares(lanes, hats, line, SCOPE), corners(lanes, weight, cell, scope_down, scope_right))
        result = fma(value, factor, result)
    store(lanes, out, c, result)


@inlined
def tables(sizes):
    lines = sizes.out_width * sizes.kernel_y * sizes.kernel_x + 1  # the last line may be written and not counted
    first, nan = np.empty(sizes.out_width + 1, np.int64), np.empty(sizes.out_width, np.float32)
    return first, nan, np.empty((lines, 5), np.int64), np.empty((lines, 14), np.float32)


@kernel
def forward_row(row, sizes, x, weight, kernel_offset, image_offset, grid_y, grid_x, out):
    """Row `row` of the N*Ho output rows."""
    n, oy = divmod(row, sizes.out_height)
    channels = sizes.channels
    first, nan, place, hats = tables(sizes)
    locate_row(n, oy, sizes, kernel_offset, image_offset, grid_y, grid_x, first, nan, place, hats)
    image = pointer(x, n * sizes.height * sizes.width * channels)
    weights = pointer(weight, (n if sizes.kernels > 1 else 0) * sizes.entries * channels)
    for ox in range(sizes.out_width):
        start, stop = first[ox], first[ox + 1]
        result = pointer(out, (row * sizes.out_width + ox) * channels)
        c = 0
        while c + 32 <= channels:
            forward_chunk(
                every(32), c, sizes, image, weights, kernel_offset, image_offset, result, start, stop, nan[ox], place, hats
            )
            c += 32
        while c + 8 <= channels:
            forward_chunk(
                every(8), c, sizes, image, weights, kernel_offset, image_offset, result, start, stop, nan[ox], place, hats
            )
            c += 8
        if c < channels:
            rest = leading(8, channels - c)
            forward_chunk(rest, c, sizes, image, weights, kernel_offset, image_offset, result, start, stop, nan[ox], place, hats)


@kernel
def forward_serial(sizes, x, weight, kernel_offset, image_offset, grid_y, grid_x, out):
    for row in range(sizes.images * sizes.out_height):
        forward_row(row, sizes, x, weight, kernel_offset, image_offset, grid_y, grid_x, out)


@parallel_driver
def forward_parallel(sizes, x, weight, kernel_offset, image_offset, grid_y, grid_x, out):
    for row in prange(sizes.images * sizes.out_height):
        forward_row(np.int64(row), sizes, x, weight, kernel_offset, image_offset, grid_y, grid_x, out)


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


@kernel
def backward_row(sizes, projected, c0, c1, grad, x, weight, grad_x, grad_weight, grad_image, grad_kernel, first, place, hats):
    """One output row, channels c0 to c1; grad and the offsets' gradients start at the row, x and grad_x at the image."""
    scope_down, scope_right = scope_steps(sizes)
    lanes, offsets = every(8), 2 * sizes.kernel_y * sizes.kernel_x
    if grad_kernel is not None:
        clear(grad_kernel, sizes.out_width * offsets)
    if grad_image is not None:
        clear(grad_image, sizes.out_width * offsets)
    for ox in range(sizes.out_width):
        g = pointer(grad, ox * sizes.channels)
        for line in range(first[ox], first[ox + 1]):
            image = place[line, PIXEL], place[line, DOWN], place[line, RIGHT], shares(lanes, hats, line, IMAGE)
            scope = place[line, CELL], scope_down, scope_right, shares(lanes, hats, line, SCOPE)
            sums = zeros(lanes), zeros(lanes)
            c = c0
            while c + 8 <= c1:
                sums = backward_chunk(
                    lanes, c, g, x, weight, grad_x, grad_weight, grad_image, grad_kernel, image, scope, sums
                )
                c += 8
            if c < c1:
                sums = backward_chunk(
                    leading(8, c1 - c), c, g, x, weight, grad_x, grad_weight, grad_image, grad_kernel, image, scope, sums
                )

            i = ox * offsets + 2 * place[line, TAP]
            if grad_image is not None:
                s00, s01, s10, s11 = sums[0]
                y0, y1, x0, x1 = shares1(lanes, hats, line, IMAGE)
                in_y0, in_y1, in_x0, in_x1 = shares1(lanes, hats, line, INSIDE)
                row0, row1 = fma(x0, s00, mul(x1, s01)), fma(x0, s10, mul(x1, s11))
                col0, col1 = fma(y0, s00, mul(y1, s10)), fma(y0, s01, mul(y1, s11))
                grad_image[i], grad_image[i + 1] = totals(
                    sub(mul(in_y1, row1), mul(in_y0, row0)), sub(mul(in_x1, col1), mul(in_x0, col0))
                )
            if grad_kernel is not None:
                s00, s01, s10, s11 = sums[1]
                y0, y1, x0, x1 = shares1(lanes, hats, line, SCOPE)
                gy, gx = totals(
                    fma(x0, sub(s10, s00), mul(x1, sub(s11, s01))), fma(y0, sub(s01, s00), mul(y1, sub(s11, s10)))
                )
                grad_kernel[i] = gy if projected or hats[line, KEEP] else f32(0)
                grad_kernel[i + 1] = gx if projected or hats[line, KEEP + 1] else f32(0)


@inlined
def clip(gradient, u, size, projected):
    """Stop a gradient at a coordinate outside the scope, or if projected, unless descending it leads back inside."""
    if u < 0 and (not projected or gradient >= 0):
        return f32(0)
    if u > size - 1 and (not projected or gradient <= 0):
        return f32(0)
    return gradient


@kernel
def clip_row(row, sizes, kernel_offset, grid_y, grid_x, projected, grad_kernel):
    """Clip the kernel offsets' gradient [N, Ho, Wo, 2*Kh*Kw] of row `row` of the N*Ho."""
    n, oy = divmod(row, sizes.out_height)
    offset = pointer(kernel_offset.address, n * kernel_offset.image + oy * kernel_offset.row)
    grad = pointer(grad_kernel, row * sizes.out_width * 2 * sizes.kernel_y * sizes.kernel_x)
    i = 0
    for ox in range(sizes.out_width):
        j = ox * kernel_offset.column
        for ky in range(sizes.kernel_y):
            for kx in range(sizes.kernel_x):
                grad[i] = clip(grad[i], offset[j] + grid_y[ky], sizes.scope_y, projected)
                grad[i + 1] = clip(grad[i + 1], offset[j + kernel_offset.channel] + grid_x[kx], sizes.scope_x, projected)
                i += 2
                j += 2 * kernel_offset.channel


@kernel
def backward_task(
    task, sizes, split, x, weight, kernel_offset, image_offset, grid_y, grid_x, projected,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    """The images of one group, the channels of one block."""
    group, block = divmod(task, split.blocks)
    channels, offsets = sizes.channels, 2 * sizes.kernel_y * sizes.kernel_x
    c0 = block * split.block
    c1 = min(c0 + split.block, channels)
    first, nan, place, hats = tables(sizes)
    grad_weights = pointer(grad_weight, group * sizes.entries * channels)
    for entry in range(sizes.entries):
        clear(pointer(grad_weights, entry * channels + c0), c1 - c0)

    for n in range(group * sizes.images // split.groups, (group + 1) * sizes.images // split.groups):
        start = n * sizes.height * sizes.width * channels
        image, grad_pixels = pointer(x, start), pointer(grad_x, start)
        weights = pointer(weight, (n if sizes.kernels > 1 else 0) * sizes.entries * channels)
        cleared = 0
        for oy in range(sizes.out_height):
            locate_row(n, oy, sizes, kernel_offset, image_offset, grid_y, grid_x, first, nan, place, hats)
            if grad_x is not None:
                # Rows are cleared just before they are first added to, while they are about to be in the cache.
                last = sizes.height
                if image_offset is None and oy + 1 < sizes.out_height:
                    reach = oy * sizes.stride_y - sizes.padding_y + (sizes.kernel_y - 1) * sizes.dilation_y + 1
                    last = max(cleared, min(reach, sizes.height))
                for pixel in range(cleared * sizes.width, last * sizes.width):
                    clear(pointer(grad_pixels, pixel * channels + c0), c1 - c0)
                cleared = last
            row = n * sizes.out_height + oy
            g = pointer(grad, row * sizes.out_width * channels)
            at = (block * sizes.images * sizes.out_height + row) * sizes.out_width * offsets
            grad_kernels, grad_images = pointer(grad_kernel, at), pointer(grad_image, at)
            backward_row(
                sizes, projected, c0, c1, g, image, weights, grad_pixels, grad_weights, grad_images, grad_kernels, first, place, hats
            )
            if kernel_offset is not None:
                if projected and split.blocks == 1:
                    clip_row(row, sizes, kernel_offset, grid_y, grid_x, projected, grad_kernel)


CHUNK = 4096


@kernel
def add_up(chunk, data, copies, size):
    """Add the other copies of `size` numbers to the first, in order; one chunk of them."""
    numbers = pointer(data, 0)
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, size)):
        for copy in range(1, copies):
            numbers[i] += numbers[copy * size + i]


@kernel
def backward_serial(
    sizes, split, x, weight, kernel_offset, image_offset, grid_y, grid_x, projected,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    for task in range(split.groups * split.blocks):
        backward_task(
            task, sizes, split, x, weight, kernel_offset, image_offset, grid_y, grid_x, projected,
            grad, grad_x, grad_weight, grad_kernel, grad_image,
        )  # fmt: skip


@parallel_driver
def backward_parallel(
    sizes, split, x, weight, kernel_offset, image_offset, grid_y, grid_x, projected,
    grad, grad_x, grad_weight, grad_kernel, grad_image,
):  # fmt: skip
    for task in prange(split.groups * split.blocks):
        backward_task(
            np.int64(task), sizes, split, x, weight, kernel_offset, image_offset, grid_y, grid_x, projected,
            grad, grad_x, grad_weight, grad_kernel, grad_image,
        )  # fmt: skip
