"""The operator's meaning: the reference against a scalar loop, PyTorch and torchvision.

The tap loop is compared with the reference.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import deform_conv2d

from dkcls.ops import deform_kernel2d
from dkcls.ops.deform_kernel import library
from dkcls.ops.geometry import make_geometry
from tests.ops.cases import CASES, Case, assert_matches_reference, make_tensors, run

interpreter = pytest.mark.interpreter


def place_at_rest(case: Case, k: int, taps: int, scope: int) -> float:
    """Return the contract's g_k, along one axis."""
    spread = (scope - 1) / max(taps - 1, 1)
    step = {"centered": 1, "spread": spread}.get(case.grid, case.grid)
    return min(max((scope - 1) / 2 + (k - (taps - 1) / 2) * step, 0), scope - 1)


def scalar_loop(case: Case, x, weight, kernel_offset, image_offset):
    """Compute the contract word by word, one number at a time, with no code of the operator's."""
    names = ("kernel_size", "stride", "padding", "dilation")
    values = (getattr(case, name) for name in names)
    kernel, stride, padding, dilation = ((v, v) if isinstance(v, int) else v for v in values)
    n_, c_, h, w = x.shape
    ho, wo = (
        math.floor((size + 2 * padding[a] - dilation[a] * (kernel[a] - 1) - 1) / stride[a]) + 1
        for a, size in enumerate((h, w))
    )
    out = torch.zeros(n_, c_, ho, wo, dtype=x.dtype)

    def pixel(n, c, y, x_):
        return x[n, c, y, x_].item() if 0 <= y < h and 0 <= x_ < w else 0.0

    def bilinear(read, y, x_, i, j):
        f, e = y - i, x_ - j
        return (1 - f) * ((1 - e) * read(i, j) + e * read(i, j + 1)) + f * (
            (1 - e) * read(i + 1, j) + e * read(i + 1, j + 1)
        )

    for n, c, p, q in torch.cartesian_prod(*(torch.arange(s) for s in out.shape)).tolist():
        total = 0.0
        for k in range(kernel[0] * kernel[1]):
            ky, kx = divmod(k, kernel[1])
            y, x_ = (
                p * stride[0] - padding[0] + ky * dilation[0],
                q * stride[1] - padding[1] + kx * dilation[1],
            )
            if image_offset is not None:
                y, x_ = (
                    y + image_offset[n, 2 * k, p, q].item(),
                    x_ + image_offset[n, 2 * k + 1, p, q].item(),
                )
            value = bilinear(
                lambda a, b, n=n, c=c: pixel(n, c, a, b), y, x_, math.floor(y), math.floor(x_)
            )
            place, cell = [], []
            for a, kk in enumerate((ky, kx)):
                u = place_at_rest(case, kk, kernel[a], case.scope[a])
                if kernel_offset is not None:
                    u += (
                        kernel_offset[n, 2 * k + a, p, q]
                        if kernel_offset.dim() == 4
                        else kernel_offset[n, 2 * k + a]
                    ).item()
                place.append(min(max(u, 0.0), case.scope[a] - 1))
                cell.append(max(0, min(math.floor(place[a]), case.scope[a] - 2)))
            top = (case.scope[0] - 1, case.scope[1] - 1)
            read = lambda a, b, c=c, top=top: (  # noqa: E731
                weight[c, 0, min(a, top[0]), min(b, top[1])].item()
            )
            total += value * bilinear(read, *place, *cell)
        out[n, c, p, q] = total
    return out


