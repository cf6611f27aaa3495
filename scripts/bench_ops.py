"""Measure the time of each operator as a multiple of the rigid depthwise convolution's.

    python scripts/bench_ops.py                                # four shapes on the CPU
    python scripts/bench_ops.py --device cuda --shapes models  # R50-DW and MobileNet-V2 layers
    python scripts/bench_ops.py --shapes 8x128x28x28 8x256x56x56s2 --repeats 50 --csv out.csv

Every operator is first compared with the float64 reference, outputs and gradients, on a small case
and on an image of the shape to be timed; if one is wrong, nothing is timed. Then all operators take
turns in one process, forward and forward + backward apart, in another order each round: what ran
before leaves its data in the caches and its threads spinning. The result is the median over the
rounds, divided by that of F.conv2d in its faster memory format. Run it on an idle machine.

Freed memory stays with the process where the C library allows it. Otherwise some calls, now of one
operator and now of another, would pay for hundreds of page faults.
"""

import argparse
import csv
import ctypes
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import deform_conv2d
from tqdm import tqdm

from dkcls.ops import deform_kernel2d
from dkcls.ops.inspect import WORKLOADS

SHAPES = ("8x128x28x28", "8x256x56x56s2", "16x40x8x8", "8x512x14x14")
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


def check(shapes: list[Shape], device: str, dtype: torch.dtype) -> str | None:
    """Return which operator is wrong and by how much, or None."""
    tried = [Shape(2, 40, 7, 6), *(shape._replace(n=1) for shape in shapes)]
    calls = [
        (operator, shape) for shape in dict.fromkeys(tried) for operator in (*RIGID, *OPERATORS)
    ]
    for operator, shape in tqdm(calls, desc="checking", unit="case", leave=False):
        error = Call(operator, shape, device, dtype).error()
        if error > TOLERANCE[dtype]:
            return (
                f"{operator.name} is wrong at {shape} in {dtype}: "
                f"a relative error of {error:.1e}; nothing is timed"
            )
    return None


def seconds(function: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start_event.record()
    function()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def medians(
    calls: list[Call], device: str, repeats: int, budget: float, bar: tqdm
) -> list[tuple[float, float]]:
    """Return the median seconds of every call, forward and forward + backward.

    Calls take turns in random order. A call that has used its budget of seconds sits out the rest.
    """
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in calls]
    ways: list[tuple[Callable[[], object], list[float], tuple[list[float], list[float]]]] = []
    for call, mine in zip(calls, samples, strict=True):
        ways += [(call.forward, mine[0], mine), (call.both, mine[1], mine)]
    order = random.Random(0)
    for call in calls:
        call.both()
    for _ in range(repeats):
        for function, times, (forward, both) in order.sample(ways, len(ways)):
            bar.update()
            if sum(forward) + sum(both) < budget:
                times.append(seconds(function, device))
    return [(statistics.median(forward), statistics.median(both)) for forward, both in samples]


def extra_memory(call: Call, device: str) -> float:
    """Return the peak memory of forward + backward, as a multiple of the input's size.

    Inputs, output and gradients are left out. On the CPU, the peak is that of PyTorch's
    allocations.
    """
    if device == "cpu":
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            results = call.both()
        assert profile.profiler is not None
        events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        used = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            used += event.nbytes()
            peak = max(peak, used)
    else:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = call.both()
        peak = torch.cuda.max_memory_allocated() - before
    return max(0, peak - sum(t.nbytes for t in results)) / call.leaves[0].nbytes


def measure(
    shape: Shape, device: str, dtype: torch.dtype, repeats: int, budget: float, bar: tqdm
) -> Iterator[dict[str, str]]:
    """Yield a table row per operator."""
    calls = [Call(operator, shape, device, dtype) for operator in (*RIGID, *OPERATORS)]
    times = medians(calls, device, repeats, budget, bar)
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


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)(?:s(\d+))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"a shape is NxCxHxW or NxCxHxWsSTRIDE, such as {SHAPES[1]}, got {text!r}"
        )
    return Shape(*(int(number) for number in match.groups(default="1")))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="float32; on cuda, float16"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        help='NxCxHxW, NxCxHxWsSTRIDE, or "models": all their layers',
    )
    parser.add_argument("--batch", type=int, help='images per batch of "models": 8; on cuda, 64')
    parser.add_argument("--repeats", type=int, default=40, help="rounds")
    parser.add_argument(
        "--budget",
        type=float,
        default=10.0,
        help="seconds per operator and shape, beyond which it is left out",
    )
    parser.add_argument("--csv", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("there is no CUDA or ROCm device on this machine")
    arguments.dtype = getattr(torch, arguments.dtype or ("float16" if on_gpu else "float32"))
    if list(arguments.shapes) == ["models"]:
        batch = arguments.batch or (64 if on_gpu else 8)
        layers = [layer for layers in WORKLOADS.values() for layer in layers]
        arguments.shapes = [Shape(batch, c, h, w, stride) for c, h, w, stride, _ in layers]
    else:
        try:
            arguments.shapes = [parse_shape(text) for text in arguments.shapes]
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    return arguments


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back to the system.

    Blocks up to its limit of 32 MB come from the heap, which is never trimmed.
    """
    mmap_threshold, trim_threshold = -3, -1
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)


def main() -> int:
    arguments = parse_arguments()
    keep_freed_memory()
    device, dtype = arguments.device, arguments.dtype
    wrong = check(arguments.shapes, device, dtype)
    if wrong:
        print(f"bench_ops: {wrong}.", file=sys.stderr)
        return 1
    where = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"{where}, {dtype}, torch {torch.__version__}; "
        f"times over those of F.conv2d, medians of {arguments.repeats} rounds\n"
    )
    rows: list[dict[str, str]] = []
    with tqdm(
        total=2 * len(arguments.shapes) * arguments.repeats * len((*RIGID, *OPERATORS)),
        unit="call",
        leave=False,
    ) as bar:
        for shape in arguments.shapes:
            bar.set_description(str(shape))
            for row in measure(shape, device, dtype, arguments.repeats, arguments.budget, bar):
                if not rows:
                    tqdm.write(f"| {' | '.join(row)} |\n|{'---|' * len(row)}")
                tqdm.write(f"| {' | '.join(row.values())} |")
                rows.append(row)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["device", "dtype", *rows[0]])
            writer.writeheader()
            writer.writerows(
                {"device": where, "dtype": str(dtype).removeprefix("torch."), **row} for row in rows
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
