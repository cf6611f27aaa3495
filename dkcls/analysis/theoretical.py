"""Theoretical receptive fields: every pixel that a position can depend on, for any weights.

They are found by running a copy of the network with random positive weights, without biases and
with offsets at zero. There, a small positive input keeps every ReLU open and no two paths cancel,
so that the gradient is nonzero exactly where there is a path. Offsets are zero because image
offsets can reach any distance.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dkcls.analysis.erf import Position, feature_map, input_gradients
from dkcls.layers import OffsetGenerator

# Lengths and width, in pixels, of the strips that are tried until one holds a whole field.
STRIPS, WIDTH = (128, 512, 1024), 64


def theoretical_receptive_field(
    model: nn.Module,
    input_size: Sequence[int],
    position: Position | None = None,
    module: str | None = None,
) -> Tensor:
    """Return which pixels the position can depend on, bool [H, W].

    The input is [C, H, W] = `input_size`. Position and module are those of
    `effective_receptive_field`.
    """
    return _fields(_positive(model), input_size, position, module).any(0)


def position_centres(
    model: nn.Module, input_size: Sequence[int], module: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows and columns, in pixels, that a feature map's positions look at.

    These are the centres of the receptive fields, measured in the middle of a strip that is longer
    than the field, where no border cuts it. A network that sees everything, or takes images of one
    size only, gets the centres of equal cells.
    """
    positive = _positive(model)
    counts = _size(positive, input_size, module)
    centres = []
    for axis, (pixels, count) in enumerate(zip(input_size[1:], counts, strict=True)):
        start, step = _first_and_step(positive, input_size[0], axis, module) or (
            (pixels / count - 1) / 2,
            pixels / count,
        )
        centres.append(start + step * torch.arange(count))
    return centres[0], centres[1]


def _first_and_step(
    positive: nn.Module, channels: int, axis: int, module: str | None
) -> tuple[float, float] | None:
    """Return the centre of the first position's field along an axis, and the step to the next.

    Returns None if no strip holds a whole field.
    """
    for length in STRIPS:
        strip = (channels, length, WIDTH) if axis == 0 else (channels, WIDTH, length)
        try:
            middle = [n // 2 for n in _size(positive, strip, module)]
            two = torch.tensor([middle, middle])
            two[1, axis] += 1
            fields = _fields(positive, strip, two, module)
        except (AssertionError, ValueError):
            # The network takes another size only, or there is one position only.
            return None
        (first, last), (next_first, next_last) = (_ends(field.any(1 - axis)) for field in fields)
        if first > 0 and next_last < length - 1:
            centre, step = (first + last) / 2, (next_first + next_last - first - last) / 2
            return centre - step * middle[axis], step
    return None


def nearest_position(centres: tuple[Tensor, Tensor], point: Sequence[float]) -> tuple[int, int]:
    """Return (row, column) of the position that looks nearest to `point`, pixels (x, y)."""
    rows, columns = centres
    return int((rows - point[1]).abs().argmin()), int((columns - point[0]).abs().argmin())


def _fields(
    positive: nn.Module, input_size: Sequence[int], position: Position | None, module: str | None
) -> Tensor:
    """Return where the gradients of two random inputs are nonzero, bool [2, H, W]."""
    images = (
        0.5
        + torch.rand(
            2, *input_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
    ) * 1e-6
    with torch.no_grad():
        channels = feature_map(positive, images[:1], module).shape[1]
    return (
        input_gradients(positive, images, torch.ones(1, channels), position, module)[0].ne(0).any(1)
    )


@torch.no_grad()
def _size(model: nn.Module, input_size: Sequence[int], module: str | None) -> tuple[int, int]:
    height, width = feature_map(
        model, torch.zeros(1, *input_size, dtype=torch.float64), module
    ).shape[2:]
    return height, width


@torch.no_grad()
def _positive(model: nn.Module) -> nn.Module:
    """Return a float64 copy in evaluation mode, with weights that keep the activations' scale."""
    model = copy.deepcopy(model).double().cpu().eval()
    generator = torch.Generator().manual_seed(0)
    for module in list(model.modules()):
        for name, child in module.named_children():
            # The gradient of max pooling reaches one pixel only.
            if isinstance(child, nn.MaxPool2d) and child.dilation in (1, (1, 1)):
                setattr(
                    module,
                    name,
                    nn.AvgPool2d(child.kernel_size, child.stride, child.padding, child.ceil_mode),
                )
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, OffsetGenerator) or name == "bias":
                parameter.zero_()
            elif parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                noise = torch.rand(parameter.shape, dtype=torch.float64, generator=generator)
                parameter.copy_((0.5 + noise) / parameter[0].numel())
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.reset_running_stats()
    return model


def _ends(line: Tensor) -> tuple[int, int]:
    """Return the indices of the first and the last nonzero entry."""
    at = line.nonzero()
    return int(at[0]), int(at[-1])
