"""Facts about a network that timm wants to know besides how to build it."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def imagenet_cfg(**changes: Any) -> dict[str, Any]:
    """Return the facts for 224 x 224 pixels, the centre of an image whose shorter side is 256.

    There are no pretrained weights.
    """
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        **changes,
    }
