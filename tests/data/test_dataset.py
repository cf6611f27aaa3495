"""Creation of every data set by its name; a wrong name or argument is named."""

import gzip
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image

from dkcls.data import DATASETS, ImageDataset, create_loader
from dkcls.data.transforms import for_channels
from dkcls.errors import UserError
from tests.data.common import make_dataset
from tests.data.sets.test_tar import packed

# The other sets have tests of their own.
IMAGE_SETS = [name for name, kind in DATASETS.items() if issubclass(kind, ImageDataset)]


def write_idx(path, array):
    path.write_bytes(
        struct.pack(">HBB" + "I" * array.ndim, 0, 8, array.ndim, *array.shape) + array.tobytes()
    )
    with gzip.open(f"{path}.gz", "wb") as file:
        file.write(path.read_bytes())


@pytest.fixture
def roots(shared_folder, tmp_path, monkeypatch):
    """Return the folder of each set's files; torchvision's are small stand-ins."""
    generator = np.random.default_rng(0)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 12), ("t10k", 7)):
        write_idx(
            raw / f"{part}-images-idx3-ubyte",
            generator.integers(0, 256, (count, 28, 28), dtype=np.uint8),
        )
        write_idx(raw / f"{part}-labels-idx1-ubyte", np.arange(count, dtype=np.uint8) % 10)
    for name, classes in (("CIFAR10", 10), ("CIFAR100", 100)):

        def reader(root, train, download, classes=classes):
            data = generator.integers(0, 256, (12 if train else 7, 32, 32, 3), dtype=np.uint8)
            return SimpleNamespace(
                data=data, targets=list(range(len(data))), classes=[str(i) for i in range(classes)]
            )

        monkeypatch.setattr(torchvision.datasets, name, reader)
    for split in ("train", "val"):
        packed(shared_folder, tmp_path / "tar", split)
    return {"folder": shared_folder, "tar": tmp_path / "tar"} | dict.fromkeys(
        ("cifar10", "cifar100", "fashion_mnist"), tmp_path
    )


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", IMAGE_SETS)
def test_every_set_gives_batches(name, training, roots):
    for split in ("train", "val", "test"):
        dataset = make_dataset(name, roots.get(name), split, training=training)
        batch = next(iter(create_loader(dataset, 3, training=training)))
        assert batch.images.shape == (3, dataset.channels, dataset.image_size, dataset.image_size)
        assert (batch.images.dtype, batch.targets.dtype, batch.indices.dtype) == (
            torch.uint8,
            torch.int64,
            torch.int64,
        )
        assert dataset.num_classes == len(dataset.class_names) > batch.targets.max()
        assert len(dataset.mean) == len(dataset.std) == dataset.channels


@pytest.mark.parametrize("name", IMAGE_SETS)
def test_every_set_takes_a_size(name, roots):
    assert next(
        iter(create_loader(make_dataset(name, roots.get(name), image_size=40), 2, training=False))
    ).images.shape[2:] == (40, 40)


def test_torchvisions_images_are_not_changed_by_an_evaluation_at_their_size(roots):
    dataset = make_dataset("fashion_mnist", roots["fashion_mnist"], "val", crop_ratio=1.0)
    assert len(dataset) == 7
    batch = dataset.load(np.array([4, 2])).batch
    assert torch.equal(batch.images, dataset.images[[4, 2]])
    assert batch.targets.tolist() == [4, 2]


@pytest.fixture
def cifar(monkeypatch):
    """Put five images of noise [N, H, W, C] in CIFAR-10's place."""
    data = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    source = SimpleNamespace(data=data, targets=[3, 1, 4, 1, 5], classes=list("abcdefghij"))
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", lambda root, train, download: source)
    return data


def test_images_of_cifar_stand_upright(cifar):
    batch = make_dataset("cifar10", ".", "val", crop_ratio=1.0).load(np.array([4, 2])).batch
    assert (batch.images.numpy() == np.moveaxis(cifar[[4, 2]], 3, 1)).all()
    assert batch.targets.tolist() == [5, 4]


@pytest.mark.usefixtures("cifar")
def test_crops_of_cifar_are_others_for_every_seed_and_epoch():
    def pixels(seed, epoch, training=True):
        dataset = make_dataset("cifar10", ".", training=training, seed=seed)
        return dataset.load(np.arange(5), epoch).batch.images.numpy().tobytes()

    assert len({pixels(0, 0), pixels(1, 0), pixels(0, 1), pixels(1, 1)}) == 4
    assert pixels(1, 1) == pixels(1, 1)
    assert pixels(1, 1, training=False) == pixels(0, 0, training=False)


