"""Global deformable kernels against a loop over images: in chunks or not, in any memory format."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dkcls.ops import global_deform_kernel2d, per_image, sample_kernel2d
from tests.ops.per_image import SHAPES, gradients, leaf, loop, options_of


def make(shape, n=3, scope=(2, 4), dtype=torch.float64, channels_last=False):
    cin, cout, groups, size, kernel_size, *_ = shape
    kh, kw = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
    x = leaf(n, cin, *size, dtype=dtype, channels_last=channels_last)
    return [
        x,
        leaf(cout, cin // groups, *scope, dtype=dtype),
        leaf(n, 2 * kh * kw, dtype=torch.promote_types(dtype, torch.float32)),
    ]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_a_loop_over_images(shape, channels_last):
    tensors, options = make(shape, channels_last=channels_last), options_of(shape)
    got = global_deform_kernel2d(*tensors, kernel_size=shape[4], **options)
    expected = loop(tensors[0], sample_kernel2d(*tensors[1:], kernel_size=shape[4]), options)
    for e, g in zip(gradients(expected, tensors), gradients(got, tensors), strict=True):
        torch.testing.assert_close(g, e)
    if channels_last:
        assert got.is_contiguous(memory_format=torch.channels_last)
    else:
        assert got.is_contiguous()


@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 1, (3, 2), 1, 2, 0, 1),
        (2, 5, 1, (2, 1), 1, 1, 0, 1),
        (2, 4, 2, (3, 3), (3, 2), 1, 1, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("clip", ["hard", "projected"])
def test_gradcheck(shape, clip):
    tensors = make(shape, n=2, scope=(5, 4))
    tensors[2] = (
        tensors[2].detach() * 0.05 + 0.25
    ).requires_grad_()  # inside the scope and off its integers
    options = {"kernel_size": shape[4], "clip": clip, **options_of(shape)}
    torch.autograd.gradcheck(
        lambda *t: global_deform_kernel2d(*t, **options), tensors, fast_mode=True
    )


@pytest.mark.parametrize("channels", [1, 2])  # depthwise, and two outputs of one input
def test_grid_and_clip_by_value(channels):
    def run(offset: float, pixel: float = 1.0, **options) -> tuple[list[float], float]:
        """Return the output of one row of two taps over the scope [1, 3, 7].

        The second result is the gradient of the last offset.
        """
        weight = torch.tensor([1.0, 3.0, 7.0]).expand(channels, 1, 1, 3)
        offsets = torch.tensor([[0.0, 0.0, 0.0, offset]]).requires_grad_()
        x = torch.tensor([10.0, pixel]).view(1, 1, 1, 2)
        out = global_deform_kernel2d(x, weight, offsets, kernel_size=(1, 2), **options)
        out.sum().backward()
        return out.flatten().tolist(), offsets.grad[0, 3].item()

    assert run(0.0) == ([10 * 2 + 5] * channels, 4 * channels)  # the grid is 0.5, 1.5
    assert run(-0.5, grid="spread") == ([10 * 1 + 5] * channels, 4 * channels)  # 0, 2
    assert run(-0.25, grid=0.5) == ([10 * 2.5 + 3] * channels, 4 * channels)  # 0.75, 1.25
    assert run(2.0) == ([10 * 2 + 7] * channels, 0)
    assert run(2.0, clip="projected") == ([10 * 2 + 7] * channels, 4 * channels)
    assert run(2.0, -1.0, clip="projected") == ([10 * 2 - 7] * channels, 0)
    assert run(-2.0, -1.0, clip="projected") == ([10 * 2 - 1] * channels, -2 * channels)


@pytest.mark.parametrize(
    "shape", [(6, 40, 1, (2, 2), 1, 1, 0, 1), (6, 40, 2, (3, 3), 3, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_chunks_change_nothing(shape, channels_last, monkeypatch):
    tensors = make(shape, n=5, channels_last=channels_last)
    results = []
    for kernels in (5, 2, 0):
        monkeypatch.setattr(
            per_image,
            "KERNEL_BYTES",
            kernels * 8 * 40 * 6 // shape[2] * (9 if shape[4] == 3 else 1),
        )
        out = global_deform_kernel2d(*tensors, kernel_size=shape[4], **options_of(shape))
        assert out.is_contiguous(memory_format=torch.channels_last) == channels_last
        results.append(gradients(out, tensors))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b)


def kept_shapes(shape) -> set[tuple[int, ...]]:
    """Shapes of the tensors kept for the backward pass, but for empty ones of PyTorch's own."""
    shapes = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: shapes.add(tuple(t.shape)) or t, lambda t: t
    ):
        global_deform_kernel2d(*make(shape, n=4), kernel_size=1)
    return shapes - {(0,)}


def test_kernels_larger_than_the_images_are_not_kept():
    assert kept_shapes((64, 128, 1, (7, 7), 1, 1, 0, 1)) == {(4, 64, 7, 7), (128, 64, 2, 4), (4, 2)}
    assert (4, 32, 16) in kept_shapes((16, 32, 1, (56, 56), 1, 1, 0, 1))


