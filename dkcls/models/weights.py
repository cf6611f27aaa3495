"""Loading of weights into networks.

The weights may be the same network's, or those of its rigid form for any variant, whose outputs
then agree with the rigid form's.
"""

import re
from collections.abc import Mapping

import timm
import torch
from timm.models import PretrainedCfg
from torch import Tensor, nn

from dkcls.layers import DynamicConv2d, load_rigid_conv_
from dkcls.models.mobilenet_v2 import MOBILENET_V2

_PREFIX = re.compile(r"^(module\.|_orig_mod\.)+")  # of DistributedDataParallel and torch.compile
_TORCHVISION_BLOCK = re.compile(r"features\.(\d+)\.conv\.([\d.]+)\.(\w+)")
_TORCHVISION_BLOCKS = [
    "",
    *(f"{stage}.{i}" for stage, s in enumerate(MOBILENET_V2.stages) for i in range(s.blocks)),
]
_TORCHVISION_FIRST = {"0.0": "conv_dw", "0.1": "bn1", "1": "conv_pw", "2": "bn2"}
_TORCHVISION_OTHERS = {
    "0.0": "conv_pw",
    "0.1": "bn1",
    "1.0": "conv_dw",
    "1.1": "bn2",
    "2": "conv_pwl",
    "3": "bn3",
}
_TORCHVISION_ENDS = {
    "features.0.0": "conv_stem",
    "features.0.1": "bn1",
    "features.18.0": "conv_head",
    "features.18.1": "bn2",
    "classifier.1": "classifier",
}


def load_weights_(model: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """Load the same network's weights, or those of its rigid form (`load_rigid_`).

    Returns the names that are left as they are: those of a classifier of another size.

    The weights may be for grey images and the network for colour, or the other way round: a grey
    image in three channels then gives the outputs that it gives in one.
    """
    own, state = model.state_dict(), _our_names(state_dict)
    first = f"{model.pretrained_cfg.get('first_conv')}.weight"  # type: ignore[operator,union-attr]
    if first in own and first in state:
        state[first] = _fit_channels(state[first], own[first].shape[1])
    if own.keys() != state.keys():
        return load_rigid_(model, state)
    left = [
        name
        for name in state
        if name.startswith(_classifier(model)) and state[name].shape != own[name].shape
    ]
    shapes = {name: value.shape for name, value in state.items() if name not in left}
    _check(shapes, {name: value.shape for name, value in own.items() if name not in left})
    model.load_state_dict(
        {name: value for name, value in state.items() if name not in left}, strict=False
    )
    return left


def classes_and_channels(name: str, state_dict: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return how many classes and channels the weights are for.

    Where the weights do not tell, the default of the network `name` counts.
    """
    cfg, state = timm.get_pretrained_cfg(name) or PretrainedCfg(), _our_names(state_dict)
    classifier, first = (
        state.get(f"{module}.weight") for module in (cfg.classifier, cfg.first_conv)
    )
    channels = (cfg.input_size or (3,))[0]
    return (cfg.num_classes if classifier is None else len(classifier)), (
        channels if first is None else first.shape[1]
    )


def check_same(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the names, shapes and kinds of the tensors are the model's."""
    own, state = model.state_dict(), _our_names(state_dict)
    if own.keys() != state.keys():
        raise ValueError(f"it has other tensors ({_some(sorted(own.keys() ^ state.keys()))})")
    _check({n: v.shape for n, v in state.items()}, {n: v.shape for n, v in own.items()})
    for name, value in own.items():
        if value.is_floating_point() != state[name].is_floating_point():
            raise ValueError(f"{name} must be {value.dtype}, got {state[name].dtype}")


def load_rigid_(model: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """Load the weights of a rigid network so that `model` computes what that network does.

    Scopes become those of least norm that read as the rigid kernels. Experts become different
    kernels that mix to the rigid kernel (see `CondConv2d.load_kernel`). All generators and routing
    become zero.

    Args:
        model: a network of this package, of the same shape, with any operators.
        state_dict: of `resnet50_dw` or `mobilenetv2_dw`, or of timm's or torchvision's
            MobileNet-V2; also from a DistributedDataParallel or a compiled model.

    Returns:
        The names that are left as they are: those of a classifier of another size.
    """
    state = _our_names(state_dict)
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, DynamicConv2d)
    }
    shapes = _rigid_shapes(model, layers)
    classifier = _classifier(model)
    left = [
        n
        for n in shapes
        if n.startswith(classifier) and (n not in state or state[n].shape != shapes[n])
    ]
    for name in [n for n in state if n.startswith(classifier) and (n in left or n not in shapes)]:
        del state[name]
    _check(
        {name: value.shape for name, value in state.items()},
        {n: s for n, s in shapes.items() if n not in left},
    )
    for name, layer in layers.items():
        load_rigid_conv_(layer, state.pop(f"{name}.weight"))
    model.load_state_dict(state, strict=False)
    return left


def _our_names(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under timm's names, without the prefixes of wrappers."""
    state = {_PREFIX.sub("", name): value for name, value in state_dict.items()}
    if "features.0.0.weight" in state:
        state = {_from_torchvision(name): value for name, value in state.items()}
    return state


def _classifier(model: nn.Module) -> str:
    """Return the prefix of the names of the classifier's tensors."""
    return next(
        f"{name}."
        for name, module in model.named_modules()
        if module is model.get_classifier()  # type: ignore[operator]
    )


def _fit_channels(weight: Tensor, channels: int) -> Tensor:
    """Convert a first convolution from grey to colour images, or the other way round, if needed."""
    if (weight.shape[1], channels) == (1, 3):
        return weight.expand(-1, 3, -1, -1) / 3
    return weight.sum(1, keepdim=True) if (weight.shape[1], channels) == (3, 1) else weight


def _rigid_shapes(model: nn.Module, layers: Mapping[str, DynamicConv2d]) -> dict[str, torch.Size]:
    """Return the shapes of the state dict that the model would have if it were rigid."""
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    for name, layer in layers.items():
        shapes = {n: shape for n, shape in shapes.items() if not n.startswith(f"{name}.")}
        shapes[f"{name}.weight"] = torch.Size(
            (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
        )
    return shapes


def _check(got: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            "the state dict is not that of this network's rigid form: "
            f"{len(missing)} names are missing ({_some(missing)}), "
            f"{len(unknown)} are unknown ({_some(unknown)})"
        )
    for name, shape in expected.items():
        if got[name] != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(got[name])}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"


def _from_torchvision(name: str) -> str:
    """Return timm's name of a tensor of torchvision's MobileNet-V2; other names stay."""
    block = _TORCHVISION_BLOCK.fullmatch(name)
    if block and int(block[1]) < len(_TORCHVISION_BLOCKS):
        number, part, rest = int(block[1]), block[2], block[3]
        parts = _TORCHVISION_FIRST if number == 1 else _TORCHVISION_OTHERS
        return f"blocks.{_TORCHVISION_BLOCKS[number]}.{parts.get(part, part)}.{rest}"
    module, _, rest = name.rpartition(".")
    return f"{_TORCHVISION_ENDS.get(module, module)}.{rest}"
