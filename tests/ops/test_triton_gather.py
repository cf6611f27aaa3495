"""The gather kernels: numerics in Triton's interpreter or on a GPU, resources for every target."""

import math
from dataclasses import replace

import pytest
import torch

from dkcls.ops import deform_kernel2d
from dkcls.ops.deform_kernel.backend import Call
from dkcls.ops.deform_kernel.triton import dot, gather
from dkcls.ops.geometry import make_geometry
from dkcls.ops.inspect import compile_spec, count_instructions
from dkcls.ops.triton_launch import KernelSpec
from tests.ops.cases import CASES, Case, assert_matches_reference, make_tensors, run
from tests.ops.compiled import has_atomics, shipped, spills

interpreter = pytest.mark.interpreter
HALF = [
    Case(scope=(9, 9), c=40, n=1),
    Case(kind="dcn_local", c=33, n=1, size=(4, 5)),
    Case(kind="dcn", scope=(3, 3), c=40, n=1),
    Case(kind="global", stride=2),
]
KINDS = [
    Case(kind=kind, c=20, size=(6, 7), stride=2)
    for kind in ("local", "dcn", "dcn_local", "global", "dcn_global")
]


@pytest.fixture(autouse=True)
def gather_only(monkeypatch):
    """Every call on the gather kernels, also those that have tensor-core kernels."""
    monkeypatch.setattr(dot, "supports", lambda *_: False)


def poisoned(function):
    """A fresh tensor of which nothing may be used before it is written."""
    return lambda *a, **k: function(*a, **k).fill_(math.nan)


def detached(case, dtype, device):
    return [None if t is None else t.detach().clone() for t in make_tensors(case, dtype, device)]


@interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_matches_the_reference(case, triton_device):
    assert_matches_reference(case, torch.float32, "triton", triton_device)


@interpreter
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 5e-4), (torch.bfloat16, 4e-3)], ids=str
)
@pytest.mark.parametrize("case", HALF, ids=str)
def test_half_precision_matches_the_reference(case, dtype, tolerance, triton_device):
    # Sums are in float32, so that only results and kernels sampled per image are rounded.
    assert_matches_reference(
        case, dtype, "triton", triton_device, tolerance * (2 if case.kind == "global" else 1)
    )


@interpreter
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_programs_take_several_tiles_when_there_are_many(case, triton_device, monkeypatch):
    monkeypatch.setattr(gather, "WARPS", 4)
    assert_matches_reference(case, torch.float32, "triton", triton_device)


@interpreter
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_two_runs_are_equal_and_no_memory_is_read_before_it_is_written(
    case, triton_device, monkeypatch
):
    case = replace(case, n=1, size=(4, 5))
    torch.use_deterministic_algorithms(True)
    try:
        first = run(case, make_tensors(case, torch.float32, triton_device), "triton")
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
        second = run(case, make_tensors(case, torch.float32, triton_device), "triton")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@interpreter
