"""Parts of a run from its config: those from a checkpoint, the seed and the options."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.data import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    create_transform,
    resolve_data_config,
)
from torch import nn

from dkcls.config import Config, DataConfig, EvalConfig, ModelConfig
from dkcls.data import create_dataset
from dkcls.engine.checkpoint import write
from dkcls.engine.distributed import World
from dkcls.engine.evaluate import data_for
from dkcls.engine.network import load
from dkcls.errors import UserError
from dkcls.tasks.classification import Classification
from dkcls.tasks.classification.predict import Predictor
from dkcls.tasks.detection import Detection
from tests.config.test_configs import config_of
from tests.data.common import make_folder
from tests.engine.checkpoints import write_checkpoint
from tests.tasks.detection.common import TINY

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
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(("asked", "size"), [(None, 40), (48, 48)])
def test_a_checkpoint_says_how_images_are_normalised_and_how_large_they_are(
    checkpoint, asked, size
):
    """Unless the config says how large."""
    parts = Classification.build(fine_tuned(checkpoint, image_size=asked), CPU)
    assert parts.train_set.image_size == parts.val_set.image_size == size
    assert (parts.card.input.mean, parts.card.input.std) == ([0.4], [0.3])
    assert parts.card.input.image_size == size
    batch = parts.val_set.load(torch.arange(2).numpy()).batch
    torch.testing.assert_close(parts.task.images(batch), (batch.images / 255 - 0.4) / 0.3)


def test_a_named_network_is_normalised_as_its_weights_were(checkpoint):
    config = fine_tuned(checkpoint)
    config.model.name = "mobilenetv2_nano"
    taken = Classification.build(config, CPU).card.input
    assert (taken.mean, taken.std, taken.image_size) == (
        [0.4],
        [0.3],
        32,
    )  # the size is the data's


SIZE = 48
LITE = "tf_efficientnet_lite0"  # timm: bicubic, mean and deviation 0.5


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Three classes of photographs, and random weights of `LITE` that say nothing."""
    root = make_folder(tmp_path_factory.mktemp("photos"), train=6, val=6)
    save_file(timm.create_model(LITE).state_dict(), root / "w.safetensors")
    return root


def on_photos(photos: Path, name: str | None, pretrained: str | None, **data) -> Config:
    model = ModelConfig(name=name, pretrained=pretrained and str(photos / pretrained))
    return Config(
        model=model,
        data=DataConfig(name="folder", root=str(photos), image_size=SIZE, workers=0, **data),
    )


def validation_images(parts) -> torch.Tensor:
    """As the network gets them before the first step."""
    return parts.task.images(parts.val_set.load(np.arange(len(parts.val_set))).batch)


def timms_images(photos: Path, **options) -> torch.Tensor:
    transform = create_transform(SIZE, is_training=False, crop_pct=0.875, **options)
    return torch.stack(
        [transform(Image.open(path)) for path in sorted((photos / "val").rglob("*.jpg"))]
    )


def test_pretrained_weights_see_what_timm_would_show_them(photos):
    """Compare images in training and in evaluation with timm's, within two levels of 255.

    A level is 2 / 255 after division by 0.5.
    """
    cfg = resolve_data_config(model=timm.create_model(LITE))
    expected = timms_images(
        photos, interpolation=cfg["interpolation"], mean=cfg["mean"], std=cfg["std"]
    )
    parts = Classification.build(on_photos(photos, LITE, "w.safetensors"), CPU)
    assert (validation_images(parts) - expected).abs().max() <= 4.02 / 255
    assert parts.train_set.transform.interpolation == "bicubic"
    assert parts.card.to_dict()["input"] == {
        "channels": 3,
        "image_size": SIZE,
        "crop_ratio": 0.875,
        "interpolation": "bicubic",
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
    }
    network = load(str(photos / "w.safetensors"), ModelConfig(LITE))
    asked = {"name": "folder", "root": str(photos), "image_size": SIZE}
    data = data_for(network, Classification, asked)
    dataset = create_dataset(data, "val")
    dataset.class_names = network.class_names()  # the network is for 1000 classes
    details = Classification.evaluation_of(network, dataset, data, EvalConfig(), CPU.device)
    batch = dataset.load(np.arange(6)).batch
    assert torch.equal(details.task.images(batch), validation_images(parts))