@pytest.fixture(scope="module")
def plain_images(tmp_path_factory):
    """Write two images: 0 is grey of level 100, 64 x 64; 1 is 256 x 256.

    In the second one red is the column and green the row.
    """
    folder = tmp_path_factory.mktemp("plain") / "train" / "class0"
    folder.mkdir(parents=True)
    Image.new("RGB", (64, 64), (100, 100, 100)).save(folder / "grey.png")
    rows, columns = np.mgrid[:256, :256].astype(np.uint8)
    Image.fromarray(np.stack([columns, rows, 0 * rows], axis=2)).save(folder / "ramps.png")
    return folder.parents[1]


def augmented(root, index, epoch=0, **options):
    """Return one augmented image, float64 [3, 32, 32]."""
    options = {"hflip": 0.0, "color_jitter": 0.0, **options}
    dataset = make_dataset("folder", root, training=True, image_size=32, **options)
    return dataset.load(np.array([index]), epoch).batch.images[0].double().numpy()


@pytest.mark.parametrize(
    ("scale", "ratio", "width", "height"),
    [
        (1, 1, 256, 256),
        (1 / 4, 1, 128, 128),
        (1 / 16, 1, 64, 64),
        (1 / 4, 4, 256, 64),
        (1 / 4, 1 / 4, 64, 256),
    ],
)
def test_scale_and_ratio_are_those_of_the_crop(plain_images, scale, ratio, width, height):
    for epoch in range(3):
        red, green, _ = augmented(
            plain_images, 1, epoch, scale=(scale, scale), ratio=(ratio, ratio)
        )
        # Between pixels that the border has no part in; 32 pixels are the crop's side.
        assert np.mean(red[:, 29] - red[:, 2]) * 32 / 27 == pytest.approx(width, abs=1)
        assert np.mean(green[29] - green[2]) * 32 / 27 == pytest.approx(height, abs=1)


def test_hflip_is_the_probability_of_a_mirrored_image(plain_images):
    def share(hflip):
        images = [augmented(plain_images, 1, epoch, hflip=hflip) for epoch in range(60)]
        return np.mean([red[0, 0] > red[0, -1] for red, _, _ in images])

    assert (share(0.0), share(1.0)) == (0, 1)
    assert 0.1 < share(0.25) < 0.4


@pytest.mark.parametrize("strength", [0.0, 0.1, 1.0])
def test_color_jitter_is_the_range_of_the_brightness(plain_images, strength):
    """Check on an image in one grey, which contrast and saturation do not change."""
    images = np.stack(
        [augmented(plain_images, 0, epoch, color_jitter=strength) for epoch in range(40)]
    )
    levels = images[:, 0, 0, 0]
    assert (images == levels[:, None, None, None]).all()
    assert 70 * strength <= abs(levels - 100).max() <= 100 * strength + 0.5


@pytest.mark.parametrize("option", [{"rand_augment": "rand-m9-n2"}, {"erase_prob": 1.0}])
def test_timms_augmentations_change_images_only_if_asked_for(plain_images, option):
    plain, changed = (
        augmented(plain_images, 1, scale=(1, 1), ratio=(1, 1), **options)
        for options in ({}, option)
    )
    assert not np.array_equal(plain, changed)
    # Not in training.
    still = make_dataset("folder", plain_images, image_size=32, crop_ratio=1.0, **option)
    assert np.array_equal(still.load(np.array([1])).batch.images[0].numpy(), plain)


def test_synthetic_images_tell_their_class():
    dataset = make_dataset("synthetic", image_size=8, num_classes=5, length=100)
    images, targets, _ = dataset.load(np.array([3, 19, 4])).batch
    assert len(dataset) == 100
    assert targets.tolist() == [3, 3, 4]
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "imagenet"}, "data set must be one of cifar10, .*, got 'imagenet'"),
        ({"name": "folder"}, "data set 'folder' needs data.root=FOLDER"),
        (
            {"name": "folder", "root": "x", "clutter": 3},
            r"data\.options\.clutter: data set 'folder' takes no 'clutter'; it takes no options",
        ),
        ({"name": "folder", "root": "nowhere"}, "nowhere must hold the folders train and val"),
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
    with pytest.raises(UserError, match=message):
        make_dataset(**arguments)


def test_one_number_per_channel():
    assert for_channels((0.25, 0.5, 0.75), 3) == [0.25, 0.5, 0.75]
    assert for_channels((0.25, 0.5, 0.9), 1) == [pytest.approx(0.55)]
    assert for_channels([0.4], 3) == [0.4] * 3