@pytest.mark.parametrize(
    "case", [KINDS[1], Case(kind="dcn_local", c=140, size=(3, 3), n=1)], ids=str
)
def test_the_deterministic_scatter_matches_the_reference(case, triton_device, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_matches_reference(case, torch.float32, "triton", triton_device)


@interpreter
@pytest.mark.parametrize("needed", range(4))
def test_only_what_is_needed_is_computed(needed, triton_device):
    case = Case(kind="dcn_local", n=1, size=(4, 4))
    tensors = detached(case, torch.float32, triton_device)
    everything = run(case, [t.clone().requires_grad_() for t in tensors], "triton")
    out = deform_kernel2d(
        *(t.requires_grad_(i == needed) for i, t in enumerate(tensors)),
        **case.options,
        backend="triton",
    )
    grad = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(out)
    (got,) = torch.autograd.grad(out, tensors[needed], grad)
    torch.testing.assert_close(got, everything[1 + needed])


@interpreter
def test_offsets_in_any_layout_and_in_half_precision(triton_device):
    case = Case(kind="dcn_local", n=2, c=8, size=(4, 5))
    x, weight, kernel_offset, image_offset = detached(case, torch.float16, triton_device)
    both = torch.cat(
        [kernel_offset, image_offset], 1
    ).half()  # as one generator would make them: parts are not dense
    expected = None
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = both.contiguous(memory_format=layout).requires_grad_()
        out = deform_kernel2d(x, weight, *leaf.chunk(2, 1), padding=1, backend="triton")
        (grad,) = torch.autograd.grad(out.float().square().sum(), leaf)
        assert grad.dtype == torch.float16
        if expected is not None:
            assert torch.equal(out, expected[0])
            assert torch.equal(grad, expected[1])
        expected = out, grad


@interpreter
@pytest.mark.parametrize("which", [0, 2, 3], ids=["input", "kernel_offset", "image_offset"])
def test_nan_in_nan_out(which, triton_device):
    case = Case(kind="dcn_local" if which == 3 else "local", n=1, size=(5, 5))
    tensors = detached(case, torch.float32, triton_device)
    tensors[which][(0,) * 4] = math.nan
    out = deform_kernel2d(*tensors, **case.options, backend="triton")
    expected = deform_kernel2d(*tensors, **case.options, backend="reference")
    # the first tap of the first position reads padding; its offset is heard all the same
    assert out[0, 0, 0, 0].isnan()
    assert torch.equal(out.isnan(), expected.isnan())


@interpreter
def test_a_nan_in_the_weight_is_heard_where_it_is_read(triton_device):
    case = Case(n=1, size=(5, 5))
    x, weight, offset, _ = detached(case, torch.float32, triton_device)
    weight[2, 0, 0, 0] = math.nan
    out = deform_kernel2d(x, weight, offset.zero_(), padding=1, backend="triton")
    assert out[0, 2, 2, 2].isnan()
    assert not out[:, [0, 1, 3]].isnan().any()


@interpreter
def test_infinite_offsets_are_clipped_or_outside(triton_device):
    case = Case(kind="dcn_local", n=1, size=(4, 4), c=4)
    tensors = detached(case, torch.float32, triton_device)
    tensors[2][0, :9] = math.inf
    tensors[2][0, 9:] = -math.inf
    tensors[3][0, ::4] = -math.inf
    tensors[3][0, 2::4] = math.inf
    wide = [t.double().requires_grad_() for t in tensors]
    expected = run(case, wide, "reference")
    got = run(case, [t.requires_grad_() for t in tensors], "triton")
    assert got[0].abs().sum() == 0  # each y coordinate is outside the image
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-5, atol=1e-6)


@interpreter
@pytest.mark.parametrize(("scope", "kernel_offset"), [(4, True), (9, True), (9, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_partial_sums_of_a_large_layer_are_small(scope, kernel_offset, dtype, monkeypatch):
    launched = []
    monkeypatch.setattr(
        KernelSpec, "launch", lambda self, grid, arguments: launched.append((self, grid, arguments))
    )
    n, c, size = 256, 1024, 14
    geometry = make_geometry((scope, scope), 3, padding=1)
    x = torch.empty(n, c, size, size, dtype=dtype, device="meta")
    weight = torch.empty(
        (c, 1, scope, scope) if kernel_offset else (n, c, 1, 3, 3), dtype=dtype, device="meta"
    )
    offset = torch.empty(n, 18, size, size, device="meta") if kernel_offset else None
    gather.backward(x, Call(x, weight, offset, None, geometry), (False, True, False, False))
    ((spec, grid, arguments),) = launched
    # The programs are still enough for a GPU.
    assert math.prod(grid) * spec.num_warps >= gather.WARPS // 2
    assert arguments["partial"].numel() * 4 <= 64 * 2**20


@pytest.mark.compile
@pytest.mark.parametrize(("arch", "spec"), shipped(gather.shipped))
def test_compiles_without_spills_and_with_atomics_only_in_the_scatter(arch, spec):
    compiled = compile_spec(spec, arch)
    assert not spills(compiled)
    assert has_atomics(arch, compiled) == (", scatter" in spec.name)
    if arch == "sm_80":
        # Counting fails unless the loops are those that the report weights.
        assert count_instructions(compiled, spec).per_element > 0


@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_instructions_per_element(arch):
    problem = gather.Problem(
        arch, torch.float32, 256, make_geometry((4, 4), 3, padding=1), (4, 4), image_offset=False
    )
    counts = [
        count_instructions(compile_spec(s, arch), s).per_element for s in gather.step_specs(problem)
    ]
    assert counts[0] <= 95
    assert sum(counts) <= 490