@pytest.mark.parametrize("case", [c for c in CASES if c.c <= 12], ids=str)
def test_reference_is_the_scalar_loop(case):
    tensors = [None if t is None else t.detach() for t in make_tensors(case, torch.float64)]
    expected = scalar_loop(case, *tensors)
    torch.testing.assert_close(
        deform_kernel2d(*tensors, **case.options, backend="reference"), expected
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tap_loop_is_the_reference_in_float64(case):
    assert_matches_reference(case, torch.float64, None, tolerance=1e-14)


@pytest.mark.parametrize("stride", [1, 2])
def test_without_offsets_it_is_conv2d(stride):
    x, weight = torch.randn(2, 6, 9, 8), torch.randn(6, 1, 3, 3)
    expected = F.conv2d(x, weight, stride=stride, padding=1, groups=6)
    torch.testing.assert_close(deform_kernel2d(x, weight, stride=stride, padding=1), expected)
    zeros = torch.zeros(2, 18, *expected.shape[2:])
    for offsets in ((zeros, None), (zeros[:, :, 0, 0], None), (None, zeros), (zeros, zeros)):
        torch.testing.assert_close(
            deform_kernel2d(x, weight, *offsets, stride=stride, padding=1), expected
        )


@pytest.mark.parametrize("integer", [False, True], ids=["between pixels", "on pixels"])
@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_with_image_offsets_it_is_torchvisions_deform_conv2d(scale, integer):
    """Compare output and gradients, also at integers, outside the image and on its border."""
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    options = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}
    ho, wo = F.conv2d(x, weight, groups=5, **options).shape[2:]
    offset = (scale * torch.randn(3, 12, ho, wo, dtype=torch.float64)).requires_grad_()
    offset = offset.detach().round().requires_grad_() if integer else offset
    inputs = (x, offset, weight)
    expected = deform_conv2d(*inputs, **options)
    grad = torch.randn_like(expected)
    for backend in ("reference", None):
        got = deform_kernel2d(
            x, weight, image_offset=offset, kernel_size=(3, 2), **options, backend=backend
        )
        torch.testing.assert_close(got, expected)
        for g, e in zip(
            torch.autograd.grad(got, inputs, grad),
            torch.autograd.grad(expected, inputs, grad, True),
            strict=True,
        ):
            torch.testing.assert_close(g, e)


@pytest.mark.parametrize(
    "case",
    [Case(c=2, size=(3, 3), n=1), Case(kind="dcn_local", c=2, size=(3, 3), n=1, stride=2)],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", None])
def test_gradcheck(case, backend):
    tensors = make_tensors(case, torch.float64, seed=3)
    given = [t for t in tensors if t is not None]

    def run(*leaves):
        leaves = iter(leaves)
        return deform_kernel2d(
            *(None if t is None else next(leaves) for t in tensors), **case.options, backend=backend
        )

    # fast_mode goes along random directions, a hundred times cheaper than number by number.
    assert torch.autograd.gradcheck(run, given, fast_mode=backend is None)
    if backend == "reference":
        assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("scope", [3, 4, 5, 9])
@pytest.mark.parametrize("backend", ["reference", None])
def test_zero_offsets_have_gradients(scope, backend):
    """Check that offsets learn on integer grids (scopes 3, 5, 9) too.

    A hat's subgradient would be zero everywhere there.
    """
    x, weight, offset, _ = make_tensors(Case(n=1, c=4, size=(6, 6), scope=(scope, scope)))
    local = torch.zeros_like(offset).requires_grad_()
    whole = torch.zeros(1, 18, requires_grad=True)
    for zeros in (local, whole):
        deform_kernel2d(x, weight, zeros, padding=1, backend=backend).square().sum().backward()
    assert (whole.grad != 0).all()
    assert (local.grad[:, :, 1:-1, 1:-1] != 0).all()  # around them, taps read padding


def _single(u, clip, backend, outer=1.0):
    """Return d out / d offset for a one-tap kernel over the scope [1, 3, 7] read at u."""
    weight = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64).view(1, 1, 1, 3)
    offset = torch.tensor([0.0, u - 1.0], dtype=torch.float64).view(1, 2, 1, 1).requires_grad_()
    x = torch.full((1, 1, 1, 1), outer, dtype=torch.float64)
    deform_kernel2d(x, weight, offset, kernel_size=1, clip=clip, backend=backend).sum().backward()
    return offset.grad.flatten()[1].item()


