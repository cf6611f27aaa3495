"""Local deformable kernels on tensor cores: scopes up to 5, half precision, channels_last.

    out[p, c] = sum_k x[p + k, c] * (B_k[p, :] @ W[:, c])

B_k holds the bilinear weights of tap k. They do not depend on the channel, and a scope of 4 x 4 has
as many entries as a tensor-core product is deep. A program owns a tile of positions and loops over
channels, so that coordinates, masks and B are computed once per position. The limit is the number
of instructions issued, not arithmetic, which explains what looks odd below:

* B is built by the thread that owns the position (`_table_of_owner`) and pinned there. In Triton's
  own layout of a [positions, 16] tensor, 16 threads would repeat the coordinate arithmetic.
* Loads are not masked. A tap outside the image has B = 0 and reads a clamped, genuine neighbour; a
  last, partial chunk of channels overlaps the chunk before.
* The columns of W are permuted within 32 channels (`pack_weight_kernel`). A fragment of the product
  then meets a coalesced 16-byte load of activations in the thread that needs both.
* The backward's product G = grad * x is packed and fenced, or Triton computes it once per consumer.

Layouts: x [N, H, W, C], out and grad [N, Ho, Wo, C]; offsets by strides (image, channel, row,
column).
"""

import triton
import triton.language as tl

from dkcls.ops.triton_device import clamp_coordinate, clip_grad, hat, scope_axis


@triton.constexpr_function
def tap_origin(k, kernel_size, scope, step):
    """Return the scope coordinate of tap k along one axis, before any offset.

    The formula is that of `geometry.tap_grid`, at compile time.
    """
    return float(min(max((scope - 1) / 2 + (k - (kernel_size - 1) / 2) * step, 0.0), scope - 1))


@triton.jit
def _hats(y, TS: tl.constexpr):
    """Return the linear weights of TS entries along one axis; NaN for a NaN coordinate."""
    hats = ()
    for i in tl.static_range(TS):
        hats = hats + (hat(y - i),)
    return hats


@triton.jit
def _join4(a, b, c, d, BP: tl.constexpr):
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(BP, 4)


@triton.jit
def _entry(hy, hx, i: tl.constexpr, TS: tl.constexpr, DT: tl.constexpr):
    """Return entry i of the flattened TS x TS table, zero past its end."""
    if i < TS * TS:
        return (hy[i // TS] * hx[i % TS]).to(DT)
    else:
        return (hy[0] * 0.0).to(DT)


@triton.jit
def _four(hy, hx, i: tl.constexpr, TS: tl.constexpr, BP: tl.constexpr, DT: tl.constexpr):
    return _join4(
        _entry(hy, hx, i, TS, DT),
        _entry(hy, hx, i + 1, TS, DT),
        _entry(hy, hx, i + 2, TS, DT),
        _entry(hy, hx, i + 3, TS, DT),
        BP,
    )


@triton.jit
def _sixteen(hy, hx, i: tl.constexpr, TS: tl.constexpr, BP: tl.constexpr, DT: tl.constexpr):
    r0 = _four(hy, hx, i, TS, BP, DT)
    r1 = _four(hy, hx, i + 4, TS, BP, DT)
    r2 = _four(hy, hx, i + 8, TS, BP, DT)
    r3 = _four(hy, hx, i + 12, TS, BP, DT)
    return tl.join(tl.join(r0, r2), tl.join(r1, r3)).permute(0, 2, 3, 1).reshape(BP, 16)


@triton.jit
def _table_of_owner(hy, hx, TS: tl.constexpr, BP: tl.constexpr, DT: tl.constexpr):
    """Return B [BP, 16 or 32], with every entry computed by the thread that owns the position."""
    if TS == 4:
        return _sixteen(hy, hx, 0, TS, BP, DT)
    else:
        halves = tl.join(_sixteen(hy, hx, 0, TS, BP, DT), _sixteen(hy, hx, 16, TS, BP, DT))
        return halves.permute(0, 2, 1).reshape(BP, 32)


@triton.jit
def _columns2(t, BP: tl.constexpr):
    return tl.split(t.reshape(BP, 2))


@triton.jit
def _columns4(t, BP: tl.constexpr):
    even, odd = tl.split(t.reshape(BP, 2, 2))
    a, c = _columns2(even, BP)
    b, d = _columns2(odd, BP)
    return a, b, c, d


@triton.jit
def _columns16(t, BP: tl.constexpr):
    """Return the 16 columns of [BP, 16], all in the thread that owns the position."""
    even, odd = tl.split(t.reshape(BP, 4, 2, 2))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    a = _columns4(c0, BP)
    b = _columns4(c1, BP)
    c = _columns4(c2, BP)
    d = _columns4(c3, BP)
    columns = ()
    for i in tl.static_range(4):
        columns = columns + (a[i], b[i], c[i], d[i])
    return columns


@triton.jit
def _columns(t, BP: tl.constexpr, TS: tl.constexpr):
    if TS == 4:
        return _columns16(t, BP)
    else:
        low, high = tl.split(t.reshape(BP, 2, 16).permute(0, 2, 1))
        return _columns16(low, BP) + _columns16(high, BP)


@triton.jit
def _pin(b, PACK: tl.constexpr):
    """Return b, in half precision, with a layout fence: b stays computed where it is.

    The fence costs no instruction (NVIDIA).
    """
    if PACK == 0:
        return b
    elif b.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b], dtype=tl.float16, is_pure=False, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b], dtype=tl.bfloat16, is_pure=False, pack=2
        )


