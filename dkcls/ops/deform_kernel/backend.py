"""Contract of a backend: the call that it is given, and its two functions."""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from dkcls.ops.geometry import Geometry

logger = logging.getLogger("dkcls")
_announced: set[str] = set()


class Call(NamedTuple):
    """Tensors and settings of a call, checked.

    `weight` is the scope [C, 1, Sh, Sw] with a kernel_offset, else the taps [1 or N, C, 1, Kh, Kw].
    Offsets are [N, 2*Kh*Kw, Ho, Wo].
    """

    x: Tensor  # [N, C, H, W]
    weight: Tensor
    kernel_offset: Tensor | None
    image_offset: Tensor | None
    geometry: Geometry


class Backend(Protocol):
    """Module that computes the operator and its gradients."""

    def forward(self, call: Call) -> Tensor:
        """Return the output, [N, C, Ho, Wo] in any layout."""

    def backward(self, grad: Tensor, call: Call, needs: Sequence[bool]) -> Sequence[Tensor | None]:
        """Return the gradients to the four tensors of the call, for the output's gradient.

        They may have any floating dtype and layout. Those that nobody needs may be anything.
        """


def announce(kernels: str, why: str = "") -> None:
    """Log, once per process, which kernels run, and why not better ones."""
    if kernels not in _announced:
        _announced.add(kernels)
        logger.info("deform_kernel2d runs %s%s", kernels, f" ({why})" if why else "")
