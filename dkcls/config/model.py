"""The group `model`: which network, and how it differs from its default."""

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass
class ModelConfig:
    """A network by its name in timm. What is null is left to the network's own default."""

    FREE: ClassVar[tuple[str, ...]] = ()

    # ours (resnet50_dw, mobilenetv2_dw, mobilenetv2_nano) or any other of timm's; null: that of
    # the checkpoint in pretrained
    name: str | None = None
    # a checkpoint or a file of weights to start from; rigid weights fit DK networks too
    pretrained: str | None = None
    # what is not trained: stem (with the first stage), backbone (all but the classifier), or the
    # beginnings of names, [conv_stem,bn1,blocks.0]
    freeze: Any = None
    # operator of the depthwise convolutions: rigid, static, global_dk, local_dk, dcn,
    # dcn_local_dk, cond, or a layer of a plug-in
    spatial: str | None = None
    pointwise: str | None = None  # operator of the 1x1 convolutions: rigid, global_dk, cond
    scope: int | None = None  # side of the scope of the depthwise deformable kernels
    pointwise_scope: int | None = None  # side of the scope of the 1x1 deformable kernels
    experts: int | None = None  # experts of conditional convolutions
    grid: Any = None  # where the taps start: centered, spread, or the step between them
    clip: str | None = None  # gradient of kernel coordinates outside the scope: hard, projected
    scope_init: str | None = None  # initial scope: rigid, independent
    depthwise_gain: float | None = None  # factor of the initial depthwise weights
    drop_rate: float | None = None  # dropout before the classifier
    drop_path_rate: float | None = None  # stochastic depth
    # further arguments of the layer that model.spatial names, as model.options.NAME=VALUE
    options: dict[str, Any] = field(default_factory=dict)
    # further arguments of the network itself, as model.kwargs.NAME=VALUE; not timm's own
    kwargs: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `timm.create_model`."""
        left_out = ("name", "pretrained", "freeze", "options", "kwargs")
        named = {
            key: value
            for key, value in vars(self).items()
            if key not in left_out and value is not None
        }
        return named | ({"options": self.options} if self.options else {}) | self.kwargs
