"""Kernels sampled from a scope: PyTorch against a loop over numbers, Triton against PyTorch."""

import math

import pytest
import torch

from dkcls.ops import sample_kernel2d
from dkcls.ops.geometry import make_geometry, tap_grid
from dkcls.ops.inspect import compile_spec
from dkcls.ops.sample_kernel import triton
from tests.ops.compiled import has_atomics, shipped, spills

# (Cout, Cin/groups, Sh, Sw), batch, kernel_size, grid, clip, scale of the offsets
CASES = [
    ((6, 1, 4, 4), 3, 3, "centered", "hard", 1.0),
    # Every coordinate is on an integer, the border's on the scope's edge.
    ((5, 3, 3, 3), 2, 3, "centered", "hard", 0.0),
    ((4, 2, 5, 2), 2, (3, 2), "spread", "projected", 3.0),
    ((3, 1, 1, 4), 2, (1, 3), 2.0, "hard", 2.0),
    ((2, 1, 1, 1), 1, 3, "centered", "projected", 1.0),
    ((40, 2, 9, 9), 5, 3, 2.0, "hard", 4.0),
    ((2, 2, 4, 4), 0, 3, "centered", "hard", 1.0),
]
interpreter = pytest.mark.interpreter


def make(case, dtype=torch.float64, device="cpu"):
    """Return weight, kernel_offset, a gradient, and the options of the call."""
    shape, n, kernel_size, grid, clip, scale = case
    taps = make_geometry(shape[2:], kernel_size).taps
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
    offset = (torch.randn(n, 2 * taps, generator=generator, dtype=torch.float64) * scale).to(
        device, dtype
    )
    options = {"kernel_size": kernel_size, "grid": grid, "clip": clip}
    grad = torch.randn(
        sample_kernel2d(weight, offset, **options).shape, generator=generator, dtype=torch.float64
    )
    return weight.requires_grad_(), offset.requires_grad_(), grad.to(device, dtype), options


def scalar_loop(weight, offset, kernel_size, grid, clip):
    geometry = make_geometry(weight.shape[2:], kernel_size, grid=grid, clip=clip)
    out = torch.zeros(offset.shape[0], *weight.shape[:2], *geometry.kernel_size, dtype=weight.dtype)
    for n, ky, kx in torch.cartesian_prod(
        *(torch.arange(s) for s in (out.shape[0], *out.shape[3:]))
    ).tolist():
        corners = []
        for a, (k, scope) in enumerate(zip((ky, kx), weight.shape[2:], strict=True)):
            g = tap_grid(geometry.kernel_size[a], scope, geometry.step[a])[k]
            c = min(
                max(g + offset[n, 2 * (ky * geometry.kernel_size[1] + kx) + a].item(), 0.0),
                scope - 1,
            )
            cell = max(0, min(math.floor(c), scope - 2))
            corners.append([(cell, 1 - (c - cell)), (min(cell + 1, scope - 1), c - cell)])
        out[n, :, :, ky, kx] = sum(
            weight[:, :, i, j] * u * v for i, u in corners[0] for j, v in corners[1]
        )
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reads_what_the_loop_reads(case):
    weight, offset, _, options = make(case)
    expected = scalar_loop(weight.detach(), offset.detach(), **options)
    torch.testing.assert_close(sample_kernel2d(weight, offset, **options), expected)


