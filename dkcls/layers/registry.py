"""Table of the layers by name."""

from torch import nn

from dkcls.layers.cond_conv import CondConv2d
from dkcls.layers.deform_kernel import (
    DeformConv2d,
    DeformKernelConv2d,
    GlobalDeformKernel2d,
    LocalDeformKernel2d,
    StaticScope2d,
)

LAYERS: dict[str, type[nn.Module]] = {
    "rigid": nn.Conv2d,
    "static": StaticScope2d,
    "global_dk": GlobalDeformKernel2d,
    "local_dk": LocalDeformKernel2d,
    "dcn": DeformConv2d,
    "dcn_local_dk": DeformKernelConv2d,
    "cond": CondConv2d,
}


def layer_class(name: str) -> type[nn.Module]:
    """Return the layer of that name; each takes nn.Conv2d's arguments and keywords of its own."""
    if name not in LAYERS:
        raise ValueError(f"layer must be one of {', '.join(LAYERS)}, got {name!r}")
    return LAYERS[name]
