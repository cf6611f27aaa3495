"""The paper's 22 networks by name in timm, and its tables.

A network has the metrics that the paper prints, exact parameters and multiply-adds, and the
arguments that build it. A detector has the metrics that the paper prints.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from timm.models import generate_default_cfgs, register_model
from torch import nn

from dkcls.models import mobilenet_v2, resnet_dw

COND2 = {"spatial": "cond", "pointwise": "cond", "experts": 2}
COND8 = {"spatial": "cond", "pointwise": "cond", "experts": 8}
DCN = {"spatial": "dcn"}
DCN_LOCAL4 = {"spatial": "dcn_local_dk", "scope": 4}
GLOBAL4 = {"spatial": "global_dk", "scope": 4}
LOCAL3 = {"spatial": "local_dk", "scope": 3}
LOCAL4 = {"spatial": "local_dk", "scope": 4}
LOCAL5 = {"spatial": "local_dk", "scope": 5}
LOCAL9 = {"spatial": "local_dk", "scope": 9}
POINT2 = {"pointwise": "global_dk", "pointwise_scope": 2}


@dataclass(frozen=True)
class PaperRow:
    """Row of the paper's tables."""

    name: str  # in timm
    top1: float  # percent on ImageNet, as printed
    parameters_printed: float  # millions
    gflops_printed: float  # multiply-adds, / 1e9
    parameters: int  # exactly
    macs: float  # multiply-adds of convolutions and linear layers at 224 x 224, five digits of them
    base: str  # timm.create_model(base, **arguments) is the network, too
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def generator_lr_multiplier(self) -> float:
        """Return the factor on the learning rate for all offset generators."""
        return 0.01 if self.name.startswith("resnet") else 0.1


PAPER = (
    PaperRow("resnet50", 76.7, 25.6, 3.86, 25_557_032, 4.0892e9, "resnet50"),
    PaperRow("resnet50_dw", 76.3, 23.7, 3.82, 23_682_216, 4.0241e9, "resnet50_dw"),
    PaperRow("resnet50_dw_local3", 77.4, 24.9, 4.32, 24_905_928, 4.4712e9, "resnet50_dw", LOCAL3),
    PaperRow("resnet50_dw_local4", 78.1, 25.0, 4.32, 24_958_792, 4.4712e9, "resnet50_dw", LOCAL4),
    PaperRow("resnet50_dw_local5", 77.8, 25.0, 4.32, 25_026_760, 4.4712e9, "resnet50_dw", LOCAL5),
    PaperRow("resnet50_dw_local9", 77.4, 25.4, 4.32, 25_449_672, 4.4712e9, "resnet50_dw", LOCAL9),
    PaperRow("resnet50_dw_global4", 77.6, 23.9, 3.82, 23_871_304, 4.0242e9, "resnet50_dw", GLOBAL4),
    PaperRow(
        "resnet50_dw_point2_global4",
        77.9,
        80.1,
        4.09,
        80_068_872,
        4.0243e9,
        "resnet50_dw",
        POINT2 | GLOBAL4,
    ),
    PaperRow(
        "resnet50_dw_point2_local4",
        78.5,
        81.2,
        4.60,
        81_156_360,
        4.4712e9,
        "resnet50_dw",
        POINT2 | LOCAL4,
    ),
    PaperRow("resnet50_dw_cond", 77.6, 42.5, 7.13, 42_525_448, 7.5685e9, "resnet50_dw", COND2),
    PaperRow(
        "resnet50_dw_cond_local4",
        78.9,
        43.7,
        7.61,
        43_718_920,
        7.9908e9,
        "resnet50_dw",
        COND2 | LOCAL4,
    ),
    PaperRow("resnet50_dw_dcn", 78.0, 24.8, 4.10, 24_843_666, 4.2761e9, "resnet50_dw", DCN),
    PaperRow(
        "resnet50_dw_dcn_local4", 79.0, 26.1, 4.60, 26_120_242, 4.7232e9, "resnet50_dw", DCN_LOCAL4
    ),
    PaperRow("mobilenetv2_100", 71.9, 3.5, 0.31, 3_504_872, 0.3008e9, "mobilenetv2_100"),
    PaperRow(
        "mobilenetv2_100_global4", 73.6, 3.7, 0.31, 3_683_578, 0.3009e9, "mobilenetv2_dw", GLOBAL4
    ),
    PaperRow(
        "mobilenetv2_100_point2_global4",
        74.5,
        10.1,
        0.34,
        10_074_942,
        0.3009e9,
        "mobilenetv2_dw",
        POINT2 | GLOBAL4,
    ),
    PaperRow(
        "mobilenetv2_100_local4", 74.1, 4.7, 0.73, 4_711_162, 0.6737e9, "mobilenetv2_dw", LOCAL4
    ),
    PaperRow(
        "mobilenetv2_100_point2_local4",
        74.8,
        11.1,
        0.76,
        11_102_526,
        0.6737e9,
        "mobilenetv2_dw",
        POINT2 | LOCAL4,
    ),
    PaperRow(
        "mobilenetv2_100_cond", 74.3, 19.0, 2.19, 18_953_760, 2.3215e9, "mobilenetv2_dw", COND8
    ),
    PaperRow(
        "mobilenetv2_100_cond_local4",
        75.5,
        19.7,
        2.48,
        19_653_258,
        2.5493e9,
        "mobilenetv2_dw",
        COND8 | LOCAL4,
    ),
    PaperRow("mobilenetv2_100_dcn", 73.2, 4.6, 0.52, 4_617_092, 0.4867e9, "mobilenetv2_dw", DCN),
    PaperRow(
        "mobilenetv2_100_dcn_local4",
        74.4,
        5.8,
        0.93,
        5_823_382,
        0.8596e9,
        "mobilenetv2_dw",
        DCN_LOCAL4,
    ),
)


