"""Gather kernels: every corner of every sample is read and weighted, whatever the scope's size.

Arithmetic is in float32. Shapes, all channels_last: x [N, H, W, C], y and its gradient
[N, Ho, Wo, C], offsets [N, 2*Kh*Kw, Ho, Wo] with any strides (_n, _c, _y, _x). `weight` is the
scope [Sh*Sw, C] with a kernel_offset, else the taps [1 or N, Kh*Kw, C] (N with PER_IMAGE). An
absent offset is None. `geometry` is a Geometry of tuples, SCOPE is (Sh, Sw).

A program owns POSITIONS positions (py, px) of one image. It reads channels CHUNK at a time, 64
bytes or so, such that four threads share a position, and takes CHUNKS such chunks, so that a
position's coordinates serve CHUNKS times. `taps` is Kh*Kw again, as a run-time value: registers
spill if the loop over taps is unrolled. An image's base index has 64 bits, indices within an image
have 32.
"""

import triton
import triton.language as tl

from dkcls.ops.deform_kernel.triton.gather_sampling import (
    add_corners,
    blend,
    image_place,
    load,
    load_weight,
    pixel,
    pixels_around,
    scope_place,
    slopes,
    weights_around,
)
from dkcls.ops.triton_device import clip_grad, hat, scope_cell

# Arguments whose values must not make Triton compile a kernel again.
SIZES = [
    "taps",
    "h",
    "w",
    "ho",
    "wo",
    "tiles",
    "tiles_each",
    "all_tiles",
    *(f"{o}_{axis}" for o in "ki" for axis in "ncyx"),
]


