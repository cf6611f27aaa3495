"""Registration of the operator with PyTorch: autograd, torch.compile, torch.export, FakeTensor.

Two ops, forward and backward, dispatch to a backend. A gradient that nobody needs is an empty
tensor, since an op cannot return None.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dkcls.ops.checks import (
    check_backend,
    check_input,
    check_offsets,
    check_same,
    check_shape,
    memory_format,
)
from dkcls.ops.deform_kernel import reference
from dkcls.ops.deform_kernel.backend import Backend, Call, announce
from dkcls.ops.geometry import Geometry, check_geometry
from dkcls.ops.triton_launch import has_kernels

# Name of a backend -> its module, and its kernels in words; "triton" chooses and names its own.
# "reference" is not among them: it is no op, since autograd differentiates its forward.
_BACKENDS = {
    "taps": ("tap_loop", "tap by tap in PyTorch"),
    "cpu": ("cpu", "on the CPU's numba kernels"),
    "triton": ("triton", ""),
}


def _choose(name: str, x: Tensor) -> Backend:
    """Return the backend of a name, or without one the fastest for the input's device and dtype."""
    if not name:
        name = "triton" if has_kernels(x) else "cpu"
    if name == "cpu" and not _numba_takes(x):
        name = "taps"
    module, kernels = _BACKENDS[name]
    if kernels:
        announce(kernels)
    return _module(module)


def _numba_takes(x: Tensor) -> bool:
    on_cpu = x.device.type == "cpu" and x.dtype != torch.float64
    return on_cpu and _module("cpu").available()


@cache
def _module(name: str) -> Any:
    return import_module(f"dkcls.ops.deform_kernel.{name}")


def _layout(x: Tensor) -> torch.memory_format:
    return memory_format(x) if x.dim() == 4 else torch.contiguous_format


def _empty_like(x: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    return torch.empty(
        x.shape if shape is None else shape,
        dtype=x.dtype,
        device=x.device,
        memory_format=_layout(x),
    )


def _output_shape(x: Tensor, geometry: Geometry) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[1], *geometry.output_size(x.shape[2], x.shape[3])


_LIBRARY = torch.library.Library("dkcls", "FRAGMENT")
_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? kernel_offset, Tensor? image_offset, "
    "int[] kernel_size, int[] stride, int[] padding, int[] dilation, float[] step, str clip, "
    "str backend"
)
_LIBRARY.define(f"deform_kernel2d({_ARGUMENTS}) -> Tensor", tags=torch.Tag.needs_fixed_stride_order)
_LIBRARY.define(
    f"deform_kernel2d_backward(Tensor grad, {_ARGUMENTS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.needs_fixed_stride_order,
)
deform_kernel2d = torch.ops.dkcls.deform_kernel2d.default
deform_kernel2d_backward = torch.ops.dkcls.deform_kernel2d_backward.default


def _parse(arguments: Sequence[Any]) -> tuple[Call, str]:
    """Return the op's own arguments as a call, and the backend's name, which may be empty."""
    x, weight, kernel_offset, image_offset, *geometry, backend = arguments
    return Call(x, weight, kernel_offset, image_offset, Geometry(*geometry)), backend


def _check(*arguments: Any) -> None:
    """Refuse arguments that a kernel would misread; the arguments of `call` are already checked."""
    (x, weight, kernel_offset, image_offset, geometry), backend = _parse(arguments)
    check_geometry(geometry)
    check_input(x, geometry)
    shape, (n, c) = list(weight.shape), x.shape[:2]
    if kernel_offset is not None:
        layout = f"[C, 1, Sh, Sw] = [{c}, 1, Sh, Sw] with a kernel_offset"
        fits = len(shape) == 4 and shape[:2] == [c, 1] and 0 not in shape[2:]
    else:
        taps = [c, 1, *geometry.kernel_size]
        layout = f"[1 or N, C, 1, Kh, Kw] = [1 or {n}, {str(taps)[1:]} without a kernel_offset"
        fits = shape in ([1, *taps], [n, *taps])
    if not fits:
        raise ValueError(f"weight must be {layout}, got {shape}")
    check_same("weight", weight, x)
    check_offsets(x, kernel_offset, image_offset, geometry, per_image=False)
    check_backend(backend, x, ("", *_BACKENDS))


def _check_backward(grad: Tensor, *arguments: Any) -> None:
    *forward, needs = arguments
    _check(*forward)
    call, _ = _parse(forward)
    given = [t is not None for t in call[:4]]
    check_shape("grad", grad, "[N, C, Ho, Wo]", _output_shape(call.x, call.geometry))
    check_same("grad", grad, call.x)
    if len(needs) != 4 or any(need and not there for need, there in zip(needs, given, strict=True)):
        raise ValueError(
            f"needs must be four booleans, true only for tensors that are given, got {list(needs)}"
        )


