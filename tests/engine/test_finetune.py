"""Fine-tuning for other classes: a fresh head, a slower or frozen backbone, grey weights."""

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from dkcls.config import OptimConfig
from dkcls.engine.network import load, read_weights
from dkcls.engine.optim import freeze_, parameter_groups
from dkcls.errors import UserError
from dkcls.models.weights import load_weights_
from tests.engine.checkpoints import write_checkpoint, write_images
from tests.engine.common import last_state, metric_lines, run_here, same_bits
from tests.models.common import awake, create, images

FINETUNE = (
    "experiment=finetune",
    "data=imagenet",
    "data.root=photos",
    "data.image_size=null",
    "data.workers=0",
    "data.options.length=null",
    "data.options.num_classes=null",
    "data.crop_ratio=1",
    "optim.lr=0.05",
)


@pytest.fixture
def photos(tmp_path):
    for split, count in (("train", 60), ("val", 30)):
        write_images(tmp_path / "photos", count, ["Bag", "Sandal", "Trouser"], split)
    return tmp_path / "photos"


def test_the_network_is_that_of_the_checkpoint_with_a_head_of_its_own(
    photos, tmp_path, monkeypatch, caplog
):
    path = write_checkpoint(tmp_path / "a.pt", spatial="local_dk", scope=5)
    assert (
        run_here(monkeypatch, tmp_path, *FINETUNE, "model.pretrained=a.pt", "model.freeze=backbone")
        == 0
    )
    assert "not in a.pt, left fresh: classifier.weight, classifier.bias" in caplog.text
    before, after = torch.load(path, weights_only=True), last_state(tmp_path)
    assert after["classes"] == ["Bag", "Sandal", "Trouser"]
    assert (after["config"]["model"]["name"], after["config"]["model"]["scope"]) == (
        "mobilenetv2_nano",
        5,
    )
    assert after["input"] | {"channels": 1, "mean": [0.15], "std": [0.25]} == before["input"]
    assert after["input"]["mean"] == [0.15] * 3  # grey, in three channels
    for name, value in after[
        "model"
    ].items():  # frozen, statistics among it; but for what became of one channel
        if not name.startswith(("classifier", "conv_stem")):
            assert torch.equal(value, before["model"][name]), name
    torch.testing.assert_close(
        after["model"]["conv_stem.weight"].sum(1, keepdim=True), before["model"]["conv_stem.weight"]
    )
    again = load(str(tmp_path / "runs/small/last.pt"))
    assert (again.num_classes, again.config.model.freeze) == (3, None)


def test_a_frozen_stage_and_a_slow_rest(photos, tmp_path, monkeypatch):
    path = write_checkpoint(tmp_path / "a.pt", spatial="local_dk")
    slow = (
        "model.pretrained=a.pt",
        "model.freeze=[conv_stem,bn1,blocks.0]",
        "optim.backbone_lr=0.1",
        "log.every=1",
    )
    assert run_here(monkeypatch, tmp_path, *FINETUNE, *slow) == 0
    before, after = torch.load(path, weights_only=True)["model"], last_state(tmp_path)["model"]
    moved = {
        name
        for name in before
        if before[name].shape == after[name].shape and not torch.equal(before[name], after[name])
    }
    assert not [name for name in moved if name.startswith(("bn1.", "blocks.0."))]
    assert {"blocks.1.0.conv_dw.weight", "blocks.1.0.bn1.running_mean", "conv_head.weight"} <= moved
    line = next(line for line in metric_lines(tmp_path) if line["step"] == 3)
    assert line["lr_weights"] == pytest.approx(0.1 * line["lr_classifier"])
    assert line["lr_generators"] == pytest.approx(
        0.1 * line["lr_classifier"]
    )  # the small runs' generator_lr is 1


