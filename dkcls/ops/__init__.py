"""Operators: functions of tensors, without parameters of their own."""

from dkcls.ops.deform_kernel import deform_kernel2d
from dkcls.ops.sample_kernel import sample_kernel2d

__all__ = ["deform_kernel2d", "sample_kernel2d"]
