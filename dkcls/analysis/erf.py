"""Effective receptive fields (ERFs): how far each pixel moves one position of a feature map.

As the paper defines it, R(i; j) = d output[:, j] / d input[:, i] for a position j of a feature map
and a pixel i of the input: a matrix of output channels times input channels, computed by autograd.
Offsets and routing are those of the image, but constants in the derivative, as in the paper's
equations. Other gates, such as squeeze-and-excitation, are differentiated too.

Measures of ERFs take maps [..., H, W] that are not negative and return [...]. A map is taken as a
distribution of mass over the pixels; lengths are in pixels.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dkcls.layers import OffsetGenerator
from dkcls.layers.generators import Routing

Position = Sequence[int] | Tensor  # (row, column) of the feature map for all images, or [N, 2]


def feature_map(model: nn.Module, images: Tensor, module: str | None = None) -> Tensor:
    """Return the output of the submodule of that name, [N, C, Ho, Wo].

    Without a name, return the last feature map of a timm network, or any other network's output.
    """
    if module is None:
        if hasattr(model, "forward_intermediates"):
            out = model.forward_intermediates(  # type: ignore[operator]
                images,
                indices=1,
                intermediates_only=True,
            )[-1]
        else:
            out = model(images)
    else:
        out = _output_of(model, images, module)
    if not isinstance(out, Tensor) or out.ndim != 4:
        came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"the output of {module or 'the network'} must be a feature map [N, C, H, W], "
            f"got {came}"
        )
    return out


def _output_of(model: nn.Module, images: Tensor, module: str) -> Any:
    named = dict(model.named_modules())
    if module not in named:
        raise ValueError(
            f"the network has no module {module!r}; "
            f"its parts are {', '.join(dict(model.named_children()))}"
        )

    def stop(module: nn.Module, args: Any, out: Any) -> None:
        raise _Reached(out)  # the layers after this one are not needed

    handle = named[module].register_forward_hook(stop)
    try:
        model(images)
    except _Reached as reached:
        return reached.args[0]
    finally:
        handle.remove()
    raise ValueError(f"the network does not use its module {module!r}")


class _Reached(Exception):
    """The output of the module where a forward pass stops."""


def input_gradients(
    model: nn.Module,
    images: Tensor,
    vectors: Tensor,
    position: Position | None = None,
    module: str | None = None,
) -> Tensor:
    """Return the signed gradients of <v, output[n, :, position]> to pixels, [V, N, Cin, H, W].

    Each row v of `vectors` [V, C] gives one gradient; a row with a single one gives R's row of that
    channel. There is one forward pass for all rows, and one backward pass for each.
    """
    with torch.enable_grad(), evaluating(model), held_generators(model):
        images = images.detach().clone().requires_grad_()
        at = _read(feature_map(model, images, module), position)
        rows = (
            torch.autograd.grad((at @ v).sum(), images, retain_graph=True)[0]
            for v in vectors.to(at)
        )
        return torch.stack(list(rows))


def effective_receptive_field(
    model: nn.Module,
    images: Tensor,
    position: Position | None = None,
    *,
    module: str | None = None,
    channels: Sequence[int] | None = None,
    projections: int = 16,
    seed: int = 0,
) -> Tensor:
    """Return the Frobenius norm of R(i; j) over all channels, [N, H, W], pixel by pixel.

    With `channels`, the norm over these output channels is exact. Without, it is over all of them,
    estimated from random projections: its square is unbiased, with a relative standard error of at
    most sqrt(2 / projections).

    Args:
        images: [N, Cin, H, W], normalised as the network takes them.
        position: (row, column) in the feature map for all images, or [N, 2]; None: the middle.
        module: see `feature_map`.
    """
    with torch.no_grad(), evaluating(model):
        count = feature_map(model, images[:1], module).shape[1]
    if channels is not None:
        if not channels or not all(0 <= channel < count for channel in channels):
            raise ValueError(
                f"channels must be numbers from 0 to {count - 1}, got {list(channels)}"
            )
        vectors = torch.eye(count)[list(channels)]
        return input_gradients(model, images, vectors, position, module).square().sum((0, 2)).sqrt()
    vectors = torch.randn(projections, count, generator=torch.Generator().manual_seed(seed))
    return input_gradients(model, images, vectors, position, module).square().sum(2).mean(0).sqrt()


def _read(out: Tensor, position: Position | None) -> Tensor:
    """Return the feature map at the positions, [N, C]."""
    height, width = out.shape[2:]
    at = torch.as_tensor((height // 2, width // 2) if position is None else position)
    at = at.expand(len(out), 2) if at.ndim == 1 else at
    if at.shape != (len(out), 2):
        raise ValueError(f"position must be (row, column) or [{len(out)}, 2], got {list(at.shape)}")
    if (at < 0).any() or (at >= torch.tensor([height, width])).any():
        raise ValueError(
            f"position must lie in the feature map of {height} x {width}, got {at.tolist()}"
        )
    return out[torch.arange(len(out)), :, at[:, 0], at[:, 1]]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep the model in evaluation mode within the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def held_generators(model: nn.Module) -> Iterator[None]:
    """Make offsets and routing constants to autograd within the context."""
    generators = [m for m in model.modules() if isinstance(m, (OffsetGenerator, Routing))]
    handles = [
        generator.register_forward_hook(lambda module, args, out: out.detach())
        for generator in generators
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def centre(field: Tensor) -> Tensor:
    """Return the mean (row, column) of the mass, [..., 2]."""
    return torch.stack([(_mass(field) * axis).sum((-2, -1)) for axis in _axes(field)], -1)


def radius(field: Tensor) -> Tensor:
    """Return the root mean square distance of the mass from its centre."""
    return _covariance(field).diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()


def area(field: Tensor, threshold: float = 0.05) -> Tensor:
    """Count the pixels that have at least that share of the largest value."""
    return (field >= threshold * field.amax((-2, -1), keepdim=True)).sum((-2, -1)).to(field)


def anisotropy(field: Tensor) -> Tensor:
    """Return the longest over the shortest standard deviation of any direction: 1 is round."""
    short, long = torch.linalg.eigvalsh(_covariance(field)).clamp(min=0).sqrt().unbind(-1)
    return long / short


def share_inside(field: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the mass that lies inside `mask`, bool [..., H, W]."""
    return (_mass(field) * mask).sum((-2, -1))


def overlap(field: Tensor, mask: Tensor, threshold: float = 0.05) -> Tensor:
    """Return the intersection over union of `mask` and the pixels that `area` counts."""
    above = field >= threshold * field.amax((-2, -1), keepdim=True)
    return (above & mask).sum((-2, -1)) / (above | mask).sum((-2, -1))


def _mass(field: Tensor) -> Tensor:
    return field / field.sum((-2, -1), keepdim=True)


def _axes(field: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows, [H, 1], and the columns, [W]."""
    height, width = field.shape[-2:]
    rows = torch.arange(height, device=field.device)[:, None].to(field)
    columns = torch.arange(width, device=field.device).to(field)
    return rows, columns


def _covariance(field: Tensor) -> Tensor:
    """Return the covariance of the mass's rows and columns, [..., 2, 2]."""
    mass, mean = _mass(field), centre(field)
    apart = [axis - mean[..., i, None, None] for i, axis in enumerate(_axes(field))]
    entries = [(mass * a * b).sum((-2, -1)) for a in apart for b in apart]
    return torch.stack(entries, -1).unflatten(-1, (2, 2))