def test_the_same_network_goes_on_with_what_it_computed(tmp_path):
    """Grey weights in a network for colour: a grey image in three channels gives the same."""
    grey, colour = awake(create(spatial="dcn")), create(seed=1, spatial="dcn", in_chans=3).eval()
    assert load_weights_(colour, grey.state_dict()) == []
    x = images()
    torch.testing.assert_close(colour(x.expand(-1, 3, -1, -1)), grey(x), rtol=1e-4, atol=1e-4)
    back = create(seed=2, spatial="dcn").eval()
    load_weights_(back, colour.state_dict())
    torch.testing.assert_close(back(x), grey(x), rtol=1e-4, atol=1e-4)
    with pytest.raises(
        ValueError, match=r"conv_stem.weight must be \[16, 2, 3, 3\], got \[16, 1, 3, 3\]"
    ):
        load_weights_(create(spatial="dcn", in_chans=2), grey.state_dict())


def test_from_rigid_weights_of_torchvision(photos, tmp_path, monkeypatch, capsys):
    save_file(
        awake(torchvision.models.mobilenet_v2(num_classes=7)).state_dict(),
        tmp_path / "tv.safetensors",
    )
    network = (
        "model.name=mobilenetv2_dw",
        "model.spatial=local_dk",
        "model.pretrained=tv.safetensors",
    )
    size = ("data.image_size=32", "schedule.epochs=1", "train.batch_size=4")
    assert run_here(monkeypatch, tmp_path, *FINETUNE, *network, *size, "model.freeze=backbone") == 0
    assert last_state(tmp_path)["model"]["classifier.weight"].shape == (3, 1280)
    capsys.readouterr()
    assert (
        run_here(monkeypatch, tmp_path, *FINETUNE, "model.pretrained=tv.safetensors", "name=other")
        == 1
    )
    assert (
        "model.name=NAME is needed to know which network this is: tv.safetensors does not say it"
        in capsys.readouterr().err
    )
    assert run_here(monkeypatch, tmp_path, *FINETUNE, "name=other") == 1
    assert "model.name=NAME is needed" in capsys.readouterr().err
    assert (
        run_here(monkeypatch, tmp_path, *FINETUNE, *network, "model.freeze=[block.3]", "name=other")
        == 1
    )
    assert (
        "there is nothing to train under 'block.3'; the network has conv_stem, bn1, blocks"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("resnet18", ("conv1", "bn1", "layer1")),
        ("mobilenetv2_100", ("conv_stem", "bn1", "blocks.0", "blocks.1")),
    ],
)
def test_the_stem_is_all_up_to_the_end_of_the_first_stage(name, stem):
    model = timm.create_model(name)
    freeze_(model, "stem")
    names = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert names == [n for n, _ in model.named_parameters() if f"{n}.".startswith(dotted(stem))]


def dotted(names):
    return tuple(f"{name}." for name in names)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_weights_within_the_checkpoint_of_another_library(tmp_path, key):
    weights = {"conv.weight": torch.randn(2, 1, 3, 3)}
    torch.save({"epoch": 3, key: weights}, tmp_path / "a.pth")
    found = read_weights(tmp_path / "a.pth")
    assert found.card is None
    assert same_bits(found.tensors, weights)


def test_every_parameter_is_in_one_group():
    model = create(spatial="local_dk")
    groups = {
        g["name"]: g
        for g in parameter_groups(model, OptimConfig(backbone_lr=0.5, generator_lr=0.1), 1.0)
    }
    assert {name: g["lr"] for name, g in groups.items()} == {
        "weights": 0.5, "norms": 0.5, "generators": pytest.approx(0.05), "classifier": 1.0
    }  # fmt: skip
    assert len(groups["classifier"]["params"]) == 2
    assert sum(len(g["params"]) for g in groups.values()) == len(list(model.parameters()))
    assert "classifier" not in [g["name"] for g in parameter_groups(model, OptimConfig(), 1.0)]
    with pytest.raises(UserError, match="leaves nothing to train"):
        freeze_(model, ["classifier", "backbone"])
