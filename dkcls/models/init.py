"""Initial weights by timm's rules.

Variants of a network that start from the same seed start with the same kernels.
"""

import math

import torch
from torch import Tensor, nn

from dkcls.layers import DynamicConv2d
from dkcls.layers.deform_kernel import ScopeConv2d
from dkcls.models.variants import Variant


@torch.no_grad()
def init_weights_(model: nn.Module, variant: Variant, *, per_group: bool) -> None:
    """Draw every kernel anew, in network order; zero the generators, reset normalisation.

    A layer with a scope or experts loads the kernel that the rigid layer in its place would have,
    so that variants with one seed start from one function. What only such layers need is drawn from
    a second stream. What was drawn before, while modules were built, does not matter: only two
    seeds are taken from PyTorch's own stream.

    Args:
        model: nothing happens to it while its parameters are on the meta device.
        per_group: whether a kernel's fan-out is Cout/groups * K * K, as in timm's EfficientNet, or
            Cout * K * K, as in timm's ResNet. The kernel's variance is 2 / fan-out.
    """
    if any(p.is_meta for p in model.parameters()):
        return
    kernels, others = (
        torch.Generator("cpu").manual_seed(int(s)) for s in torch.randint(2**62, (2,), device="cpu")
    )
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, DynamicConv2d)):
            _init_conv(module, variant, per_group, kernels, others)
        elif isinstance(module, nn.Linear):
            _init_linear(module, per_group, kernels)
        elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
            module.reset_parameters()


def _init_conv(
    conv: nn.Conv2d | DynamicConv2d,
    variant: Variant,
    per_group: bool,
    kernels: torch.Generator,
    others: torch.Generator,
) -> None:
    depthwise = conv.groups == conv.in_channels == conv.out_channels > 1
    fan_out = conv.out_channels * math.prod(conv.kernel_size) // (conv.groups if per_group else 1)
    std = math.sqrt(2 / fan_out) * (variant.depthwise_gain if depthwise else 1)
    shape = conv.out_channels, conv.in_channels // conv.groups, *conv.kernel_size
    kernel = torch.empty(shape, dtype=conv.weight.dtype, device="cpu").normal_(
        0, std, generator=kernels
    )
    if isinstance(conv, nn.Conv2d):
        conv.weight.copy_(kernel)
        return
    if isinstance(conv, ScopeConv2d) and conv.scope_init == "independent":
        conv.weight.copy_(_like(conv.weight).normal_(0, std, generator=others))
    else:
        conv.load_kernel(kernel.to(conv.weight.device), others)
    conv.reset_generators()


def _init_linear(linear: nn.Linear, per_group: bool, kernels: torch.Generator) -> None:
    """Draw the classifier by EfficientNet's rule, or by nn.Linear's, which timm's ResNet keeps."""
    bound = (linear.out_features if per_group else linear.in_features) ** -0.5
    linear.weight.copy_(_like(linear.weight).uniform_(-bound, bound, generator=kernels))
    if per_group:
        linear.bias.zero_()
    else:
        linear.bias.copy_(_like(linear.bias).uniform_(-bound, bound, generator=kernels))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