@pytest.mark.parametrize("backend", ["reference", None])
def test_one_sided_derivatives_and_the_clip(backend):
    # right derivative at integers, left one at the last; passes at equality, zero strictly outside
    for u, expected in ((0.5, 2), (1.0, 4), (1.5, 4), (0.0, 2), (2.0, 4), (-0.01, 0), (2.01, 0)):
        assert _single(u, "hard", backend) == expected
    # projected: outside, only what leads back inside
    for u, outer, expected in (
        (-1.0, 1.0, 0),
        (-1.0, -1.0, -2),
        (3.0, 1.0, 4),
        (3.0, -1.0, 0),
        (2.0, -1.0, -4),
    ):
        assert _single(u, "projected", backend, outer) == expected


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_in_nan_out(dtype, backend):
    case = Case(kind="dcn_local", n=1, c=3, size=(5, 5))
    for i in range(4):
        tensors = [t.detach().clone() for t in make_tensors(case, dtype)]
        tensors[i][(0,) * tensors[i].dim()] = float("nan")
        assert deform_kernel2d(*tensors, **case.options, backend=backend).isnan().any()
    # the first tap of the first position reads padding; its offset is heard all the same
    tensors = [t.detach().clone() for t in make_tensors(Case(n=1, c=3, size=(5, 5)), dtype)[:3]]
    tensors[2][0, 0, 0, 0] = float("nan")
    assert deform_kernel2d(*tensors, padding=1, backend=backend)[0, :, 0, 0].isnan().all()


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scope", [(1, 1), (1, 3), (3, 1)])
def test_a_nan_is_heard_where_the_scope_has_but_one_place(scope, dtype, backend):
    tensors = make_tensors(Case(n=1, c=3, size=(5, 5), scope=scope), dtype)[:2]
    for channel in (8, 9):  # the middle tap, along y and along x
        offset = torch.zeros(1, 18, 5, 5, dtype=dtype)
        offset[0, channel, 2, 2] = float("nan")
        out = deform_kernel2d(*tensors, offset, padding=1, backend=backend)
        assert out[0, :, 2, 2].isnan().all()
        assert out.isnan().sum() == 3


@pytest.mark.parametrize("backend", ["reference", None])
def test_infinite_offsets_are_clipped_or_outside(backend):
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 1, 4, 4)
    far = torch.full((1, 18, 4, 4), float("inf"))
    at_the_end = deform_kernel2d(x, weight, torch.full_like(far, 1e6), padding=1, backend=backend)
    torch.testing.assert_close(
        deform_kernel2d(x, weight, far, padding=1, backend=backend), at_the_end
    )
    assert (deform_kernel2d(x, weight, None, far, padding=1, backend=backend) == 0).all()


