"""Effective receptive fields (ERFs): how far each pixel moves one position of a feature map.

R(i; j) = d output[:, j] / d input[:, i], as the paper defines it, by autograd: for a position j of a feature map and a pixel i
of the input, a matrix of output channels times input channels. Offsets and routing are what their generators say for the image,
and constants in the derivative, as in the paper's equations; other gates, such as squeeze-and-excitation, are not held.
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
    """[N, C, Ho, Wo]: what the submodule of that name puts out; None: the last feature map of a timm network, or the output."""
    if module is None:
        if hasattr(model, "forward_intermediates"):
            out = model.forward_intermediates(images, indices=1, intermediates_only=True)[-1]  # type: ignore[operator]
        else:
            out = model(images)
    else:
        out = _output_of(model, images, module)
    if not isinstance(out, Tensor) or out.ndim != 4:
        came = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"the output of {module or 'the network'} must be a feature map [N, C, H, W], got {came}"
        )
    return out


def _output_of(model: nn.Module, images: Tensor, module: str) -> Any:
    named = dict(model.named_modules())
    if module not in named:
        raise ValueError(
            f"the network has no module {module!r}; its parts are {', '.join(dict(model.named_children()))}"
        )

    def stop(module: nn.Module, args: Any, out: Any) -> None:
        raise _Reached(out)  # what comes after is of no interest

    handle = named[module].register_forward_hook(stop)
    try:
        model(images)
    except _Reached as reached:
        return reached.args[0]
    finally:
        handle.remove()
    raise ValueError(f"the network does not use its module {module!r}")


class _Reached(Exception):
    pass


def input_gradients(
    model: nn.Module,
    images: Tensor,
    vectors: Tensor,
    position: Position | None = None,
    module: str | None = None,
) -> Tensor:
    """[V, N, Cin, H, W]: the signed gradient of <v, output[n, :, position]> to the pixels, for each row v of `vectors` [V, C].

    A row with a single one gives R's row of that channel. One forward pass for all, one backward pass for each row.
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
    """[N, H, W], not negative: the Frobenius norm of R(i; j) over output and input channels, pixel by pixel.

    With `channels`, over these channels of the output, exactly. Otherwise over all of them, from random projections: the
    square is estimated without bias, with a relative standard error of at most sqrt(2 / projections).

    Args:
        images: [N, Cin, H, W], normalised as the network takes them.
        position: in the feature map, (row, column), for all images or one for each, [N, 2]; None: the middle.
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
    """[N, C]: the feature map at the positions."""
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
    """Within the context, the model is in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def held_generators(model: nn.Module) -> Iterator[None]:
    """Within the context, offsets and routing are constants to autograd."""
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
