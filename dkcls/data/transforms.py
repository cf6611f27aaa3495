"""Transforms from a decoded image to the network's input size, and on to the network's input.

An image stays uint8 until a batch is on the device, so that only uint8 crosses the bus.

The crop is drawn as torchvision's RandomResizedCrop draws it. The resize is torch's antialiased one
on bytes: bilinear within one level of PIL's, bicubic within two. Every number that is drawn comes
from the generator of one sample.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from dkcls.config import AugmentConfig, DataConfig

INTERPOLATIONS = ("bilinear", "bicubic")
GREY = (0.299, 0.587, 0.114)  # shares of red, green and blue in grey


class Source(Protocol):
    """Image that may not be decoded yet."""

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width in pixels."""

    def rows(self, count: int | None = None) -> Tensor:
        """Return uint8 [C, at least count, W]; all rows if None."""


class Transform(Protocol):
    """Interface of a transform to the network's size; `key` seeds the random numbers."""

    # Whether the result is in planes, not channels_last: a batch of the same layout is quicker to
    # put together.
    planar: bool

    def __call__(self, source: Source, key: int) -> Tensor: ...


class EvalTransform:
    """Resize of the shorter side to floor(image_size / crop_ratio), as timm does; centre crop."""

    def __init__(self, image_size: int, crop_ratio: float = 0.875, interpolation: str = "bilinear"):
        if not 0 < crop_ratio <= 1:
            raise ValueError(f"crop_ratio must be in (0, 1], got {crop_ratio}")
        self.interpolation = _check_interpolation(interpolation)
        self.image_size, self.shorter_side = image_size, math.floor(image_size / crop_ratio)
        self.planar = False

    def __call__(self, source: Source, key: int) -> Tensor:
        height, width = source.size
        side, shorter = self.shorter_side, min(height, width)
        image = resize(
            source.rows(), side * height // shorter, side * width // shorter, self.interpolation
        )
        top, left = (round((length - self.image_size) / 2) for length in image.shape[1:])
        return image[:, top : top + self.image_size, left : left + self.image_size]


