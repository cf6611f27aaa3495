"""eval.py on checkpoints, and on weights that do not say what they are."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from dkcls.data import Batch
from dkcls.engine.distributed import World
from dkcls.tasks.classification import Classification
from dkcls.tasks.classification.metrics import Details
from tests.engine.checkpoints import write_checkpoint, write_images
from tests.engine.common import metric_lines, on_ranks, run_here
from tests.models.common import awake, create


@pytest.fixture
def run(tmp_path, monkeypatch):
    assert run_here(monkeypatch, tmp_path, "train.ema_decay=0.5") == 0
    return tmp_path / "runs/small"


@pytest.fixture
def evaluate(tmp_path, monkeypatch, capsys):
    """Runs eval.py here; returns its figures, or what it says when it fails."""

    def run(*arguments):
        code = run_here(monkeypatch, tmp_path, *arguments, "output=out.json", script="eval.py")
        said = capsys.readouterr()
        if code:
            assert (code, said.err.count("error: "), said.err.count("Traceback")) == (1, 1, 0), (
                said.err
            )
            return said.err
        results = json.loads((tmp_path / "out.json").read_text())
        assert said.out.count("\n") == 2 + len(results)
        return results

    return run


def without_clock(result):
    return {
        name: value
        for name, value in result.items()
        if name not in ("images_per_s", "checkpoint", "split")
    }


def test_figures_are_those_of_the_training_run(run, tmp_path, evaluate):
    last, best = evaluate("checkpoint=[runs/small/last.pt,runs/small/best.pt]", "batch_size=7")
    expected = metric_lines(tmp_path)[-1]
    assert {name: last[name] for name in ("top1", "top5", "images")} == {
        n: expected[n] for n in ("top1", "top5", "images")
    }
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert best["top1"] >= last["top1"]
    assert last["images_per_s"] > 0
    losses = [
        evaluate("checkpoint=runs/small/last.pt", f"weights={weights}")[0]["loss"]
        for weights in ("ema", "model")
    ]
    assert losses[0] == pytest.approx(last["loss"])
    assert losses[0] != losses[1]


class Fixed(nn.Module):
    """Says the same of a batch whatever it sees, or of its mirror image."""

    def __init__(self, logits, mirrored):
        super().__init__()
        self.answers = [mirrored, logits]

    def forward(self, images):
        return self.answers.pop()


@pytest.mark.parametrize("flip", [False, True])
def test_every_figure_is_what_its_definition_says(flip):
    generator = torch.Generator().manual_seed(0)
    logits, mirrored = (3 * torch.randn(200, 8, generator=generator) for _ in range(2))
    targets = torch.randint(6, (200,), generator=generator)
    outputs = [7, 0, 3, 1, 6, 2]
    task = Classification([0.5], [0.5], 6, torch.device("cpu"))
    details = Details(task, list("abcdef"), outputs, flip=flip)
    batch = Batch(torch.zeros(200, 1, 2, 2, dtype=torch.uint8), targets, torch.arange(200))
    details.add(Fixed(logits, mirrored), batch)
    got = details.metrics(World(torch.device("cpu")))

    shares = logits.double()[:, outputs].softmax(1).numpy()
    if flip:
        shares = (shares + mirrored.double()[:, outputs].softmax(1).numpy()) / 2
    target, guess = targets.numpy(), shares.argmax(1)
    order = (-shares).argsort(1)
    assert got["images"] == 200
    assert got["loss"] == pytest.approx(-np.log(shares[np.arange(200), target]).mean(), rel=1e-5)
    assert got["top1"] == pytest.approx(100 * (guess == target).mean())
    assert got["top5"] == pytest.approx(100 * (order[:, :5] == target[:, None]).any(1).mean())
    error, confidence = 0.0, shares.max(1)
    for k in range(15):
        inside = (confidence >= k / 15) & (confidence < (k + 1) / 15)
        if inside.any():
            error += inside.mean() * abs(
                confidence[inside].mean() - (guess == target)[inside].mean()
            )
    assert got["ece15"] == pytest.approx(100 * error, rel=1e-5)
    for i in range(6):
        members = target == i
        assert [row[i] for row in got["per_class"]] == [
            members.sum(), (guess == i)[members].sum(), (order[members][:, :5] == i).any(1).sum()
        ]  # fmt: skip
        assert got["confusion"][i] == [(guess[members] == j).sum() for j in range(6)]


def test_tables_and_picture(tmp_path, evaluate):
    write_checkpoint(tmp_path / "a.pt")
    data = ("data.options.object_scale=[1,1.1]", "data.options.length=2000", "data.workers=0")
    [result] = evaluate(
        "checkpoint=a.pt", *data, "per_class=tables/classes.csv", "confusion=tables/confusion.png"
    )
    rows = list(csv.DictReader((tmp_path / "tables/classes.csv").open()))
    assert [row["class"] for row in rows][:2] == ["T-shirt", "Trouser"]
    assert sum(int(row["images"]) for row in rows) == result["images"] == 2000
    assert sum(
        int(row["images"]) * float(row["top1"] or 0) for row in rows
    ) / 2000 == pytest.approx(result["top1"], abs=1e-3)
    assert min(Image.open(tmp_path / "tables/confusion.png").size) > 500
    assert "draws one checkpoint, got c.png for 2" in evaluate(
        "checkpoint=[a.pt,a.pt]", "confusion=c.png"
    )


def test_the_same_images_in_a_folder_have_the_same_figures(tmp_path, evaluate):
    """Evaluate a folder by data=NAME, grey or in colour.

    Size, crop and normalisation stay the checkpoint's.
    """
    write_checkpoint(tmp_path / "a.pt", scope=3, spatial="local_dk")
    write_images(tmp_path / "grey", 60)
    write_images(tmp_path / "colour", 60, colour=True)
    folder = ("checkpoint=a.pt", "data=imagenet", "data.workers=0", "data.root=")
    [grey], [colour] = (evaluate(*folder[:-1], folder[-1] + name) for name in ("grey", "colour"))
    assert without_clock(grey) == pytest.approx(without_clock(colour), rel=1e-6)
    [cropped] = evaluate(*folder[:-1], "data.root=grey", "data.crop_ratio=0.5")
    assert cropped["images"] == grey["images"] == 60
    assert cropped["loss"] != pytest.approx(grey["loss"], rel=1e-3)


def test_a_folder_with_some_of_the_classes(tmp_path, evaluate):
    write_checkpoint(tmp_path / "a.pt")
    some = ["Bag", "Sandal", "Shirt"]
    write_images(tmp_path / "all", 60)
    write_images(tmp_path / "some", 60, some)
    folder = ("checkpoint=a.pt", "data=imagenet", "data.workers=0")
    assert evaluate(*folder, "data.root=all", "per_class=all.csv")[0]["images"] == 60
    [result] = evaluate(*folder, "data.root=some", "per_class=some.csv")
    hits = {}
    for name in ("all", "some"):
        rows = csv.DictReader((tmp_path / f"{name}.csv").open())
        hits[name] = {row["class"]: int(row["images"]) * float(row["top1"]) for row in rows}
    assert list(hits["some"]) == some
    assert all(
        hits["some"][name] >= hits["all"][name] for name in some
    )  # fewer classes to be wrong with
    assert result["top5"] == 100
    (tmp_path / "some/val/Hat").mkdir()
    Image.new("L", (40, 40)).save(tmp_path / "some/val/Hat/0.png")
    assert "a.pt has no class Hat: its 10 classes are T-shirt, Trouser, Pullover, ..." in evaluate(
        *folder, "data.root=some"
    )


def test_plain_weights_are_evaluated_as_their_network_wants(tmp_path, evaluate):
    """Evaluate timm's network at the size, crop and normalisation that timm has for it.

    The command line may say otherwise.
    """
    model = awake(create("mobilenetv2_100", num_classes=10))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    write_images(tmp_path / "all", 40)
    arguments = (
        "model.pretrained=w.safetensors",
        "data=imagenet",
        "data.workers=0",
        "data.root=all",
        "data.image_size=48",
    )
    [result] = evaluate("model.name=mobilenetv2_100", *arguments)
    assert result["images"] == 40
    assert "model.name=NAME is needed" in evaluate(*arguments)
    assert "there is no network 'mobilenetv2_10'" in evaluate(
        "model.name=mobilenetv2_10", *arguments
    )
    said = evaluate(
        "model.name=mobilenetv2_dw",
        "model.spatial=cond",
        *arguments[1:],
        "checkpoint=[w.safetensors]",
        "split=train",
    )
    assert "there is no all/train" in said
    assert "w.safetensors is for 10 classes, the data has 1000" in evaluate(
        "model.name=mobilenetv2_100", *arguments[:1], "data=synthetic", "data.image_size=48"
    )
    assert "is not that of this network's rigid form" in evaluate("model.name=resnet18", *arguments)


def test_bad_input(tmp_path, evaluate):
    path = write_checkpoint(tmp_path / "a.pt")
    (tmp_path / "copy.pt").write_bytes(path.read_bytes()[:-1000])
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    state = torch.load(path, weights_only=True)
    torch.save(state | {"classes": ["cat", "dog"]}, tmp_path / "names.pt")
    torch.save({"format": 1, "model": {}}, tmp_path / "silent.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    wide = {**state["model"], "conv_stem.weight": torch.zeros(16, 2, 3, 3)}
    torch.save(state | {"model": wide}, tmp_path / "shape.pt")
    torch.save(state | {"config": state["config"] | {"colour": 1}}, tmp_path / "key.pt")
    for arguments, sentence in (
        (("checkpoint=nowhere.pt",), "there is no file nowhere.pt"),
        (("checkpoint=copy.pt",), "copy.pt is not a file of weights that is safe to load"),
        (("checkpoint=cut.safetensors",), "cut.safetensors is not a whole .safetensors file"),
        (
            ("checkpoint=names.pt",),
            "names.pt does not hold the network that it says: classifier.weight must be [2, 128]",
        ),
        (
            ("checkpoint=silent.pt",),
            "silent.pt must say what its network is by config, classes, input, got none",
        ),
        (("checkpoint=list.pt",), "list.pt does not hold a state dict"),
        (("checkpoint=key.pt",), "key.pt does not say what its network is"),
        (("checkpoint=a.pt", "weights=ema"), "a.pt has no moving average"),
        (("checkpoint=a.pt", "splitt=val"), "did you mean 'split'?"),
        (("checkpoint=a.pt", "split=tset"), "split must be one of"),
        (("checkpoint=a.pt", "data.imagesize=3"), "did you mean 'data.image_size'?"),
        (("checkpoint=a.pt", "model.name=mobilenetv2_dw"), "model.pretrained=a.pt: "),
        (("checkpoint=a.pt", "data=synthetic", "data.options.num_classes=3"), "a.pt has no class"),
        ((), "checkpoint=FILE is needed"),
    ):
        assert sentence in evaluate(*arguments)


def test_bad_files_beyond_the_limit_are_no_evaluation(tmp_path, evaluate):
    write_checkpoint(tmp_path / "a.pt")
    root = write_images(tmp_path / "all", 20)
    next(root.rglob("*.png")).write_bytes(b"nonsense")
    folder = ("checkpoint=a.pt", "data=imagenet", "data.workers=0", "data.root=all")
    assert "more than 0.10% of the images cannot be read" in evaluate(*folder)
    assert evaluate(*folder, "data.bad_limit=0.1")[0]["images"] == 19


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_image_counts_once_whatever_the_ranks(ranks, tmp_path, evaluate):
    """23 images divide by neither; batches of 4 leave ranks with different numbers of them."""
    write_checkpoint(tmp_path / "a.pt")
    write_images(tmp_path / "all", 23)
    arguments = [
        "checkpoint=a.pt",
        "data=imagenet",
        "data.root=all",
        "data.workers=0",
        "batch_size=4",
        "per_class=classes.csv",
    ]
    [one] = evaluate(*arguments)
    classes = (tmp_path / "classes.csv").read_text()
    (tmp_path / "classes.csv").unlink()

    def work():
        return run_here(
            pytest.MonkeyPatch(), tmp_path, *arguments, "output=ranks.json", script="eval.py"
        )

    assert on_ranks(tmp_path, work, ranks) == [0] * ranks
    [several] = json.loads((tmp_path / "ranks.json").read_text())
    assert one["images"] == several["images"] == 23
    assert (one["top1"], one["top5"]) == (several["top1"], several["top5"])
    assert without_clock(one) == pytest.approx(without_clock(several), rel=1e-5)
    assert (tmp_path / "classes.csv").read_text() == classes
    assert [
        (tmp_path / f"rank{rank}.txt").read_text().count("| a.pt |") for rank in range(ranks)
    ] == [1, 0, 0][:ranks]
