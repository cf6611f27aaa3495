"""Conditional convolution: one mixed kernel per image, against E convolutions and a loop."""

import pytest
import torch
import torch.nn.functional as F

from dkcls.ops import cond_conv2d, per_image
from tests.ops.per_image import SHAPES, gradients, leaf, loop, options_of


def make(shape, n=3, experts=4, dtype=torch.float64, channels_last=False):
    cin, cout, groups, size, kernel_size, *_ = shape
    kh, kw = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    x = leaf(n, cin, *size, dtype=dtype, channels_last=channels_last)
    routing = leaf(n, experts, dtype=torch.promote_types(dtype, torch.float32))
    return [x, leaf(experts, cout, cin // groups, kh, kw, dtype=dtype), routing]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_a_loop_over_images(shape, channels_last):
    (x, weight, routing), options = make(shape, channels_last=channels_last), options_of(shape)
    got = cond_conv2d(x, weight, routing, **options)
    expected = loop(x, torch.einsum("ne,eoihw->noihw", routing, weight), options)
    for e, g in zip(
        gradients(expected, [x, weight, routing]), gradients(got, [x, weight, routing]), strict=True
    ):
        torch.testing.assert_close(g, e)
    assert got.is_contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format
    )


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[7], SHAPES[9]], ids=str)
def test_is_the_experts_convolutions_mixed(shape):
    x, weight, routing = make(shape)
    outs = torch.stack([F.conv2d(x, w, **options_of(shape)) for w in weight], 1)
    torch.testing.assert_close(
        cond_conv2d(x, weight, routing, **options_of(shape)),
        torch.einsum("ne,neohw->nohw", routing, outs),
    )


@pytest.mark.parametrize(
    "shape",
    [(2, 3, 1, (3, 2), 1, 2, 0, 1), (2, 5, 1, (2, 1), 1, 1, 0, 1), (2, 2, 2, (3, 3), 2, 1, 1, 1)],
)
def test_gradcheck(shape):
    torch.autograd.gradcheck(
        lambda *t: cond_conv2d(*t, **options_of(shape)), make(shape, n=2, experts=2), fast_mode=True
    )


def test_chunks_change_nothing(monkeypatch):
    shape = (6, 40, 1, (2, 2), 1, 1, 0, 1)
    tensors, results = make(shape, n=5, channels_last=True), []
    for kernels in (5, 2):
        monkeypatch.setattr(per_image, "KERNEL_BYTES", kernels * 8 * 240)
        results.append(gradients(cond_conv2d(*tensors), tensors))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_empty_batch(shape):
    tensors = make(shape, n=0)
    out = cond_conv2d(*tensors, **options_of(shape))
    assert out.shape == (0, *cond_conv2d(*make(shape, n=1), **options_of(shape)).shape[1:])
    out.sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in tensors)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[7]], ids=str)
def test_autocast(shape):
    tensors = make(shape, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = cond_conv2d(*tensors, **options_of(shape))
    assert got.dtype == torch.bfloat16
    wide = gradients(cond_conv2d(*tensors, **options_of(shape)), tensors)
    for e, g in zip(wide, gradients(got, tensors), strict=True):
        assert (g.float() - e).norm() <= 0.03 * e.norm()


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[9]], ids=str)
def test_compiles_as_one_graph(shape, monkeypatch):
    monkeypatch.setattr(per_image, "KERNEL_BYTES", 2 * 8 * 240)
    torch.compiler.reset()
    tensors = make(shape)
    got = torch.compile(cond_conv2d, fullgraph=True, backend="aot_eager")(
        *tensors, **options_of(shape)
    )
    for e, g in zip(
        gradients(cond_conv2d(*tensors, **options_of(shape)), tensors),
        gradients(got, tensors),
        strict=True,
    ):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(6, 5, 4)}, r"input must be \[N, C, H, W\], got \[6, 5, 4\]"),
        (
            {"weight": torch.zeros(4, 3, 1, 1)},
            r"weight must be \[E, Cout, Cin/groups, Kh, Kw\], got \[4, 3, 1, 1\]",
        ),
        (
            {"weight": torch.zeros(4, 4, 6, 1, 1).double()},
            r"with Cin/groups = 3, got \[4, 4, 6, 1, 1\]",
        ),
        (
            {"weight": torch.zeros(4, 4, 3, 1, 1)},
            "weight must have input's dtype torch.float64, got torch.float32",
        ),
        ({"groups": 4}, "groups must divide Cin = 6 and Cout = 4, got 4"),
        (
            {"routing": torch.zeros(3, 2).double()},
            r"routing must be \[N, E\] = \[3, 4\], got \[3, 2\]",
        ),
        (
            {"routing": torch.zeros(3, 4).half()},
            "routing must have input's dtype torch.float64, got torch.float16",
        ),
        (
            {"routing": torch.zeros(3, 4, device="meta")},
            "routing must be on input's device cpu, got meta",
        ),
        ({"dilation": 0}, "dilation must be"),
        ({"weight": torch.zeros(4, 4, 3, 7, 7).double()}, r"input of \[5, 4\] is too small"),
    ],
)
def test_errors_name_what_came(changes, message):
    x, weight, routing = make((6, 4, 2, (5, 4), 1, 1, 0, 1))
    with pytest.raises(ValueError, match=message):
        cond_conv2d(**{"input": x, "weight": weight, "routing": routing, "groups": 2, **changes})
