"""Faster R-CNN over the networks: levels, classifiers' weights, frozen parts, the paper's rows."""

from dataclasses import replace

import pytest
import torch

import dkcls.models  # noqa: F401
from dkcls.config import Config, DetectionConfig, ModelConfig
from dkcls.engine.distributed import World
from dkcls.engine.network import load, read_weights
from dkcls.engine.optim import parameter_groups
from dkcls.engine.task import Input
from dkcls.errors import UserError
from dkcls.layers import offset_generators
from dkcls.models.zoo import PAPER, PAPER_DETECTION
from dkcls.tasks.classification import Classification
from dkcls.tasks.detection import Detection
from dkcls.tasks.detection.detector import pyramid_levels
from dkcls.tasks.detection.task import create_detector, load_backbone_
from tests.config.test_configs import config_of
from tests.engine.checkpoints import write_checkpoint
from tests.tasks.detection.common import write_coco

INPUT = Input(3, 64, 1.0, "bilinear", [0.5] * 3, [0.2] * 3)
SMALL = DetectionConfig(
    min_size=64,
    max_size=64,
    fpn_channels=8,
    box_channels=16,
    proposals=20,
    box_samples=8,
    anchor_samples=8,
)


@pytest.fixture(scope="module")
def coco(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"))


def stem_of(name: str) -> tuple[str, ...]:
    """Return the beginnings of the names that are frozen, written by hand: stem and first stage."""
    if name.startswith("resnet"):
        return tuple(f"backbone.body.model.{part}." for part in ("conv1", "bn1", "layer1"))
    body = "backbone.body." if name == "mobilenetv2_100" else "backbone.body.model."
    return tuple(f"{body}{part}." for part in ("conv_stem", "bn1", "blocks.0", "blocks.1"))


@pytest.mark.slow
@pytest.mark.parametrize("row", PAPER_DETECTION, ids=lambda row: row.name)
def test_every_row_of_the_paper_takes_a_step(row, coco):
    """Take a step from the experiment file, over images of two shapes.

    All that is on top of the backbone is made small.
    """
    config = config_of(
        f"experiment={row.name}", "recipe=coco", f"data.root={coco}", "data.workers=0"
    )
    classifier = next(paper for paper in PAPER if paper.name == row.name)
    assert (config.model.name, config.model.arguments()) == (classifier.base, classifier.arguments)
    assert (config.schedule.epochs, config.schedule.drop_epochs, config.schedule.warmup_steps) == (
        12,
        [8, 11],
        500,
    )
    assert (config.learning_rate, config.train.batch_size, config.optim.weight_decay) == (
        pytest.approx(0.02),
        16,
        1e-4,
    )
    assert config.task == DetectionConfig()
    parts = Detection.build(
        replace(config, task=replace(SMALL, min_size=32, max_size=48)),
        World(torch.device("cpu")),
    )
    model = parts.model
    assert [info["reduction"] for info in model.body.feature_info.get_dicts()] == [4, 8, 16, 32]
    groups = {
        group["name"]: group
        for group in parameter_groups(model, config.optim, config.learning_rate)
    }
    dynamic = [
        p
        for _, generator in offset_generators(model)
        for p in generator.parameters()
        if p.requires_grad
    ]
    assert {id(p) for p in groups.get("generators", {"params": []})["params"]} == {
        id(p) for p in dynamic
    }
    if dynamic:
        multiplier = 0.01 if row.name.startswith("resnet") else 0.1
        assert groups["generators"]["lr"] == pytest.approx(0.02 * multiplier)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss, counts = parts.task.loss(model, parts.train_set.load(torch.arange(2).numpy()).batch)
    loss.backward()
    optimizer.step()
    assert counts[0] == 2
    assert loss.isfinite()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any(name.startswith("backbone.body") for name in moved)
    assert any(name.startswith("roi_heads") for name in moved)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert not moved & frozen
    assert {name for name in before if ".bn" in name and name.startswith("backbone.body")} <= frozen
    norms = {name for name in before if ".bn" in name or "downsample.1" in name}
    assert frozen == {name for name in before if name.startswith(stem_of(row.name))} | {
        name for name in norms if name.startswith("backbone.body")
    }
    assert not any(
        "layer2" in name and ".bn" not in name and "downsample" not in name for name in frozen
    )


@pytest.mark.parametrize(
    ("weights", "backbone"),
    [("rigid", "local_dk"), ("local_dk", "local_dk"), ("dcn", "dcn"), ("cond", "cond")],
)
def test_a_classifiers_weights_become_the_backbones(tmp_path, weights, backbone):
    """Rigid ones too: the features are then those of the classifier."""
    path = write_checkpoint(tmp_path / "classifier.pt", spatial=weights)
    config = Config(
        model=ModelConfig(name="mobilenetv2_nano", pretrained=str(path), spatial=backbone)
    )
    taken = Input(1, 64, 1.0, "bilinear", [0.15], [0.25])
    detector = create_detector(
        config.model, DetectionConfig(levels=[1, 2], anchor_sizes=[8, 16, 32]), 10, taken
    )
    load_backbone_(detector.body, config, read_weights(path), 1)
    classifier = load(str(path)).model.eval()
    images = torch.randn(2, 1, 64, 64)
    with torch.inference_mode():
        expected = classifier.forward_intermediates(images, indices=[1, 2], intermediates_only=True)
        for got, wanted in zip(detector.body.eval()(images), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_heads_start_the_same_on_every_backbone():
    heads = []
    for spatial in ("rigid", "dcn"):
        model = create_detector(
            ModelConfig(name="mobilenetv2_dw", spatial=spatial), SMALL, 3, INPUT, seed=5
        )
        heads.append(model.get_classifier().state_dict())
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())


def test_what_does_not_fit_is_said():
    assert pyramid_levels([2, 4, 8, 16, 32]) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="strides from 4 to 32"):
        pyramid_levels([1, 2])
    with pytest.raises(UserError, match="one for each of the 3 feature maps and one for the pool"):
        create_detector(
            ModelConfig(name="mobilenetv2_dw"), DetectionConfig(levels=[1, 2, 3]), 3, INPUT
        )
    cpu = World(torch.device("cpu"))
    with pytest.raises(UserError, match="data with boxes"):
        Detection.build(config_of("experiment=det_quickstart", "data=deformed_fashion"), cpu)
    with pytest.raises(UserError, match="images with classes"):
        Classification.build(
            config_of("model.name=mobilenetv2_nano", "data=deformed_detection"), cpu
        )
    with pytest.raises(UserError, match=r"augment\.mixup is for classification"):
        Detection.build(config_of("experiment=det_quickstart", "augment.mixup=0.2"), cpu)


def test_boxes_come_back_in_the_images_own_pixels():
    """Whatever size the detector works at."""
    config = DetectionConfig(128, 128, score_threshold=0.0)
    model = create_detector(ModelConfig(name="mobilenetv2_dw"), config, 3, INPUT)
    with torch.inference_mode():
        (found,) = model.eval()([torch.rand(3, 40, 60)])
    assert len(found["boxes"]) > 0
    assert found["boxes"][:, 2].max() > 40
    assert (found["boxes"] <= torch.tensor([60.0, 40.0, 60.0, 40.0]) + 1e-3).all()
    assert (found["labels"] >= 1).all()
