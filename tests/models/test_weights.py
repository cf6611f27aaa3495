"""Loading of rigid weights into every variant: the same outputs before any training."""

from functools import cache

import pytest
import torch
import torchvision

from dkcls.models import PAPER, load_rigid_
from dkcls.models.weights import classes_and_channels, load_weights_
from tests.models.common import VARIANTS, awake, create, images, stir

MOBILENETS = [row.name for row in PAPER if row.base == "mobilenetv2_dw"]


@pytest.mark.parametrize("key", VARIANTS)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_into_every_variant(key, prefix):
    rigid, model = (
        awake(create(num_classes=6)),
        stir(create(seed=1, num_classes=6, **VARIANTS[key])).eval(),
    )
    state = {prefix + name: value for name, value in rigid.state_dict().items()}
    assert load_rigid_(model, state) == []
    torch.testing.assert_close(model(images()), rigid(images()), rtol=1e-4, atol=1e-4)


@cache
@torch.no_grad()
def rigid_mobilenet(library: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the network's state and outputs; those of the two libraries differ."""
    torch.manual_seed(2)
    rigid = (
        create("mobilenetv2_100", num_classes=7)
        if library == "timm"
        else torchvision.models.mobilenet_v2(num_classes=7)
    )
    return awake(rigid).state_dict(), rigid(images(3, (64, 64)))


@pytest.mark.parametrize("name", MOBILENETS)
@torch.no_grad()
def test_mobilenet_of_timm_and_torchvision(name):
    x = images(3, (64, 64))
    model = create(name, seed=1, num_classes=7).eval()
    for library in ("timm", "torchvision"):
        state, expected = rigid_mobilenet(library)
        load_rigid_(model, state)
        torch.testing.assert_close(
            model(x), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
        )


@cache
@torch.no_grad()
def rigid_resnet() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rigid = awake(create("resnet50_dw", num_classes=7))
    return rigid.state_dict(), rigid(images(3, (64, 64)))


@pytest.mark.parametrize(
    "name", ["resnet50_dw_cond_local4", "resnet50_dw_dcn_local4", "resnet50_dw_global4"]
)
@torch.no_grad()
def test_resnet(name):
    x, (state, expected) = images(3, (64, 64)), rigid_resnet()
    model = create(name, seed=1, num_classes=7).eval()
    load_rigid_(model, state)
    torch.testing.assert_close(
        model(x), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
    )


@pytest.mark.parametrize("classes", [0, 5])
def test_a_classifier_of_another_size_is_left_and_named(classes):
    rigid = awake(create(num_classes=6))
    model = create(seed=1, num_classes=classes, spatial="local_dk").eval()
    before = [p.clone() for p in model.classifier.parameters()]
    assert load_rigid_(model, rigid.state_dict()) == (
        ["classifier.weight", "classifier.bias"] if classes else []
    )
    assert all(
        torch.equal(p, b) for p, b in zip(model.classifier.parameters(), before, strict=True)
    )
    torch.testing.assert_close(
        model.forward_features(images()), rigid.forward_features(images()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("key", ["rigid", "local"])
@pytest.mark.parametrize(("given", "wanted"), [(1, 3), (3, 1)])
def test_grey_weights_for_colour_and_the_other_way_round(key, given, wanted):
    source = awake(create(in_chans=given, num_classes=6))
    model = create(seed=1, in_chans=wanted, num_classes=6, **VARIANTS[key]).eval()
    assert load_weights_(model, source.state_dict()) == []
    grey = images()
    expected = source(grey.expand(-1, given, -1, -1))
    torch.testing.assert_close(
        model(grey.expand(-1, wanted, -1, -1)), expected, rtol=1e-4, atol=1e-4
    )


def test_the_same_networks_weights_are_loaded_classifier_and_all():
    source, model = (
        stir(create(seed=seed, num_classes=6, spatial="local_dk")).eval() for seed in (0, 1)
    )
    assert load_weights_(model, source.state_dict()) == []
    assert torch.equal(model(images()), source(images()))
    other = create(seed=1, num_classes=5, spatial="local_dk").eval()
    before = other.classifier.weight.clone()
    assert load_weights_(other, source.state_dict()) == ["classifier.weight", "classifier.bias"]
    assert torch.equal(other.classifier.weight, before)
    assert torch.equal(other.forward_features(images()), source.forward_features(images()))


def test_weights_tell_their_classes_and_channels():
    state = create(in_chans=3, num_classes=6).state_dict()
    assert classes_and_channels("mobilenetv2_nano", state) == (6, 3)
    assert classes_and_channels(
        "mobilenetv2_nano", {f"module.{name}": value for name, value in state.items()}
    ) == (6, 3)
    assert classes_and_channels("mobilenetv2_nano", {}) == (10, 1)
    assert classes_and_channels("resnet50_dw", {"conv1.weight": torch.zeros(64, 4, 7, 7)}) == (
        1000,
        4,
    )
    torchvisions = {
        "features.0.0.weight": torch.zeros(32, 1, 3, 3),
        "classifier.1.weight": torch.zeros(7, 1280),
    }
    assert classes_and_channels("mobilenetv2_dw", torchvisions) == (7, 1)


def test_what_is_not_rigid_or_of_another_shape_is_refused_and_nothing_is_loaded():
    model = create(spatial="local_dk")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError,
        match=r"0 names are missing \(none\), 12 are unknown \(blocks.0.0.conv_dw.kernel_",
    ):
        load_rigid_(model, create(spatial="local_dk", scope=3).state_dict())
    with pytest.raises(
        ValueError, match=r"conv_stem.weight must be \[16, 1, 3, 3\], got \[16, 3, 3, 3\]"
    ):
        load_rigid_(model, create(in_chans=3).state_dict())
    with pytest.raises(ValueError, match=r"conv_dw.weight must be \[\d+, 1, 3, 3\], got"):
        load_rigid_(
            model, {**create().state_dict(), "blocks.1.0.conv_dw.weight": torch.zeros(48, 1, 5, 5)}
        )
    with pytest.raises(
        ValueError, match=r"\d+ names are missing \(blocks.0.0.bn1.bias, .*, \.\.\.\)"
    ):
        load_rigid_(model, {"conv_stem.weight": torch.zeros(16, 1, 3, 3)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
