"""Embedded set for detection: draws by (seed, epoch, index), and boxes that fit their objects."""

import itertools

import numpy as np
import pytest
import torch

from dkcls.data import create_loader
from dkcls.data.sets import deformed_detection as module
from dkcls.data.sets.deformed_detection import DeformedDetection
from dkcls.data.sets.deformed_fashion import DeformedFashion, Factors
from tests.data.common import assert_same_batches, batches_from

SPLITS = ("train", "val", "test")


def assert_same_targets(some, others):
    assert [target.keys() for target in some] == [target.keys() for target in others]
    for one, other in zip(some, others, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_splits():
    sets = [DeformedDetection(split) for split in SPLITS]
    assert [len(dataset) for dataset in sets] == [6000, 1000, 2000]
    assert len(DeformedDetection("val", length=7)) == 7
    assert [len(DeformedDetection(split, length=7000)) for split in ("train", "val", "test")] == [
        7000,
        1000,
        2000,
    ]
    assert (sets[0].num_classes, sets[0].channels, sets[0].size(3), sets[0].groups()) == (
        10,
        1,
        (96, 96),
        None,
    )


@pytest.mark.parametrize(
    "options", [{}, {"image_size": 65, "object_scale": (0.2, 1.6), "objects": (3, 9), "noise": 0.0}]
)
def test_a_canvas_is_the_same_whatever_batch_it_comes_in(options):
    dataset = DeformedDetection(training=True, seed=4, **options)
    indices = np.random.default_rng(0).integers(0, len(dataset), 20)
    whole = dataset.load(indices, epoch=3).batch
    assert whole.indices.tolist() == indices.tolist()
    assert {(image.shape, image.dtype) for image in whole.images} == {
        ((1, *[dataset.image_size] * 2), torch.uint8)
    }
    for part in (slice(0, 1), slice(7, 15), slice(19, 20)):
        batch = dataset.load(indices[part], epoch=3).batch
        assert torch.equal(torch.stack(batch.images), torch.stack(whole.images[part]))
        assert_same_targets(batch.targets, whole.targets[part])


def test_training_varies_with_seed_and_epoch_and_evaluation_with_neither():
    index = np.arange(6)

    def load(training, seed, epoch):
        return torch.stack(
            DeformedDetection("val", training=training, seed=seed).load(index, epoch).batch.images
        )

    for one, other in itertools.combinations(
        [load(True, *pair) for pair in ((0, 0), (0, 1), (1, 0))], 2
    ):
        assert not torch.equal(one, other)
    assert torch.equal(load(False, 0, 0), load(False, 3, 5))


@pytest.mark.parametrize("scale", [(0.4, 2.2), (0.2, 0.5)])
def test_boxes_are_those_of_the_objects_masks(scale):
    """Check one object per canvas, without noise, against the same object by DeformedFashion."""
    dataset = DeformedDetection(objects=(1, 1), object_scale=scale, noise=0.0, length=60)
    reference = DeformedFashion(image_size=96, noise=0.0)
    keys = dataset._keys(np.arange(60), 0)
    draws = module.uniforms(keys, 1, 3)
    objects = dataset._draw_objects(keys)
    assert objects.canvas.tolist() == list(range(60))
    low, high = np.log(scale)
    centres = objects.corners + (objects.patches.shape[-1] - 96) / 2
    factors = Factors(np.exp(low + (high - low) * draws[:, 1]), -60 + 120 * draws[:, 2], *centres.T)
    numbers = (draws[:, 0] * 25_000).astype(int)
    images, masks = reference.render(numbers, factors)
    batch = dataset.load(np.arange(60)).batch
    for expected, mask, number, image, target in zip(
        images, masks, numbers, batch.images, batch.targets, strict=True
    ):
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        box = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        assert target["boxes"].tolist() == [box]
        assert target["labels"].tolist() == [reference.targets[number] + 1]
        x1, y1, x2, y2 = box
        inside = (slice(None), slice(y1, y2), slice(x1, x2))
        assert (image[inside].int() - expected[inside].int()).abs().max() <= 1


def test_objects_are_within_the_canvas_and_hardly_overlap():
    dataset = DeformedDetection(training=True, objects=(2, 6))
    targets = dataset.load(np.arange(300), epoch=1).batch.targets
    counts = [len(target["boxes"]) for target in targets]
    assert min(counts) >= 1
    assert max(counts) == 6
    overlapping = 0
    for target in targets:
        boxes = target["boxes"].numpy()
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= 96).all()
        assert (boxes[:, 2:] > boxes[:, :2]).all()
        for one, other in itertools.combinations(boxes, 2):
            shared = np.prod(
                np.clip(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]), 0, None)
            )
            assert shared <= 0.25 * min(np.prod(box[2:] - box[:2]) for box in (one, other))
            overlapping += shared > 0
    assert overlapping > 50


