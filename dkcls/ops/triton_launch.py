"""Launches of Triton kernels, as far as they need no Triton: Triton may not be installed.

A KernelSpec configures a launch. The rest says which kernels a device has, and lays tensors out as
kernels read them.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

AMD = "gfx942"  # of AMD's devices, the one that has tiles
# Triton's names of the dtypes that kernels take.
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

logger = logging.getLogger("dkcls")


@dataclass(frozen=True)
class KernelSpec:
    """Configuration of a kernel launch: all that compiling it takes, and its loops' trip counts.

    `pointers` and `constants` name arguments of `fn`; each argument that they leave out is a 32-bit
    integer. An absent pointer is a constant None.
    """

    name: str
    fn: Any  # triton.JITFunction
    pointers: Mapping[str, str]  # argument -> Triton type, "*fp16"
    constants: Mapping[str, Any]
    num_warps: int
    elements: int  # output elements per program
    maxnreg: int | None = None
    trips: tuple[int, ...] = ()  # of each loop, in the order of their start addresses

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of a launch, which are also options of a compilation."""
        options: dict[str, Any] = {
            "num_warps": self.num_warps,
            "num_stages": 1,
            "enable_fp_fusion": True,
        }
        return options | ({} if self.maxnreg is None else {"maxnreg": self.maxnreg})

    def launch(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Run the kernel with those of the arguments that it takes."""
        given = {name: arguments[name] for name in self.fn.arg_names if name in arguments}
        self.fn[grid](**(dict(self.constants) | given), **self.options)


@cache
def _architecture(device: int) -> str | None:
    """Return a GPU's key in the tile tables, or None if they have none for it."""
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if name == AMD:
            return name
        _warn(name)
        return None
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100" if major > 9 else "sm_80")


@cache
def _warn(name: str) -> None:
    logger.warning(
        "deform_kernel2d has no kernels for %s, of AMD's devices only for %s: "
        "it runs tap by tap in PyTorch, many times slower",
        name,
        AMD,
    )


@torch.compiler.assume_constant_result
def _has_tiles(device: int) -> bool:
    return _architecture(device) is not None


def has_kernels(tensor: Tensor) -> bool:
    """Return whether there are Triton kernels for a tensor's device and dtype."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return False
    return torch.version.hip is None or _has_tiles(tensor.get_device())


def architecture(tensor: Tensor) -> str:
    """Return the key of a tensor's device in the tile tables: its generation, not its model."""
    found = "sm_80" if interpreting() else _architecture(tensor.get_device())
    assert found is not None, "who launches has asked has_kernels"
    return found


def interpreting() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on the CPU."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def device_guard(tensor: Tensor) -> AbstractContextManager:
    """Make the tensor's device current, because Triton launches on the current device."""
    return nullcontext() if interpreting() else torch.cuda.device(tensor.device)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def dense(offset: Tensor) -> Tensor:
    """Return offsets as they are if contiguous or channels_last, else a contiguous copy."""
    return (
        offset if offset.is_contiguous(memory_format=torch.channels_last) else offset.contiguous()
    )