@triton.jit
def _product(a, b, PACK: tl.constexpr):
    """Return a * b, two numbers at a time.

    It is not pure on purpose, or each consumer's layout would compute it again.
    """
    if PACK == 1:
        return tl.inline_asm_elementwise(
            "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=False, pack=2
        )
    elif PACK == 2:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 z; mov.b32 z, 0x80008000; fma.rn.bf16x2 $0, $1, $2, z; }",
            "=r,r,r",
            [a, b],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=2,
        )
    elif a.dtype == tl.bfloat16:
        return a.to(tl.float32) * b.to(tl.float32)
    else:
        return a * b


@triton.jit
def _widen(v, PACK: tl.constexpr):
    """Return v in float32.

    A pair of bfloat16 takes two instructions, where Triton's own unpacking takes three.
    """
    if PACK == 2:
        return tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            "=r,=r,r",
            [v],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return v.to(tl.float32)


@triton.jit
def _inside(a, size):
    return tl.minimum(tl.maximum(a, 0), size - 1)


@triton.jit
def _positions(
    tile,
    m,
    images,
    height,
    width,
    tiles_y,
    tiles_x,
    TH: tl.constexpr,
    TW: tl.constexpr,
    BP: tl.constexpr,
):
    """Locate position m of a tile: (first image, image counted from it, row, column, whether real).

    TW = 0: tiles are BP consecutive positions and may span images, for small images; else tiles are
    TH x TW positions.
    """
    if TW == 0:
        area = height * width
        first = (tile * BP) // area
        q = tile * BP - first * area + m
        n = q // area
        q -= n * area
        h = q // width
        w = q - h * width
        ok = first + n < images
    else:
        first = tile // (tiles_x * tiles_y)
        n = m * 0
        h = (tile // tiles_x) % tiles_y * TH + m // TW
        w = tile % tiles_x * TW + m % TW
        ok = (m < tl.where(first < images, TH * TW, 0)) & (h < height) & (w < width)
    first = tl.minimum(first, images - 1)
    return first, tl.minimum(n, images - 1 - first), h, w, ok


@triton.jit
def _chunk_start(c0, C: tl.constexpr, CP: tl.constexpr):
    """Return the first channel of the chunk of 32 at c0.

    A last, partial chunk overlaps the one before, because masks would cost registers.
    """
    if CP == C:
        return c0
    elif isinstance(c0, tl.constexpr):
        return min(c0, C - 32)
    else:
        return tl.multiple_of(tl.minimum(c0, C - 32), 8)


@triton.constexpr_function
def _reaches(k, stride, padding, dilation, residue):
    """Return whether tap k links input rows that are `residue` modulo stride to an output row."""
    return (residue + padding - k * dilation) % stride == 0


@triton.jit
def dot_map_kernel(
    SRC, OFFSET, WEIGHT, DST, images, src_h, src_w, dst_h, dst_w, tiles_y, tiles_x,
    o_image, o_channel, o_row, o_column,
    C: tl.constexpr, CP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr, PAD_X: tl.constexpr, DIL_Y: tl.constexpr, DIL_X: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr, FLIP: tl.constexpr,
    RES_Y: tl.constexpr, RES_X: tl.constexpr, TS: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    NW: tl.constexpr, R: tl.constexpr, PACK: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    """Compute the forward or, with FLIP, the input gradient.

    DST is the sum over taps of SRC, shifted, times the tap's weight. SRC [images, src_h, src_w, C]
    and DST [images, dst_h, dst_w, C] are in half precision, WEIGHT [TS*TS padded, CP] in float16,
    packed. FLIP = 0: x -> output, offsets on DST's grid. FLIP = 1: grad -> input gradient, offsets
    on SRC's grid; a launch computes the rows and columns that are (RES_Y, RES_X) modulo the stride,
    to which the same taps contribute. NW = num_warps.
    """
    BP: tl.constexpr = 16 * NW * R
    m = tl.arange(0, BP)
    # B is computed for position mb in row m of the product, whose rows then fall to the threads
    # that load position m.
    mb = (m // (16 * NW)) * (16 * NW) + ((m // 8) % 2) * (8 * NW) + ((m // 16) % NW) * 8 + m % 8
    grid_h = (dst_h - RES_Y + STRIDE_Y - 1) // STRIDE_Y if FLIP else dst_h
    grid_w = (dst_w - RES_X + STRIDE_X - 1) // STRIDE_X if FLIP else dst_w
    tile = tl.program_id(0)
    first, n, h, w, ok = _positions(tile, m, images, grid_h, grid_w, tiles_y, tiles_x, TH, TW, BP)
    _, nb, hb, wb, okb = _positions(tile, mb, images, grid_h, grid_w, tiles_y, tiles_x, TH, TW, BP)
    SRC += first.to(tl.int64) * src_h * src_w * C
    DST += first.to(tl.int64) * dst_h * dst_w * C
    OFFSET += first.to(tl.int64) * o_image
    tables = ()
    rows = ()
    for k in tl.static_range(KH * KW):
        if not FLIP or (
            _reaches(k // KW, STRIDE_Y, PAD_Y, DIL_Y, RES_Y)
            and _reaches(k % KW, STRIDE_X, PAD_X, DIL_X, RES_X)
        ):
            if FLIP:
                ah = h + (RES_Y + PAD_Y - (k // KW) * DIL_Y) // STRIDE_Y
                aw = w + (RES_X + PAD_X - (k % KW) * DIL_X) // STRIDE_X
                bh = hb + (RES_Y + PAD_Y - (k // KW) * DIL_Y) // STRIDE_Y
                bw = wb + (RES_X + PAD_X - (k % KW) * DIL_X) // STRIDE_X
                oh = _inside(bh, src_h)
                ow = _inside(bw, src_w)
            else:
                ah = h * STRIDE_Y + ((k // KW) * DIL_Y - PAD_Y)
                aw = w * STRIDE_X + ((k % KW) * DIL_X - PAD_X)
                bh = hb * STRIDE_Y + ((k // KW) * DIL_Y - PAD_Y)
                bw = wb * STRIDE_X + ((k % KW) * DIL_X - PAD_X)
                oh = _inside(hb, dst_h)
                ow = _inside(wb, dst_w)
            at = OFFSET + (nb * o_image + oh * o_row + ow * o_column + 2 * k * o_channel)
            y = tl.load(at).to(tl.float32) + tap_origin(k // KW, KH, SH, STEP_Y)
            x = tl.load(at + o_channel).to(tl.float32) + tap_origin(k % KW, KW, SW, STEP_X)
            live = okb & (bh >= 0) & (bh < src_h) & (bw >= 0) & (bw < src_w)
            if not FLIP:
                # A NaN offset shows even where the tap reads padding.
                live = live | (y != y) | (x != x)
            y = tl.where(live, clamp_coordinate(y, SH - 1), -8.0)  # no entry is within 1 of -8
            x = clamp_coordinate(x, SW - 1)
            tables = tables + (
                _pin(_table_of_owner(_hats(y, TS), _hats(x, TS), TS, BP, tl.float16), PACK),
            )
            rows = rows + (((n * src_h + _inside(ah, src_h)) * src_w + _inside(aw, src_w)) * C,)
    if FLIP:
        out = (n * dst_h + h * STRIDE_Y + RES_Y) * dst_w + w * STRIDE_X + RES_X
    else:
        out = (n * dst_h + h) * dst_w + w
    out = tl.where(ok, out, 0) * C
    s = tl.arange(0, 16 if TS == 4 else 32)
    for c0 in tl.range(0, C, 32):
        c = _chunk_start(c0, C, CP) + tl.arange(0, 32)
        weight = tl.load(WEIGHT + s[:, None] * CP + (c0 + tl.arange(0, 32))[None, :])
        acc = tl.zeros((BP, 32), tl.float32)
        for k in tl.static_range(len(tables)):
            tap_weight = tl.dot(tables[k], weight)
            tap_weight = (
                tap_weight.reshape(R, NW, 2, 8, 4, 4, 2)
                .permute(0, 2, 1, 3, 5, 4, 6)
                .reshape(BP, 32)
            )
            v = tl.load(SRC + rows[k][:, None] + c[None, :])
            acc += _widen(v, PACK) * tap_weight
            if FENCE > 0 and k % FENCE == FENCE - 1 and k < len(tables) - 1:
                tl.debug_barrier()  # or ptxas hoists every tap's loads at once, and spills
        tl.store(DST + out[:, None] + c[None, :], acc.to(DST.dtype.element_ty), mask=ok[:, None])


@triton.jit
def dot_grad_kernel(
    GRAD, X, OFFSET, WEIGHT, OFFSET_GRAD, WEIGHT_GRAD, images, height, width, out_h, out_w,
    tiles_y, tiles_x, part, o_image, o_channel, o_row, o_column,
    C: tl.constexpr, CP: tl.constexpr, CB: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr, PAD_X: tl.constexpr, DIL_Y: tl.constexpr, DIL_X: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr, PROJECTED: tl.constexpr,
    TS: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, BP: tl.constexpr, TILES: tl.constexpr,
    DT: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients to the kernel offsets and the scope.

    Grid (programs, CP / CB): TILES tiles and CB channels per program.
    GRAD [images, out_h, out_w, C], X [images, height, width, C], WEIGHT [TS*TS padded, CP] packed,
    of dtype DT. OFFSET_GRAD has CP / CB parts, `part` elements apart, each laid out as OFFSET; a
    single part is clipped here, several in `sum_parts_kernel`. WEIGHT_GRAD
    [programs, TS*TS padded, CP] in float32 is summed afterwards in a fixed order.
    WIDE: some tensor has 2**31 elements or more. (Pointers advanced per image, as in
    `dot_map_kernel`, cost registers that are not there.)
    """
    SS: tl.constexpr = 16 if TS == 4 else 32
    CHUNKS: tl.constexpr = CB // 32
    m = tl.arange(0, BP)
    s = tl.arange(0, SS)
    cb = 0 if CP == CB else tl.program_id(1) * CB
    weight_grads = ()
    weights = ()
    for j in tl.static_range(CHUNKS):
        weight_grads = weight_grads + (tl.zeros((SS, 32), tl.float32),)
        weights = weights + (
            tl.load(WEIGHT + s[:, None] * CP + (cb + j * 32 + tl.arange(0, 32))[None, :]),
        )
    for t in tl.range(TILES):
        tile = tl.program_id(0) * TILES + t
        first, n, h, w, ok = _positions(tile, m, images, out_h, out_w, tiles_y, tiles_x, TH, TW, BP)
        hc = tl.minimum(h, out_h - 1)
        wc = tl.minimum(w, out_w - 1)
        n += first
        if WIDE:
            n = n.to(tl.int64)
        grad_row = ((n * out_h + hc) * out_w + wc) * C
        offset_at = n * o_image + hc * o_row + wc * o_column
        for k in tl.range(KH * KW):
            ky = k // KW
            kx = k % KW
            ih = h * STRIDE_Y - PAD_Y + ky * DIL_Y
            iw = w * STRIDE_X - PAD_X + kx * DIL_X
            live = ok & (ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)
            x_row = ((n * height + _inside(ih, height)) * width + _inside(iw, width)) * C
            at = offset_at + 2 * k * o_channel
            oy = tl.load(OFFSET + at).to(tl.float32)
            ox = tl.load(OFFSET + at + o_channel).to(tl.float32)
            uy, y = scope_axis(oy, ky, KH, SH, STEP_Y)
            ux, x = scope_axis(ox, kx, KW, SW, STEP_X)
            hy = _hats(tl.where(live, y, -8.0), TS)
            table = tl.trans(_pin(_table_of_owner(hy, _hats(x, TS), TS, BP, DT), PACK))
            table_grad = tl.zeros((SS, BP), tl.float32)
            updated = ()
            for j in tl.static_range(CHUNKS):
                c = _chunk_start(cb + j * 32, C, CP) + tl.arange(0, 32)
                v = tl.load(X + x_row[:, None] + c[None, :])
                g = tl.load(GRAD + grad_row[:, None] + c[None, :])
                G = _product(v, g, PACK).to(DT)
                # Columns are in the order of the packed weight's, transposed: a fragment is then
                # the vector that is stored for the second product anyway.
                packed = tl.trans(G.reshape(BP, 4, 4, 2).permute(0, 2, 1, 3).reshape(BP, 32))
                table_grad = tl.dot(weights[j], packed, table_grad)
                updated = updated + (tl.dot(table, G, weight_grads[j]),)
            weight_grads = updated
            gy, gx = _offset_slopes(tl.trans(table_grad), y, x, SH, SW, TS, BP)
            if CP == CB:
                gy = clip_grad(gy, uy, SH - 1, PROJECTED)
                gx = clip_grad(gx, ux, SW - 1, PROJECTED)
            to = OFFSET_GRAD + tl.program_id(1).to(tl.int64) * part + at
            tl.store(to, tl.where(live, gy, 0.0), mask=ok)
            tl.store(to + o_channel, tl.where(live, gx, 0.0), mask=ok)
    to = (
        WEIGHT_GRAD
        + tl.program_id(0).to(tl.int64) * (SS * CP)
        + s[:, None] * CP
        + (cb + tl.arange(0, 32))[None, :]
    )
    for j in tl.static_range(CHUNKS):
        tl.store(to + j * 32, weight_grads[j])


@triton.jit
def _neighbours(lines, cell, scope: tl.constexpr):
    """Return the two lines around a cell; the last cell is scope - 2."""
    low = lines[0]
    high = lines[1]
    for i in tl.static_range(1, scope - 1):
        low = tl.where(cell >= i, lines[i], low)
        high = tl.where(cell >= i, lines[i + 1], high)
    return low, high


@triton.jit
def _offset_slopes(
    table_grad, y, x, SH: tl.constexpr, SW: tl.constexpr, TS: tl.constexpr, BP: tl.constexpr
):
    """Return the gradient to (y, x) for a gradient to the table, [BP, TS*TS padded].

    The derivative is right-sided at integers, left-sided at the last one. Only four entries count:
    weighting all of them with the hats that made the table would keep the hats alive, and spill.
    """
    entries = _columns(table_grad, BP, TS)
    cell_y = y.to(tl.int32)
    cell_x = x.to(tl.int32)
    top = ()
    bottom = ()
    for j in tl.static_range(TS):
        column = ()
        for i in tl.static_range(TS):
            column = column + (entries[i * TS + j],)
        low, high = _neighbours(column, cell_y, SH)
        top = top + (low,)
        bottom = bottom + (high,)
    g00, g01 = _neighbours(top, cell_x, SW)
    g10, g11 = _neighbours(bottom, cell_x, SW)
    fy = y - tl.minimum(cell_y, max(SH - 2, 0)).to(tl.float32)
    fx = x - tl.minimum(cell_x, max(SW - 2, 0)).to(tl.float32)
    gy = (g10 - g00) + fx * ((g11 - g01) - (g10 - g00)) if SH > 1 else tl.zeros_like(y)
    gx = (g01 - g00) + fy * ((g11 - g10) - (g01 - g00)) if SW > 1 else tl.zeros_like(x)
    return gy, gx


@triton.jit
def pack_weight_kernel(
    WEIGHT,
    PACKED,
    C: tl.constexpr,
    CP: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    TS: tl.constexpr,
    SS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Pack WEIGHT [C, SH*SW] into PACKED [SS, CP].

    The entries form a TS x TS table, by rows; channels are permuted within each chunk of 32.
    ONCE: zeros where a chunk repeats channels of the one before, so that a sum over chunks counts
    each channel once.
    """
    s = tl.arange(0, SS)[:, None]
    column = tl.arange(0, 32)[None, :]
    c0 = tl.program_id(0) * 32
    channel = _chunk_start(c0, C, CP) + 8 * ((column // 2) % 4) + 2 * (column // 8) + column % 2
    real = (s // TS < SH) & (s % TS < SW)
    if ONCE:
        real = real & (channel >= c0)
    value = tl.load(WEIGHT + channel * (SH * SW) + (s // TS) * SW + s % TS, mask=real, other=0.0)
    tl.store(PACKED + s * CP + c0 + column, value.to(PACKED.dtype.element_ty))


@triton.jit
def sum_parts_kernel(
    PARTS, OFFSET, OUT, total, inner, COUNT: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    STEP_Y: tl.constexpr, STEP_X: tl.constexpr, PROJECTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum COUNT parts of an offset gradient into OUT, and clip the sum.

    Parts, OFFSET and OUT share one dense layout of `total` elements. Neighbouring channels are
    `inner` elements apart (1: channels_last, Ho*Wo: contiguous).
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < total
    grad = tl.load(PARTS + i, mask=ok, other=0.0)
    for part in tl.static_range(1, COUNT):
        grad += tl.load(PARTS + part * total + i, mask=ok, other=0.0)
    channel = (i // inner) % (2 * KH * KW)
    tap = channel // 2
    offset = tl.load(OFFSET + i, mask=ok, other=0.0).to(tl.float32)
    uy, _ = scope_axis(offset, tap // KW, KH, SH, STEP_Y)
    ux, _ = scope_axis(offset, tap % KW, KW, SW, STEP_X)
    grad = tl.where(
        channel % 2 == 1,
        clip_grad(grad, ux, SW - 1, PROJECTED),
        clip_grad(grad, uy, SH - 1, PROJECTED),
    )
    tl.store(OUT + i, grad, mask=ok)
