"""Operators: each over the rigid depthwise convolution, torchvision's beside them."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import deform_conv2d
from tqdm import tqdm

from dkcls.cli.bench import Arguments
from dkcls.cli.bench.measure import describe, medians, peak_bytes, seconds
from dkcls.errors import UserError
from dkcls.ops import deform_kernel2d
from dkcls.ops.inspect import WORKLOADS

SHAPES = ["8x128x28x28", "8x256x56x56s2", "16x40x8x8", "8x512x14x14"]
# Largest relative error, in norm, of a right result: a sum's inputs and its result are rounded.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Shape(NamedTuple):
    n: int
    c: int
    h: int
    w: int
    stride: int = 1

    def __str__(self) -> str:
        return f"{self.n}x{self.c}x{self.h}x{self.w}" + (
            f"s{self.stride}" if self.stride > 1 else ""
        )

    @property
    def out(self) -> tuple[int, int]:
        return (self.h - 1) // self.stride + 1, (self.w - 1) // self.stride + 1


class Operator(NamedTuple):
    """An operator with 3x3 kernels and padding 1.

    `offsets` names the offsets that it takes: kernel, kernel per image, image.
    """

    name: str
    function: Callable[..., Tensor]  # (x, weight, kernel_offset, image_offset, stride)
    scope: int = 3
    offsets: tuple[str, ...] = ()
    channels_last: bool = True


def ours(
    x: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    stride: int,
) -> Tensor:
    return deform_kernel2d(x, weight, kernel_offset, image_offset, stride=stride, padding=1)


def rigid(
    x: Tensor, weight: Tensor, kernel_offset: None, image_offset: None, stride: int
) -> Tensor:
    return F.conv2d(x, weight, None, stride, 1, 1, x.shape[1])


def torchvisions(
    x: Tensor, weight: Tensor, kernel_offset: None, image_offset: Tensor, stride: int
) -> Tensor:
    return deform_conv2d(x, image_offset.to(x.dtype), weight, None, stride, 1)


RIGID = (
    Operator("rigid, contiguous", rigid, channels_last=False),
    Operator("rigid, channels_last", rigid),
)
LOCAL = Operator("local DK, scope 4", ours, 4, ("kernel",))
OPERATORS = (
    LOCAL,
    Operator("local DK, scope 9", ours, 9, ("kernel",)),
    Operator("global DK, scope 4", ours, 4, ("kernel per image",)),
    Operator("DCN", ours, 3, ("image",)),
    Operator("DCN + local DK, scope 4", ours, 4, ("kernel", "image")),
    Operator("torchvision deform_conv2d", torchvisions, 3, ("image",), channels_last=False),
)


class Call:
    """An operator and tensors of one shape."""

    def __init__(
        self, operator: Operator, shape: Shape, device: str, dtype: torch.dtype, seed: int = 0
    ):
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int, kind: torch.dtype = dtype) -> Tensor:
            t = torch.randn(size, generator=generator).to(device, kind)
            layout = (
                torch.channels_last
                if operator.channels_last and t.dim() == 4
                else torch.contiguous_format
            )
            return t.contiguous(memory_format=layout)

        def offset(kind: str) -> Tensor | None:
            if kind not in operator.offsets:
                return None
            size = () if kind == "kernel per image" else shape.out
            return random(shape.n, 18, *size, kind=torch.float32).requires_grad_()

        self.operator, self.shape = operator, shape
        x = random(shape.n, shape.c, shape.h, shape.w).requires_grad_()
        weight = random(shape.c, 1, operator.scope, operator.scope).contiguous().requires_grad_()
        per_position, per_image = offset("kernel"), offset("kernel per image")
        self.tensors = (
            x,
            weight,
            per_image if per_position is None else per_position,
            offset("image"),
        )
        self.leaves = [t for t in self.tensors if t is not None]
        self.grad = random(shape.n, shape.c, *shape.out)

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.operator.function(*self.tensors, self.shape.stride)

    def both(self) -> list[Tensor]:
        out = self.operator.function(*self.tensors, self.shape.stride)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]

    def error(self) -> float:
        """Return the largest relative error, in norm, of the output and of the gradients."""
        wide = [None if t is None else t.detach().double().requires_grad_() for t in self.tensors]
        out = deform_kernel2d(
            *wide,  # type: ignore[arg-type]
            stride=self.shape.stride,
            padding=1,
            backend="reference",
        )
        expected = [
            out,
            *torch.autograd.grad(out, [t for t in wide if t is not None], self.grad.double()),
        ]
        pairs = zip(expected, self.both(), strict=True)
        errors = [
            ((got.double() - e).norm() / e.norm().clamp_min(1e-12)).item() for e, got in pairs
        ]
        return max(math.inf if math.isnan(error) else error for error in errors)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes that have to move at least, in forward and in forward + backward.

        Both read everything and write their results.
        """
        read = sum(t.nbytes for t in self.leaves)
        forward = read + self.grad.nbytes
        return forward, forward + 2 * read + self.grad.nbytes


