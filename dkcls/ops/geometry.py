"""Output sizes, and the grid on which a fresh deformable kernel reads its scope.

Python code computes both here only; the Triton kernels repeat the grid's formula.
"""

from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[int, int]
Grid = str | float


def pair(value: int | Sequence[int], name: str, minimum: int) -> Pair:
    """Return an int or a pair of ints as a pair, after checking it."""
    if type(value) is int and value >= minimum:
        return value, value
    values = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(values) != 2 or any(
        not isinstance(v, int) or isinstance(v, bool) or v < minimum for v in values
    ):
        raise ValueError(
            f"{name} must be an int or a pair of ints, each at least {minimum}, got {value!r}"
        )
    return values[0], values[1]


def grid_step(grid: Grid, kernel_size: int, scope: int) -> float:
    """Return the distance between neighbouring taps in the scope, along one axis."""
    if grid == "centered":
        return 1.0
    if grid == "spread":
        return (scope - 1) / (kernel_size - 1) if kernel_size > 1 else 0.0
    if isinstance(grid, (int, float)) and not isinstance(grid, bool) and 0 <= grid < float("inf"):
        return float(grid)
    raise ValueError(f'grid must be "centered", "spread" or a step of at least 0, got {grid!r}')


def tap_grid(kernel_size: int, scope: int, step: float) -> list[float]:
    """Return the scope coordinate of each tap along one axis, before any offset.

    Taps are centred, `step` apart, and clamped to [0, scope - 1].
    """
    centre, last = (scope - 1) / 2, scope - 1
    return [
        min(max(centre + (k - (kernel_size - 1) / 2) * step, 0.0), float(last))
        for k in range(kernel_size)
    ]


class Geometry(NamedTuple):
    """Settings of a call that are not tensors, with one value per axis (y, x).

    Their order is that of the registered ops.
    """

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    step: Sequence[float]
    clip: str

    @property
    def taps(self) -> int:
        return self.kernel_size[0] * self.kernel_size[1]

    def static(self) -> "Geometry":
        """Return the same settings with tuples for the dispatcher's lists, which have no hash."""
        size, stride, padding, dilation, step, clip = self
        return Geometry(
            tuple(size), tuple(stride), tuple(padding), tuple(dilation), tuple(step), clip
        )

    def tap_origin(self, tap: int, scope: Sequence[int]) -> tuple[float, float]:
        """Return the scope coordinates (y, x) of a tap, before any offset."""
        y, x = (
            tap_grid(self.kernel_size[a], scope[a], self.step[a])[k]
            for a, k in enumerate(divmod(tap, self.kernel_size[1]))
        )
        return y, x

    def output_size(self, height: int, width: int) -> Pair:
        """Return the output height and width, below 1 where the kernel does not fit."""
        ho, wo = (
            (size + 2 * self.padding[a] - self.dilation[a] * (self.kernel_size[a] - 1) - 1)
            // self.stride[a]
            + 1
            for a, size in enumerate((height, width))
        )
        return ho, wo


def make_geometry(
    scope: Sequence[int],
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    grid: Grid = "centered",
    clip: str = "hard",
) -> Geometry:
    """Return the user's arguments checked and normalised."""
    size = pair(kernel_size, "kernel_size", 1)
    if clip not in ("hard", "projected"):
        raise ValueError(f'clip must be "hard" or "projected", got {clip!r}')
    step = grid_step(grid, size[0], scope[0]), grid_step(grid, size[1], scope[1])
    return Geometry(
        size,
        pair(stride, "stride", 1),
        pair(padding, "padding", 0),
        pair(dilation, "dilation", 1),
        step,
        clip,
    )


def check_geometry(geometry: Geometry) -> None:
    """Check the arguments of a registered op by the rules for a user's arguments."""
    size, stride, padding, dilation, step, clip = geometry
    if len(step) != 2:
        raise ValueError(f"step must be two numbers, got {list(step)}")
    for s in step:
        make_geometry((1, 1), size, stride, padding, dilation, s, clip)
