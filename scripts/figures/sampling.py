"""Draw docs/operator.png: a scope, where taps read it, and the kernels that they read.

    python scripts/figures/sampling.py [--output docs/operator.png]

There is a rigid position and two deformed ones.
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes

from dkcls.ops import sample_kernel2d
from dkcls.ops.geometry import tap_grid

KERNEL, SCOPE = 3, 9


def taps() -> torch.Tensor:
    """Return the grid, (y, x), of a 3x3 kernel that spans a third of the scope, [taps, 2]."""
    axis = torch.tensor(tap_grid(KERNEL, SCOPE, 2.0))
    return torch.cartesian_prod(axis, axis)


def offsets(scale: float, angle: float) -> torch.Tensor:
    """Return the offsets that turn and scale the grid about its centre, [taps, 2]."""
    centred = taps() - (SCOPE - 1) / 2
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    return scale * centred @ turn.T - centred


def draw_grid(axes: Axes, values: torch.Tensor, title: str) -> None:
    axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/operator.png"))
    arguments = parser.parse_args()
    axis = torch.linspace(-1.6, 1.6, SCOPE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    # The weights have a direction, so that turning shows.
    scope = (torch.sin(2.2 * x + 0.5 * y) * torch.exp(-0.35 * (x**2 + y**2)))[None, None]
    positions = {
        "at rest": (offsets(1.0, 0.0), "black"),
        "a small object": (offsets(0.45, 0.0), "tab:green"),
        "a large, turned one": (offsets(1.5, 0.6), "tab:orange"),
    }
    figure, panels = plt.subplots(1, 4, figsize=(11, 3.3), width_ratios=[1.5, 1, 1, 1])
    draw_grid(
        panels[0],
        scope[0, 0],
        f"the scope, {SCOPE} x {SCOPE} weights,\nand where three positions read it",
    )
    for panel, (name, (offset, colour)) in zip(panels[1:], positions.items(), strict=True):
        at = (taps() + offset).clamp(0, SCOPE - 1)
        panels[0].scatter(at[:, 1], at[:, 0], c=colour, edgecolors="white", s=42, linewidths=0.8)
        kernel = sample_kernel2d(scope, offset.flatten()[None], kernel_size=KERNEL, grid=2.0)[
            0, 0, 0
        ]
        draw_grid(panel, kernel, f"the 3 x 3 kernel\n{name}")
        for spine in panel.spines.values():
            spine.set(color=colour, linewidth=3)
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=130)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