TINY = [
    Case(kind=kind, n=2, c=3, size=(4, 3), scope=(3, 3) if kind == "dcn" else (4, 4))
    for kind in ("local", "dcn", "dcn_local", "global")
]


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("case", TINY, ids=str)
def test_float32_offsets_lose_no_digits_of_float64_data(case, backend):
    tensors = [None if t is None else t.detach() for t in make_tensors(case, torch.float64)]
    narrow = [None if t is None else t.float() if i >= 2 else t for i, t in enumerate(tensors)]
    wide = [None if t is None else t.double() for t in narrow]
    expected = scalar_loop(case, *wide)
    got = deform_kernel2d(*narrow, **case.options, backend=backend)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    leaves = [
        [None if t is None else t.clone().requires_grad_() for t in ts] for ts in (narrow, wide)
    ]
    gradients = run(case, leaves[0], backend), run(case, leaves[1], "reference")
    for g, e in zip(*gradients, strict=True):
        digits = 1e-6 if g.dtype == torch.float32 else 1e-13
        torch.testing.assert_close(g.double(), e, rtol=digits, atol=digits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", TINY[:3], ids=str)
def test_the_tap_loop_sums_half_precision_in_float32(case, dtype):
    """Check that each result is the exact number, rounded once.

    A few may differ, where float32's own rounding tips them.
    """
    tensors = make_tensors(case, dtype)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    weight = tensors[1] if case.kind != "dcn" else tensors[1][None]
    geometry = make_geometry(case.scope, **case.options)
    got = library.deform_kernel2d(tensors[0], weight, *tensors[2:], *geometry, "taps")
    expected = deform_kernel2d(*wide, **case.options, backend="reference")
    leaves, wide_leaves = ([t for t in ts if t is not None] for ts in (tensors, wide))
    got = [got, *torch.autograd.grad(got.sum(), leaves)]
    expected = [expected, *torch.autograd.grad(expected.sum(), wide_leaves)]
    for g, e in zip(got, expected, strict=True):
        digits = 1e-5 if g.dtype == torch.float32 else 0
        wrong = ~torch.isclose(g, e.to(g.dtype), rtol=digits, atol=digits)
        assert wrong.float().mean() < 0.02


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("kind", ["local", "dcn", "dcn_local", "global"])
def test_output_follows_the_input_memory_format(kind, backend):
    for channels_last in (False, True):
        case = Case(kind=kind, channels_last=channels_last)
        tensors = make_tensors(case)
        out = deform_kernel2d(*tensors, **case.options, backend=backend)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        assert out.is_contiguous(memory_format=memory_format)
        out.sum().backward()
        assert tensors[0].grad.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_have_the_strides_of_the_weight(channels_last, dtype):
    """Check also the stride of an axis of size 1, which only DistributedDataParallel looks at."""
    case = Case()
    x, weight, offset, _ = make_tensors(case, dtype)
    if channels_last:
        weight = weight.detach().to(memory_format=torch.channels_last).requires_grad_()
        assert weight.stride() == (16, 1, 4, 1)
    (grad,) = torch.autograd.grad(deform_kernel2d(x, weight, offset, **case.options).sum(), weight)
    assert grad.stride() == weight.stride()


def test_non_contiguous_tensors():
    case = Case(kind="dcn_local")
    tensors = [t.detach() for t in make_tensors(case)]
    strided = [torch.stack([t, t], -1)[..., 0] for t in tensors]
    assert not any(t.is_contiguous() for t in strided)
    torch.testing.assert_close(
        deform_kernel2d(*strided, **case.options), deform_kernel2d(*tensors, **case.options)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    """Check that autocast takes input and weight to the low precision, offsets to float32.

    Gradients come back in the parameters' dtype.
    """
    case = Case(kind="dcn_local")
    tensors = make_tensors(case)
    with torch.autocast("cpu", dtype):
        out = deform_kernel2d(*tensors, **case.options)
    assert out.dtype == dtype
    low = [t.detach().to(dtype) if i < 2 else t.detach() for i, t in enumerate(tensors)]
    assert torch.equal(out, deform_kernel2d(*low, **case.options))
    out.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)
    double = [t.detach().double() for t in tensors]
    with torch.autocast("cpu", dtype):
        assert deform_kernel2d(*double, **case.options).dtype == torch.float64
        with pytest.raises(ValueError, match=r"weight must have input's dtype torch\.float64, got"):
            deform_kernel2d(double[0], *tensors[1:], **case.options)


@pytest.mark.parametrize("kind", ["local", "dcn", "dcn_local", "global", "dcn_global"])
def test_opcheck(kind):
    from dkcls.ops.sample_kernel import sample_kernel2d

    for channels_last in (True, False):
        case = Case(kind=kind, channels_last=channels_last)
        x, weight, kernel_offset, image_offset = make_tensors(case)
        if kernel_offset is None or kernel_offset.dim() == 2:
            weight = sample_kernel2d(weight, kernel_offset, kernel_size=3).detach().requires_grad_()
            kernel_offset = None
        options = make_geometry(case.scope, **case.options)
        torch.library.opcheck(
            library.deform_kernel2d, (x, weight, kernel_offset, image_offset, *options, "")
        )


@pytest.mark.parametrize("kind", ["local", "global", "dcn_local"])
def test_compile_in_one_graph(kind):
    case = Case(kind=kind)
    tensors = make_tensors(case)

    def call(*tensors):
        return deform_kernel2d(*tensors, **case.options) * 2

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, got = call(*tensors), compiled(*tensors)
    torch.testing.assert_close(got, expected)
    given = [t for t in tensors if t is not None]
    for g, e in zip(
        torch.autograd.grad(got.sum(), given),
        torch.autograd.grad(expected.sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(g, e)


def test_export_with_a_dynamic_batch():
    class Model(torch.nn.Module):
        def forward(self, x, weight, offset):
            return deform_kernel2d(x, weight, offset, padding=1)

    case = Case(n=3)
    x, weight, offset, _ = (None if t is None else t.detach() for t in make_tensors(case))
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        Model(), (x, weight, offset), dynamic_shapes=({0: batch}, None, {0: batch})
    )
    two = (
        x[:2].contiguous(memory_format=torch.channels_last),
        weight,
        offset[:2].contiguous(memory_format=torch.channels_last),
    )
    torch.testing.assert_close(program.module()(*two), deform_kernel2d(*two, padding=1))


def test_flops_are_the_convolutions():
    from torch.utils.flop_counter import FlopCounterMode

    def flops(function):
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    x, weight, offset, _ = make_tensors(Case(c=16, size=(14, 14)))
    rigid = torch.randn(16, 1, 3, 3, requires_grad=True)
    plain = flops(lambda: F.conv2d(x, rigid, padding=1, groups=16))
    assert (
        plain
        == flops(lambda: deform_kernel2d(x, weight, offset, padding=1))
        == 2 * 2 * 16 * 14 * 14 * 9
    )
    # The backward counts once for the input, once for the weight; PyTorch's own formula counts a
    # grouped weight gradient as a dense one.
    assert (
        flops(lambda: deform_kernel2d(x, weight, offset, padding=1).sum().backward()) == 3 * plain
    )


def test_the_direct_call_is_the_registered_op():
    """Check that autograd's short cut past the dispatcher gives the same numbers."""
    case = Case(kind="dcn_local")
    tensors = make_tensors(case)
    options = (*make_geometry(case.scope, **case.options), "")
    direct, registered = (
        library.call(*tensors, *options),
        library.deform_kernel2d(*tensors, *options),
    )
    assert torch.equal(direct, registered)
    grads = [torch.autograd.grad(out.square().sum(), tensors) for out in (direct, registered)]
    assert all(torch.equal(d, r) for d, r in zip(*grads, strict=True))


def test_double_backward_is_an_error_that_names_the_way_out():
    x, weight, offset, _ = make_tensors(Case())
    (grad,) = torch.autograd.grad(
        deform_kernel2d(x, weight, offset, padding=1).square().sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match='backend="reference"'):
        grad.sum().backward()


X, WEIGHT, OFFSET = torch.zeros(2, 3, 5, 5), torch.zeros(3, 1, 4, 4), torch.zeros(2, 18, 5, 5)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ((X[0], WEIGHT), {}, r"input must be \[N, C, H, W\], got \[3, 5, 5\]"),
        ((X.long(), WEIGHT), {}, "input must be floating point, got torch.int64"),
        (
            (X[:, :, :0], WEIGHT, OFFSET[:, :, :2]),
            {"padding": (2, 1)},
            r"input must have at least one row and one column, got \[2, 3, 0, 5\]",
        ),
        (
            (X[..., :0], WEIGHT, None, OFFSET[..., :2]),
            {"padding": (1, 2)},
            r"input must have at least one row and one column, got \[2, 3, 5, 0\]",
        ),
        (
            (X, WEIGHT[:2]),
            {},
            r"weight must be \[C, 1, Sh, Sw\] = \[3, 1, Sh, Sw\], got \[2, 1, 4, 4\]",
        ),
        ((X, WEIGHT[:, 0]), {}, r"weight must be .* got \[3, 4, 4\]"),
        ((X, WEIGHT[..., :0]), {}, r"weight must be .* got \[3, 1, 4, 0\]"),
        (
            (X, WEIGHT.double()),
            {},
            "weight must have input's dtype torch.float32, got torch.float64",
        ),
        ((X, WEIGHT.to("meta")), {}, "weight must be on input's device cpu, got meta"),
        (
            (X, WEIGHT, OFFSET[:, :9]),
            {},
            r"kernel_offset must be \[N, 2\*Kh\*Kw, Ho, Wo\] = \[2, 18, 5, 5\] or .* "
            r"got \[2, 9, 5, 5\]",
        ),
        ((X, WEIGHT, OFFSET[:1]), {}, r"kernel_offset must be .* got \[1, 18, 5, 5\]"),
        ((X, WEIGHT, OFFSET[:, :, :4]), {}, r"kernel_offset must be .* got \[2, 18, 4, 5\]"),
        (
            (X, WEIGHT, OFFSET.double()),
            {},
            "kernel_offset must have input's dtype torch.float32, got torch.float64",
        ),
        (
            (X, WEIGHT, OFFSET.to("meta")),
            {},
            "kernel_offset must be on input's device cpu, got meta",
        ),
        (
            (X, WEIGHT, None, OFFSET[:, :, 0, 0]),
            {},
            r"image_offset must be \[N, 2\*Kh\*Kw, Ho, Wo\] = .* got \[2, 18\]",
        ),
        (
            (X, WEIGHT, None, OFFSET.half()),
            {},
            "image_offset must have input's dtype torch.float32, got torch.float16",
        ),
        (
            (X, WEIGHT),
            {"kernel_size": 0},
            "kernel_size must be an int or a pair of ints, each at least 1, got 0",
        ),
        ((X, WEIGHT), {"stride": (1, 2, 3)}, r"stride must be .* got \(1, 2, 3\)"),
        ((X, WEIGHT), {"padding": -1}, "padding must be .* at least 0, got -1"),
        ((X, WEIGHT), {"dilation": 1.5}, "dilation must be .* got 1.5"),
        ((X, WEIGHT), {"kernel_size": 9}, r"input of \[5, 5\] is too small"),
        (
            (X, WEIGHT),
            {"grid": "even"},
            'grid must be "centered", "spread" or a step of at least 0, got \'even\'',
        ),
        ((X, WEIGHT), {"grid": -1.0}, "grid must be .* got -1.0"),
        ((X, WEIGHT), {"clip": "soft"}, 'clip must be "hard" or "projected", got \'soft\''),
        ((X, WEIGHT), {"backend": "cuda"}, "backend must be one of .* got 'cuda'"),
        (
            (X.double(), WEIGHT.double()),
            {"backend": "triton"},
            'backend "triton" takes float32, float16 and bfloat16, got',
        ),
    ],
)
def test_bad_arguments_are_named(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        deform_kernel2d(*tensors, **({"padding": 1} | options))


@pytest.mark.parametrize(
    ("case", "dtype", "backend", "kernels"),
    [
        (Case(n=1), torch.float32, None, "on the CPU's numba kernels"),
        (Case(n=1), torch.float64, None, "tap by tap in PyTorch"),
        (Case(n=1), torch.float64, "cpu", "tap by tap in PyTorch"),
        (Case(n=1), torch.float32, "reference", None),
        # A convolution of PyTorch's.
        (Case(n=1, kind="rigid", scope=(3, 3)), torch.float32, None, None),
        pytest.param(
            Case(n=1, c=32, size=(4, 4)),
            torch.float16,
            "triton",
            "on Triton's tensor-core kernels",
            marks=interpreter,
        ),
        pytest.param(
            Case(n=1, c=32, size=(4, 4)),
            torch.float32,
            "triton",
            "on Triton's gather kernels (float32: the tensor cores take half precision only)",
            marks=interpreter,
        ),
        pytest.param(
            Case(n=1, c=32, size=(4, 4), kind="dcn_local"),
            torch.float16,
            "triton",
            "on Triton's gather kernels (the tensor cores take local DK only)",
            marks=interpreter,
        ),
        pytest.param(
            Case(n=1, c=12, size=(4, 4)),
            torch.float16,
            "triton",
            "on Triton's gather kernels "
            "(scope, taps or channels do not fit the tensor cores' tiles)",
            marks=interpreter,
        ),
    ],
)
def test_the_kernels_that_run_are_named_once(
    case, dtype, backend, kernels, caplog, monkeypatch, triton_device
):
    monkeypatch.setattr("dkcls.ops.deform_kernel.backend._announced", set())
    tensors = make_tensors(case, dtype, triton_device if backend == "triton" else "cpu")
    with caplog.at_level("INFO", logger="dkcls"):
        for _ in range(2):
            deform_kernel2d(*tensors, **case.options, backend=backend).sum().backward()
    said = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "dkcls"
    ]
    assert said == ([("INFO", f"deform_kernel2d runs {kernels}")] if kernels else [])


