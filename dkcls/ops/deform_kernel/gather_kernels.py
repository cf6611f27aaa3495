"""Gather kernels: every corner of every sample is read and weighed in float32, whatever the size of the scope.

Shapes, all channels_last: x [N, H, W, C], y and its gradient [N, Ho, Wo, C], offsets [N, 2*Kh*Kw, Ho, Wo] with any strides
(_n, _c, _y, _x). `weight` is the scope [Sh*Sw, C] with a kernel_offset, else the taps [1 or N, Kh*Kw, C] (PER_IMAGE: N). An
offset of None is not there. `geometry` is a Geometry of tuples, SCOPE is (Sh, Sw).

A program owns POSITIONS positions (py, px) of one image. Channels come CHUNK at a time, 64 bytes or so, and a program takes
CHUNKS of them: four threads share a position, and its coordinates serve CHUNKS times. Taps are a loop at run time, since
unrolled they spill. Bases of images are 64-bit, indices within an image 32-bit.
"""

import triton
import triton.language as tl

from dkcls.ops.triton_support import clamp_coordinate, clip_grad

SIZES = ["h", "w", "ho", "wo", "tiles", "tiles_each", "all_tiles", "k_n", "k_c", "k_y", "k_x", "i_n", "i_c", "i_y", "i_x"]


