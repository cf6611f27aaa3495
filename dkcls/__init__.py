"""dkcls: image classification with deformable kernels."""

__version__ = "0.1.0"
