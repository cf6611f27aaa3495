"""Layers: nn.Modules that own their weights and the generators of their offsets."""

from dkcls.layers.base import LAYERS, DynamicConv2d, layer_class
from dkcls.layers.cond_conv import CondConv2d
from dkcls.layers.convert import convert_depthwise, load_rigid_conv_
from dkcls.layers.deform_kernel import (
    DeformConv2d,
    DeformKernelConv2d,
    GlobalDeformKernel2d,
    LocalDeformKernel2d,
    StaticScope2d,
)
from dkcls.layers.generators import OffsetGenerator, offset_generators
from dkcls.layers.init import fill_scope_, scope_from_kernel
from dkcls.layers.record import OffsetRecord, record_offsets

__all__ = [
    "LAYERS",
    "CondConv2d",
    "DeformConv2d",
    "DeformKernelConv2d",
    "DynamicConv2d",
    "GlobalDeformKernel2d",
    "LocalDeformKernel2d",
    "OffsetGenerator",
    "OffsetRecord",
    "StaticScope2d",
    "convert_depthwise",
    "fill_scope_",
    "layer_class",
    "load_rigid_conv_",
    "offset_generators",
    "record_offsets",
    "scope_from_kernel",
]
