"""Agreement with timm's own evaluation, for the same weights and JPEGs.

Pixels agree within two levels; logits and decisions agree too.
"""

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import create_dataset as timm_dataset
from timm.data import create_loader as timm_loader
from timm.data import resolve_data_config
from torch import nn

from dkcls.config import ModelConfig
from dkcls.data import create_dataset, create_loader
from dkcls.engine.evaluate import data_for
from dkcls.engine.network import load
from dkcls.tasks.classification.metrics import Details
from dkcls.tasks.classification.task import Classification, outputs_of
from tests.data.common import photograph
from tests.models.common import create

SIZE, IMAGES = 112, 24  # of 128: a whole number, which timm would round down and we to the nearest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs of many shapes, in three classes with names of ImageNet's."""
    root = tmp_path_factory.mktemp("images")
    for number in range(IMAGES):
        place = root / "val" / ("n01440764", "n01443537", "n02099601")[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        photograph(number, 90 + 37 * (number % 7), 80 + 29 * (number % 5)).save(
            place / f"{number:02d}.jpg", quality=90
        )
    return root


def settle(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Set statistics as training would leave them, with most of the activations on.

    Random weights are otherwise so chaotic that one pixel's last bit changes everything. The
    classifier tells images from each other, not the mean image from nothing.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the mean over batches
            nn.init.constant_(module.bias, 2)
            nn.init.ones_(module.weight)  # timm's last ones in a block start at zero
    model.train()
    with torch.no_grad():
        model(images)
        model.eval().get_classifier().bias -= model(images).mean(0)
    return model


@pytest.mark.parametrize(
    ("name", "interpolation", "levels", "error_in_mean"),
    [
        ("resnet50", "bicubic", 2, 0.02),
        ("mobilenetv2_100", "bicubic", 2, 0.02),
        ("mobilenetv2_100", "bilinear", 1, 0.01),
    ],
)
def test_logits_are_timms(name, interpolation, levels, error_in_mean, folder, tmp_path):
    """Compare logits with bicubic resizing, which the weights want, and with bilinear.

    torch rounds bilinear resizing as PIL does but for one level.
    """
    options = {
        "input_size": (3, SIZE, SIZE),
        "batch_size": IMAGES,
        "use_prefetcher": False,
        "num_workers": 0,
    }
    files, model = timm_dataset("", root=folder / "val"), create(name)
    cfg = resolve_data_config(model=model)
    assert cfg["interpolation"] == "bicubic"
    options |= {key: cfg[key] for key in ("mean", "std")} | {"interpolation": interpolation}
    [(theirs, targets)] = timm_loader(files, is_training=False, crop_pct=0.875, **options)
    settle(model, theirs)
    with torch.no_grad():
        expected = model(theirs)
    save_file(model.state_dict(), tmp_path / "w.safetensors")

    network = load(str(tmp_path / "w.safetensors"), ModelConfig(name=name))
    asked = {"name": "folder", "root": str(folder), "image_size": SIZE, "crop_ratio": 0.875}
    asked |= {"interpolation": interpolation} if interpolation == "bilinear" else {}
    data = data_for(network, Classification, asked)
    dataset = create_dataset(data, "val")
    assert outputs_of(network, dataset.class_names) == [0, 1, 207]
    task = Classification(network.input.mean, network.input.std, 3, torch.device("cpu"))
    details = Details(task, network.class_names(), range(1000))
    [batch] = create_loader(dataset, IMAGES, training=False)
    with torch.no_grad():
        ours = task.images(batch)
        got = details.logits(network.model.eval(), ours)
        torch.testing.assert_close(
            network.model(theirs), expected, rtol=1e-4, atol=1e-5
        )  # on the same pixels

    assert torch.equal(batch.targets, targets)
    level = 1 / (255 * torch.tensor(network.input.std)).view(3, 1, 1)
    differs = (ours - theirs).abs() > 0.01 * level
    assert ((ours - theirs).abs() <= (levels + 0.01) * level).all()  # of 255,
    assert ((ours - theirs).abs() > 1.01 * level).float().mean() < 1e-4  # nearly always one,
    assert 0 < differs.float().mean() < 0.01  # in few pixels
    spread, error = expected.std(0).mean(), (got - expected).abs()
    assert error.max() < 0.2 * spread
    assert error.mean() < error_in_mean * spread
    assert torch.equal(got.argmax(1), expected.argmax(1))
    assert expected.argmax(1).unique().numel() > IMAGES // 2


def test_weights_are_evaluated_at_the_size_that_they_are_published_at(tmp_path):
    """timm trained these on images of 176 pixels, and tells their accuracy at 224."""
    cfg = timm.get_pretrained_cfg("resnet10t.c3_in1k")
    assert (cfg.input_size[-1], cfg.test_input_size[-1]) == (176, 224)
    save_file(timm.create_model("resnet10t").state_dict(), tmp_path / "w.safetensors")
    network = load(str(tmp_path / "w.safetensors"), ModelConfig(name="resnet10t.c3_in1k"))
    assert network.input.image_size == 224
