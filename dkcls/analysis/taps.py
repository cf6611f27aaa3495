"""Where the taps of deformable kernels read their scopes."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dkcls.analysis.erf import evaluating
from dkcls.layers import record_offsets
from dkcls.layers.deform_kernel import ScopeConv2d
from dkcls.ops.geometry import grid_step, tap_grid


class Scope(NamedTuple):
    """Of one layer: its sides, the taps at rest, [taps, 2], and where they read, [N, taps, 2, Ho, Wo]; all (y, x).

    Of global kernels Ho and Wo are 1. Places are clipped to the scope, as the operator does.
    """

    name: str
    sides: tuple[int, int]
    rest: np.ndarray
    places: np.ndarray


@torch.no_grad()
def read_scopes(model: nn.Module, images: Tensor) -> list[Scope]:
    """Of every layer with kernel offsets, in the order of the network; layers are named by their number."""
    with evaluating(model), record_offsets(model) as records:
        model(images)
    layers = dict(model.named_modules())
    found = [
        (layers[name], record.kernel_offset)
        for name, record in records.items()
        if record.kernel_offset is not None
    ]
    return [_scope(f"layer {i}", layer, offset) for i, (layer, offset) in enumerate(found, 1)]  # type: ignore[arg-type]


def _scope(name: str, layer: ScopeConv2d, kernel_offset: Tensor) -> Scope:
    pairs = zip(layer.kernel_size, layer.scope, strict=True)
    rest = torch.cartesian_prod(
        *(torch.tensor(tap_grid(k, s, grid_step(layer.grid, k, s))) for k, s in pairs)
    ).numpy()
    rest = rest.reshape(-1, 2)  # a single tap is given without its dimension
    offset = (
        kernel_offset.reshape(len(kernel_offset), -1, 2, *(kernel_offset.shape[2:] or (1, 1)))
        .cpu()
        .numpy()
    )
    last = np.array(layer.scope)[:, None, None] - 1
    return Scope(name, layer.scope, rest, np.clip(offset + rest[..., None, None], 0, last))


def moves(scope: Scope) -> dict[str, float]:
    """How far taps are from rest, root mean square, in entries of the scope, and how much of it is the same for all images and
    positions, differs between images, and differs between the positions of an image; squares add up."""
    apart = scope.places - scope.rest[..., None, None]
    mean, of_image = apart.mean((0, 3, 4), keepdims=True), apart.mean((3, 4), keepdims=True)
    last = np.array(scope.sides)[:, None, None] - 1
    return {
        "from rest": _size(apart),
        "the same for all": _size(mean),
        "between images": _size(of_image - mean),
        "between positions": _size(apart - of_image),
        "share on the scope's edge": float(((scope.places == 0) | (scope.places == last)).mean()),
    }


def _size(moved: np.ndarray) -> float:
    return float(np.sqrt((moved**2).sum(2).mean()))