class TrainTransform:
    """Random crop, flip, colour jitter or timm's RandAugment, and timm's random erasing."""

    def __init__(
        self,
        image_size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        hflip: float = 0.5,
        color_jitter: float = 0.4,
        rand_augment: str | None = None,
        erase_prob: float = 0.0,
        interpolation: str = "bilinear",
        mean: Sequence[float] = (0.5,),
        std: Sequence[float] = (0.25,),
    ):
        for name, pair, top in (("scale", scale, 1.0), ("ratio", ratio, math.inf)):
            if not 0 < pair[0] <= pair[1] <= top:
                raise ValueError(
                    f"{name} must be a range (low, high) above 0 and up to {top}, got {tuple(pair)}"
                )
        if not (0 <= hflip <= 1 and 0 <= color_jitter <= 1 and 0 <= erase_prob <= 1):
            raise ValueError(
                "hflip, color_jitter and erase_prob must be from 0 to 1, "
                f"got {hflip}, {color_jitter} and {erase_prob}"
            )
        self.interpolation = _check_interpolation(interpolation)
        self.image_size, self.scale, self.ratio = image_size, scale, ratio
        self.hflip, self.color_jitter = hflip, color_jitter
        self.rand_augment = (
            _timm_rand_augment(rand_augment, image_size, mean) if rand_augment else None
        )
        self.erase = _timm_random_erasing(erase_prob) if erase_prob else None
        self.mean, self.std = (torch.tensor(v)[:, None, None] for v in (mean, std))
        self.planar = bool(color_jitter) and not rand_augment

    def __call__(self, source: Source, key: int) -> Tensor:
        generator = torch.Generator().manual_seed(key)
        top, left, height, width = random_crop_box(*source.size, self.scale, self.ratio, generator)
        crop = source.rows(top + height)[:, top : top + height, left : left + width]
        image = resize(crop, self.image_size, self.image_size, self.interpolation)
        if torch.rand(1, generator=generator).item() < self.hflip:
            image = image.flip(-1)
        if self.rand_augment is not None:
            with _seeded_globals(key):
                image = _to_tensor(self.rand_augment(_to_pil(image)))
        elif self.color_jitter:
            image = jitter_colors(image, self.color_jitter, generator)
        if self.erase is not None:
            with _seeded_globals(key ^ 1):
                image = self._erased(self.erase, image)
        return image

    def _erased(self, erase: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
        """Erase in normalised pixels, into which timm's erasing writes normal noise."""
        pixels = erase((image / 255 - self.mean) / self.std)
        return ((pixels * self.std + self.mean) * 255).round().clamp(0, 255).byte()


def create_transform(
    data: DataConfig,
    augment: AugmentConfig,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    training: bool,
) -> Transform:
    """Return the transform that a config asks for, to square images of `image_size` pixels.

    `mean` and `std` are the data set's own. Where the config has others, erasing and RandAugment
    take those, with which the images will be normalised.
    """
    interpolation = data.interpolation or "bilinear"
    if not training:
        return EvalTransform(image_size, data.crop_ratio, interpolation)
    return TrainTransform(
        image_size,
        scale=(augment.scale[0], augment.scale[1]),
        ratio=(augment.ratio[0], augment.ratio[1]),
        hflip=augment.hflip,
        color_jitter=augment.color_jitter,
        rand_augment=augment.rand_augment,
        erase_prob=augment.erase_prob,
        interpolation=interpolation,
        mean=for_channels(data.mean or mean, len(mean)),
        std=for_channels(data.std or std, len(std)),
    )


def random_crop_box(
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width), with the numbers of torchvision's RandomResizedCrop."""
    low, high = _log_range(tuple(ratio))
    number = torch.empty(1)
    for _ in range(10):
        area = height * width * number.uniform_(*scale, generator=generator).item()
        aspect = number.uniform_(low, high, generator=generator).exp_().item()
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = torch.randint(height - h + 1, (1,), generator=generator).item()
            left = torch.randint(width - w + 1, (1,), generator=generator).item()
            return int(top), int(left), h, w
    h, w = height, width
    if width / height < min(ratio):
        h = round(width / min(ratio))
    elif width / height > max(ratio):
        w = round(height * max(ratio))
    return (height - h) // 2, (width - w) // 2, h, w


@cache
def _log_range(ratio: tuple[float, ...]) -> list[float]:
    return torch.log(torch.tensor(ratio)).tolist()


def _check_interpolation(name: str) -> str:
    if name not in INTERPOLATIONS:
        raise ValueError(f"interpolation must be {' or '.join(INTERPOLATIONS)}, got {name!r}")
    return name


def resize(image: Tensor, height: int, width: int, interpolation: str = "bilinear") -> Tensor:
    """Resize uint8 [C, H, W], antialiased."""
    # Packed in channels_last, the batch's stride too: torch's vectorised path takes no other.
    packed = image.permute(1, 2, 0).contiguous()[None].permute(0, 3, 1, 2)
    return F.interpolate(packed, (height, width), mode=interpolation, antialias=True)[0]


def jitter_colors(image: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Change brightness, contrast and saturation in random order.

    Each factor is drawn from 1 - strength to 1 + strength. The result is that of torchvision's
    ColorJitter, but rounded once, at the end, and is in planes. numpy computes the sums and no
    operation is fused, so that the result does not depend on the number of threads.
    """
    order = torch.randperm(3, generator=generator).tolist()
    factors = torch.empty(3).uniform_(1 - strength, 1 + strength, generator=generator).tolist()
    pixels = torch.empty(image.shape).copy_(image)
    for operation in order:
        factor = factors[operation]
        if operation == 0:
            pixels *= factor
        elif operation == 1:
            means = pixels.flatten(1).numpy().mean(axis=1).tolist()
            mean = (
                sum(m * w for m, w in zip(means, GREY, strict=True))
                if len(means) == 3
                else means[0]
            )
            pixels.mul_(factor).add_((1 - factor) * mean)
        elif len(pixels) == 3:
            red, green, blue = (plane * weight for plane, weight in zip(pixels, GREY, strict=True))
            grey = red.add_(green).add_(blue).mul_(1 - factor)
            pixels.mul_(factor).add_(grey)
        if factor > 1:  # below that, every pixel moves towards a value that there is
            pixels.clamp_(0, 255)
    # numpy's conversion is the vectorised one.
    return torch.from_numpy(pixels.round_().numpy().astype(np.uint8))


def _timm_rand_augment(config: str, image_size: int, mean: Sequence[float]) -> Callable[[Any], Any]:
    from timm.data.auto_augment import rand_augment_transform

    if len(mean) != 3:
        raise ValueError(f"rand_augment needs images of 3 channels, got {len(mean)}")
    fill = tuple(min(255, round(255 * m)) for m in mean)
    return rand_augment_transform(
        config, {"translate_const": int(image_size * 0.45), "img_mean": fill}
    )


def _timm_random_erasing(probability: float) -> Callable[[Tensor], Tensor]:
    from timm.data.random_erasing import RandomErasing

    return RandomErasing(probability, mode="pixel", device="cpu")


@contextmanager
def _seeded_globals(key: int) -> Iterator[None]:
    """Seed the global generators of random, numpy and torch for timm; restore them after."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))


def _to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def for_channels(values: Sequence[float], channels: int) -> list[float]:
    """Return `values`, or their mean for every channel if their number differs from `channels`."""
    return list(values) if len(values) == channels else [sum(values) / len(values)] * channels


class Normalize(nn.Module):
    """Map from uint8 [B, C, H, W] to (x / 255 - mean) / std in `dtype`; keeps the memory format."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32
    ):
        super().__init__()
        if len(mean) != len(std) or min(std) <= 0:
            raise ValueError(
                "mean and std must have one number per channel, std positive, "
                f"got {tuple(mean)} and {tuple(std)}"
            )
        self.dtype = dtype
        scale, shift = (
            [1 / (255 * s) for s in std],
            [-m / s for m, s in zip(mean, std, strict=True)],
        )
        self.register_buffer("scale", torch.tensor(scale).view(-1, 1, 1), persistent=False)
        self.register_buffer("shift", torch.tensor(shift).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.addcmul(self.shift, images.float(), self.scale).to(self.dtype)


def fit_channels(images: Tensor, channels: int) -> Tensor:
    """Return uint8 [B, channels, H, W]: colour as grey, as PIL converts it, or grey repeated."""
    if images.shape[1] == channels:
        return images
    if (images.shape[1], channels) == (1, 3):
        return images.expand(-1, 3, -1, -1)
    if (images.shape[1], channels) == (3, 1):
        shares = images.new_tensor(GREY, dtype=torch.float32).view(3, 1, 1)
        return (images * shares).sum(1, keepdim=True).round().byte()
    raise ValueError(
        f"images must have {channels} channels, as the network takes them, got {images.shape[1]}"
    )