def _run_forward(*arguments: Any) -> Tensor:
    call, backend = _parse(arguments)
    shape = _output_shape(call.x, call.geometry)
    if 0 in shape:
        return _empty_like(call.x, shape)
    out = _choose(backend, call.x).forward(call)
    return out.contiguous(memory_format=memory_format(call.x))


@torch.library.register_fake("dkcls::deform_kernel2d", lib=_LIBRARY)
def _forward_fake(x, weight, kernel_offset, image_offset, *options):
    return _empty_like(x, _output_shape(x, Geometry(*options[:-1])))


def _as_laid_out(g: Tensor, t: Tensor) -> Tensor:
    """Return the gradient g with the strides of t, also along axes of size 1.

    Those strides mean nothing, and yet DistributedDataParallel wants them equal.
    """
    return (
        g.as_strided(t.shape, t.stride())
        if g.stride() != t.stride() and g.is_contiguous() and t.is_contiguous()
        else g
    )


def _run_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *forward, needs = arguments
    call, backend = _parse(forward)
    tensors = call[:4]
    if grad.numel() == 0:
        grads: Sequence[Tensor | None] = [
            None if t is None else torch.zeros_like(t) for t in tensors
        ]
    else:
        grads = _choose(backend, call.x).backward(grad, call, needs)
    dense = []
    for t, g, need in zip(tensors, grads, needs, strict=True):
        if need and t is not None and g is not None:
            dense.append(_as_laid_out(g.to(t.dtype).contiguous(memory_format=_layout(t)), t))
        else:
            dense.append(call.x.new_empty(0))
    return tuple(dense)


@torch.library.register_fake("dkcls::deform_kernel2d_backward", lib=_LIBRARY)
def _backward_fake(grad, x, weight, kernel_offset, image_offset, *options):
    tensors = (x, weight, kernel_offset, image_offset)
    return tuple(
        _empty_like(t) if need else x.new_empty(0)
        for t, need in zip(tensors, options[-1], strict=True)
    )


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx, grad, run=deform_kernel2d_backward):
    needs = list(ctx.needs_input_grad[:4])
    grads = run(grad, *ctx.saved_tensors, *ctx.options, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *(
        None for _ in ctx.options
    )


def _double_backward(ctx, *grads):
    raise RuntimeError(
        'deform_kernel2d has no double backward on this backend: backend="reference" has one'
    )


@torch.compiler.disable
def _checked_forward(*arguments) -> Tensor:
    _check(*arguments)
    return _run_forward(*arguments)


@torch.compiler.disable
def _checked_backward(*arguments) -> tuple[Tensor, ...]:
    _check_backward(*arguments)
    return _run_backward(*arguments)


_LIBRARY.impl("deform_kernel2d", _checked_forward, "CompositeExplicitAutograd")
_LIBRARY.impl("deform_kernel2d_backward", _checked_backward, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "dkcls::deform_kernel2d", _backward, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_autograd("dkcls::deform_kernel2d_backward", _double_backward, lib=_LIBRARY)


class _Direct(torch.autograd.Function):
    """Operator without the dispatcher, whose Python takes longer than a small layer's kernels."""

    @staticmethod
    def forward(ctx, *arguments):
        _setup_context(ctx, arguments, None)
        return _run_forward(*arguments)

    @staticmethod
    def backward(ctx, grad):
        differentiated_again = torch.is_grad_enabled()
        return _backward(
            ctx,
            grad,
            deform_kernel2d_backward if differentiated_again or _watched() else _run_backward,
        )


def _watched() -> bool:
    """Return whether a dispatch mode must see the op: FakeTensor's, the FLOP counter's."""
    return torch._C._len_torch_dispatch_stack() > 0


def call(*arguments: Any) -> Tensor:
    """Call the op with its own arguments, and directly where only autograd needs to see it.

    The backend may also be "reference", which is no op.
    """
    if arguments[-1] == "reference":
        return reference.forward(_parse(arguments)[0])
    if (
        torch.compiler.is_compiling()
        or _watched()
        or any(type(t) not in _PLAIN for t in arguments[:4])
    ):
        return deform_kernel2d(*arguments)
    return _Direct.apply(*arguments)


_PLAIN = (Tensor, torch.nn.Parameter, type(None))


@register_flop_formula(torch.ops.dkcls.deform_kernel2d)
def _forward_flops(
    x_shape, weight_shape, ko, io, kernel_size, *args, out_shape=None, **kwargs
) -> int:
    """Return the FLOPs of the depthwise convolution, as for F.conv2d.

    Sampling is left out, as in the paper.
    """
    n, c, ho, wo = out_shape
    return 2 * n * c * ho * wo * kernel_size[0] * kernel_size[1]


@register_flop_formula(torch.ops.dkcls.deform_kernel2d_backward)
def _backward_flops(
    grad_shape, x_shape, weight_shape, ko, io, kernel_size, *args, out_shape=None, **kwargs
) -> int:
    n, c, ho, wo = grad_shape
    needs = args[-1]
    return 2 * n * c * ho * wo * kernel_size[0] * kernel_size[1] * (bool(needs[0]) + bool(needs[1]))
