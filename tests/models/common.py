"""Networks under test: all names, the small network's variants, and helpers.

The helpers give a fresh network outputs that tell something.
"""

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from dkcls.models import PAPER

PAPER_NAMES = [row.name for row in PAPER]
OWN_NAMES = [row.name for row in PAPER if row.base != row.name] + [
    "resnet50_dw",
    "mobilenetv2_dw",
    "mobilenetv2_nano",
]
VARIANTS = {
    "rigid": {},
    "static": {"spatial": "static"},
    "global": {"spatial": "global_dk", "pointwise": "global_dk"},
    "local": {"spatial": "local_dk", "scope": 5},
    "dcn": {"spatial": "dcn"},
    "dcn_local": {"spatial": "dcn_local_dk", "grid": "spread"},
    "cond": {"spatial": "cond", "pointwise": "cond", "experts": 3},
    "cond_local": {"spatial": "local_dk", "pointwise": "cond", "clip": "projected"},
}


def create(name: str = "mobilenetv2_nano", seed: int = 0, **arguments) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, **arguments)


def drawn_once(name: str, seed: int = 0, **arguments) -> nn.Module:
    """Return the same network as `create`, in half the time.

    The layers do not draw weights before the network does.
    """
    with torch.device("meta"):
        model = timm.create_model(name, **arguments)
    torch.manual_seed(seed)
    model.to_empty(device="cpu").init_weights()
    return model


def images(channels: int = 1, size: tuple[int, int] = (32, 32), n: int = 2) -> Tensor:
    return torch.randn(n, channels, *size, generator=torch.Generator().manual_seed(1))


def awake(model: nn.Module) -> nn.Module:
    """Put the network into eval mode, with normalisation that hides nothing.

    timm's last normalisation in a block starts at zero.
    """
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in (
                (module.weight, 0.8, 1.2),
                (module.bias, -0.2, 0.2),
                (module.running_mean, -0.2, 0.2),
                (module.running_var, 0.5, 1.5),
            ):
                tensor.data.uniform_(low, high, generator=generator)
    return model.eval()


def stir(model: nn.Module, scale: float = 0.05) -> nn.Module:
    """Move the generators away from zero, so that something moves."""
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "generator" in name or "routing" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator) * scale)
    return model


def shapes_of(model: nn.Module, channels: int, size: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes of the outputs, without computing the outputs."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    with FakeTensorMode(), torch.no_grad():
        fakes = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in tensors}
        out = functional_call(model, fakes, (torch.empty(2, channels, *size, device="cpu"),))
    return [tuple(o.shape[1:]) for o in (out if isinstance(out, list) else [out])]
