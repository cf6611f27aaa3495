"""Classification by value: losses, counts, mixing and channels."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dkcls.data import Batch, fit_channels
from dkcls.tasks.classification import Classification

CPU = torch.device("cpu")


class Says(nn.Module):
    """Says `logits` of any images, and keeps what it is shown."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, images):
        self.seen = images
        return self.logits


def task_of(classes=3, **options):
    return Classification([0.0], [1.0], classes, CPU, **options)


def batch_of(images, targets):
    return Batch(images, torch.tensor(targets), torch.arange(len(targets)))


def black(targets):
    return batch_of(torch.zeros(len(targets), 1, 4, 4, dtype=torch.uint8), targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_the_cross_entropy_with_smoothed_targets(smoothing):
    logits = np.array([[2.0, 0.0, -1.0], [0.5, 1.0, 3.0]])
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wanted = np.full((2, 3), smoothing / 3)
    wanted[[0, 1], [0, 1]] += 1 - smoothing
    loss, sums = task_of(label_smoothing=smoothing).loss(Says(torch.tensor(logits)), black([0, 1]))
    expected = -(wanted * np.log(shares)).sum(1)
    assert loss.item() == pytest.approx(expected.mean(), rel=1e-5)
    # Two images, the sum of their losses, one right, and both among the three that are there.
    assert sums.tolist() == pytest.approx([2, expected.sum(), 1, 2], rel=1e-5)


def test_five_guesses_count_as_top_5():
    logits = -torch.arange(7.0).repeat(4, 1)
    _, sums = task_of(7).loss(Says(logits), black([0, 4, 5, 6]))
    assert sums.tolist()[2:] == [1, 2]


@pytest.mark.parametrize(("mixup", "cutmix"), [(1.0, 0.0), (0.0, 1.0)])
def test_mixup_mixes_pixels_and_cutmix_cuts_them(mixup, cutmix):
    """Mix a black and a white image: mixup gives one grey, cutmix has both and nothing between."""
    np.random.seed(3)  # timm's Mixup draws from numpy's global generator
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).repeat(1, 1, 16, 16)
    logits = torch.log(torch.tensor([[0.7, 0.3], [0.7, 0.3]]))
    model = Says(logits)
    loss, _ = task_of(2, mixup=mixup, cutmix=cutmix, label_smoothing=0.2).loss(
        model, batch_of(images, [0, 1])
    )
    values = model.seen[0].unique()
    white = model.seen[0].mean().item()
    assert 0.05 < white < 0.95
    if mixup:
        assert len(values) == 1
    else:
        assert values.tolist() == [0, 1]
    # Targets are mixed as the pixels are, and smoothed: 0.1 for each class, 0.8 to be shared.
    first = 0.1 + 0.8 * (1 - white)
    expected = -np.mean(
        [
            first * np.log(0.7) + (1 - first) * np.log(0.3),
            (1 - first) * np.log(0.7) + first * np.log(0.3),
        ]
    )
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_images_are_normalised_by_mean_and_std():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    task = Classification([0.5, 0.1, 0.2], [0.25, 0.5, 0.4], 2, CPU)
    assert task.images(batch_of(images, [0])).flatten().tolist() == pytest.approx([-2, 0.2, 2])


def test_colour_becomes_the_grey_of_pil_and_grey_three_channels():
    colour = np.random.default_rng(0).integers(256, size=(8, 8, 3), dtype=np.uint8)
    grey = np.array(Image.fromarray(colour).convert("L")).astype(int)
    got = fit_channels(torch.from_numpy(colour).permute(2, 0, 1)[None], 1)
    assert np.abs(got[0, 0].numpy().astype(int) - grey).max() <= 1  # PIL rounds otherwise
    assert torch.equal(fit_channels(got, 3), torch.cat([got] * 3, 1))
    with pytest.raises(ValueError, match="must have 2 channels"):
        fit_channels(got, 2)
