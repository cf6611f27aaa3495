"""Recording of offsets by hooks, which the generators have only while somebody records."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dkcls.layers.deform_kernel import DeformConv2d, ScopeConv2d
from dkcls.ops.geometry import grid_step, tap_grid


@dataclass
class OffsetRecord:
    """Offsets of one layer in its last forward pass, detached."""

    kernel_offset: Tensor | None = None  # [N, 2*Kh*Kw, Ho, Wo] or [N, 2*Kh*Kw]
    image_offset: Tensor | None = None  # [N, 2*Kh*Kw, Ho, Wo]
    clipped: Tensor | None = None  # scalar: share of coordinates strictly outside [0, S-1]


@contextmanager
def record_offsets(model: nn.Module) -> Iterator[dict[str, OffsetRecord]]:
    """Record every layer's offsets in the last forward pass, by the layer's name.

    A compiled model runs uncompiled in this context: compiled code does not see hooks.

        with record_offsets(model) as records:
            model(images)
        records["layer1.0.conv2"].clipped
    """
    records: dict[str, OffsetRecord] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, layer in model.named_modules():
            if not isinstance(layer, (ScopeConv2d, DeformConv2d)):
                continue
            name = name.replace("_orig_mod.", "")
            for kind in ("kernel", "image"):
                generator = getattr(layer, f"{kind}_generator", None)
                if generator is not None:
                    hook = partial(_record, records, name, layer, kind)
                    stack.callback(generator.register_forward_hook(hook).remove)
        yield records


def _record(
    records: dict[str, OffsetRecord],
    name: str,
    layer: nn.Module,
    kind: str,
    generator: nn.Module,
    args: tuple,
    out: Tensor,
) -> None:
    record = records.setdefault(name, OffsetRecord())
    setattr(record, f"{kind}_offset", out.detach())
    if kind == "kernel":
        assert isinstance(layer, ScopeConv2d)
        record.clipped = clipped_share(out.detach(), layer)


def clipped_share(kernel_offset: Tensor, layer: ScopeConv2d) -> Tensor:
    """Return the share of the taps' coordinates that lie strictly outside the layer's scope.

    The coordinates are those of the grid plus `kernel_offset`.
    """
    (kh, kw), (sh, sw) = layer.kernel_size, layer.scope
    y = torch.tensor(tap_grid(kh, sh, grid_step(layer.grid, kh, sh)), device=kernel_offset.device)
    x = torch.tensor(tap_grid(kw, sw, grid_step(layer.grid, kw, sw)), device=kernel_offset.device)
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1).flatten(0, 1)  # [taps, 2]
    last = grid.new_tensor([sh - 1, sw - 1])
    u = kernel_offset.unflatten(1, (-1, 2)).movedim((1, 2), (-2, -1)) + grid
    return ((u < 0) | (u > last)).float().mean()