def test_the_convolution_itself_is_not_repeated_in_the_backward():
    """The checkpoint makes the kernels again and stops there."""
    tensors = make((64, 128, 1, (4, 4), 1, 1, 0, 1))
    with FlopCounterMode(display=False) as forward:
        out = global_deform_kernel2d(*tensors, kernel_size=1)
    convolution, sampling = 2 * 3 * 64 * 128 * 16, 2 * 3 * 64 * 128 * 8
    assert forward.get_total_flops() == convolution + sampling
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * convolution + 3 * sampling


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_empty_batch(shape):
    tensors = make(shape, n=0)
    out = global_deform_kernel2d(*tensors, kernel_size=shape[4], **options_of(shape))
    expected = global_deform_kernel2d(*make(shape, n=1), kernel_size=shape[4], **options_of(shape))
    assert out.shape == (0, *expected.shape[1:])
    out.sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in tensors)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[7]], ids=str)
def test_autocast(shape):
    tensors, options = (
        make(shape, dtype=torch.float32, channels_last=True),
        {"kernel_size": shape[4], **options_of(shape)},
    )
    with torch.autocast("cpu", torch.bfloat16):
        got = global_deform_kernel2d(*tensors, **options)
    assert got.dtype == torch.bfloat16
    wide = gradients(global_deform_kernel2d(*tensors, **options), tensors)
    for e, g in zip(wide, gradients(got, tensors), strict=True):
        assert (g.float() - e).norm() <= 0.03 * e.norm()
    with torch.autocast("cpu", torch.bfloat16):
        assert global_deform_kernel2d(*make(shape), **options).dtype == torch.float64


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[7]], ids=str)
def test_compiles_as_one_graph(shape, monkeypatch):
    monkeypatch.setattr(per_image, "KERNEL_BYTES", 2 * 8 * 240)
    torch.compiler.reset()

    def run(*tensors):
        return global_deform_kernel2d(*tensors, kernel_size=shape[4], **options_of(shape))

    tensors = make(shape)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(*tensors)
    for e, g in zip(gradients(run(*tensors), tensors), gradients(got, tensors), strict=True):
        torch.testing.assert_close(g, e)


def call(**changes):
    x, weight, kernel_offset = make((6, 4, 2, (5, 4), 1, 1, 0, 1))
    arguments = {
        "input": x,
        "weight": weight,
        "kernel_offset": kernel_offset,
        "kernel_size": 1,
        "groups": 2,
        **changes,
    }
    return global_deform_kernel2d(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(6, 5, 4)}, r"input must be \[N, C, H, W\], got \[6, 5, 4\]"),
        ({"input": torch.zeros(3, 6, 5, 4, dtype=torch.int64)}, "floating point, got torch.int64"),
        ({"input": torch.zeros(3, 8, 5, 4).double()}, r"with Cin/groups = 4, got \[4, 3, 2, 4\]"),
        (
            {"weight": torch.zeros(4, 3, 2)},
            r"weight must be \[Cout, Cin/groups, Sh, Sw\], got \[4, 3, 2\]",
        ),
        ({"weight": torch.zeros(4, 3, 0, 2)}, r"got \[4, 3, 0, 2\]"),
        (
            {"weight": torch.zeros(4, 3, 2, 4)},
            "weight must have input's dtype torch.float64, got torch.float32",
        ),
        (
            {"weight": torch.zeros(4, 3, 2, 4, device="meta").double()},
            "weight must be on input's device cpu, got meta",
        ),
        ({"groups": 4}, "groups must divide Cin = 6 and Cout = 4, got 4"),
        ({"groups": 0}, "got 0"),
        ({"groups": 1.0}, "got 1.0"),
        (
            {"kernel_offset": torch.zeros(3, 4).double()},
            r"kernel_offset must be \[N, 2\*Kh\*Kw\] = \[3, 2\], got \[3, 4\]",
        ),
        ({"kernel_offset": torch.zeros(3, 2, 5, 4).double()}, r"got \[3, 2, 5, 4\]"),
        (
            {"kernel_offset": torch.zeros(3, 2).half()},
            "kernel_offset must have input's dtype torch.float64, got torch.float16",
        ),
        (
            {"kernel_offset": torch.zeros(3, 2, device="meta")},
            "kernel_offset must be on input's device cpu, got meta",
        ),
        ({"stride": 0}, "stride must be"),
        ({"grid": "wide"}, "grid must be"),
        ({"clip": "soft"}, "clip must be"),
        ({"backend": "cuda"}, "backend must be one of"),
        (
            {"kernel_size": 7, "kernel_offset": torch.zeros(3, 98)},
            r"input of \[5, 4\] is too small",
        ),
    ],
)
def test_errors_name_what_came(changes, message):
    call()
    with pytest.raises(ValueError, match=message):
        call(**changes)