@triton.jit
def _load(base, index, inside, c, C: tl.constexpr, BLOCK: tl.constexpr):
    """base[index + c] in float32, [positions, channels]; zero where not inside. Masks channels if blocks do not divide C."""
    mask = inside[:, None]
    if C % BLOCK != 0:
        mask = mask & (c < C)[None, :]
    return tl.load(base + index[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_weight(pointers, c, C: tl.constexpr, BLOCK: tl.constexpr):
    if C % BLOCK != 0:
        return tl.load(pointers, mask=(c < C)[None, :], other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def _load_offset(offset, strides, py, px, tap, ok):
    """Both axes of one tap's offset, [positions]."""
    p = offset + py * strides[1] + px * strides[2] + 2 * tap * strides[0]
    return tl.load(p, mask=ok, other=0.0).to(tl.float32), tl.load(p + strides[0], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _scope_axis(offset, k, K: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr):
    """One axis of a tap in the scope: the coordinate before clipping and after."""
    u = offset + tl.clamp((S - 1) * 0.5 + (k - (K - 1) * 0.5) * STEP, 0.0, S - 1.0)
    return u, clamp_coordinate(u, S - 1)


@triton.jit
def _scope_place(offset, strides, py, px, tap, ok, geometry: tl.constexpr, SCOPE: tl.constexpr):
    """Where a tap reads the scope: (uy, ux) before clipping, (cy, cx) after; [positions] each."""
    KW: tl.constexpr = geometry.kernel_size[1]
    oy, ox = _load_offset(offset, strides, py, px, tap, ok)
    uy, cy = _scope_axis(oy, tap // KW, geometry.kernel_size[0], SCOPE[0], geometry.step[0])
    ux, cx = _scope_axis(ox, tap % KW, KW, SCOPE[1], geometry.step[1])
    return uy, ux, cy, cx


@triton.jit
def _cell(c, S: tl.constexpr):
    """A clipped coordinate as the entry below it and how far beyond that it is; a NaN is that far beyond entry 0."""
    cell = tl.minimum(tl.maximum(c, 0.0).to(tl.int32), S - 2 if S > 1 else 0)
    return cell, c - cell.to(tl.float32)


@triton.jit
def _image_axis(offset, place, size):
    """One axis of a tap in the image: the pixel below it and how far beyond that it is. Infinity is just outside."""
    u = tl.maximum(place.to(tl.float32) + offset, -2.0, propagate_nan=tl.PropagateNan.ALL)
    u = tl.minimum(u, size + 1.0, propagate_nan=tl.PropagateNan.ALL)
    low = tl.floor(tl.maximum(u, -2.0))
    return low.to(tl.int32), u - low


@triton.jit
def _image_place(offset, strides, py, px, tap, ok, h, w, geometry: tl.constexpr):
    """Where a tap reads the image: the pixel (iy, ix) and, with an offset, how far beyond it (fy, fx)."""
    KW: tl.constexpr = geometry.kernel_size[1]
    iy = py * geometry.stride[0] - geometry.padding[0] + tap // KW * geometry.dilation[0]
    ix = px * geometry.stride[1] - geometry.padding[1] + tap % KW * geometry.dilation[1]
    if offset is None:
        return iy, ix, 0.0, 0.0
    else:
        oy, ox = _load_offset(offset, strides, py, px, tap, ok)
        iy, fy = _image_axis(oy, iy, h)
        ix, fx = _image_axis(ox, ix, w)
        return iy, ix, fy, fx


@triton.jit
def _pixel(x, iy, ix, ok, c, h, w, C: tl.constexpr, BLOCK: tl.constexpr):
    """x[iy, ix], zero outside the image."""
    inside = ok & (iy >= 0) & (iy < h) & (ix >= 0) & (ix < w)
    return _load(x, (iy * w + ix) * C, inside, c, C, BLOCK)


@triton.jit
def _pixels(x, iy, ix, ok, c, h, w, C: tl.constexpr, BLOCK: tl.constexpr):
    """The four pixels around a place."""
    return (
        _pixel(x, iy, ix, ok, c, h, w, C, BLOCK),
        _pixel(x, iy, ix + 1, ok, c, h, w, C, BLOCK),
        _pixel(x, iy + 1, ix, ok, c, h, w, C, BLOCK),
        _pixel(x, iy + 1, ix + 1, ok, c, h, w, C, BLOCK),
    )


@triton.jit
def _weights(weight, wy, wx, c, SCOPE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """The four entries of the scope around a place; a scope of one entry has it on both sides."""
    RIGHT: tl.constexpr = C if SCOPE[1] > 1 else 0
    DOWN: tl.constexpr = C * SCOPE[1] if SCOPE[0] > 1 else 0
    p = weight + ((wy * SCOPE[1] + wx) * C)[:, None] + c[None, :]
    return (
        _load_weight(p, c, C, BLOCK),
        _load_weight(p + RIGHT, c, C, BLOCK),
        _load_weight(p + DOWN, c, C, BLOCK),
        _load_weight(p + (DOWN + RIGHT), c, C, BLOCK),
    )


@triton.jit
def _blend(corners, fy, fx):
    """Bilinear: the corners weighed by how near they are."""
    ny, nx = 1.0 - fy, 1.0 - fx
    top = corners[0] * (ny * nx)[:, None] + corners[1] * (ny * fx)[:, None]
    return top + corners[2] * (fy * nx)[:, None] + corners[3] * (fy * fx)[:, None]


@triton.jit
def _add4(total, a, corners):
    return total[0] + a * corners[0], total[1] + a * corners[1], total[2] + a * corners[2], total[3] + a * corners[3]


@triton.jit
def _slopes(corners, fy, fx):
    """The blend's derivatives by its coordinates, summed over channels; the right ones at an integer."""
    v00, v01, v10, v11 = tl.sum(corners[0], 1), tl.sum(corners[1], 1), tl.sum(corners[2], 1), tl.sum(corners[3], 1)
    return (1.0 - fx) * (v10 - v00) + fx * (v11 - v01), (1.0 - fy) * (v01 - v00) + fy * (v11 - v10)


@triton.jit
def _zeros(POSITIONS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(CHUNKS):
        zeros = zeros + (tl.zeros((POSITIONS, CHUNK), tl.float32),)
    return zeros


@triton.jit
def _add_tap(total, src, weight, kernel_offset, k_strides, image_offset, iy, ix, fy, fx, py, px, tap, ok, c0, h, w,
             geometry: tl.constexpr, SCOPE: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """total + src sampled at (iy + fy, ix + fx) * weight sampled at the offset of (py, px), for each chunk."""
    BLOCK: tl.constexpr = CHUNKS * CHUNK
    if kernel_offset is not None:
        _, _, cy, cx = _scope_place(kernel_offset, k_strides, py, px, tap, ok, geometry, SCOPE)
        wy, ey = _cell(cy, SCOPE[0])
        wx, ex = _cell(cx, SCOPE[1])
    added = ()
    for j in tl.static_range(CHUNKS):
        c = c0 + j * CHUNK
        if kernel_offset is not None:
            share = _blend(_weights(weight, wy, wx, c, SCOPE, C, BLOCK), ey, ex)
        else:
            share = _load_weight(weight + tap * C + c[None, :], c, C, BLOCK)
        if image_offset is not None:
            value = _blend(_pixels(src, iy, ix, ok, c, h, w, C, BLOCK), fy, fx)
        else:
            value = _pixel(src, iy, ix, ok, c, h, w, C, BLOCK)
        added = added + (total[j] + value * share,)
    return added


@triton.jit(do_not_specialize=SIZES)
def map_kernel(src, weight, kernel_offset, image_offset, dst, h, w, ho, wo, tiles, k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x,
               geometry: tl.constexpr, SCOPE: tl.constexpr, PER_IMAGE: tl.constexpr, C: tl.constexpr, FLIP: tl.constexpr,
               POSITIONS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """The sum over taps: y from x or, flipped, x's gradient from y's, in gather form. Grid (N * SY * SX * tiles, blocks).

    src [N, h, w, C], dst [N, ho, wo, C]. Flipped, the offsets lie on src's grid, and a program owns pixels that are a stride
    apart: a tap that misses y's grid for one of them misses it for all, and is skipped.
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
    for tap in tl.range(TAPS):
        if FLIP:
            dy = tap // KW * geometry.dilation[0] - geometry.padding[0]
            dx = tap % KW * geometry.dilation[1] - geometry.padding[1]
            if ((first_y - dy) % SY == 0) & ((first_x - dx) % SX == 0):
                qy, qx = (py - dy) // SY, (px - dx) // SX
                live = ok & (py >= dy) & (px >= dx) & (qy < h) & (qx < w)
                total = _add_tap(total, src, weight, kernel_offset, (k_c, k_y, k_x), None, qy, qx, 0.0, 0.0, qy, qx, tap, live,
                                 c0, h, w, geometry, SCOPE, C, CHUNK, CHUNKS)  # fmt: skip
        else:
            iy, ix, fy, fx = _image_place(image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
            total = _add_tap(total, src, weight, kernel_offset, (k_c, k_y, k_x), image_offset, iy, ix, fy, fx, py, px, tap, ok,
                             c0, h, w, geometry, SCOPE, C, CHUNK, CHUNKS)  # fmt: skip
    for j in tl.static_range(CHUNKS):
        c = c0 + j * CHUNK
        mask = ok[:, None] & (c < C)[None, :]
        tl.store(dst + ((py * wo + px) * C)[:, None] + c[None, :], total[j].to(dst.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def scatter_kernel(grad, weight, kernel_offset, image_offset, grad_x, h, w, ho, wo, tiles, k_n, k_c, k_y, k_x,
                   i_n, i_c, i_y, i_x, geometry: tl.constexpr, SCOPE: tl.constexpr, PER_IMAGE: tl.constexpr,
                   C: tl.constexpr, ORDERED: tl.constexpr, POSITIONS: tl.constexpr, CHUNK: tl.constexpr,
                   CHUNKS: tl.constexpr):  # fmt: skip
    """x's gradient where taps move in the image: grad [N, ho, wo, C] goes to four pixels each of grad_x [N, h, w, C], fp32.

    Grid (N * tiles, blocks), with atomics. ORDERED, the deterministic form: grid (N, blocks), and a program adds the
    positions of an image one after the other, tiles = ho * wo of one position each.
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
        for tap in tl.range(TAPS):
            if kernel_offset is not None:
                _, _, cy, cx = _scope_place(kernel_offset, (k_c, k_y, k_x), py, px, tap, ok, geometry, SCOPE)
                wy, ey = _cell(cy, SCOPE[0])
                wx, ex = _cell(cx, SCOPE[1])
            iy, ix, fy, fx = _image_place(image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
            for j in tl.static_range(CHUNKS):
                c = c0 + j * CHUNK
                if kernel_offset is not None:
                    share = _blend(_weights(weight, wy, wx, c, SCOPE, C, BLOCK), ey, ex)
                else:
                    share = _load_weight(weight + tap * C + c[None, :], c, C, BLOCK)
                v = _load(grad, p * C, ok, c, C, BLOCK) * share
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
def offset_grad_kernel(grad, x, weight, kernel_offset, image_offset, grad_kernel, grad_image, h, w, ho, wo, tiles,
                       k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x, geometry: tl.constexpr, SCOPE: tl.constexpr,
                       PER_IMAGE: tl.constexpr, C: tl.constexpr, POSITIONS: tl.constexpr, CHUNK: tl.constexpr,
                       CHUNKS: tl.constexpr):  # fmt: skip
    """Gradients of both offsets. Grid (N * tiles,): a program sums over all channels, so that the sums are whole.

    grad [N, ho, wo, C], x [N, h, w, C]; grad_kernel and grad_image lie as the offsets do, None where not needed.
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
    for tap in tl.range(TAPS):
        if kernel_offset is not None:
            uy, ux, cy, cx = _scope_place(kernel_offset, (k_c, k_y, k_x), py, px, tap, ok, geometry, SCOPE)
            wy, ey = _cell(cy, SCOPE[0])
            wx, ex = _cell(cx, SCOPE[1])
        iy, ix, fy, fx = _image_place(image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
        by_weight = _zeros(POSITIONS, CHUNK, 4)
        by_pixel = _zeros(POSITIONS, CHUNK, 4)
        for c0 in tl.range(0, C, BLOCK):
            for j in tl.static_range(CHUNKS):
                c = c0 + j * CHUNK + tl.arange(0, CHUNK)
                g = _load(grad, p * C, ok, c, C, BLOCK)
                if kernel_offset is not None:
                    weights = _weights(weight, wy, wx, c, SCOPE, C, BLOCK)
                if image_offset is not None:
                    pixels = _pixels(x, iy, ix, ok, c, h, w, C, BLOCK)
                if grad_kernel is not None:
                    if image_offset is not None:
                        value = _blend(pixels, fy, fx)
                    else:
                        value = _pixel(x, iy, ix, ok, c, h, w, C, BLOCK)
                    by_weight = _add4(by_weight, g * value, weights)
                if grad_image is not None:
                    if kernel_offset is not None:
                        share = _blend(weights, ey, ex)
                    else:
                        share = _load_weight(weight + tap * C + c[None, :], c, C, BLOCK)
                    by_pixel = _add4(by_pixel, g * share, pixels)
        if grad_kernel is not None:
            gy, gx = _slopes(by_weight, ey, ex)
            at = grad_kernel + n * k_n + py * k_y + px * k_x + 2 * tap * k_c
            tl.store(at, clip_grad(gy, uy, SCOPE[0] - 1, geometry.clip == "projected"), mask=ok)
            tl.store(at + k_c, clip_grad(gx, ux, SCOPE[1] - 1, geometry.clip == "projected"), mask=ok)
        if grad_image is not None:
            gy, gx = _slopes(by_pixel, fy, fx)
            at = grad_image + n * i_n + py * i_y + px * i_x + 2 * tap * i_c
            tl.store(at, gy, mask=ok)
            tl.store(at + i_c, gx, mask=ok)


@triton.jit
def _hats(c, entry):
    """[entries, positions]: what each entry of one axis contributes at clipped coordinates c."""
    return tl.maximum(1.0 - tl.abs(c[None, :] - entry[:, None]), 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=SIZES)
def scope_grad_kernel(grad, x, kernel_offset, image_offset, partial, h, w, ho, wo, tiles, all_tiles, tiles_each,
                      k_n, k_c, k_y, k_x, i_n, i_c, i_y, i_x, geometry: tl.constexpr, SCOPE: tl.constexpr, C: tl.constexpr,
                      POSITIONS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr, OPERAND: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    """The scope's gradient, a partial sum per program: B^T [ENTRIES, positions] @ (grad * value) [positions, BLOCK].

    grad [N, ho, wo, C], x [N, h, w, C], partial [programs, Sh*Sw, C] fp32. Grid (programs, blocks of BLOCK channels, blocks
    of ENTRIES entries); a program takes tiles_each of the all_tiles = N * tiles tiles. OPERAND is the dot's dtype.
    """
    TAPS: tl.constexpr = geometry.kernel_size[0] * geometry.kernel_size[1]
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
        g = _load(grad + n * ho * wo * C, p * C, ok, c, C, BLOCK)
        for tap in tl.range(TAPS):
            _, _, cy, cx = _scope_place(kernel_offset + n * k_n, (k_c, k_y, k_x), py, px, tap, ok, geometry, SCOPE)
            if image_offset is not None:
                iy, ix, fy, fx = _image_place(image_offset + n * i_n, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
                value = _blend(_pixels(x + n * h * w * C, iy, ix, ok, c, h, w, C, BLOCK), fy, fx)
            else:
                iy, ix, _, _ = _image_place(None, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
                value = _pixel(x + n * h * w * C, iy, ix, ok, c, h, w, C, BLOCK)
            shares = _hats(cy, row) * _hats(cx, column)
            total = tl.dot(shares.to(OPERAND), (g * value).to(OPERAND), total, input_precision=PRECISION)
    at = partial + tl.program_id(0).to(tl.int64) * (SCOPE[0] * SCOPE[1] * C) + s[:, None] * C + c[None, :]
    tl.store(at, total, mask=(s < SCOPE[0] * SCOPE[1])[:, None] & (c < C)[None, :])


@triton.jit(do_not_specialize=SIZES)
def tap_grad_kernel(grad, x, image_offset, partial, h, w, ho, wo, tiles, tiles_each, i_n, i_c, i_y, i_x,
                    geometry: tl.constexpr, C: tl.constexpr, POSITIONS: tl.constexpr, CHUNK: tl.constexpr,
                    CHUNKS: tl.constexpr):  # fmt: skip
    """The taps' gradient, a partial sum per program: the sum over positions of grad * value.

    grad [N, ho, wo, C], x [N, h, w, C], partial [N, splits, Kh*Kw, C] fp32. Grid (N, splits, blocks of channels); a program
    takes tiles_each of an image's tiles.
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
    for tap in tl.range(TAPS):
        total = _zeros(POSITIONS, CHUNK, CHUNKS)
        for tile in tl.range(first, last):
            p = tile * POSITIONS + tl.arange(0, POSITIONS)
            py, px = p // wo, p % wo
            ok = py < ho
            iy, ix, fy, fx = _image_place(image_offset, (i_c, i_y, i_x), py, px, tap, ok, h, w, geometry)
            added = ()
            for j in tl.static_range(CHUNKS):
                c = c0 + j * CHUNK
                if image_offset is not None:
                    value = _blend(_pixels(x, iy, ix, ok, c, h, w, C, BLOCK), fy, fx)
                else:
                    value = _pixel(x, iy, ix, ok, c, h, w, C, BLOCK)
                added = added + (total[j] + _load(grad, p * C, ok, c, C, BLOCK) * value,)
            total = added
        for j in tl.static_range(CHUNKS):
            c = c0 + j * CHUNK
            tl.store(partial + tap * C + c, tl.sum(total[j], 0), mask=c < C)
