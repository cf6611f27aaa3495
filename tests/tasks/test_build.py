"""The parts of a run from its config: what is taken from a checkpoint, from the seed and from the options."""

import pytest
import torch
from torch import nn

from dkcls.config import Config, DataConfig, ModelConfig
from dkcls.engine.checkpoint import write
from dkcls.engine.distributed import World
from dkcls.tasks import classification, detection
from tests.configs.test_configs import config_of
from tests.detection.common import TINY
from tests.engine.checkpoints import write_checkpoint

CPU = World(torch.device("cpu"))
NANO = ModelConfig(name="mobilenetv2_nano")
FASHION = {"name": "deformed_fashion", "workers": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """Of a network that was trained on images of 40 pixels, normalised as no data set is."""
    path = write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "a.pt")
    state = torch.load(path, weights_only=True)
    state["input"] |= {"image_size": 40, "mean": [0.4], "std": [0.3]}
    write(path, state)
    return str(path)


def fine_tuned(checkpoint: str, **data) -> Config:
    return Config(
        model=ModelConfig(name=None, pretrained=checkpoint),
        data=DataConfig(**FASHION | data),
    )


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize(("asked", "size"), [(None, 40), (48, 48)])
def test_a_checkpoint_says_how_images_are_normalised_and_how_large_they_are(checkpoint, asked, size):
    """Unless the config says how large."""
    parts = classification.build(fine_tuned(checkpoint, image_size=asked), CPU)
    assert parts.train_set.image_size == parts.val_set.image_size == size
    assert (parts.facts["input"]["mean"], parts.facts["input"]["std"]) == ([0.4], [0.3])
    assert parts.facts["input"]["image_size"] == size
    batch = parts.val_set.load(torch.arange(2).numpy()).batch
    torch.testing.assert_close(parts.task.images(batch), (batch.images / 255 - 0.4) / 0.3)


def test_a_named_network_is_normalised_as_its_data(checkpoint):
    config = fine_tuned(checkpoint)
    config.model.name = "mobilenetv2_nano"
    assert classification.build(config, CPU).facts["input"]["mean"] == [0.15]


def test_another_seed_is_another_classifier():
    def start(seed):
        return classification.build(Config(seed=seed, model=NANO, data=DataConfig(**FASHION)), CPU).model

    assert same_weights(start(0), start(0))
    assert not same_weights(start(0), start(1))


def test_options_of_training_reach_the_task():
    config = config_of(
        "model=mobilenetv2_nano",
        "data=synthetic",
        "data.image_size=32",
        "data.mixup=0.3",
        "data.cutmix=0.7",
        "train.label_smoothing=0.2",
    )
    task = classification.build(config, CPU).task
    assert (task.mixup.mixup_alpha, task.mixup.cutmix_alpha, task.mixup.label_smoothing) == (
        0.3,
        0.7,
        0.2,
    )
    assert task.label_smoothing == 0.2


def detector_of(*overrides: str):
    return detection.build(config_of(*TINY, "data.workers=0", *overrides), CPU)


def test_another_seed_is_another_detector_from_the_backbone_to_the_heads():
    first, again, other = (detector_of(f"seed={seed}").model for seed in (3, 3, 4))
    assert same_weights(first, again)
    assert not torch.equal(first.body.model.conv_stem.weight, other.body.model.conv_stem.weight)
    assert not torch.equal(
        first.roi_heads.box_predictor.cls_score.weight,
        other.roi_heads.box_predictor.cls_score.weight,
    )


@pytest.mark.parametrize("frozen", [True, False])
def test_freeze_bn_decides_whether_normalisation_trains(frozen):
    body = detector_of(f"train.freeze_bn={str(frozen).lower()}").model.body
    norms = [module for module in body.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    assert {norm.weight.requires_grad or norm.bias.requires_grad for norm in norms} == {not frozen}
    assert body.model.conv_stem.weight.requires_grad


def test_a_detector_normalises_as_its_backbone_was_trained(checkpoint):
    parts = detector_of(f"model.pretrained={checkpoint}", "model.spatial=rigid")
    assert (parts.model.transform.image_mean, parts.model.transform.image_std) == ([0.4], [0.3])
    assert (parts.facts["input"]["mean"], parts.facts["input"]["std"]) == ([0.4], [0.3])
    assert detector_of().model.transform.image_mean == [0.15]