class DetectionRow(NamedTuple):
    """Row of the paper's Tables 3 and 4: average precisions on COCO, percent, as printed."""

    name: str  # of the backbone, in timm
    map: float
    small: float
    medium: float
    large: float


PAPER_DETECTION = (
    DetectionRow("resnet50_dw", 36.6, 22.1, 39.9, 46.6),
    DetectionRow("resnet50_dw_global4", 36.7, 22.6, 40.2, 46.9),
    DetectionRow("resnet50_dw_point2_global4", 37.1, 23.1, 40.6, 46.6),
    DetectionRow("resnet50_dw_local4", 37.8, 23.4, 41.6, 48.2),
    DetectionRow("resnet50_dw_point2_local4", 38.4, 23.4, 42.0, 49.4),
    DetectionRow("resnet50_dw_cond", 36.3, 22.1, 39.3, 47.0),
    DetectionRow("resnet50_dw_cond_local4", 38.0, 23.4, 41.9, 48.4),
    DetectionRow("resnet50_dw_dcn", 39.9, 24.0, 43.4, 52.6),
    DetectionRow("resnet50_dw_dcn_local4", 40.6, 24.6, 43.9, 53.3),
    DetectionRow("mobilenetv2_100", 31.3, 18.6, 33.7, 40.4),
    DetectionRow("mobilenetv2_100_global4", 32.5, 19.6, 35.8, 41.9),
    DetectionRow("mobilenetv2_100_point2_global4", 32.9, 19.4, 35.5, 42.8),
    DetectionRow("mobilenetv2_100_local4", 32.9, 19.5, 36.0, 42.5),
    DetectionRow("mobilenetv2_100_point2_local4", 33.7, 20.2, 36.7, 44.0),
    DetectionRow("mobilenetv2_100_cond", 33.2, 20.5, 35.6, 43.3),
    DetectionRow("mobilenetv2_100_cond_local4", 34.3, 20.2, 37.3, 44.7),
    DetectionRow("mobilenetv2_100_dcn", 34.4, 20.5, 37.0, 44.7),
    DetectionRow("mobilenetv2_100_dcn_local4", 35.6, 20.6, 38.5, 47.3),
)

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
