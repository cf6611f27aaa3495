"""Every data set by its name; a wrong name or argument is named."""

import gzip
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision.datasets

from dkcls.data import DATASETS, create_dataset, create_loader
from dkcls.data.create import DETECTION_SETS
from tests.data.test_tar import packed

IMAGE_SETS = [name for name in DATASETS if name not in DETECTION_SETS]  # the others have tests of their own


def write_idx(path, array):
    path.write_bytes(struct.pack(">HBB" + "I" * array.ndim, 0, 8, array.ndim, *array.shape) + array.tobytes())
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())


@pytest.fixture
def roots(shared_folder, tmp_path, monkeypatch):
    """Where each set's files are; small stand-ins for torchvision's."""
    generator = np.random.default_rng(0)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 7)):
        write_idx(raw / f"{part}-images-idx3-ubyte", generator.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    for name, classes in (("CIFAR10", 10), ("CIFAR100", 100)):

        def reader(root, train, download, classes=classes):
            data = generator.integers(0, 256, (12 if train else 7, 32, 32, 3), dtype=np.uint8)
            return SimpleNamespace(data=data, targets=list(range(len(data))), classes=[str(i) for i in range(classes)])

        monkeypatch.setattr(torchvision.datasets, name, reader)
    for split in ("train", "val"):
        packed(shared_folder, tmp_path / "tar", split)
    return {"imagefolder": shared_folder, "tar": tmp_path / "tar"} | dict.fromkeys(
        ("cifar10", "cifar100", "fashion_mnist"), tmp_path
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", IMAGE_SETS)
def test_every_set_gives_batches(name, training, roots):
    for split in ("train", "val", "test"):
        dataset = create_dataset(name, roots.get(name), split, training=training)
        batch = next(iter(create_loader(dataset, 3, training=training)))
        assert batch.images.shape == (3, dataset.channels, dataset.image_size, dataset.image_size)
        assert (batch.images.dtype, batch.targets.dtype, batch.indices.dtype) == (torch.uint8, torch.int64, torch.int64)
        assert dataset.num_classes == len(dataset.class_names) > batch.targets.max()
        assert len(dataset.mean) == len(dataset.std) == dataset.channels


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_every_set_takes_a_size(name, roots):
    assert next(iter(create_loader(create_dataset(name, roots.get(name), image_size=40), 2, training=False))).images.shape[
        2:
    ] == (40, 40)


def test_torchvisions_images_are_not_changed_by_an_evaluation_at_their_size(roots):
    dataset = create_dataset("fashion_mnist", roots["fashion_mnist"], "val", crop_ratio=1.0)
    assert len(dataset) == 7
    batch = dataset.load(np.array([4, 2])).batch
    assert torch.equal(batch.images, dataset.images[[4, 2]])
    assert batch.targets.tolist() == [4, 2]


def test_synthetic_images_tell_their_class():
    dataset = create_dataset("synthetic", image_size=8, num_classes=5, length=100)
    images, targets, _ = dataset.load(np.array([3, 19, 4])).batch
    assert len(dataset) == 100
    assert targets.tolist() == [3, 3, 4]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "imagenet"}, "data set must be one of imagefolder, .*, got 'imagenet'"),
        ({"name": "imagefolder"}, "data set 'imagefolder' needs root"),
        ({"name": "imagefolder", "root": "x", "clutter": 3}, "data set 'imagefolder' takes no clutter"),
        ({"name": "imagefolder", "root": "nowhere"}, "nowhere must hold the folders train and val"),
        ({"name": "tar", "root": "nowhere"}, r"there is no nowhere/train\.index"),
        ({"name": "synthetic", "split": "dev"}, "split must be one of train, val, test, got 'dev'"),
        ({"name": "synthetic", "length": 0}, "length must be positive"),
        (
            {"name": "fashion_mnist", "root": "nowhere"},
            "fashion_mnist is not complete in nowhere, and download=true fetches it",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        create_dataset(**arguments)