def test_float32_offsets_lose_no_digits_of_a_float64_scope():
    weight, offset, _, options = make(CASES[0])
    narrow = offset.detach().float()
    expected = scalar_loop(weight.detach(), narrow.double(), **options)
    torch.testing.assert_close(
        sample_kernel2d(weight, narrow, **options), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("clip", ["hard", "projected"])
def test_gradcheck_away_from_the_kinks(clip):
    weight = torch.randn(3, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    offset = (
        torch.rand(2, 12, dtype=torch.float64) * 0.4 + 0.55
    ).requires_grad_()  # inside the scope, between entries
    call = lambda w, o: sample_kernel2d(w, o, kernel_size=(2, 3), grid=0.5, clip=clip)  # noqa: E731
    assert torch.autograd.gradcheck(call, (weight, offset))
    assert torch.autograd.gradgradcheck(call, (weight, offset))


@pytest.mark.parametrize(
    ("offset", "slope", "clip"),
    [
        (0.0, 2.0, "hard"),  # at an integer: the right derivative
        (1.0, 2.0, "hard"),  # at the last entry: the left one, and the clamp passes
        (-1.0, 1.0, "hard"),  # at the first entry
        (1.5, 0.0, "hard"),
        (1.5, 2.0, "projected"),  # beyond the last entry and descending leads back
        (-1.5, 0.0, "projected"),
    ],
)
@pytest.mark.parametrize("backend", [None, pytest.param("triton", marks=interpreter)])
def test_derivative_at_the_kinks(offset, slope, clip, backend, triton_device):
    device = triton_device if backend else "cpu"
    weight = torch.tensor([0.0, 1.0, 3.0], device=device).view(1, 1, 1, 3)
    offset = torch.tensor([[0.0, offset]], device=device, requires_grad=True)
    out = sample_kernel2d(weight, offset, kernel_size=1, clip=clip, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), offset)
    assert grad.tolist() == [[0.0, slope]]


def test_the_grid_itself():
    weight = torch.randn(4, 1, 3, 3)
    assert torch.equal(sample_kernel2d(weight, None, kernel_size=3), weight[None])
    weight = torch.randn(4, 1, 4, 4)
    expected = torch.nn.functional.avg_pool2d(weight, 2, 1)[None]  # halfway between entries
    torch.testing.assert_close(sample_kernel2d(weight, None, kernel_size=3), expected)


def test_wrong_arguments_are_named():
    weight, offset = torch.randn(4, 1, 4, 4), torch.zeros(2, 18)
    with pytest.raises(
        ValueError, match=r"weight must be \[Cout, Cin/groups, Sh, Sw\], got \[4, 4, 4\]"
    ):
        sample_kernel2d(weight[:, 0], offset, kernel_size=3)
    with pytest.raises(
        ValueError, match=r"kernel_offset must be \[N, 2\*Kh\*Kw\] = \[N, 18\], got \[2, 9\]"
    ):
        sample_kernel2d(weight, offset[:, :9], kernel_size=3)
    with pytest.raises(
        ValueError, match=r"kernel_offset must have weight's dtype torch.float32, got torch.float64"
    ):
        sample_kernel2d(weight, offset.double(), kernel_size=3)
    with pytest.raises(ValueError, match='clip must be "hard" or "projected"'):
        sample_kernel2d(weight, offset, kernel_size=3, clip="soft")
    with pytest.raises(ValueError, match="backend must be one of"):
        sample_kernel2d(weight, offset, kernel_size=3, backend="cuda")


def test_under_autocast_offsets_may_come_in_half_precision():
    weight, offset, _, options = make(CASES[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = sample_kernel2d(weight, offset.bfloat16(), **options)
    expected = scalar_loop(weight.detach(), offset.detach().bfloat16(), **options)
    assert (got - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight": torch.zeros(4, 4, 4)},
            r"weight must be \[Cout, Cin/groups, Sh, Sw\], got \[4, 4, 4\]",
        ),
        ({"weight": torch.zeros(4, 1, 0, 4)}, r"weight must be .* got \[4, 1, 0, 4\]"),
        (
            {"weight": torch.zeros(4, 1, 4, 4).double()},
            'backend "triton" takes float32, float16 and bfloat16, got',
        ),
        ({"offset": torch.zeros(2, 9)}, r"kernel_offset must be .* = \[N, 18\], got \[2, 9\]"),
        (
            {"offset": torch.zeros(2, 18).half()},
            "kernel_offset must have weight's dtype torch.float32",
        ),
        ({"kernel_size": [3, 0]}, "kernel_size must be"),
        ({"step": [1.0]}, r"step must be two numbers, got \[1\.0\]"),
        ({"clip": "soft"}, 'clip must be "hard" or "projected"'),
    ],
)
def test_the_registered_ops_refuse_what_their_kernels_would_misread(changes, message):
    """Also where no Triton kernel can run: they are refused before one is looked for."""
    sound = {"weight": torch.zeros(4, 1, 4, 4), "offset": torch.zeros(2, 18), "kernel_size": [3, 3]}
    arguments = (sound | {"step": [1.0, 1.0], "clip": "hard"} | changes).values()
    with pytest.raises(ValueError, match=message):
        torch.ops.dkcls.sample_kernel2d(*arguments)
    with pytest.raises(ValueError, match=message):
        torch.ops.dkcls.sample_kernel2d_backward(
            torch.zeros(2, 4, 1, 3, 3), *arguments, [True, True]
        )


@interpreter
@pytest.mark.parametrize(
    ("grad", "needs", "message"),
    [
        (
            torch.zeros(2, 4, 1, 3),
            [True, True],
            r"grad must be .* = \[2, 4, 1, 3, 3\], got \[2, 4, 1, 3\]",
        ),
        (torch.zeros(2, 4, 1, 3, 3), [True], r"needs must be two booleans, got \[True\]"),
    ],
)
def test_the_registered_backward_refuses_another_calls_gradient(grad, needs, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.dkcls.sample_kernel2d_backward(
            grad, torch.zeros(4, 1, 4, 4), torch.zeros(2, 18), [3, 3], [1.0, 1.0], "hard", needs
        )


def gradients(weight, offset, grad, options, backend):
    out = sample_kernel2d(weight, offset, **options, backend=backend)
    return [out, *torch.autograd.grad(out, (weight, offset), grad)]


@interpreter
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_is_the_plain_version(case, dtype, tolerance, triton_device):
    weight, offset, grad, options = make(case, dtype, triton_device)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in (weight, offset, grad)]
    expected = gradients(*wide, options, "reference")
    for name, e, g in zip(
        ("kernels", "weight", "offset"),
        expected,
        gradients(weight, offset, grad, options, "triton"),
        strict=True,
    ):
        assert (g.shape, g.dtype) == (e.shape, dtype), name
        assert (g.double() - e).norm() <= tolerance * e.norm() + 1e-30, name


@interpreter
def test_triton_splits_the_batch_and_the_rows_in_a_fixed_order(triton_device, monkeypatch):
    monkeypatch.setattr(triton, "PROGRAMS", 6)
    weight, offset, grad, options = make(
        ((40, 1, 4, 4), 7, 3, "centered", "hard", 1.0), torch.float32, triton_device
    )
    expected = gradients(weight, offset, grad, options, "reference")
    got = gradients(weight, offset, grad, options, "triton")
    torch.testing.assert_close(got, expected)
    again = gradients(weight, offset, grad, options, "triton")
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@interpreter
def test_triton_writes_all_that_it_returns(triton_device, monkeypatch):
    weight, offset, grad, options = make(CASES[0], torch.float32, triton_device)
    first = gradients(weight, offset, grad, options, "triton")
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))
    second = gradients(weight, offset, grad, options, "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@interpreter
def test_triton_hears_nan_and_clips_infinity(triton_device):
    weight, offset, grad, options = make(CASES[0], torch.float32, triton_device)
    offset = offset.detach().clone()
    offset[0, 4], offset[1, 0], offset[1, 1] = math.nan, math.inf, -math.inf
    out, weight_grad, offset_grad = gradients(
        weight, offset.requires_grad_(), grad, options, "triton"
    )
    assert out[0, :, :, 0, 2].isnan().all()
    assert out.isnan().sum() == out[0, :, :, 0, 2].numel()
    assert weight_grad.isnan().any()
    assert torch.equal(out[1, :, :, 0, 0], weight[:, :, 3, 0])
    assert offset_grad[1, :2].tolist() == [0.0, 0.0]


@interpreter
def test_triton_op_is_registered_well(triton_device):
    weight, offset, _, _ = make(CASES[0], torch.float32, triton_device)
    torch.library.opcheck(
        torch.ops.dkcls.sample_kernel2d.default, (weight, offset, (3, 3), (1.0, 1.0), "hard")
    )
    out = sample_kernel2d(weight, offset, kernel_size=3, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="sample_kernel2d has no double backward"):
        grad.sum().backward()


@pytest.mark.compile
@pytest.mark.parametrize(("arch", "spec"), shipped(lambda arch: triton.shipped()))
def test_compiles_without_spills_or_atomics(arch, spec):
    compiled = compile_spec(spec, arch)
    assert not spills(compiled)
    assert not has_atomics(arch, compiled)
