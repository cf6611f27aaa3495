"""Kernels per image: those kept for the backward pass are no larger than the layers' inputs."""

import math

import pytest
import timm
import torch

from dkcls.layers import DynamicConv2d
from tests.models.common import shapes_of


@pytest.mark.parametrize(
    ("name", "kept_mib", "inputs_mib"),
    [
        ("resnet50_dw_point2_global4", 5.67, 46.5),
        ("resnet50_dw_cond", 5.67, 46.5),
        ("mobilenetv2_100_point2_global4", 1.33, 25.2),
        ("mobilenetv2_100_cond", 1.33, 25.2),
    ],
)
def test_kept_kernels_and_the_images_they_meet(name, kept_mib, inputs_mib):
    """Check docs/models.md: MiB per image of 224 x 224 pixels in float32, over all layers."""
    kept, inputs = [], []

    def count(layer, args, out):
        kernel = out.shape[1] * layer.in_channels // layer.groups * math.prod(layer.kernel_size)
        inputs.append(args[0][0].numel())
        # Larger kernels are made again in the backward pass, for a few images at a time.
        kept.append(kernel if kernel <= inputs[-1] else 0)

    with torch.device("meta"):
        model = timm.create_model(name)
    for layer in model.modules():
        if isinstance(layer, DynamicConv2d):
            layer.register_forward_hook(count)
    shapes_of(model, 3, (224, 224))
    assert sum(kept) * 4 / 2**20 == pytest.approx(kept_mib, abs=0.01)
    assert sum(inputs) * 4 / 2**20 == pytest.approx(inputs_mib, abs=0.05)
    assert max(k / i for k, i in zip(kept, inputs, strict=True)) < 0.66
