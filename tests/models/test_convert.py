"""Rigid weights in every variant: the same outputs before any training."""

import pytest
import torch
import torchvision

from dkcls.models import PAPER, load_rigid_
from tests.models.common import VARIANTS, awake, create, images, stir

MOBILENETS = [row.name for row in PAPER if row.base == "mobilenetv2_dw"]


@pytest.mark.parametrize("key", VARIANTS)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_into_every_variant(key, prefix):
    rigid, model = awake(create(num_classes=6)), stir(create(seed=1, num_classes=6, **VARIANTS[key])).eval()
    state = {prefix + name: value for name, value in rigid.state_dict().items()}
    assert load_rigid_(model, state) == []
    torch.testing.assert_close(model(images()), rigid(images()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MOBILENETS)
def test_mobilenet_of_timm_and_torchvision(name):
    x = images(3, (64, 64))
    for rigid in (create("mobilenetv2_100", num_classes=7), torchvision.models.mobilenet_v2(num_classes=7)):
        model = create(name, seed=1, num_classes=7).eval()
        load_rigid_(model, awake(rigid).state_dict())
        expected = rigid(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["resnet50_dw_cond_local4", "resnet50_dw_dcn_local4", "resnet50_dw_global4"])
def test_resnet(name):
    x = images(3, (64, 64))
    rigid, model = awake(create("resnet50_dw", num_classes=7)), create(name, seed=1, num_classes=7).eval()
    load_rigid_(model, rigid.state_dict())
    expected = rigid(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("classes", [0, 5])
def test_a_classifier_of_another_size_is_left_and_named(classes):
    rigid = awake(create(num_classes=6))
    model = create(seed=1, num_classes=classes, spatial="local_dk").eval()
    before = [p.clone() for p in model.classifier.parameters()]
    assert load_rigid_(model, rigid.state_dict()) == (["classifier.weight", "classifier.bias"] if classes else [])
    assert all(torch.equal(p, b) for p, b in zip(model.classifier.parameters(), before, strict=True))
    torch.testing.assert_close(model.forward_features(images()), rigid.forward_features(images()), rtol=1e-4, atol=1e-4)


def test_what_is_not_rigid_or_of_another_shape_is_refused_and_nothing_is_loaded():
    model = create(spatial="local_dk")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"0 names are missing \(none\), 12 are unknown \(blocks.0.0.conv_dw.kernel_"):
        load_rigid_(model, create(spatial="local_dk", scope=3).state_dict())
    with pytest.raises(ValueError, match=r"conv_stem.weight must be \[16, 1, 3, 3\], got \[16, 3, 3, 3\]"):
        load_rigid_(model, create(in_chans=3).state_dict())
    with pytest.raises(ValueError, match=r"conv_dw.weight must be \[\d+, 1, 3, 3\], got"):
        load_rigid_(model, {**create().state_dict(), "blocks.1.0.conv_dw.weight": torch.zeros(48, 1, 5, 5)})
    with pytest.raises(ValueError, match=r"\d+ names are missing \(blocks.0.0.bn1.bias, .*, \.\.\.\)"):
        load_rigid_(model, {"conv_stem.weight": torch.zeros(16, 1, 3, 3)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
