"""Operators: functions of tensors, without parameters of their own."""

from dkcls.ops.cond_conv import cond_conv2d
from dkcls.ops.deform_kernel import deform_kernel2d
from dkcls.ops.global_deform_kernel import global_deform_kernel2d
from dkcls.ops.sample_kernel import sample_kernel2d

__all__ = ["cond_conv2d", "deform_kernel2d", "global_deform_kernel2d", "sample_kernel2d"]
