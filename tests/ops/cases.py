"""Cases in which every backend is compared with the reference, by outputs and all gradients."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dkcls.ops import deform_kernel2d
from dkcls.ops.geometry import make_geometry

Pair = int | tuple[int, int]


@dataclass(frozen=True)
class Case:
    """Call of the operator. `kind` names its offsets: local, global, dcn, dcn_local, dcn_global."""

    kind: str = "local"
    n: int = 2
    c: int = 8
    size: tuple[int, int] = (7, 6)
    scope: tuple[int, int] = (4, 4)
    kernel_size: Pair = 3
    stride: Pair = 1
    padding: Pair = 1
    dilation: Pair = 1
    grid: str | float = "centered"
    clip: str = "hard"
    channels_last: bool = True
    offset_scale: float = 1.0
    integer: bool = False  # offsets that put every coordinate on an integer
    # Of all tensors: "transposed" or "sliced", in which H and W are no single axis.
    layout: str = ""

    def __str__(self) -> str:
        default = Case()
        changed = [
            f"{k}={v}" for k, v in self.__dict__.items() if k == "kind" or v != getattr(default, k)
        ]
        return ",".join(changed).replace(" ", "")

    @property
    def options(self) -> dict:
        names = ("kernel_size", "stride", "padding", "dilation", "grid", "clip")
        return {name: getattr(self, name) for name in names}


CASES = [
    Case(),
    Case(n=1, c=40, size=(9, 11)),
    Case(n=3, c=5, size=(5, 4), channels_last=False),
    Case(n=1, c=72, size=(5, 5)),
    Case(scope=(1, 1)),
    Case(scope=(2, 2)),
    Case(scope=(3, 3), integer=True),
    Case(scope=(5, 5), integer=True),
    Case(n=1, scope=(5, 5), c=33, size=(4, 5)),
    Case(scope=(7, 7), grid=2.0),
    Case(scope=(9, 9), c=12),
    Case(scope=(3, 5)),
    Case(scope=(1, 4)),
    Case(scope=(9, 2)),
    Case(kernel_size=1, padding=0, scope=(2, 2)),
    Case(kernel_size=5, padding=2, scope=(4, 4), c=4, size=(5, 4)),
    Case(
        kernel_size=(3, 2),
        scope=(4, 3),
        stride=(2, 1),
        padding=(2, 0),
        dilation=(1, 2),
        size=(8, 9),
    ),
    Case(stride=2, size=(8, 7)),
    Case(stride=3, padding=0, size=(10, 9)),
    Case(dilation=2, padding=2),
    Case(padding=4, size=(3, 3)),
    Case(grid="spread"),
    Case(clip="projected", offset_scale=3.0),
    Case(clip="projected", offset_scale=3.0, n=1, c=300, size=(3, 3)),
    Case(offset_scale=10.0),
    Case(kind="dcn", scope=(3, 3)),
    Case(kind="dcn", n=1, scope=(4, 4), c=40, size=(4, 5)),
    Case(kind="dcn", scope=(3, 3), integer=True, stride=2),
    Case(kind="dcn", scope=(3, 3), offset_scale=8.0, channels_last=False),
    Case(
        kind="dcn", kernel_size=(1, 3), scope=(2, 3), padding=(0, 1), dilation=(1, 2), size=(5, 8)
    ),
    Case(kind="dcn_local", n=1, c=40, size=(4, 5)),
    Case(kind="dcn_local", scope=(9, 9), stride=2, integer=True),
    Case(kind="dcn_local", scope=(3, 2), clip="projected", offset_scale=3.0, channels_last=False),
    Case(kind="global"),
    Case(kind="global", scope=(9, 9), stride=2, c=40),
    Case(kind="global", scope=(3, 3), clip="projected", offset_scale=3.0, channels_last=False),
    Case(kind="dcn_global", n=3),
    Case(n=0),
    Case(kind="dcn", n=0, scope=(3, 3)),
    Case(n=1, c=4, size=(4, 3), layout="transposed"),
    Case(kind="dcn", n=1, c=4, size=(4, 3), scope=(3, 3), layout="transposed"),
    Case(kind="dcn", n=1, c=4, size=(4, 3), scope=(3, 3), layout="sliced"),
    Case(kind="dcn_local", n=1, c=4, size=(4, 3), layout="transposed"),
    Case(kind="dcn_local", n=1, c=4, size=(4, 3), layout="sliced"),
    Case(kind="global", n=2, c=4, size=(4, 3), layout="transposed"),
]


def relaid(t: Tensor, layout: str) -> Tensor:
    """Return the same numbers in another layout."""
    if layout == "transposed":
        return t.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "sliced":
        return torch.nn.functional.pad(t, (2, 1, 1, 0))[..., 1:, 2:-1]
    return t


def make_tensors(
    case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> list[Tensor | None]:
    """Return (input, weight, kernel_offset, image_offset), leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    geometry = make_geometry(case.scope, **case.options)
    ho, wo = geometry.output_size(*case.size)
    local, whole = (case.n, 2 * geometry.taps, ho, wo), (case.n, 2 * geometry.taps)
    shapes: list[tuple[int, ...] | None] = [
        (case.n, case.c, *case.size),
        (case.c, 1, *case.scope),
        {"local": local, "global": whole}.get(case.kind.removeprefix("dcn_")),
        local if case.kind.startswith("dcn") else None,
    ]
    tensors: list[Tensor | None] = []
    for i, shape in enumerate(shapes):
        if shape is None:
            tensors.append(None)
            continue
        t = torch.randn(shape, generator=generator, dtype=torch.float64)
        if i >= 2:
            t = t * case.offset_scale
            t = t.round() if case.integer else t
            t = t + 0.5 if case.integer and i == 2 and case.scope[0] % 2 == 0 else t
        t = t.to(device, dtype if i < 2 else torch.promote_types(dtype, torch.float32))
        if case.channels_last and t.dim() == 4 and i != 1:
            t = t.contiguous(memory_format=torch.channels_last)
        tensors.append(relaid(t, case.layout).detach().requires_grad_())
    return tensors


def run(case: Case, tensors: list[Tensor | None], backend: str | None) -> list[Tensor]:
    """Return the output and the gradients to all tensors, for an output gradient of fixed seed."""
    out = deform_kernel2d(*tensors, **case.options, backend=backend)
    grad = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(out)
    return [out.detach(), *torch.autograd.grad(out, [t for t in tensors if t is not None], grad)]


def assert_matches_reference(
    case: Case,
    dtype: torch.dtype,
    backend: str | None,
    device: str = "cpu",
    tolerance: float = 2e-6,
):
    """Check the output and each gradient against the float64 reference of the same numbers.

    The error is relative, in norm.
    """
    tensors = make_tensors(case, dtype, device)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected, got = run(case, wide, "reference"), run(case, tensors, backend)
    names = [
        "output",
        *(
            n
            for n, t in zip(
                ("input", "weight", "kernel_offset", "image_offset"), tensors, strict=True
            )
            if t is not None
        ),
    ]
    for name, e, g in zip(names, expected, got, strict=True):
        assert e.shape == g.shape, name
        assert g.isfinite().all(), name
        error = (
            (g.double() - e).norm() / e.norm().clamp_min(1e-6) if e.numel() else torch.tensor(0.0)
        )
        assert error <= tolerance, f"{name}: relative error {error:.2e} over {tolerance:.0e}"
