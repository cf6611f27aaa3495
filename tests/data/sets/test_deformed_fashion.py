"""Embedded set: its splits, and samples that depend on (seed, epoch, index) alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

import dkcls.data
from dkcls.data.dataset import bits, sample_keys, uniforms
from dkcls.data.sets.deformed_fashion import DeformedFashion, Factors

SPLITS = ("train", "val", "test")


def test_the_splits_are_disjoint_balanced_and_small_enough_to_ship():
    sets = {split: DeformedFashion(split) for split in SPLITS}
    assert [len(sets[split]) for split in SPLITS] == [25_000, 4_000, 5_000]
    for dataset in sets.values():
        assert np.bincount(dataset.targets).tolist() == [len(dataset) // 10] * 10
    images = [image.tobytes() for dataset in sets.values() for image in dataset.images]
    assert len(set(images)) == len(images)
    folder = Path(dkcls.data.__file__).parent / "sets"
    assert (folder / "fashion.npz").stat().st_size < 15e6
    assert "Zalando" in (folder / "fashion.LICENSE").read_text()


@pytest.mark.parametrize(
    "options",
    [{}, {"image_size": 48, "object_scale": (0.3, 2.0), "clutter": 3}, {"image_size": 33}],
)
def test_a_sample_is_the_same_whatever_batch_it_comes_in(options):
    dataset = DeformedFashion(training=True, seed=4, **options)
    indices = np.random.default_rng(0).integers(0, len(dataset), 50)
    whole = dataset.load(indices, epoch=3).batch
    assert whole.images.shape == (50, 1, dataset.image_size, dataset.image_size)
    assert whole.targets.tolist() == dataset.targets[indices].tolist()
    assert torch.equal(dataset.load(indices[7:30], epoch=3).batch.images, whole.images[7:30])
    for place in (0, 13, 49):
        assert torch.equal(
            dataset.load(indices[place : place + 1], epoch=3).batch.images[0], whole.images[place]
        )
        one, all_ = (
            dataset.factors(indices[place : place + 1], epoch=3),
            dataset.factors(indices, epoch=3),
        )
        assert [value[0] for value in one] == [values[place] for values in all_]


def test_training_varies_with_seed_and_epoch_and_index():
    index = np.array([5, 6])
    samples = [
        DeformedFashion(training=True, seed=s).factors(index, epoch=e)
        for s, e in ((0, 0), (0, 1), (1, 0))
    ]
    scales = np.concatenate([factors.scale for factors in samples])
    assert len(set(scales)) == 6


@pytest.mark.parametrize("split", SPLITS)
def test_evaluation_is_the_same_for_every_seed_and_epoch(split):
    index = np.arange(20)
    first = DeformedFashion(split, seed=0).load(index, epoch=0).batch.images
    assert torch.equal(DeformedFashion(split, seed=7).load(index, epoch=9).batch.images, first)


def splitmix64(state):
    """Return the hash of Steele, Lea and Flood (2014), in whole numbers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def draw(seed, epoch, index, number):
    """Return one draw of a sample, 64 random bits."""
    state = 0
    for part in (seed, epoch, index):
        state = splitmix64((state + 0x9E3779B97F4A7C15 * (part + 1)) % 2**64)
    return splitmix64((state + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64)


def test_draws_are_splitmix64s():
    keys = sample_keys(3, 7, np.array([0, 11]))
    for first in (0, 1, 1000):
        expected = [[draw(3, 7, index, first + number) for number in range(4)] for index in (0, 11)]
        assert bits(keys, first, 4).tolist() == expected
        assert uniforms(keys, first, 4) == pytest.approx(
            np.array(expected, float) / 2**64, abs=1e-15
        )


@pytest.mark.parametrize(("split", "seed"), [("train", 0), ("val", 1), ("test", 2)])
def test_every_split_has_factors_of_its_own_for_evaluation(split, seed):
    factors = DeformedFashion(split, seed=5).factors(np.arange(6), epoch=2)
    shares = [draw(seed, 0, index, 1) / 2**64 for index in range(6)]
    assert factors.rotation == pytest.approx([-60 + 120 * share for share in shares])


def test_factors_fill_their_ranges():
    dataset = DeformedFashion(training=True)
    factors = dataset.factors(np.arange(20_000))
    assert 0.4 <= factors.scale.min() < 0.401
    assert 1.099 < factors.scale.max() <= 1.1
    assert abs(np.log(factors.scale).mean() - np.log([0.4, 1.1]).mean()) < 0.01
    assert -60 <= factors.rotation.min() < -59
    assert 59 < factors.rotation.max() <= 60
    room = np.abs(32 - 28 * factors.scale) / 2
    assert (np.abs(factors.x) <= room).all()
    assert (np.abs(factors.y) <= room).all()
    assert max(abs(np.corrcoef(np.stack(factors))[np.triu_indices(4, 1)])) < 0.03


def moments(image: np.ndarray) -> tuple[float, float, float, float]:
    """Return mass, centre (x, y) from the middle, and the long axis's angle, clockwise degrees."""
    axis = np.arange(len(image)) - (len(image) - 1) / 2
    mass = image.sum()
    x, y = (image.sum(0) * axis).sum() / mass, (image.sum(1) * axis).sum() / mass
    dx, dy = axis - x, axis - y
    xx, yy = (image.sum(0) * dx**2).sum(), (image.sum(1) * dy**2).sum()
    xy = (image * dx * dy[:, None]).sum()
    return mass, x, y, np.degrees(np.arctan2(2 * xy, xx - yy)) / 2


def test_factors_are_what_was_done_to_the_image():
    dataset = DeformedFashion(training=True, image_size=64, noise=0.0)
    # Trousers are long and nearly straight, so that the angle is clear.
    trousers = np.flatnonzero(dataset.targets == 1)[:40]
    images = dataset.load(trousers).batch.images[:, 0].double().numpy()
    factors = dataset.factors(trousers)
    for image, index, scale, rotation, x, y in zip(images, trousers, *factors, strict=True):
        mass, centre_x, centre_y, angle = moments(image)
        mass_before, x_before, y_before, angle_before = moments(dataset.images[index].astype(float))
        assert mass / mass_before == pytest.approx(scale**2, rel=0.12)
        radians = np.radians(rotation)
        moved_x = scale * (np.cos(radians) * x_before - np.sin(radians) * y_before)
        moved_y = scale * (np.sin(radians) * x_before + np.cos(radians) * y_before)
        assert (centre_x, centre_y) == pytest.approx((x + moved_x, y + moved_y), abs=0.4)
        assert (angle - angle_before - rotation + 90) % 180 - 90 == pytest.approx(0, abs=5)


def test_the_object_at_rest_is_the_image_itself():
    dataset = DeformedFashion(
        image_size=28, object_scale=(1.0, 1.0), object_rotation=(0.0, 0.0), noise=0.0
    )
    pixels = dataset.load(np.arange(8)).batch.images[:, 0].numpy()
    assert np.abs(pixels.astype(int) - dataset.images[:8]).max() <= 1


def test_noise_and_clutter():
    still = {"image_size": 48, "object_scale": (0.5, 0.5)}
    plain = DeformedFashion(**still, noise=0.0).load(np.arange(200)).batch.images.float()
    noisy = DeformedFashion(**still, noise=0.1).load(np.arange(200)).batch.images.float()
    between = (plain > 80) & (plain < 175)  # where the noise is not cut off
    assert (noisy - plain)[between].std().item() == pytest.approx(25.5, rel=0.05)
    assert (noisy - plain)[between].mean().item() == pytest.approx(0, abs=1)
    cluttered = (
        DeformedFashion(**still, noise=0.0, clutter=3).load(np.arange(200)).batch.images.float()
    )
    assert (cluttered >= plain).all()
    assert 0.01 < (cluttered > plain).float().mean() < 3 * 64 / 48**2


def test_clutter_has_nothing_to_do_with_the_factors():
    still = {"image_size": 48, "object_scale": (0.3, 0.5), "noise": 0.0}
    numbers = np.arange(400)
    plain, cluttered = (
        DeformedFashion(**still, clutter=n).load(numbers).batch.images for n in (0, 1)
    )
    added = (cluttered.int() - plain.int())[:, 0].numpy().astype(float)
    seen = added.sum((1, 2)) > 0
    axis = np.arange(48)
    mass = added[seen].sum((1, 2))
    place = [(added[seen].sum(side) * axis).sum(1) / mass for side in (1, 2)]
    factors = np.stack(DeformedFashion(**still).factors(numbers))[:, seen]
    assert seen.sum() > 200
    assert np.abs(np.corrcoef([*place, *factors])[:2, 2:]).max() < 0.2


def test_the_mask_is_where_the_image_is_brighter_than_32():
    dataset = DeformedFashion(image_size=28)
    _, masks = dataset.render(np.arange(50), Factors(np.ones(50), *np.zeros((3, 50))))
    assert (masks.numpy() == (dataset.images[:50] > 32)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"object_scale": (0.0, 1.0)}, "object_scale must be a range of positive numbers"),
        ({"object_rotation": (10.0, -10.0)}, "object_rotation must be a range"),
        ({"image_size": 4}, "image_size must be at least 8, got 4"),
        ({"noise": -0.1}, "noise and clutter must not be negative"),
        ({"split": "dev"}, "split must be one of train, val, test, got 'dev'"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DeformedFashion(**options)
