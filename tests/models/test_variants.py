"""Arguments of the networks: their effects, and errors for wrong ones."""

import pytest
import timm
import torch

from dkcls.layers import LAYERS
from dkcls.models import Variant, count_parameters
from tests.models.common import create


@pytest.mark.parametrize("spatial", LAYERS)
@pytest.mark.parametrize("pointwise", ["rigid", "global_dk", "cond"])
def test_arguments_choose_the_layers(spatial, pointwise):
    model = create(
        spatial=spatial,
        pointwise=pointwise,
        scope=5,
        pointwise_scope=3,
        experts=6,
        grid="spread",
        clip="projected",
    )
    block = model.blocks[1][0]
    assert type(block.conv_dw) is LAYERS[spatial]
    assert {type(conv) for conv in (block.conv_pw, block.conv_pwl, model.conv_head)} == {
        LAYERS[pointwise]
    }
    for conv, scope in ((block.conv_dw, (5, 5)), (block.conv_pw, (3, 3))):
        assert getattr(conv, "scope", scope) == scope
        assert getattr(conv, "grid", "spread") == "spread"
        assert getattr(conv, "clip", "projected") == "projected"
        assert getattr(conv, "experts", 6) == 6
    assert type(model.conv_stem) is torch.nn.Conv2d
    assert model.variant.spatial == spatial


def test_arguments_override_those_of_a_name():
    with torch.device("meta"):
        model = timm.create_model("resnet50_dw_local4", scope=5)
        assert count_parameters(model) == count_parameters(timm.create_model("resnet50_dw_local5"))
        assert timm.create_model("mobilenetv2_dw", pointwise="cond").conv_head.experts == 8
        assert timm.create_model("resnet50_dw", pointwise="cond").layer1[0].conv1.experts == 2


@pytest.mark.parametrize(
    "name", ["resnet50_dw", "resnet50_dw_local4", "mobilenetv2_dw", "mobilenetv2_nano"]
)
def test_an_unknown_argument_names_the_valid_ones(name):
    with pytest.raises(
        ValueError, match=f"^{name} has no argument 'scop'; it has scope, "
    ) as error:
        timm.create_model(name, scop=4)
    valid = str(error.value).split("it has ")[1].split(", ")
    expected = {
        "spatial",
        "pointwise",
        "scope",
        "pointwise_scope",
        "experts",
        "grid",
        "clip",
        "scope_init",
        "depthwise_gain",
    }
    assert expected | {
        "num_classes",
        "in_chans",
        "drop_path_rate",
        "output_stride",
        "features_only",
        "out_indices",
    } <= set(valid)
    assert ("width" in valid) == ("mobilenet" in name)
    assert not {"layout", "variant"} & set(valid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spatial": "local"}, "spatial must be one of local_dk, .*, got 'local'"),
        ({"pointwise": "local_dk"}, "pointwise must be one of global_dk, .*, got 'local_dk'"),
        ({"depthwise_gain": 0}, "depthwise_gain must be above 0, got 0"),
        (
            {"spatial": "local_dk", "scope": 0},
            "scope must be an int or a pair of ints, each at least 1, got 0",
        ),
        ({"spatial": "local_dk", "grid": "even"}, "grid must be"),
        ({"spatial": "local_dk", "clip": "soft"}, "clip must be"),
        ({"spatial": "local_dk", "scope_init": "zero"}, "scope_init must be"),
        ({"spatial": "cond", "experts": 0}, "experts must be at least 1, got 0"),
        ({"output_stride": 4}, "output_stride must be 8, 16 or 32, got 4"),
    ],
)
def test_wrong_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("mobilenetv2_nano", **arguments)


@pytest.mark.parametrize("name", ["resnet50_dw", "mobilenetv2_nano"])
def test_device_is_that_of_every_tensor(name):
    for arguments in (
        {"spatial": "dcn_local_dk", "pointwise": "cond"},
        {"spatial": "cond", "pointwise": "global_dk"},
        {},
    ):
        model = timm.create_model(name, device="meta", **arguments)
        assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_a_variant_can_be_used_without_timm():
    conv = Variant(spatial="dcn").spatial_conv(8, 2, 1, deformable=False)
    assert type(conv) is torch.nn.Conv2d
    assert conv.weight.shape == (8, 1, 3, 3)