def test_objects_come_up_to_every_edge():
    dataset = DeformedDetection(
        objects=(1, 1), object_scale=(2.4, 2.4), object_rotation=(0.0, 0.0), length=300
    )
    boxes = torch.cat([target["boxes"] for target in dataset.load(np.arange(300)).batch.targets])
    assert boxes.amin(0)[:2].tolist() == [0, 0]
    assert boxes.amax(0)[2:].tolist() == [96, 96]


def test_an_object_without_a_place_is_left_out(monkeypatch):
    monkeypatch.setattr(module, "_COVERED", 0.0)
    dataset = DeformedDetection(objects=(3, 3), object_scale=(2.2, 2.2), length=40)
    assert (
        {1, 2}
        <= {len(target["boxes"]) for target in dataset.load(np.arange(40)).batch.targets}
        <= {1, 2, 3}
    )


def test_objects_are_drawn_where_their_boxes_are():
    batch = DeformedDetection(noise=0.0).load(np.arange(50)).batch
    for image, target in zip(batch.images, batch.targets, strict=True):
        covered = torch.zeros(96, 96, dtype=torch.bool)
        for x1, y1, x2, y2 in target["boxes"].int().tolist():
            covered[y1:y2, x1:x2] = True
            assert (image[0, y1:y2, x1:x2] > 32).float().mean() > 0.1
        # Half of a bright pixel is not part of the mask.
        assert image[0][~covered].max() <= (255 + 32) / 2


@pytest.mark.parametrize(
    "options", [{}, {"image_size": 160, "object_scale": (0.5, 4.0)}, {"object_scale": (0.8, 1.2)}]
)
def test_all_sizes_and_classes_and_numbers_occur(options):
    dataset = DeformedDetection("train", length=1000, **options)
    rows = dataset.coco()["annotations"]
    areas = np.array([row["area"] for row in rows])
    shares = np.diff([0, *np.searchsorted(np.sort(areas), dataset.areas), len(areas)]) / len(areas)
    assert shares.min() > 0.2
    assert np.bincount([row["category_id"] for row in rows])[1:].min() > 0.07 * len(rows)
    counts = np.bincount([row["image_id"] for row in rows])
    assert (np.bincount(counts, minlength=5)[1:] > 50).all()


def test_the_ground_truth_is_that_of_the_batches():
    dataset = DeformedDetection("val", length=100)
    truth = dataset.coco()
    assert [image["id"] for image in truth["images"]] == [
        dataset.image_id(index) for index in range(100)
    ]
    assert truth["images"][0] == {"id": 0, "width": 96, "height": 96}
    assert [c["name"] for c in truth["categories"]] == dataset.class_names
    assert len({row["id"] for row in truth["annotations"]}) == len(truth["annotations"])
    for batch in create_loader(dataset, 16, training=False):
        for index, target in zip(batch.indices.tolist(), batch.targets, strict=True):
            rows = [
                row for row in truth["annotations"] if row["image_id"] == dataset.image_id(index)
            ]
            x1, y1, x2, y2 = target["boxes"].T
            assert [row["bbox"] for row in rows] == torch.stack(
                [x1, y1, x2 - x1, y2 - y1], dim=1
            ).tolist()
            assert [row["category_id"] for row in rows] == [
                dataset.category_id(label) for label in target["labels"].tolist()
            ]
            assert [row["area"] for row in rows] == ((x2 - x1) * (y2 - y1)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_restart_within_an_epoch_is_exact_with_any_number_of_workers(workers):
    options = {"batch_size": 4, "accumulation": 2, "training": True, "seed": 3}
    whole = batches_from(
        create_loader(DeformedDetection(training=True, length=50, seed=5), **options), 1, 0
    )
    resumed = create_loader(
        DeformedDetection(training=True, length=50, seed=5), workers=workers, **options
    )
    assert_same_batches(batches_from(resumed, 1, 2), whole[4:])
    assert_same_batches(batches_from(resumed, 1, 0), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"object_scale": (0.0, 1.0)},
            r"object_scale must be a range of positive numbers up to 2\.42, .* got \(0\.0, 1\.0\)",
        ),
        (
            {"object_scale": (1.0, 2.0), "image_size": 64},
            r"up to 1\.62, beyond which .* does not fit into 64 pixels",
        ),
        ({"object_rotation": (10.0, -10.0)}, "object_rotation must be a range"),
        ({"objects": (0, 3)}, r"objects must be a range of numbers from 1 to 52, got \(0, 3\)"),
        ({"objects": (1, 53)}, "from 1 to 52"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"noise": -0.1}, "noise must not be negative"),
        ({"split": "dev"}, "split must be one of train, val, test, got 'dev'"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DeformedDetection(**options)
