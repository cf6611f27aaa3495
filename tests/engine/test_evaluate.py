"""What eval.py's options do to the figures, and which data and outputs they are of."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from dkcls.config import Config, DataConfig, EvalConfig
from dkcls.data import create_dataset
from dkcls.engine import evaluate as evaluating
from dkcls.engine.checkpoint import write
from dkcls.engine.distributed import World
from dkcls.engine.evaluate import data_for, evaluate
from dkcls.engine.network import load
from dkcls.errors import UserError
from dkcls.tasks.classification.predict import Predictor
from dkcls.tasks.classification.task import outputs_of
from dkcls.tasks.detection import Detection
from tests.config.test_configs import config_of
from tests.engine.checkpoints import write_checkpoint
from tests.tasks.detection.common import TINY

CPU = World(torch.device("cpu"))
DATA = DataConfig(
    name="synthetic", image_size=32, options={"length": 8, "num_classes": 10}, workers=0
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "a.pt", DATA))


@pytest.fixture(scope="module")
def by_hand(checkpoint):
    """The logits of normalised images, by the network as it is loaded."""
    network = load(checkpoint)
    mean, std = (
        torch.tensor(values).view(-1, 1, 1) for values in (network.input.mean, network.input.std)
    )

    @torch.no_grad()
    def logits(images):
        return network.model.eval()(
            ((images / 255 - mean) / std).contiguous(memory_format=torch.channels_last)
        ).float()

    return logits


@pytest.fixture(scope="module")
def val():
    """The images of the evaluation and their classes."""
    return create_dataset(DATA, "val").load(np.arange(8)).batch


def loss_of(checkpoint: str, **options) -> float:
    result = evaluate(checkpoint, EvalConfig(**options), CPU)
    assert result["images"] == 8
    return result["loss"]


def test_what_is_asked_of_the_data_counts_from_python_too(checkpoint):
    asked = EvalConfig(data={"options": {"length": 5}})
    assert evaluate(checkpoint, asked, CPU)["images"] == 5


def test_flip_is_the_mean_of_both_probabilities(checkpoint, by_hand, val):
    shares = [
        by_hand(images).double().softmax(1)[torch.arange(8), val.targets]
        for images in (val.images, val.images.flip(3))
    ]
    assert loss_of(checkpoint) == pytest.approx(-shares[0].log().mean().item(), rel=1e-5)
    assert loss_of(checkpoint, flip=True) == pytest.approx(
        -((shares[0] + shares[1]) / 2).log().mean().item(), rel=1e-5
    )
    assert (shares[0] - shares[1]).abs().max() > 1e-3


def test_precision_is_that_of_the_network(checkpoint, by_hand, val):
    with torch.autocast("cpu", torch.bfloat16):
        logits = by_hand(val.images)
    expected = torch.nn.functional.cross_entropy(logits.double(), val.targets).item()
    assert loss_of(checkpoint, precision="bf16") == pytest.approx(expected, rel=1e-6)
    assert loss_of(checkpoint) != pytest.approx(expected, rel=1e-6)


def test_predictions_are_of_the_precision_asked_for(checkpoint, by_hand, val, tmp_path):
    for number, image in enumerate(val.images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    network = load(checkpoint)
    with torch.autocast("cpu", torch.bfloat16):
        half = by_hand(val.images)
    assert not torch.equal(half, by_hand(val.images))
    for precision, logits in (("bf16", half), ("fp32", by_hand(val.images))):
        said = list(
            Predictor(network, CPU.device, top=1, precision=precision)(
                [str(tmp_path / f"{i}.png") for i in range(8)]
            )
        )
        expected = logits.softmax(1).amax(1).tolist()
        assert [share for row in said for share in row.probabilities] == pytest.approx(
            expected, rel=1e-5
        )


class OtherRankHasBadFiles(World):
    def any(self, *flags):
        return [True] * len(flags)


def test_bad_files_of_any_rank_end_the_evaluation_on_all(checkpoint):
    with pytest.raises(UserError, match=r"more than 0\.10% of the images cannot be read"):
        evaluate(checkpoint, EvalConfig(), OtherRankHasBadFiles(CPU.device))


TRAINED = DataConfig("synthetic", image_size=32, crop_ratio=0.9, options={"length": 7})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, ("synthetic", 40, 0.9, {"length": 7})),
        ({"image_size": 48, "crop_ratio": 0.5}, ("synthetic", 48, 0.5, {"length": 7})),
        ({"crop_ratio": 0.875}, ("synthetic", 40, 0.875, {"length": 7})),  # the default, too
        ({"options": {"num_classes": 5}}, ("synthetic", 40, 0.9, {"length": 7, "num_classes": 5})),
        ({"name": "folder"}, ("folder", 40, 0.875, {})),  # another set: nothing of the run's
        ({"name": "folder", "image_size": 48}, ("folder", 48, 0.875, {})),
    ],
)
def test_what_is_asked_then_the_network_then_the_run_say_which_data(asked, expected):
    network = SimpleNamespace(
        classes=["a"],
        config=Config(data=TRAINED),
        input=SimpleNamespace(image_size=40),
    )
    task = SimpleNamespace(input_keys=("image_size",))
    data = data_for(network, task, asked)
    assert (data.name, data.image_size, data.crop_ratio, data.options) == expected


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"crop_ratios": 0.5}, "data: there is no key 'crop_ratios'; did you mean 'crop_ratio'?"),
        ({"crop_ratio": 2.0}, "data: data.crop_ratio must be above 0 and at most 1, got 2.0"),
        ({"workers": "many"}, "data: workers: Value 'many' of type 'str' could not be converted"),
    ],
)
def test_wrong_data_is_refused_in_a_sentence(asked, sentence):
    network = SimpleNamespace(config=Config(data=TRAINED))
    with pytest.raises(UserError, match=re.escape(sentence)):
        data_for(network, SimpleNamespace(input_keys=()), asked)


def network_of(num_classes: int, classes: list[str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(path="w.pt", num_classes=num_classes, classes=classes)


def test_outputs_by_the_names_of_classes():
    """ImageNet's tench, goldfish and toilet tissue are 0, 1 and 999."""
    names = ["n15075141", "n01440764", "n01443537"]
    assert outputs_of(network_of(1000), names) == [999, 0, 1]
    assert outputs_of(network_of(3), names) == [0, 1, 2]
    assert outputs_of(network_of(4, ["d", "c", "b", "a"]), ["a", "c"]) == [3, 1]
    with pytest.raises(UserError, match=r"w\.pt is for 1000 classes, the data has 2"):
        outputs_of(network_of(1000), ["cat", "n01440764"])
    with pytest.raises(UserError, match=r"w\.pt has no class cat: its 2 classes are a, b"):
        outputs_of(network_of(2, ["a", "b"]), ["cat", "a"])


