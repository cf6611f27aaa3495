"""The operator's meaning: the reference against a scalar loop, PyTorch and torchvision; the tap loop against the reference."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import deform_conv2d

from dkcls.ops import deform_kernel2d
from dkcls.ops.geometry import make_geometry, tap_grid
from tests.ops.cases import CASES, Case, assert_matches_reference, make_tensors


def scalar_loop(case: Case, x, weight, kernel_offset, image_offset):
    """The contract word by word, one number at a time."""
    g = make_geometry(case.scope, **case.options)
    (n_, c_, h, w), (ho, wo) = x.shape, g.output_size(*x.shape[2:])
    out = torch.zeros(n_, c_, ho, wo, dtype=x.dtype)

    def pixel(n, c, y, x_):
        return x[n, c, y, x_].item() if 0 <= y < h and 0 <= x_ < w else 0.0

    def bilinear(read, y, x_, i, j):
        f, e = y - i, x_ - j
        return (1 - f) * ((1 - e) * read(i, j) + e * read(i, j + 1)) + f * ((1 - e) * read(i + 1, j) + e * read(i + 1, j + 1))

    for n, c, p, q in torch.cartesian_prod(*(torch.arange(s) for s in out.shape)).tolist():
        total = 0.0
        for k in range(g.taps):
            ky, kx = divmod(k, g.kernel_size[1])
            y, x_ = p * g.stride[0] - g.padding[0] + ky * g.dilation[0], q * g.stride[1] - g.padding[1] + kx * g.dilation[1]
            if image_offset is not None:
                y, x_ = y + image_offset[n, 2 * k, p, q].item(), x_ + image_offset[n, 2 * k + 1, p, q].item()
            value = bilinear(lambda a, b, n=n, c=c: pixel(n, c, a, b), y, x_, math.floor(y), math.floor(x_))
            place, cell = [], []
            for a, kk in enumerate((ky, kx)):
                u = tap_grid(g.kernel_size[a], case.scope[a], g.step[a])[kk]
                if kernel_offset is not None:
                    u += (kernel_offset[n, 2 * k + a, p, q] if kernel_offset.dim() == 4 else kernel_offset[n, 2 * k + a]).item()
                place.append(min(max(u, 0.0), case.scope[a] - 1))
                cell.append(max(0, min(math.floor(place[a]), case.scope[a] - 2)))
            top = (case.scope[0] - 1, case.scope[1] - 1)
            read = lambda a, b, c=c, top=top: weight[c, 0, min(a, top[0]), min(b, top[1])].item()  # noqa: E731
            total += value * bilinear(read, *place, *cell)
        out[n, c, p, q] = total
    return out


@pytest.mark.parametrize("case", [c for c in CASES if c.c <= 12], ids=str)
def test_reference_is_the_scalar_loop(case):
    tensors = [None if t is None else t.detach() for t in make_tensors(case, torch.float64)]
    expected = scalar_loop(case, *tensors)
    torch.testing.assert_close(deform_kernel2d(*tensors, **case.options, backend="reference"), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tap_loop_is_the_reference_in_float64(case):
    assert_matches_reference(case, torch.float64, None, tolerance=1e-14)
