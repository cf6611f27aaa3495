"""Samples of the gather kernels: a tap's coordinates in scope and image, and the corners' blend."""

import triton
import triton.language as tl

from dkcls.ops.triton_device import scope_axis


@triton.jit
def load(base, index, inside, c, C: tl.constexpr, BLOCK: tl.constexpr):
    """Load base[index + c] in float32, [positions, channels], with zero where not inside.

    Channels are masked only if blocks do not divide C.
    """
    mask = inside[:, None]
    if C % BLOCK != 0:
        mask = mask & (c < C)[None, :]
    return tl.load(base + index[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_weight(pointers, c, C: tl.constexpr, BLOCK: tl.constexpr):
    if C % BLOCK != 0:
        return tl.load(pointers, mask=(c < C)[None, :], other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)


@triton.jit
def _load_offset(offset, strides, py, px, tap, ok):
    """Load both axes of one tap's offset, [positions] each."""
    p = offset + py * strides[1] + px * strides[2] + 2 * tap * strides[0]
    return tl.load(p, mask=ok, other=0.0).to(tl.float32), tl.load(
        p + strides[0], mask=ok, other=0.0
    ).to(tl.float32)


@triton.jit
def scope_place(offset, strides, py, px, tap, ok, geometry: tl.constexpr, SCOPE: tl.constexpr):
    """Return a tap's scope coordinates, [positions]: (uy, ux) before clipping, (cy, cx) after."""
    KW: tl.constexpr = geometry.kernel_size[1]
    oy, ox = _load_offset(offset, strides, py, px, tap, ok)
    uy, cy = scope_axis(oy, tap // KW, geometry.kernel_size[0], SCOPE[0], geometry.step[0])
    ux, cx = scope_axis(ox, tap % KW, KW, SCOPE[1], geometry.step[1])
    return uy, ux, cy, cx


@triton.jit
def _image_axis(offset, place, size):
    """Return the pixel below a tap along one axis of the image, and the distance beyond that pixel.

    An infinite offset ends just outside the image.
    """
    u = tl.maximum(place.to(tl.float32) + offset, -2.0, propagate_nan=tl.PropagateNan.ALL)
    u = tl.minimum(u, size + 1.0, propagate_nan=tl.PropagateNan.ALL)
    low = tl.floor(tl.maximum(u, -2.0))
    return low.to(tl.int32), u - low


@triton.jit
def image_place(offset, strides, py, px, tap, ok, h, w, geometry: tl.constexpr):
    """Return the pixel (iy, ix) that a tap reads.

    With an offset, (fy, fx) is the distance beyond that pixel, else 0.
    """
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
def pixel(x, iy, ix, ok, c, h, w, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return x[iy, ix], zero outside the image."""
    inside = ok & (iy >= 0) & (iy < h) & (ix >= 0) & (ix < w)
    return load(x, (iy * w + ix) * C, inside, c, C, BLOCK)


@triton.jit
def pixels_around(x, iy, ix, ok, c, h, w, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the four pixels around an image coordinate."""
    return (
        pixel(x, iy, ix, ok, c, h, w, C, BLOCK),
        pixel(x, iy, ix + 1, ok, c, h, w, C, BLOCK),
        pixel(x, iy + 1, ix, ok, c, h, w, C, BLOCK),
        pixel(x, iy + 1, ix + 1, ok, c, h, w, C, BLOCK),
    )


@triton.jit
def weights_around(weight, wy, wx, c, SCOPE: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the four entries around a scope coordinate.

    Along an axis with one entry, its neighbour is the entry itself.
    """
    RIGHT: tl.constexpr = C if SCOPE[1] > 1 else 0
    DOWN: tl.constexpr = C * SCOPE[1] if SCOPE[0] > 1 else 0
    p = weight + ((wy * SCOPE[1] + wx) * C)[:, None] + c[None, :]
    return (
        load_weight(p, c, C, BLOCK),
        load_weight(p + RIGHT, c, C, BLOCK),
        load_weight(p + DOWN, c, C, BLOCK),
        load_weight(p + (DOWN + RIGHT), c, C, BLOCK),
    )


@triton.jit
def blend(corners, fy, fx):
    """Return the bilinear blend of four corners, each weighted by its nearness."""
    ny, nx = 1.0 - fy, 1.0 - fx
    top = corners[0] * (ny * nx)[:, None] + corners[1] * (ny * fx)[:, None]
    return top + corners[2] * (fy * nx)[:, None] + corners[3] * (fy * fx)[:, None]


@triton.jit
def add_corners(total, a, corners):
    return (
        total[0] + a * corners[0],
        total[1] + a * corners[1],
        total[2] + a * corners[2],
        total[3] + a * corners[3],
    )


@triton.jit
def slopes(corners, fy, fx):
    """Return the blend's derivatives by y and x, summed over channels, right-sided at integers."""
    v00, v01, v10, v11 = (
        tl.sum(corners[0], 1),
        tl.sum(corners[1], 1),
        tl.sum(corners[2], 1),
        tl.sum(corners[3], 1),
    )
    return (1.0 - fx) * (v10 - v00) + fx * (v11 - v01), (1.0 - fy) * (v01 - v00) + fy * (v11 - v10)