@pytest.mark.parametrize("task", ["classification", "detection"])
def test_an_evaluation_is_normalised_as_asked_or_as_the_network_was(
    task, checkpoint, tmp_path, monkeypatch
):
    """The deviation is the network's own."""
    if task == "detection":
        parts = Detection.build(config_of(*TINY, "data.workers=0"), CPU)
        write(
            checkpoint := tmp_path / "a.pt",
            {**parts.card.to_dict(), "model": parts.model.state_dict(), "ema": None},
        )
    seen = []

    def look(evaluation, model, *rest):
        if task == "detection":
            seen.append((model.transform.image_mean, model.transform.image_std))
        else:  # of black and white
            normalize = evaluation.task.normalize
            shift, scale = normalize.shift.flatten(), normalize.scale.flatten()
            seen.append(((-shift / scale / 255).tolist(), (1 / scale / 255).tolist()))
        return {"images": 1}

    monkeypatch.setattr(evaluating, "measure", look)
    for data in ({}, {"mean": [0.3]}):
        evaluate(str(checkpoint), EvalConfig(data=data), CPU)
    (own, std), *others = seen
    assert own == pytest.approx([0.15] if task == "detection" else [0.485, 0.456, 0.406])
    assert [given for given, _ in others] == [pytest.approx([0.3] * len(own))]
    assert [std, *(same for _, same in others)] == [
        pytest.approx([0.25] if task == "detection" else [0.229, 0.224, 0.225])
    ] * 2


def test_a_detector_is_not_evaluated_on_other_classes(tmp_path):
    """As many, in another order."""
    parts = Detection.build(config_of(*TINY, "data.workers=0"), CPU)
    state = {**parts.card.to_dict(), "model": parts.model.state_dict(), "ema": None}
    write(tmp_path / "a.pt", state | {"classes": state["classes"][::-1]})
    with pytest.raises(
        UserError, match=r"a\.pt finds Ankle boot, Bag, .*; the data has T-shirt, Trouser"
    ):
        evaluate(str(tmp_path / "a.pt"), EvalConfig(), CPU)
