"""Networks, registered with timm on import: `timm.create_model("resnet50_dw_local4")`."""

from dkcls.models import zoo
from dkcls.models.mobilenet_v2 import MobileNetV2, mobilenetv2_dw, mobilenetv2_nano
from dkcls.models.resnet_dw import ResNetDW, resnet50_dw
from dkcls.models.summary import count_activations, count_macs, count_parameters
from dkcls.models.variants import Variant
from dkcls.models.weights import load_rigid_
from dkcls.models.zoo import PAPER, PaperRow

__all__ = [
    "PAPER",
    "MobileNetV2",
    "PaperRow",
    "ResNetDW",
    "Variant",
    "count_activations",
    "count_macs",
    "count_parameters",
    "load_rigid_",
    "mobilenetv2_dw",
    "mobilenetv2_nano",
    "resnet50_dw",
    "zoo",
]
