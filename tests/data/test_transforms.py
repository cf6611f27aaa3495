"""Transforms: crops as in torchvision, pixels as in PIL and timm, colours as in torchvision."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as TF

from dkcls.data.sets.torchvision import Pixels
from dkcls.data.transforms import (
    EvalTransform,
    TrainTransform,
    jitter_colors,
    random_crop_box,
    resize,
)
from tests.data.common import photograph

# The long ones come to the fallback.
SIZES = [(47, 61), (375, 500), (500, 375), (10, 400), (400, 10), (1, 1), (64, 64)]


def tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    ("scale", "ratio"),
    [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.5, 0.6), (0.9, 1.5)), ((0.9, 1.0), (2.0, 3.0))],
)
def test_crop_boxes_are_torchvisions(height, width, scale, ratio):
    image = torch.empty(3, height, width, dtype=torch.uint8)
    for seed in range(40):
        torch.manual_seed(seed)
        expected = RandomResizedCrop.get_params(image, scale, ratio)
        generator = torch.Generator().manual_seed(seed)
        assert random_crop_box(height, width, scale, ratio, generator) == expected
        assert torch.rand(1, generator=generator) == torch.rand(1)  # as many numbers were drawn


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("width", "height"), [(500, 375), (320, 480), (90, 70)])
def test_pixels_are_pils(width, height, interpolation):
    image = photograph(1, width, height)
    means = []
    for seed in range(24):
        generator = torch.Generator().manual_seed(seed)
        top, left, h, w = random_crop_box(height, width, (0.08, 1.0), (3 / 4, 4 / 3), generator)
        ours = resize(tensor(image)[:, top : top + h, left : left + w], 224, 224, interpolation)
        cropped = image.crop((left, top, left + w, top + h))
        pils = tensor(cropped.resize((224, 224), Image.Resampling[interpolation.upper()]))
        difference = (ours.int() - pils.int()).abs()
        assert difference.max() <= (1 if interpolation == "bilinear" else 2)
        assert (difference > 1).float().mean() <= 1e-4
        means.append(difference.float().mean().item())
    # Of portrait images more crops are near 224 pixels wide.
    assert sum(means) / len(means) <= (0.05 if width > height else 0.08)


def test_training_crops_flips_and_nothing_else():
    image = tensor(photograph(2, 120, 90))
    flips = 0
    for key in range(20):
        ours = TrainTransform(64, color_jitter=0.0)(Pixels(image), key)
        top, left, h, w = random_crop_box(
            90, 120, (0.08, 1.0), (3 / 4, 4 / 3), torch.Generator().manual_seed(key)
        )
        straight = resize(image[:, top : top + h, left : left + w], 64, 64)
        assert torch.equal(ours, straight) != torch.equal(ours, straight.flip(-1))
        flips += torch.equal(ours, straight.flip(-1))
    assert 3 < flips < 17


def test_training_crops_are_resized_as_asked():
    image = photograph(2, 120, 90)
    for key in range(8):
        ours = TrainTransform(64, color_jitter=0.0, hflip=0.0, interpolation="bicubic")(
            Pixels(tensor(image)), key
        )
        top, left, h, w = random_crop_box(
            90, 120, (0.08, 1.0), (3 / 4, 4 / 3), torch.Generator().manual_seed(key)
        )
        cropped = image.crop((left, top, left + w, top + h))
        cubic = tensor(cropped.resize((64, 64), Image.Resampling.BICUBIC))
        linear = tensor(cropped.resize((64, 64), Image.Resampling.BILINEAR))
        assert (ours.int() - cubic.int()).abs().max() <= 2
        assert (ours.int() - linear.int()).abs().max() > 2


@pytest.mark.parametrize("hflip", [0.0, 1.0])
def test_hflip_0_is_never_and_1_always(hflip):
    image = tensor(photograph(2, 120, 90))
    for key in range(8):
        ours = TrainTransform(64, color_jitter=0.0, hflip=hflip)(Pixels(image), key)
        top, left, h, w = random_crop_box(
            90, 120, (0.08, 1.0), (3 / 4, 4 / 3), torch.Generator().manual_seed(key)
        )
        straight = resize(image[:, top : top + h, left : left + w], 64, 64)
        assert torch.equal(ours, straight.flip(-1) if hflip else straight)


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (333, 500), (256, 256), (100, 81), (224, 640)]
)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_agrees_with_timms(width, height, interpolation):
    image = photograph(3, width, height)
    options = {
        "is_training": False,
        "interpolation": interpolation,
        "crop_pct": 0.875,
        "use_prefetcher": True,
    }
    timms = torch.as_tensor(create_transform(224, **options)(image))
    ours = EvalTransform(224, 0.875, interpolation)(Pixels(tensor(image)), key=0)
    difference = (ours.int() - timms.int()).abs()
    assert difference.shape == (3, 224, 224)
    assert difference.max() <= 1
    assert difference.float().mean() <= 0.05


def test_jitter_does_what_torchvisions_operations_do():
    image = tensor(photograph(4, 80, 60))
    changes = [TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation]
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        ours = jitter_colors(image, 0.4, torch.Generator().manual_seed(seed))
        order = torch.randperm(3, generator=generator).tolist()
        factors = torch.empty(3).uniform_(0.6, 1.4, generator=generator).tolist()
        # On bytes, torchvision would cut off to a whole level after each operation.
        expected = image / 255
        for operation in order:
            expected = changes[operation](expected, factors[operation])
        assert (ours - expected * 255).abs().max() <= 0.55  # and its grey weighs red with 0.2989
        assert (ours.int() - image.int()).abs().float().mean() > 1


def test_jitter_of_grey_images_leaves_one_channel():
    image = tensor(photograph(5, 80, 60))[:1]
    assert jitter_colors(image, 0.4, torch.Generator().manual_seed(0)).shape == image.shape


def test_jitter_does_not_depend_on_the_number_of_threads():
    image = tensor(photograph(6, 320, 300))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(
                [
                    jitter_colors(image, 0.4, torch.Generator().manual_seed(seed))
                    for seed in range(6)
                ]
            )
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("options", [{"rand_augment": "rand-m9-n2-mstd0.5"}, {"erase_prob": 1.0}])
def test_timms_augmentations_are_a_function_of_the_key_and_leave_the_global_generators_alone(
    options,
):
    image = tensor(photograph(7, 90, 70))
    plain = TrainTransform(48, color_jitter=0.0, mean=(0.5,) * 3, std=(0.2,) * 3)
    transform = TrainTransform(48, color_jitter=0.0, mean=(0.5,) * 3, std=(0.2,) * 3, **options)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    results = [transform(Pixels(image), key) for key in range(6)]
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == states
    random.seed(5)
    np.random.seed(6)
    torch.manual_seed(7)
    assert all(torch.equal(transform(Pixels(image), key), results[key]) for key in range(6))
    assert sum(not torch.equal(plain(Pixels(image), key), results[key]) for key in range(6)) >= 3
    assert all(result.shape == (3, 48, 48) and result.dtype == torch.uint8 for result in results)


def test_rand_augment_is_timms_at_the_images_size_and_mean():
    config, image = "rand-m9-n2-mstd0.5", tensor(photograph(7, 90, 70))
    options = {"color_jitter": 0.0, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    plain, ours = TrainTransform(48, **options), TrainTransform(48, **options, rand_augment=config)
    timms = rand_augment_transform(config, {"translate_const": 21, "img_mean": (124, 116, 104)})
    for key in range(24):
        random.seed(key)
        np.random.seed(key)
        torch.manual_seed(key)
        expected = timms(Image.fromarray(plain(Pixels(image), key).permute(1, 2, 0).numpy()))
        assert torch.equal(ours(Pixels(image), key), tensor(expected))


def test_erasing_changes_a_part_only():
    image = tensor(photograph(8, 90, 70))
    options = {"color_jitter": 0.0, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    whole, erased = (
        TrainTransform(64, **options)(Pixels(image), 1),
        TrainTransform(64, **options, erase_prob=1.0)(Pixels(image), 1),
    )
    changed = (whole != erased).any(0).float().mean().item()
    assert 0.01 < changed < 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.5, 0.1)}, r"scale must be a range .* got \(0\.5, 0\.1\)"),
        ({"ratio": (0.0, 1.0)}, "ratio must be a range"),
        ({"hflip": 1.5}, "hflip, color_jitter and erase_prob must be from 0 to 1, got 1.5"),
        (
            {"rand_augment": "rand-m9", "mean": (0.5,)},
            "rand_augment needs images of 3 channels, got 1",
        ),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        TrainTransform(32, **options)


@pytest.mark.parametrize("make", [EvalTransform, TrainTransform])
def test_an_unknown_interpolation_is_refused(make):
    with pytest.raises(
        ValueError, match="interpolation must be bilinear or bicubic, got 'lanczos'"
    ):
        make(32, interpolation="lanczos")


def test_a_crop_ratio_above_one_is_refused():
    with pytest.raises(ValueError, match=r"crop_ratio must be in \(0, 1\], got 1.2"):
        EvalTransform(32, 1.2)
