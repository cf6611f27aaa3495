"""Costs of a network: parameters, multiply-adds, activations.

Tensors without data are enough for the counts, so nothing is computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from dkcls.layers import CondConv2d, DynamicConv2d, OffsetGenerator
from dkcls.layers.generators import Routing

IMAGES = 2  # in train mode, normalisation of one image whose features are 1 x 1 is refused


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, input_size: Sequence[int]) -> int:
    """Return the multiply-adds per image [C, H, W] = `input_size`, as the paper counts them.

    Only convolutions and linear layers count, by torch's FLOP counter, halved. For a layer with a
    kernel per image, the counter sees how the kernel is computed: sampled by an einsum, or mixed
    from experts. Of such a layer only the generators' count is kept. The rest is counted as the
    convolution's own Cout*Ho*Wo*Cin/groups*Kh*Kw, times the number of experts: sampling is left
    out, and E experts are E convolutions.
    """
    own, counter = 0, FlopCounterMode(display=False)
    inner: list[int] = []

    def enter(layer: nn.Module) -> None:
        inner.append(counter.get_total_flops())

    def leave(layer: nn.Module, out: Tensor) -> None:
        nonlocal own
        before, counted = inner.pop(), counter.get_total_flops()
        if isinstance(layer, DynamicConv2d):
            own += _conv_macs(layer, out) * IMAGES * 2 - (counted - before)
        else:
            own += counted - before  # a generator, in the layer whose count is taken away

    with counter, _hooks(model, (DynamicConv2d, OffsetGenerator, Routing), leave, enter):
        _run(model, input_size)
    return (counter.get_total_flops() + own) // (2 * IMAGES)


def count_activations(model: nn.Module, input_size: Sequence[int]) -> int:
    """Return the elements per image that convolutions, linear layers and generators put out."""
    total = 0

    def leave(layer: nn.Module, out: Tensor) -> None:
        nonlocal total
        total += out.numel() // IMAGES

    with _hooks(model, (nn.Conv2d, nn.Linear, DynamicConv2d, OffsetGenerator, Routing), leave):
        _run(model, input_size)
    return total


def _conv_macs(layer: DynamicConv2d, out: Tensor) -> int:
    """Return the multiply-adds per image."""
    per_output = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return out[0].numel() * per_output * (layer.experts if isinstance(layer, CondConv2d) else 1)


@contextmanager
def _hooks(
    model: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    leave: Callable[[nn.Module, Tensor], None],
    enter: Callable[[nn.Module], None] = lambda layer: None,
) -> Iterator[None]:
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    handles = [
        layer.register_forward_pre_hook(lambda layer, args: enter(layer)) for layer in layers
    ]
    handles += [
        layer.register_forward_hook(lambda layer, args, out: leave(layer, out)) for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _run(model: nn.Module, input_size: Sequence[int]) -> None:
    """Run a forward pass with FakeTensors.

    The model stays as it is, its mode and statistics included.
    """
    if len(input_size) != 3:
        raise ValueError(f"input_size must be [C, H, W], got {list(input_size)}")
    with FakeTensorMode():
        tensors = [*model.named_parameters(), *model.named_buffers()]
        fakes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for name, tensor in tensors
        }
        dtype = next((p.dtype for p in model.parameters()), None)
        functional_call(
            model, fakes, (torch.empty(IMAGES, *input_size, dtype=dtype, device="cpu"),)
        )
