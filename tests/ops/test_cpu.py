"""Backend "cpu": the reference's numbers for any layout, number of threads and kind of process."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from shutil import copytree

import pytest
import torch

import dkcls
from dkcls.ops import deform_kernel2d
from dkcls.ops.deform_kernel import cpu
from dkcls.ops.deform_kernel.backend import Call
from tests.ops.cases import CASES, Case, assert_matches_reference, make_tensors, relaid, run

pytestmark = pytest.mark.xdist_group("test_cpu")  # one worker compiles what is tested here alone

LOCAL = Case(n=8, c=44, size=(9, 8))
# Few images: channels are cut into blocks, whose offset gradients are summed and then projected.
BLOCKS = [
    Case(n=1, c=260, size=(6, 5)),
    Case(n=2, c=200, size=(6, 5), clip="projected", offset_scale=3.0),
    Case(
        kind="dcn_local",
        n=1,
        c=136,
        size=(6, 5),
        clip="projected",
        offset_scale=3.0,
        channels_last=False,
    ),
    Case(kind="dcn", n=3, c=130, scope=(3, 3), size=(6, 5)),
]
SHARED = [
    LOCAL,
    Case(n=70, c=3, size=(4, 4)),
    Case(kind="dcn_local", n=5, c=24),
    Case(kind="dcn_global", n=3, c=24),
    *BLOCKS,
]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", CASES + BLOCKS, ids=str)
def test_is_the_reference(case):
    assert_matches_reference(case, torch.float32, "cpu")


def test_blocks_are_more_than_one():
    for case in BLOCKS:
        x, weight, kernel_offset, _ = make_tensors(case)
        geometry = cpu.Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1.0, 1.0), "")
        shape = weight.shape if kernel_offset is not None else (1, *weight.shape)
        assert (
            cpu._plan_shapes(x.shape, shape, kernel_offset is not None, geometry).split.blocks > 1
        )


# Computed in float32, so that what is lost is the rounding of the incoming gradient and of each
# result: 2**-11 and 2**-8 each.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=str
)
@pytest.mark.parametrize(
    "case",
    [Case(c=40), Case(kind="dcn", scope=(3, 3)), Case(kind="dcn_local", n=1, c=136)],
    ids=str,
)
def test_half_precision(case, dtype, tolerance):
    assert_matches_reference(case, dtype, "cpu", tolerance=tolerance)
    assert run(case, make_tensors(case, dtype), "cpu")[0].dtype == dtype


def test_float64_is_the_tap_loop():
    assert_matches_reference(Case(kind="dcn_local"), torch.float64, "cpu", tolerance=1e-14)


def strided(t, how):
    """Return the same numbers in another layout."""
    if how == "planar":
        return t.contiguous()
    if how == "sliced channels":
        return torch.cat([t.flip(1), t], 1).contiguous(memory_format=torch.channels_last)[
            :, t.shape[1] :
        ]
    return relaid(t, how)


@pytest.mark.parametrize("how", ["planar", "sliced channels", "sliced", "transposed"])
@pytest.mark.parametrize("kind", ["dcn_local", "dcn_global"])
def test_layouts(kind, how):
    case = Case(kind=kind, c=16)
    tensors = make_tensors(case)
    expected = run(case, tensors, "cpu")
    other = [
        t if t is None or t.dim() != 4 else strided(t.detach(), how).requires_grad_()
        for t in tensors
    ]
    assert all(
        a is None or a.dim() != 4 or not a.is_contiguous(memory_format=torch.channels_last)
        for a in other[2:]
    )
    assert_same_bits(run(case, other, "cpu"), expected)


def test_expanded_offsets_and_gradient():
    x, weight, _, _ = make_tensors(LOCAL)
    offset = torch.randn(1, 18, 1, 1).expand(8, 18, 9, 8)
    out = deform_kernel2d(x, weight, offset, padding=1)
    torch.testing.assert_close(
        out, deform_kernel2d(x, weight, offset.contiguous(), padding=1), rtol=0, atol=0
    )
    expanded, dense = (
        torch.autograd.grad(out, x, g, retain_graph=True)
        for g in (torch.ones(()).expand_as(out), out * 0 + 1)
    )
    assert_same_bits(expanded, dense)


def test_only_what_is_needed():
    x, weight, kernel_offset, _ = make_tensors(LOCAL)
    _, _, *expected = run(LOCAL, [x, weight, kernel_offset, None], "cpu")
    grad = torch.randn(
        x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).float()
    out = deform_kernel2d(x.detach(), weight, kernel_offset, padding=1)
    assert_same_bits(torch.autograd.grad(out, [weight, kernel_offset], grad), expected)


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_same_bits_for_any_number_of_threads(case):
    tensors = make_tensors(case)
    expected = run(case, tensors, "cpu")
    assert_same_bits(run(case, tensors, "cpu"), expected)
    torch.set_num_threads(1)
    assert_same_bits(run(case, tensors, "cpu"), expected)


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_fresh_memory_is_not_read(case, monkeypatch):
    tensors = make_tensors(case)
    expected = run(case, tensors, "cpu")

    def poisoned(original, *args, **kwargs):
        out = original(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, partial(poisoned, getattr(torch, name)))
    assert torch.empty(3).isnan().all()
    assert_same_bits(run(case, tensors, "cpu"), expected)


@pytest.mark.parametrize(
    "case",
    [Case(n=8, c=64, size=(14, 14)), Case(n=1, c=512, size=(7, 7)), Case(n=64, c=8, size=(3, 3))],
)
@pytest.mark.parametrize("scope", [4, 9])
def test_extra_memory_is_half_an_input_and_two_copies_of_the_weight_at_most(
    case, scope, monkeypatch
):
    x = torch.randn(case.n, case.c, *case.size).contiguous(memory_format=torch.channels_last)
    weight, offset = torch.randn(case.c, 1, scope, scope), torch.randn(case.n, 18, *case.size)
    geometry = cpu.Geometry((3, 3), (1, 1), (1, 1), (1, 1), (1.0, 1.0), "hard")
    allocated = []
    monkeypatch.setattr(
        cpu, "_empty", lambda *shape: allocated.append(torch.empty(shape)) or allocated[-1]
    )
    cpu.backward(x, Call(x, weight, offset, None, geometry), [True] * 4)
    extra = sum(t.numel() for t in allocated) - offset.numel() - weight.numel()
    assert extra <= x.numel() / 2 + 2 * weight.numel()  # it and its gradient, channels last


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("kind", "which"), [("local", 2), ("dcn_local", 2), ("dcn", 3), ("dcn_local", 3)]
)
def test_offsets_that_are_not_finite(kind, which, number):
    """Check that a NaN shows even at a tap that reads only padding, and that infinity is clipped.

    An infinite kernel offset is the scope's border, an infinite image offset is outside the image.
    """
    case = Case(kind=kind, scope=(3, 3))
    tensors = [None if t is None else t.detach() for t in make_tensors(case)]
    with torch.no_grad():
        tensors[which][0, 1, 0, 0] = number  # tap (-1, -1) of the first position, along x
        tensors[which][1, 8, 3, 3] = number  # the middle tap of an inner one, along y
    expected = deform_kernel2d(
        *(None if t is None else t.double() for t in tensors), **case.options, backend="reference"
    )
    out = deform_kernel2d(*tensors, **case.options, backend="cpu")
    assert out[0, :, 0, 0].isnan().all() == out[1, :, 3, 3].isnan().all() == (number != number)
    torch.testing.assert_close(out, expected.float(), equal_nan=True, rtol=1e-5, atol=1e-5)
    if number == number:
        leaves = [None if t is None else t.requires_grad_() for t in tensors]
        wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
        for a, b in zip(run(case, leaves, "cpu"), run(case, wide, "reference"), strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["local", "dcn", "dcn_local"])
def test_nan_in_the_input_goes_no_further_than_in_the_reference(kind):
    case = Case(kind=kind, scope=(3, 3), c=12)
    tensors = [None if t is None else t.detach() for t in make_tensors(case)]
    tensors[0][0, 3, 0, 2] = float("nan")
    out, expected = (
        deform_kernel2d(*tensors, **case.options, backend=b) for b in ("cpu", "reference")
    )
    assert out.isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())


def child(queue, tensors, expected):
    """Compare results with the expected ones, in another process."""
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    queue.put(
        all(torch.equal(a, b) for a, b in zip(run(LOCAL, leaves, "cpu"), expected, strict=True))
    )


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_processes(method):
    tensors = make_tensors(LOCAL)
    expected = run(LOCAL, tensors, "cpu")
    plain = [None if t is None else t.detach() for t in tensors]
    context = get_context(method)
    queue = context.Queue()
    process = context.Process(target=child, args=(queue, plain, expected))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert queue.get(timeout=5)


def concurrent_runs() -> bool:
    """Run four Python threads at once, each several times; return whether results are right."""
    tensors = [make_tensors(LOCAL, seed=seed) for seed in range(4)]
    expected = [run(LOCAL, t, "cpu") for t in tensors]

    def work(i):
        return all(
            torch.equal(a, b)
            for _ in range(20)
            for a, b in zip(run(LOCAL, tensors[i], "cpu"), expected[i], strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        return all(pool.map(work, range(4)))


def test_concurrent_threads():
    assert concurrent_runs()


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        cwd=environment["PYTHONPATH"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_threading_layer_is_the_users_choice():
    """Check that workqueue, the layer that is always there, sees no concurrent launches.

    It aborts on them.
    """
    code = (
        "import torch, numba; torch.set_num_threads(2)\n"
        "from tests.ops.test_cpu import concurrent_runs\n"
        "assert concurrent_runs() and numba.threading_layer() == 'workqueue'"
    )
    result = python(code, NUMBA_THREADING_LAYER_PRIORITY="workqueue omp tbb", NUMBA_NUM_THREADS="2")
    assert result.returncode == 0, result.stderr


ONE_CALL = (
    "import torch, dkcls; torch.set_num_threads(1); print(dkcls.__file__)\n"
    "from dkcls.ops import deform_kernel2d\n"
    "x, w, o = torch.randn(2, 8, 5, 5), torch.randn(8, 1, 4, 4), torch.randn(2, 18, 5, 5)\n"
    "expected = deform_kernel2d(x, w, o, padding=1, backend='reference')\n"
    "torch.testing.assert_close(deform_kernel2d(x, w, o, padding=1), expected)"
)


@pytest.mark.long
def test_compiling_is_announced_and_cached_until_a_source_changes(tmp_path):
    """Work in a copy of the package, so that a file of which a kernel is made can be changed."""
    package = copytree(
        Path(dkcls.__file__).parent, tmp_path / "dkcls", ignore=lambda *_: ["__pycache__"]
    )

    def announcements() -> int:
        result = python(ONE_CALL, PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
        assert result.returncode == 0, result.stderr
        assert str(package) in result.stdout
        said = r"compiled the CPU kernel forward_serial in \d+\.\d s, once; kept in /"
        assert result.stderr.count("compiled") == len(re.findall(said, result.stderr))
        return result.stderr.count("compiled")

    assert announcements() == 1
    assert announcements() == 0
    with (package / "ops/deform_kernel/cpu/vector.py").open("a") as source:
        source.write("# changed\n")
    assert announcements() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_kernels_the_tap_loop_takes_over(dtype, monkeypatch):
    monkeypatch.setattr(cpu, "_kernels", lambda: None)
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3
    for kind in ("local", "dcn_local", "global"):
        assert_matches_reference(Case(kind=kind), dtype, "cpu", tolerance=tolerance)


def test_without_numba():
    result = python("import sys; sys.modules['numba'] = None\n" + ONE_CALL)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("without numba") == 1
