"""The operator as PyTorch sees it: registered once, so that autograd, torch.compile, torch.export and FakeTensor all know it.

Two ops, forward and backward, dispatch to a backend: a module with `forward(x, weight, kernel_offset, image_offset,
geometry)` and `backward(grad, x, weight, kernel_offset, image_offset, geometry, needs)`. A gradient that nobody needs is an
empty tensor, since an op cannot return None.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dkcls.ops.checks import memory_format
from dkcls.ops.geometry import Geometry

_MODULES = {"taps": "tap_loop", "cpu": "cpu", "triton": "gpu"}


def default_backend(tensor: Tensor) -> str:
    """The fastest backend for a tensor's device and dtype."""
    if tensor.dtype == torch.float64:
        return "taps"
    return {"cpu": "cpu", "cuda": "triton"}.get(tensor.device.type, "taps")


def _backend(name: str, tensor: Tensor) -> ModuleType:
    return import_module(f"dkcls.ops.deform_kernel.{_MODULES[name or default_backend(tensor)]}")


def _empty_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    shape = x.shape if shape is None else shape
    layout = memory_format(x) if x.dim() == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)


def _output_shape(x: Tensor, geometry: Geometry) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[1], *geometry.output_size(x.shape[2], x.shape[3])


@torch.library.custom_op("dkcls::deform_kernel2d", mutates_args=())
def deform_kernel2d(
    input: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    step: Sequence[float],
    clip: str,
    backend: str,
) -> Tensor:
    geometry = Geometry(kernel_size, stride, padding, dilation, step, clip)
    if 0 in _output_shape(input, geometry):
        return _empty_like(input, _output_shape(input, geometry))
    out = _backend(backend, input).forward(input, weight, kernel_offset, image_offset, geometry)
    return out.contiguous(memory_format=memory_format(input))


@deform_kernel2d.register_fake
def _(input, weight, kernel_offset, image_offset, kernel_size, stride, padding, dilation, step, clip, backend):
    return _empty_like(input, _output_shape(input, Geometry(kernel_size, stride, padding, dilation, step, clip)))


@torch.library.custom_op("dkcls::deform_kernel2d_backward", mutates_args=())
def deform_kernel2d_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    kernel_offset: Tensor | None,
    image_offset: Tensor | None,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    step: Sequence[float],
    clip: str,
    backend: str,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    geometry = Geometry(kernel_size, stride, padding, dilation, step, clip)
    tensors = (input, weight, kernel_offset, image_offset)
    if grad.numel() == 0:
        grads: Sequence[Tensor | None] = [None if t is None else torch.zeros_like(t) for t in tensors]
    else:
        grads = _backend(backend, input).backward(grad, *tensors, geometry, needs)
    dense = []
    for t, g, need in zip(tensors, grads, needs, strict=True):
        if need and t is not None and g is not None:
            layout = memory_format(t) if t.dim() == 4 else torch.contiguous_format
            dense.append(g.to(t.dtype).contiguous(memory_format=layout))
        else:
            dense.append(input.new_empty(0))
    return dense[0], dense[1], dense[2], dense[3]


@deform_kernel2d_backward.register_fake
def _(grad, input, weight, kernel_offset, image_offset, *rest):
    tensors = (input, weight, kernel_offset, image_offset)
    return tuple(_empty_like(t) if need else input.new_empty(0) for t, need in zip(tensors, rest[-1], strict=True))


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx, grad):
    needs = list(ctx.needs_input_grad[:4])
    grads = deform_kernel2d_backward(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(None for _ in ctx.options)


def _double_backward(ctx, *grads):
    raise RuntimeError('deform_kernel2d has no double backward on this backend: backend="reference" has one')


deform_kernel2d.register_autograd(_backward, setup_context=_setup_context)
deform_kernel2d_backward.register_autograd(_double_backward, setup_context=lambda ctx, inputs, output: None)


@register_flop_formula(torch.ops.dkcls.deform_kernel2d)
def _forward_flops(x_shape, weight_shape, ko, io, kernel_size, *args, out_shape=None, **kwargs) -> int:
    """The depthwise convolution's own count, as F.conv2d's; sampling is left out, as in the paper."""
    n, c, ho, wo = out_shape
    return 2 * n * c * ho * wo * kernel_size[0] * kernel_size[1]


@register_flop_formula(torch.ops.dkcls.deform_kernel2d_backward)
def _backward_flops(grad_shape, x_shape, weight_shape, ko, io, kernel_size, *args, out_shape=None, **kwargs) -> int:
    n, c, ho, wo = grad_shape
    needs = args[-1]
    return 2 * n * c * ho * wo * kernel_size[0] * kernel_size[1] * (bool(needs[0]) + bool(needs[1]))