def test_without_weights_the_recipe_says_how_images_are_made(photos):
    """The same for all networks of a table: bilinear, and ImageNet's mean."""
    parts = Classification.build(on_photos(photos, LITE, None), CPU)
    expected = timms_images(
        photos, interpolation="bilinear", mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD
    )
    assert (validation_images(parts) - expected).abs().max() <= 1.01 / 255 / min(
        IMAGENET_DEFAULT_STD
    )
    assert parts.train_set.transform.interpolation == "bilinear"


def test_what_is_asked_for_goes_before_what_the_weights_say(photos, caplog):
    asked = {"mean": [0.3, 0.4, 0.2], "std": [0.25], "interpolation": "bilinear"}
    with caplog.at_level("INFO", "dkcls"):
        parts = Classification.build(on_photos(photos, LITE, "w.safetensors", **asked), CPU)
    expected = timms_images(photos, interpolation="bilinear", mean=(0.3, 0.4, 0.2), std=(0.25,) * 3)
    assert (validation_images(parts) - expected).abs().max() <= 1.01 / 255 / 0.25
    [line] = [record.getMessage() for record in caplog.records if "mean" in record.getMessage()]
    assert line == (
        "images: 3 x 48 x 48, crop_ratio 0.875, bilinear, "
        "mean [0.3, 0.4, 0.2], std [0.25, 0.25, 0.25]"
    )


def test_a_networks_card_says_how_its_images_are_resized(photos, tmp_path):
    """Training from a checkpoint, its evaluation and its predictions follow it."""
    parts = Classification.build(
        on_photos(photos, "mobilenetv2_nano", None, interpolation="bicubic"), CPU
    )
    write(
        tmp_path / "a.pt", {**parts.card.to_dict(), "model": parts.model.state_dict(), "ema": None}
    )
    again = Classification.build(on_photos(photos, None, str(tmp_path / "a.pt")), CPU)
    expected = timms_images(
        photos, interpolation="bicubic", mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD
    )
    level = 2.01 / 255 / min(IMAGENET_DEFAULT_STD)
    assert (validation_images(again) - expected).abs().max() <= level
    network = load(str(tmp_path / "a.pt"))
    assert data_for(network, Classification, {"name": "tar"}).interpolation == "bicubic"
    seen = []
    network.model.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    list(
        Predictor(network, CPU.device)(
            [str(path) for path in sorted((photos / "val").rglob("*.jpg"))]
        )
    )
    assert (seen[0] - expected).abs().max() <= level


def test_an_unknown_tag_of_timms_is_named(photos):
    with pytest.raises(
        UserError, match=r"model.name: Invalid pretrained tag \(best\) for resnet18"
    ):
        Classification.build(on_photos(photos, "resnet18.best", "w.safetensors"), CPU)


def test_another_seed_is_another_classifier():
    def start(seed):
        return Classification.build(
            Config(seed=seed, model=NANO, data=DataConfig(**FASHION)), CPU
        ).model

    assert same_weights(start(0), start(0))
    assert not same_weights(start(0), start(1))


def test_options_of_training_reach_the_task():
    config = config_of(
        "model.name=mobilenetv2_nano",
        "data=synthetic",
        "data.image_size=32",
        "augment.mixup=0.3",
        "augment.cutmix=0.7",
        "task.label_smoothing=0.2",
    )
    task = Classification.build(config, CPU).task
    assert (task.mixup.mixup_alpha, task.mixup.cutmix_alpha, task.mixup.label_smoothing) == (
        0.3,
        0.7,
        0.2,
    )
    assert task.label_smoothing == 0.2


def detector_of(*overrides: str):
    return Detection.build(config_of(*TINY, "data.workers=0", *overrides), CPU)


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
    assert (parts.card.input.mean, parts.card.input.std) == ([0.4], [0.3])
    assert detector_of().model.transform.image_mean == [0.15]
    asked = detector_of(
        f"model.pretrained={checkpoint}", "model.spatial=rigid", "data.mean=[0.2]", "data.std=[0.1]"
    )
    assert (asked.model.transform.image_mean, asked.model.transform.image_std) == ([0.2], [0.1])


def test_a_detector_on_weights_of_timms_normalises_as_timm_does(photos):
    """Grey images: the mean of the three channels."""
    weights = (
        "model.name=" + LITE,
        "model.spatial=null",
        f"model.pretrained={photos}/w.safetensors",
        "model.scope=null",
    )
    parts = detector_of(*weights, "model.depthwise_gain=null")
    assert (parts.model.transform.image_mean, parts.model.transform.image_std) == ([0.5], [0.5])
    assert (parts.card.input.mean, parts.card.input.interpolation) == (
        [0.5],
        "bilinear",
    )
