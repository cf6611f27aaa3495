"""Tensor-core kernels: numerics in Triton's interpreter or on a GPU, resources for every target."""

from dataclasses import replace

import pytest
import torch

from dkcls.ops import deform_kernel2d
from dkcls.ops.deform_kernel.triton import dot
from dkcls.ops.inspect import compile_spec, count_instructions
from tests.ops.cases import Case, assert_matches_reference, make_tensors, run
from tests.ops.compiled import has_atomics, shipped, spills

CASES = [
    Case(c=32),
    Case(c=40, size=(9, 11), n=1),  # a last, partial chunk of channels
    # Several blocks, which are clipped after their sum.
    Case(c=288, size=(3, 3), clip="projected", offset_scale=3.0),
    Case(c=64, size=(9, 17), n=1, channels_last=False),
    Case(c=32, scope=(1, 1)),
    Case(c=32, scope=(3, 3), integer=True),
    Case(c=32, scope=(4, 2), n=1, grid="spread"),
    Case(c=32, scope=(5, 5), n=1, integer=True),
    Case(c=192, scope=(5, 3), size=(4, 4), clip="projected", offset_scale=3.0),
    Case(c=32, kernel_size=1, padding=0, scope=(2, 2), stride=2),
    Case(
        c=32,
        kernel_size=(3, 2),
        scope=(4, 3),
        stride=(2, 1),
        padding=(2, 0),
        dilation=(1, 2),
        size=(8, 9),
        n=1,
    ),
    Case(c=32, stride=2, size=(8, 7)),
    Case(c=32, stride=3, padding=0, size=(10, 9), n=1),
    Case(c=32, padding=4, size=(3, 3)),
    Case(c=32, size=(4, 4), n=9, offset_scale=10.0),  # tiles that span images
    Case(c=32, size=(4, 3), n=1, layout="transposed"),
]
interpreter = pytest.mark.interpreter


@interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float16_matches_the_reference(case, triton_device):
    assert_matches_reference(case, torch.float16, "triton", triton_device, tolerance=5e-4)


@interpreter
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[8]], ids=str)
def test_bfloat16_matches_the_reference(case, triton_device):
    # rounding the output to 8 bits is the larger part of it
    assert_matches_reference(case, torch.bfloat16, "triton", triton_device, tolerance=4e-3)


@interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_these_cases_run_on_tensor_cores(case, triton_device, monkeypatch):
    calls = []
    monkeypatch.setattr(dot, "forward", lambda call: calls.append("dot") or call.x)
    deform_kernel2d(
        *make_tensors(case, torch.float16, triton_device), **case.options, backend="triton"
    )
    assert calls == ["dot"]


@interpreter
def test_offsets_in_half_precision(triton_device):
    case = Case(c=32, n=1, size=(4, 4))
    x, weight, offset, _ = (
        None if t is None else t.detach() for t in make_tensors(case, torch.float16, triton_device)
    )
    half = offset.half().requires_grad_()
    wide = half.detach().float().requires_grad_()
    outputs = [deform_kernel2d(x, weight, o, padding=1, backend="triton") for o in (half, wide)]
    assert torch.equal(*outputs)
    grads = [
        torch.autograd.grad(out.sum(), o)[0] for out, o in zip(outputs, (half, wide), strict=True)
    ]
    assert grads[0].dtype == torch.float16
    torch.testing.assert_close(grads[0], grads[1].half())


@interpreter
def test_64_bit_indices(triton_device, monkeypatch):
    monkeypatch.setattr(dot, "WIDE_FROM", 1)
    assert_matches_reference(
        Case(c=192, size=(4, 4)), torch.float16, "triton", triton_device, tolerance=5e-4
    )


@interpreter
def test_two_runs_are_equal_and_no_memory_is_read_before_it_is_written(triton_device, monkeypatch):
    case = Case(c=288, size=(3, 3), stride=2)
    first = run(case, make_tensors(case, torch.float16, triton_device), "triton")
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(
        torch,
        "empty_like",
        lambda t: (
            empty(t.shape, dtype=t.dtype, device=t.device)
            .fill_(float("nan"))
            .as_strided(t.shape, t.stride())
        ),
    )
    second = run(case, make_tensors(case, torch.float16, triton_device), "triton")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@interpreter
def test_nan_in_nan_out(triton_device):
    case = Case(c=32, n=1, size=(5, 5))
    for i in range(3):
        tensors = [t.detach().clone() for t in make_tensors(case, torch.float16, triton_device)[:3]]
        tensors[i][(0,) * 4] = float("nan")
        # the first tap of the first position reads padding; its offset is heard all the same
        assert deform_kernel2d(*tensors, padding=1, backend="triton")[0, :, 0, 0].isnan().any()


@pytest.mark.compile
@pytest.mark.parametrize(("arch", "spec"), shipped(dot.shipped))
def test_compiles_without_spills_or_atomics(arch, spec):
    compiled = compile_spec(spec, arch)
    assert not spills(compiled)
    assert not has_atomics(arch, compiled)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("dtype", "arch"),
    [
        (torch.float16, "sm_80"),
        pytest.param(torch.bfloat16, "sm_90", marks=pytest.mark.long),
        pytest.param(torch.float16, "sm_90", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, "sm_80", marks=pytest.mark.long),
    ],
)
def test_instructions_per_element(dtype, arch):
    def per_element(spec):
        return count_instructions(compile_spec(spec, arch), spec).per_element

    forward = per_element(dot.map_spec(dot.layer(arch, dtype)))
    backward = per_element(dot.map_spec(dot.layer(arch, dtype), flip=True)) + per_element(
        dot.grad_spec(dot.layer(arch, dtype))
    )
    assert forward <= 45
    assert forward + backward <= 130
    assert per_element(dot.map_spec(dot.layer(arch, dtype, channels=64))) <= 80


@pytest.mark.parametrize(
    ("channels", "block", "wide"),
    [
        (32, 32, 32),
        (144, 160, None),
        (192, 192, 96),
        (256, 256, 128),
        (352, None, None),
        (960, 192, 96),
        (1024, 256, 128),
    ],
)
def test_channel_blocks(channels, block, wide):
    """Whole networks run on tensor cores: every width of the paper's has equal blocks."""
    config = dot.CONFIGS["sm_80", 4]
    assert dot.channel_block(channels, config, False) == block
    assert dot.channel_block(channels, config, True) == wide
    for c in (0, 8, 24, 33):
        assert dot.channel_block(c, config, False) is None


@pytest.mark.compile
def test_counting_refuses_undeclared_loops():
    spec = dot.map_spec(dot.layer("sm_80", channels=64))
    compiled = compile_spec(spec, "sm_80")
    with pytest.raises(ValueError, match="expected 2 loops, as declared, got 1 in the SASS"):
        count_instructions(compiled, replace(spec, trips=(2, 9)))