def check(shapes: list[Shape], device: str, dtype: torch.dtype) -> None:
    """Raise UserError if an operator is wrong, with by how much."""
    tried = [Shape(2, 40, 7, 6), *(shape._replace(n=1) for shape in shapes)]
    calls = [
        (operator, shape) for shape in dict.fromkeys(tried) for operator in (*RIGID, *OPERATORS)
    ]
    for operator, shape in tqdm(calls, desc="checking", unit="case", leave=False):
        error = Call(operator, shape, device, dtype).error()
        if error > TOLERANCE[dtype]:
            raise UserError(
                f"{operator.name} is wrong at {shape} in {dtype}: "
                f"a relative error of {error:.1e}; nothing is timed"
            )


def extra_memory(call: Call, device: str) -> float:
    """Return the peak memory of forward + backward, as a multiple of the input's size.

    Inputs, output and gradients are left out.
    """
    results = call.grad.nbytes + sum(t.nbytes for t in call.leaves)
    return max(0, peak_bytes(call.both, device) - results) / call.leaves[0].nbytes


def rows(
    shape: Shape, device: str, dtype: torch.dtype, rounds: int, budget: float, bar: tqdm
) -> Iterator[dict[str, str]]:
    """Yield a table row per operator."""
    calls = [Call(operator, shape, device, dtype) for operator in (*RIGID, *OPERATORS)]
    for call in calls:
        call.both()
    timers = [
        (partial(seconds, call.forward, device), partial(seconds, call.both, device))
        for call in calls
    ]
    times = medians(timers, rounds, budget, bar)
    yardstick = [min(times[i][way] for i in range(len(RIGID))) for way in (0, 1)]
    for call, time_of in zip(calls, times, strict=True):
        row = {"shape": str(shape), "operator": call.operator.name}
        row |= {
            way: f"{t / y:.2f}"
            for way, t, y in zip(("forward", "forward + backward"), time_of, yardstick, strict=True)
        }
        row["extra memory"] = f"{extra_memory(call, device):.2f}" if call.operator == LOCAL else ""
        if device != "cpu":
            rates = (
                f"{moved / t / 1e9:.0f}" for moved, t in zip(call.bytes(), time_of, strict=True)
            )
            row |= dict(zip(("GB/s forward", "GB/s forward + backward"), rates, strict=True))
        yield row


def shapes_of(arguments: Arguments) -> list[Shape]:
    """Return the shapes that were asked for."""
    if arguments.shapes == "models":
        batch = arguments.batch_size or (64 if arguments.device == "cuda" else 8)
        layers = [layer for layers in WORKLOADS.values() for layer in layers]
        return [Shape(batch, c, h, w, stride) for c, h, w, stride, _ in layers]
    if arguments.batch_size is not None:
        raise UserError("batch_size goes with shapes=models; other shapes begin with their own")
    given = SHAPES if arguments.shapes is None else arguments.shapes
    return [parse_shape(str(text)) for text in (given if isinstance(given, list) else [given])]


def parse_shape(text: str) -> Shape:
    number = "([1-9][0-9]*)"
    match = re.fullmatch(f"{number}x{number}x{number}x{number}(?:s{number})?", text)
    if not match:
        raise UserError(f"a shape is NxCxHxW or NxCxHxWsSTRIDE, such as {SHAPES[1]}, got {text!r}")
    return Shape(*(int(number) for number in match.groups(default="1")))


def table(arguments: Arguments, dtype: torch.dtype) -> list[dict[str, str]]:
    """Check and time the operators; print the table's rows as they come, and return them."""
    shapes, device = shapes_of(arguments), arguments.device
    rounds, budget = arguments.rounds or 40, arguments.budget or 10.0
    check(shapes, device, dtype)
    print(
        f"{describe(device)}, {dtype}, torch {torch.__version__}; "
        f"times over those of F.conv2d, medians of {rounds} rounds\n"
    )
    found: list[dict[str, str]] = []
    total = 2 * len(shapes) * rounds * len((*RIGID, *OPERATORS))
    with tqdm(total=total, unit="call", leave=False) as bar:
        for shape in shapes:
            bar.set_description(str(shape))
            for row in rows(shape, device, dtype, rounds, budget, bar):
                if not found:
                    tqdm.write(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
                tqdm.write(f"| {' | '.join(row.values())} |")
                found.append(row)
    return found