@triton.jit
def _zeros(POSITIONS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(CHUNKS):
        zeros = zeros + (tl.zeros((POSITIONS, CHUNK), tl.float32),)
    return zeros


@triton.jit
def _add_tap(
    total, src, weight, kernel_offset, k_strides, image_offset, iy, ix, fy, fx, py, px, tap, ok,
    c0, h, w, geometry: tl.constexpr, SCOPE: tl.constexpr,
    C: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return `total` plus, for each chunk, the product of src and weight at one tap.

    src is sampled at (iy + fy, ix + fx), the weight at the offset of (py, px).
    """
    BLOCK: tl.constexpr = CHUNKS * CHUNK
    if kernel_offset is not None:
        _, _, cy, cx = scope_place(kernel_offset, k_strides, py, px, tap, ok, geometry, SCOPE)
        wy, ey = scope_cell(cy, SCOPE[0])
        wx, ex = scope_cell(cx, SCOPE[1])
    added = ()
    for j in tl.static_range(CHUNKS):
        c = c0 + j * CHUNK
        if kernel_offset is not None:
            share = blend(weights_around(weight, wy, wx, c, SCOPE, C, BLOCK), ey, ex)
        else:
            share = load_weight(weight + tap * C + c[None, :], c, C, BLOCK)
        if image_offset is not None:
            value = blend(pixels_around(src, iy, ix, ok, c, h, w, C, BLOCK), fy, fx)
        else:
            value = pixel(src, iy, ix, ok, c, h, w, C, BLOCK)
        added = added + (total[j] + value * share,)
    return added


@triton.jit(do_not_specialize=SIZES)
def map_kernel(
    src, weight, kernel_offset, image_offset, dst, taps, h, w, ho, wo, tiles,
    k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x,
    geometry: tl.constexpr, SCOPE: tl.constexpr, PER_IMAGE: tl.constexpr, C: tl.constexpr,
    FLIP: tl.constexpr, POSITIONS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sum over taps: y from x or, with FLIP, x's gradient from y's, in gather form.

    src [N, h, w, C], dst [N, ho, wo, C]. Grid (N * SY * SX * tiles, blocks of channels). With FLIP
    the offsets lie on src's grid, and a program owns pixels that are a stride apart: a tap that
    misses y's grid for one of them misses it for all, and is skipped.
    """
    KW: tl.constexpr = geometry.kernel_size[1]
    TAPS: tl.constexpr = geometry.kernel_size[0] * KW
    SY: tl.constexpr = geometry.stride[0] if FLIP else 1
    SX: tl.constexpr = geometry.stride[1] if FLIP else 1
    first = tl.program_id(0) // tiles
    first_y, first_x = first // SX % SY, first % SX
    columns = tl.cdiv(wo, SX)
    p = tl.program_id(0) % tiles * POSITIONS + tl.arange(0, POSITIONS)
    py, px = p // columns * SY + first_y, p % columns * SX + first_x
    ok = (py < ho) & (px < wo)
    c0 = tl.program_id(1) * (CHUNKS * CHUNK) + tl.arange(0, CHUNK)
    n = (first // (SY * SX)).to(tl.int64)
    src += n * h * w * C
    dst += n * ho * wo * C
    if PER_IMAGE:
        weight += n * (TAPS * C)
    if kernel_offset is not None:
        kernel_offset += n * k_n
    if image_offset is not None:
        image_offset += n * i_n
    total = _zeros(POSITIONS, CHUNK, CHUNKS)
    for tap in tl.range(taps):
        if FLIP:
            dy = tap // KW * geometry.dilation[0] - geometry.padding[0]
            dx = tap % KW * geometry.dilation[1] - geometry.padding[1]
            if ((first_y - dy) % SY == 0) & ((first_x - dx) % SX == 0):
                qy, qx = (py - dy) // SY, (px - dx) // SX
                live = ok & (py >= dy) & (px >= dx) & (qy < h) & (qx < w)
                total = _add_tap(
                    total, src, weight, kernel_offset, (k_c, k_y, k_x), None, qy, qx, 0.0, 0.0,
                    qy, qx, tap, live, c0, h, w, geometry, SCOPE, C, CHUNK, CHUNKS,
                )  # fmt: skip
        else:
            iy, ix, fy, fx = image_place(
                image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry
            )
            total = _add_tap(
                total, src, weight, kernel_offset, (k_c, k_y, k_x), image_offset, iy, ix, fy, fx,
                py, px, tap, ok, c0, h, w, geometry, SCOPE, C, CHUNK, CHUNKS,
            )  # fmt: skip
    for j in tl.static_range(CHUNKS):
        c = c0 + j * CHUNK
        mask = ok[:, None] & (c < C)[None, :]
        tl.store(
            dst + ((py * wo + px) * C)[:, None] + c[None, :],
            total[j].to(dst.dtype.element_ty),
            mask=mask,
        )


@triton.jit(do_not_specialize=SIZES)
def scatter_kernel(
    grad, weight, kernel_offset, image_offset, grad_x, taps, h, w, ho, wo, tiles,
    k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x,
    geometry: tl.constexpr, SCOPE: tl.constexpr, PER_IMAGE: tl.constexpr, C: tl.constexpr,
    ORDERED: tl.constexpr, POSITIONS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Scatter x's gradient where taps move in the image.

    Each number of grad [N, ho, wo, C] goes to four pixels of grad_x [N, h, w, C], in float32. Grid
    (N * tiles, blocks of channels), with atomics. ORDERED is the deterministic form: the grid is
    (N, blocks), and a program adds the positions of an image one after the other, in
    tiles = ho * wo of one position each.
    """
    TAPS: tl.constexpr = geometry.kernel_size[0] * geometry.kernel_size[1]
    BLOCK: tl.constexpr = CHUNKS * CHUNK
    if ORDERED:
        n = tl.program_id(0).to(tl.int64)
        first, last = 0, tiles
    else:
        n = (tl.program_id(0) // tiles).to(tl.int64)
        first = tl.program_id(0) % tiles
        last = first + 1
    c0 = tl.program_id(1) * BLOCK + tl.arange(0, CHUNK)
    grad += n * ho * wo * C
    grad_x += n * h * w * C
    image_offset += n * i_n
    if PER_IMAGE:
        weight += n * (TAPS * C)
    if kernel_offset is not None:
        kernel_offset += n * k_n
    for tile in tl.range(first, last):
        p = tile * POSITIONS + tl.arange(0, POSITIONS)
        py, px = p // wo, p % wo
        ok = py < ho
        for tap in tl.range(taps):
            if kernel_offset is not None:
                _, _, cy, cx = scope_place(
                    kernel_offset, (k_c, k_y, k_x), py, px, tap, ok, geometry, SCOPE
                )
                wy, ey = scope_cell(cy, SCOPE[0])
                wx, ex = scope_cell(cx, SCOPE[1])
            iy, ix, fy, fx = image_place(
                image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry
            )
            for j in tl.static_range(CHUNKS):
                c = c0 + j * CHUNK
                if kernel_offset is not None:
                    share = blend(weights_around(weight, wy, wx, c, SCOPE, C, BLOCK), ey, ex)
                else:
                    share = load_weight(weight + tap * C + c[None, :], c, C, BLOCK)
                v = load(grad, p * C, ok, c, C, BLOCK) * share
                at, inside, part = (), (), ()
                for corner in tl.static_range(4):
                    jy, jx = iy + corner // 2, ix + corner % 2
                    near = (fy if corner // 2 else 1.0 - fy) * (fx if corner % 2 else 1.0 - fx)
                    hit = ok & (jy >= 0) & (jy < h) & (jx >= 0) & (jx < w)
                    at = at + (grad_x + ((jy * w + jx) * C)[:, None] + c[None, :],)
                    inside = inside + (hit[:, None] & (c < C)[None, :],)
                    part = part + (v * near[:, None],)
                if ORDERED:
                    old = ()
                    for corner in tl.static_range(4):
                        old = old + (tl.load(at[corner], mask=inside[corner], other=0.0),)
                    for corner in tl.static_range(4):
                        tl.store(at[corner], old[corner] + part[corner], mask=inside[corner])
                else:
                    for corner in tl.static_range(4):
                        tl.atomic_add(at[corner], part[corner], mask=inside[corner], sem="relaxed")
            if ORDERED:
                tl.debug_barrier()  # the next tap may add to the same pixels


@triton.jit(do_not_specialize=SIZES)
def offset_grad_kernel(
    grad, x, weight, kernel_offset, image_offset, grad_kernel, grad_image,
    taps, h, w, ho, wo, tiles, k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x,
    geometry: tl.constexpr, SCOPE: tl.constexpr, PER_IMAGE: tl.constexpr, C: tl.constexpr,
    POSITIONS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of both offsets.

    grad [N, ho, wo, C], x [N, h, w, C]; grad_kernel and grad_image have the strides of the offsets,
    and are None where not needed. Grid (N * tiles,): a program sums over all channels, so that no
    sum is left in parts.
    """
    TAPS: tl.constexpr = geometry.kernel_size[0] * geometry.kernel_size[1]
    BLOCK: tl.constexpr = CHUNKS * CHUNK
    n = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * POSITIONS + tl.arange(0, POSITIONS)
    py, px = p // wo, p % wo
    ok = py < ho
    grad += n * ho * wo * C
    x += n * h * w * C
    if PER_IMAGE:
        weight += n * (TAPS * C)
    if kernel_offset is not None:
        kernel_offset += n * k_n
    if image_offset is not None:
        image_offset += n * i_n
    for tap in tl.range(taps):
        if kernel_offset is not None:
            uy, ux, cy, cx = scope_place(
                kernel_offset, (k_c, k_y, k_x), py, px, tap, ok, geometry, SCOPE
            )
            wy, ey = scope_cell(cy, SCOPE[0])
            wx, ex = scope_cell(cx, SCOPE[1])
        iy, ix, fy, fx = image_place(image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
        by_weight = _zeros(POSITIONS, CHUNK, 4)
        by_pixel = _zeros(POSITIONS, CHUNK, 4)
        for c0 in tl.range(0, C, BLOCK):
            for j in tl.static_range(CHUNKS):
                c = c0 + j * CHUNK + tl.arange(0, CHUNK)
                g = load(grad, p * C, ok, c, C, BLOCK)
                if kernel_offset is not None:
                    weights = weights_around(weight, wy, wx, c, SCOPE, C, BLOCK)
                if image_offset is not None:
                    pixels = pixels_around(x, iy, ix, ok, c, h, w, C, BLOCK)
                if grad_kernel is not None:
                    if image_offset is not None:
                        value = blend(pixels, fy, fx)
                    else:
                        value = pixel(x, iy, ix, ok, c, h, w, C, BLOCK)
                    by_weight = add_corners(by_weight, g * value, weights)
                if grad_image is not None:
                    if kernel_offset is not None:
                        share = blend(weights, ey, ex)
                    else:
                        share = load_weight(weight + tap * C + c[None, :], c, C, BLOCK)
                    by_pixel = add_corners(by_pixel, g * share, pixels)
        if grad_kernel is not None:
            gy, gx = slopes(by_weight, ey, ex)
            at = grad_kernel + n * k_n + py * k_y + px * k_x + 2 * tap * k_c
            tl.store(at, clip_grad(gy, uy, SCOPE[0] - 1, geometry.clip == "projected"), mask=ok)
            tl.store(
                at + k_c, clip_grad(gx, ux, SCOPE[1] - 1, geometry.clip == "projected"), mask=ok
            )
        if grad_image is not None:
            gy, gx = slopes(by_pixel, fy, fx)
            at = grad_image + n * i_n + py * i_y + px * i_x + 2 * tap * i_c
            tl.store(at, gy, mask=ok)
            tl.store(at + i_c, gx, mask=ok)


@triton.jit(do_not_specialize=SIZES)
def scope_grad_kernel(
    grad, x, kernel_offset, image_offset, partial, taps, h, w, ho, wo, tiles, all_tiles, tiles_each,
    k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x,
    geometry: tl.constexpr, SCOPE: tl.constexpr, C: tl.constexpr, POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr, ENTRIES: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the scope's gradient, one partial sum per program.

    The sum is B^T [ENTRIES, positions] @ (grad * value) [positions, BLOCK], where B holds the
    bilinear weights of a tap. grad [N, ho, wo, C], x [N, h, w, C], partial [programs, Sh*Sw, C] in
    float32. Grid (programs, blocks of BLOCK channels, blocks of ENTRIES entries); a program takes
    tiles_each of the all_tiles = N * tiles tiles. OPERAND is the dot's dtype.
    """
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    s = tl.program_id(2) * ENTRIES + tl.arange(0, ENTRIES)
    row, column = (s // SCOPE[1]).to(tl.float32), (s % SCOPE[1]).to(tl.float32)
    total = tl.zeros((ENTRIES, BLOCK), tl.float32)
    first = tl.program_id(0) * tiles_each
    for tile in tl.range(first, tl.minimum(first + tiles_each, all_tiles)):
        n = (tile // tiles).to(tl.int64)
        p = tile % tiles * POSITIONS + tl.arange(0, POSITIONS)
        py, px = p // wo, p % wo
        ok = py < ho
        g = load(grad + n * ho * wo * C, p * C, ok, c, C, BLOCK)
        for tap in tl.range(taps):
            _, _, cy, cx = scope_place(
                kernel_offset + n * k_n, (k_c, k_y, k_x), py, px, tap, ok, geometry, SCOPE
            )
            if image_offset is not None:
                iy, ix, fy, fx = image_place(
                    image_offset + n * i_n, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry
                )
                value = blend(
                    pixels_around(x + n * h * w * C, iy, ix, ok, c, h, w, C, BLOCK), fy, fx
                )
            else:
                iy, ix, _, _ = image_place(None, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
                value = pixel(x + n * h * w * C, iy, ix, ok, c, h, w, C, BLOCK)
            shares = hat(cy[None, :] - row[:, None]) * hat(cx[None, :] - column[:, None])
            total = tl.dot(
                shares.to(OPERAND), (g * value).to(OPERAND), total, input_precision=PRECISION
            )
    at = (
        partial
        + tl.program_id(0).to(tl.int64) * (SCOPE[0] * SCOPE[1] * C)
        + s[:, None] * C
        + c[None, :]
    )
    tl.store(at, total, mask=(s < SCOPE[0] * SCOPE[1])[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=SIZES)
def tap_grad_kernel(
    grad, x, image_offset, partial, taps, h, w, ho, wo, tiles, tiles_each, i_n, i_c, i_y, i_x,
    geometry: tl.constexpr, C: tl.constexpr, POSITIONS: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Compute the taps' gradient, one partial sum of grad * value over positions per program.

    grad [N, ho, wo, C], x [N, h, w, C], partial [N, splits, Kh*Kw, C] in float32. Grid (N, splits,
    blocks of channels); a program takes tiles_each of an image's tiles.
    """
    TAPS: tl.constexpr = geometry.kernel_size[0] * geometry.kernel_size[1]
    BLOCK: tl.constexpr = CHUNKS * CHUNK
    n = tl.program_id(0).to(tl.int64)
    c0 = tl.program_id(2) * BLOCK + tl.arange(0, CHUNK)
    grad += n * ho * wo * C
    x += n * h * w * C
    partial += (n * tl.num_programs(1) + tl.program_id(1)) * (TAPS * C)
    if image_offset is not None:
        image_offset += n * i_n
    first = tl.program_id(1) * tiles_each
    last = tl.minimum(first + tiles_each, tiles)
    for tap in tl.range(taps):
        total = _zeros(POSITIONS, CHUNK, CHUNKS)
        for tile in tl.range(first, last):
            p = tile * POSITIONS + tl.arange(0, POSITIONS)
            py, px = p // wo, p % wo
            ok = py < ho
            iy, ix, fy, fx = image_place(
                image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry
            )
            added = ()
            for j in tl.static_range(CHUNKS):
                c = c0 + j * CHUNK
                if image_offset is not None:
                    value = blend(pixels_around(x, iy, ix, ok, c, h, w, C, BLOCK), fy, fx)
                else:
                    value = pixel(x, iy, ix, ok, c, h, w, C, BLOCK)
                added = added + (total[j] + load(grad, p * C, ok, c, C, BLOCK) * value,)
            total = added
        for j in tl.static_range(CHUNKS):
            c = c0 + j * CHUNK
            tl.store(partial + tap * C + c, tl.sum(total[j], 0), mask=c < C)
