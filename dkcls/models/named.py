"""Networks of the paper by name in timm: a builder, with the arguments of the row as defaults."""

from collections.abc import Callable
from typing import Any

from timm.models import generate_default_cfgs, register_model
from torch import nn

from dkcls.models import mobilenet_v2, resnet_dw
from dkcls.models.paper import PAPER, PaperRow

BUILDERS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "resnet50_dw": (resnet_dw.create_resnet50_dw, resnet_dw.CFG),
    "mobilenetv2_dw": (mobilenet_v2.create_mobilenetv2_dw, mobilenet_v2.CFG),
}
NAMED = {row.name: row for row in PAPER if row.arguments}

default_cfgs = generate_default_cfgs({name: BUILDERS[row.base][1] for name, row in NAMED.items()})


def _entry_point(row: PaperRow) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **arguments: Any) -> nn.Module:
        return BUILDERS[row.base][0](row.name, pretrained, **{**row.arguments, **arguments})

    create.__name__ = create.__qualname__ = row.name
    return create


for _row in NAMED.values():
    globals()[_row.name] = register_model(_entry_point(_row))