TAPS = torch.zeros(1, 3, 1, 3, 3)
RAW = {
    "input": X,
    "weight": WEIGHT,
    "kernel_offset": OFFSET,
    "image_offset": None,
    "kernel_size": [3, 3],
    "stride": [1, 1],
    "padding": [1, 1],
    "dilation": [1, 1],
    "step": [1.0, 1.0],
    "clip": "hard",
    "backend": "",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": X[0]}, r"input must be \[N, C, H, W\], got \[3, 5, 5\]"),
        ({"input": X[:, :, :, :0]}, "input must have at least one row and one column"),
        ({"input": X[..., :1], "padding": [1, 0]}, r"input of \[5, 1\] is too small"),
        (
            {"weight": TAPS},
            r"weight must be \[C, 1, Sh, Sw\] = \[3, 1, Sh, Sw\] .* got \[1, 3, 1, 3, 3\]",
        ),
        ({"weight": WEIGHT[:2]}, r"weight must be .* got \[2, 1, 4, 4\]"),
        ({"weight": WEIGHT.expand(3, 2, 4, 4)}, r"weight must be .* got \[3, 2, 4, 4\]"),
        ({"weight": WEIGHT[:, :, :0]}, r"weight must be .* got \[3, 1, 0, 4\]"),
        (
            {"weight": WEIGHT.double()},
            "weight must have input's dtype torch.float32, got torch.float64",
        ),
        (
            {"weight": WEIGHT, "kernel_offset": None, "image_offset": OFFSET},
            r"weight must be \[1 or N, C, 1, Kh, Kw\] = \[1 or 2, 3, 1, 3, 3\] .* "
            r"got \[3, 1, 4, 4\]",
        ),
        (
            {"weight": TAPS.expand(3, 3, 1, 3, 3), "kernel_offset": None},
            r"weight must be .* got \[3, 3, 1, 3, 3\]",
        ),
        (
            {"kernel_offset": OFFSET[..., 0, 0]},
            r"kernel_offset must be \[N, .* = \[2, 18, 5, 5\], got \[2, 18\]",
        ),
        ({"kernel_offset": OFFSET[:, :, 1:]}, r"kernel_offset must be .* got \[2, 18, 4, 5\]"),
        (
            {"kernel_offset": OFFSET.double()},
            "kernel_offset must have input's dtype torch.float32, got torch.float64",
        ),
        ({"image_offset": OFFSET[:1]}, r"image_offset must be .* got \[1, 18, 5, 5\]"),
        ({"kernel_size": [3]}, r"kernel_size must be .* got \[3\]"),
        ({"stride": [1, 0]}, r"stride must be .* got \[1, 0\]"),
        ({"padding": [-1, 1]}, r"padding must be .* got \[-1, 1\]"),
        ({"dilation": [1, 1, 1]}, r"dilation must be .* got \[1, 1, 1\]"),
        ({"step": [1.0]}, r"step must be two numbers, got \[1\.0\]"),
        ({"step": [1.0, math.nan]}, "grid must be .* a step of at least 0, got nan"),
        ({"clip": "soft"}, 'clip must be "hard" or "projected", got .soft'),
        ({"backend": "cuda"}, "backend must be one of .* got 'cuda'"),
        (
            {"backend": "triton", "input": X.double(), "weight": WEIGHT.double()},
            'backend "triton" takes float32',
        ),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_registered_ops_refuse_what_their_kernels_would_misread(changes, message, autocast):
    arguments = tuple((RAW | changes).values())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(ValueError, match=message):
            torch.ops.dkcls.deform_kernel2d(*arguments)
        with pytest.raises(ValueError, match=message):
            torch.ops.dkcls.deform_kernel2d_backward(X, *arguments, [True, False, False, False])


@pytest.mark.parametrize(
    ("grad", "needs", "message"),
    [
        (
            X[..., 1:],
            [True] * 3 + [False],
            r"grad must be \[N, C, Ho, Wo\] = \[2, 3, 5, 5\], got \[2, 3, 5, 4\]",
        ),
        (
            X.double(),
            [True] * 3 + [False],
            "grad must have input's dtype torch.float32, got torch.float64",
        ),
        (X, [True] * 3, r"needs must be four booleans, .* got \[True, True, True\]"),
        (
            X,
            [True] * 4,
            r"needs must be .* true only for tensors that are given, "
            r"got \[True, True, True, True\]",
        ),
    ],
)
def test_the_registered_backward_refuses_another_calls_gradient(grad, needs, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.dkcls.deform_kernel2d_backward(grad, *RAW.values(), needs)


def test_meta_tensors_have_shapes():
    x, weight, offset = (
        torch.empty(shape, device="meta") for shape in ((2, 8, 9, 9), (8, 1, 4, 4), (2, 18, 5, 5))
    )
    assert deform_kernel2d(x, weight, offset, stride=2, padding=1).shape == (2, 8, 5, 5)
