"""Predictions of a classifier for images in files."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dkcls.config import DataConfig
from dkcls.data import create_loader
from dkcls.data.encoded import EncodedImages
from dkcls.data.named import find_images, read_image
from dkcls.data.transforms import EvalTransform
from dkcls.engine import distributed
from dkcls.engine.distributed import autocast
from dkcls.engine.network import Network, load
from dkcls.engine.task import Input
from dkcls.tasks.classification.task import Classification


class Prediction(NamedTuple):
    """The likeliest classes of an image, best first, with their probabilities."""

    image: str
    classes: list[str]
    probabilities: list[float]


class ImageFiles(EncodedImages):
    """Images by their names, without classes."""

    def __init__(self, paths: Sequence[str], taken: Input, max_pixels: int):
        transform = EvalTransform(taken.image_size, taken.crop_ratio, taken.interpolation)
        super().__init__(transform, taken.image_size, training=False, seed=0)
        self.paths, self.class_names = list(paths), []
        self.max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        return read_image(self.paths[index], self.max_pixels)

    def name(self, index: int) -> str:
        return self.paths[index]

    def target(self, index: int) -> int:
        return 0


def predict(path: str, images: str | Iterable[str], **options: Any) -> list[Prediction]:
    """Return the likeliest classes of each image, by the network of a checkpoint or an export.

    Args:
        path: the file of the network, as `dkcls.load` takes it.
        images: a file, a folder, "embedded:12", or several of them, as `find_images` takes them;
            files that cannot be read are left out.
        options: keywords of `Predictor`, such as top=5.
    """
    network = load(path, task="classification")
    places = [images] if isinstance(images, str) else images
    with distributed.start("auto", timeout=600) as world:
        return list(Predictor(network, world.device, **options)(find_images(places)))


class Predictor:
    """Predictions one after the other.

    Files that cannot be read are named in the log, counted in `bad`, and left out.
    """

    def __init__(
        self,
        network: Network,
        device: torch.device,
        *,
        top: int = 5,
        batch_size: int = 64,
        workers: int = 0,
        precision: str = "fp32",
        max_pixels: int = DataConfig.max_pixels,
    ):
        self.network, self.device, self.precision = network, device, precision
        self.max_pixels = max_pixels
        self.top, self.batch_size, self.workers = min(top, network.num_classes), batch_size, workers
        self.model = network.model.to(device).eval()
        self.task = Classification(
            network.input.mean,
            network.input.std,
            network.num_classes,
            device,
            channels_last=network.config.train.channels_last,
        )
        self.bad = 0

    def __call__(self, paths: Sequence[str]) -> Iterator[Prediction]:
        files = ImageFiles(paths, self.network.input, self.max_pixels)
        workers = min(self.workers, len(paths) // self.batch_size)
        loader = create_loader(
            files, self.batch_size, training=False, workers=workers, bad_limit=1.0
        )
        names = self.network.class_names()
        for batch in loader:
            with torch.inference_mode(), autocast(self.device, self.precision):
                shares = self.model(self.task.images(batch)).float().softmax(1)
            best = shares.topk(self.top, dim=1)
            for file, values, outputs in zip(
                batch.indices.tolist(), best.values.tolist(), best.indices.tolist(), strict=True
            ):
                yield Prediction(paths[file], [names[i] for i in outputs], values)
        self.bad += loader.bad_files.count
