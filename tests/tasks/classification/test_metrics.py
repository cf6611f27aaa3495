"""Edges of eval.py's metrics: certainty, mirror images, and as many classes as can be drawn."""

import math

import pytest
import torch
from torch import nn

from dkcls.data import Batch
from dkcls.engine.distributed import World
from dkcls.tasks.classification import Classification
from dkcls.tasks.classification.metrics import Details

CPU = World(torch.device("cpu"))


def metrics_of(model, images, targets, classes, **options):
    task = Classification([0.0], [1.0], classes, CPU.device)
    details = Details(task, [str(i) for i in range(classes)], range(classes), **options)
    details.add(model, Batch(images, torch.tensor(targets), torch.arange(len(targets))))
    return details.metrics(CPU)


class Sure(nn.Module):
    """A logit of 100 for class 0: a confidence of exactly 1."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes

    def forward(self, images):
        return 100.0 * torch.eye(self.classes)[:1].expand(len(images), -1)


def test_a_confidence_of_exactly_1_is_in_the_last_bin():
    got = metrics_of(Sure(3), torch.zeros(4, 1, 2, 2, dtype=torch.uint8), [0, 0, 0, 1], 3)
    assert (got["top1"], got["images"]) == (75, 4)
    assert got["ece15"] == pytest.approx(25)  # sure of all, right in three of four
    assert got["loss"] == pytest.approx(25)  # 100 for the one that is wrong


class TopLeft(nn.Module):
    """The logit of class 0 is what is in the first pixel, in the units of 0 to 1."""

    def forward(self, images):
        return torch.stack([images[:, 0, 0, 0], torch.zeros(len(images))], 1)


@pytest.mark.parametrize(("flip", "corner"), [(False, 0), (True, 255)])
def test_flip_takes_the_mean_over_left_and_right(flip, corner):
    images = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    images[0, 0, 0, 2] = 255  # the first pixel of the mirror image
    images[0, 0, 2, 0] = 128  # the first pixel if it were upside down
    share = (0.5 + 1 / (1 + math.exp(-corner / 255))) / 2
    got = metrics_of(TopLeft(), images, [0], 2, flip=flip)
    assert got["loss"] == pytest.approx(-math.log(share), rel=1e-6)


@pytest.mark.parametrize(("classes", "there"), [(100, True), (101, False)])
def test_up_to_100_classes_there_is_a_confusion_matrix(classes, there):
    got = metrics_of(Sure(classes), torch.zeros(3, 1, 2, 2, dtype=torch.uint8), [0, 7, 7], classes)
    assert ("confusion" in got) == there
    assert [got["per_class"][0][i] for i in (0, 7)] == [1, 2]
    if there:
        assert [got["confusion"][i][0] for i in (0, 7)] == [1, 2]
        assert sum(map(sum, got["confusion"])) == 3
