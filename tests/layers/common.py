"""Small layers under test: a name, the layer's name in the registry, and how to build one."""

import torch
from torch import nn

from dkcls.layers import LAYERS, layer_class

SMALL = {
    "static": ("static", {"groups": 6}),
    "static_dense": ("static", {}),
    "global_dk": ("global_dk", {"groups": 6}),
    "global_dk_dense": ("global_dk", {"groups": 1}),
    "global_dk_grouped": ("global_dk", {"groups": 2}),
    "local_dk": ("local_dk", {"groups": 6}),
    "dcn": ("dcn", {"groups": 6}),
    "dcn_local_dk": ("dcn_local_dk", {"groups": 6}),
    "cond": ("cond", {"groups": 6}),
    "cond_dense": ("cond", {"groups": 1, "experts": 2}),
}
DK = [key for key, (name, _) in SMALL.items() if "dk" in name]
MOVING = [*DK, "dcn"]
assert {name for name, _ in SMALL.values()} == LAYERS.keys() - {"rigid"}


def build(key: str, kernel_size=3, dtype=torch.float64, seed: int = 0, **options) -> nn.Module:
    name, groups = SMALL[key]
    torch.manual_seed(seed)
    return layer_class(name)(6, 6, kernel_size, **{"padding": 1, **groups, **options}, dtype=dtype)


def rigid(key: str, kernel_size=3, dtype=torch.float64, seed: int = 0, **options) -> nn.Conv2d:
    """Return nn.Conv2d with the same arguments and seed."""
    torch.manual_seed(seed)
    groups = SMALL[key][1].get("groups", 1)
    return nn.Conv2d(6, 6, kernel_size, **{"padding": 1, "groups": groups, **options}, dtype=dtype)


def image(
    dtype: torch.dtype = torch.float64, size: tuple[int, int] = (7, 6), n: int = 2
) -> torch.Tensor:
    return torch.randn(
        n, 6, *size, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).to(dtype)


def stir(layer: nn.Module, scale: float = 0.2) -> nn.Module:
    """Move the generators away from zero, so that something moves."""
    generator = torch.Generator().manual_seed(5)
    for name, p in layer.named_parameters():
        if "generator" in name or "routing" in name:
            p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale)
    return layer
