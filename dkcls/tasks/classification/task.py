"""Classification: from a config to the parts of a run, and from batches to losses and metrics."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, Mixup
from torch import Tensor, nn

from dkcls.config import ClassificationConfig, Config, DataConfig, EvalConfig, ModelConfig
from dkcls.data import (
    Batch,
    Dataset,
    ImageDataset,
    Normalize,
    create_dataset,
    fit_channels,
    for_channels,
    takes_image_size,
)
from dkcls.engine.distributed import World
from dkcls.engine.network import (
    Network,
    Weights,
    create_network,
    load_,
    network_config,
    read_weights,
    start_from,
    weights_input,
)
from dkcls.engine.optim import freeze_
from dkcls.engine.task import TASKS, Card, Input, Parts, Task
from dkcls.errors import UserError
from dkcls.models.weights import classes_and_channels
from dkcls.tasks.classification.metrics import TOTALS, Details, Totals, count_hits, from_totals

logger = logging.getLogger(__name__)


@TASKS.register("classification")
class Classification(Task):
    """Cross entropy, top-1 and top-5.

    Args:
        mean, std: of the channels, for normalisation on the device.
        mixup, cutmix: alphas of timm's Mixup, which takes its random numbers from numpy's global
            generator; 0 is off.
    """

    best = "top1"
    shown = ("loss", "top1")
    sums = TOTALS
    input_keys = ("image_size", "crop_ratio", "interpolation", "mean", "std")

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        num_classes: int,
        device: torch.device,
        *,
        label_smoothing: float = 0.0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        channels_last: bool = True,
    ):
        self.device = device
        self.channels = len(mean)
        self.label_smoothing = label_smoothing
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.normalize = Normalize(mean, std).to(device)
        self.mixup = None
        if mixup or cutmix:
            self.mixup = Mixup(
                mixup, cutmix, label_smoothing=label_smoothing, num_classes=num_classes
            )

    @classmethod
    def build(cls, config: Config, world: World) -> Parts:
        if config.augment.mixup or config.augment.cutmix:
            batch = world.batch_per_rank(config.train.batch_size, config.train.accumulation)
            if batch % 2:
                raise UserError(
                    f"mixup and cutmix need an even number of images per rank and step, got {batch}"
                )
        path = config.model.pretrained
        weights = read_weights(path) if path is not None else None
        keys = ["interpolation", "mean", "std"]
        if config.model.name is None and takes_image_size(config.data.name):
            keys.append("image_size")
        config = start_from(config, weights, keys)
        augment = config.augment
        train_set = create_dataset(
            config.data, "train", config.seed, augment=augment, training=True
        )
        val_set = create_dataset(config.data, "val", config.seed)
        if not isinstance(train_set, ImageDataset) or not isinstance(val_set, ImageDataset):
            raise UserError(
                "task=classification needs images with classes, "
                f"data.name={config.data.name} is for task=detection"
            )
        model = build_model(config, weights, train_set)
        taken = network_input(config.data, train_set)
        logger.info("images: %s", taken)
        assert isinstance(config.task, ClassificationConfig)
        task = cls(
            taken.mean,
            taken.std,
            train_set.num_classes,
            world.device,
            label_smoothing=config.task.label_smoothing,
            mixup=augment.mixup,
            cutmix=augment.cutmix,
            channels_last=config.train.channels_last,
        )
        card = Card(config, list(train_set.class_names), taken)
        size = (val_set.channels, val_set.image_size, val_set.image_size)
        return Parts(config, task, model, train_set, val_set, card, model, size)

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, path: str) -> Network:
        config = network_config(config, weights)
        assert config.name is not None
        taken = weights_input(config, weights)
        num_classes, channels = classes_and_channels(config.name, weights.tensors)
        taken = taken.with_channels(channels)
        model = create_network(config, num_classes, channels)
        if fresh := load_(model, weights, path):
            raise UserError(f"{path} has no weights for {', '.join(fresh)} of {config.name}")
        own = replace(config, pretrained=None, freeze=None)
        if weights.card is None:
            return Network(path, model, num_classes, taken, Config(model=own))
        classes = weights.card.classes
        if len(classes) != num_classes:
            raise UserError(
                f"{path} names {len(classes)} classes, but its network has {num_classes}"
            )
        config_of_run = replace(weights.card.config, model=own)
        return Network(path, model, num_classes, taken, config_of_run, classes)

    @classmethod
    def evaluation_of(
        cls,
        network: Network,
        dataset: Dataset[Any],
        data: DataConfig,
        config: EvalConfig,
        device: torch.device,
    ) -> Details:
        assert data.mean is not None
        assert data.std is not None
        outputs = outputs_of(network, dataset.class_names)
        channels = network.input.channels
        task = cls(
            for_channels(data.mean, channels),
            for_channels(data.std, channels),
            len(outputs),
            device,
            channels_last=network.config.train.channels_last,
        )
        return Details(task, dataset.class_names, outputs, flip=config.flip)

    def images(self, batch: Batch) -> Tensor:
        """Return a batch's images as the network takes them."""
        images = fit_channels(batch.images, self.channels)
        images = images.to(self.device, non_blocking=True, memory_format=self.layout)
        return self.normalize(images)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images = self.images(batch)
        targets = batch.targets.to(self.device, non_blocking=True)
        soft = targets
        if self.mixup is not None:
            images, soft = self.mixup(images, targets)
        logits = model(images).float()
        loss = self.criterion(logits, soft)
        with torch.no_grad():
            count = len(targets)
            hits = count_hits(logits, targets)
            sums = torch.stack([loss.new_tensor(count), loss.detach() * count, *hits])
        return loss, sums

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of logits [B, C]; targets are [B], or with mixup shares [B, C]."""
        smoothing = 0.0 if self.mixup else self.label_smoothing  # mixup has smoothed the targets
        return F.cross_entropy(logits, targets, label_smoothing=smoothing)

    def metrics(self, sums: list[float]) -> dict[str, Any]:
        return from_totals(sums)

    def evaluation(self) -> Totals:
        return Totals(self)


def build_model(config: Config, weights: Weights | None, dataset: ImageDataset) -> nn.Module:
    """Return the network to train, with the pretrained weights if there are any."""
    model = create_network(config.model, dataset.num_classes, dataset.channels, config.seed)
    if weights is not None:
        path = config.model.pretrained
        if fresh := load_(model, weights, path):
            logger.info("not in %s, left fresh: %s", path, ", ".join(fresh))
    freeze_(model, config.model.freeze)
    return model


def network_input(data: DataConfig, dataset: ImageDataset) -> Input:
    """Return what the network takes in evaluation: as the config has it, else as the data set."""
    crop_ratio = data.crop_ratio if hasattr(dataset, "transform") else 1.0
    mean = list(data.mean or dataset.mean)
    std = list(data.std or dataset.std)
    interpolation = data.interpolation or "bilinear"
    channels = dataset.channels
    taken = Input(channels, dataset.image_size, crop_ratio, interpolation, mean, std)
    return taken.with_channels(channels)


def outputs_of(network: Network, names: list[str]) -> list[int]:
    """Return the network's output for each of the data's classes, maybe some of its own."""
    classes = network.classes
    if classes is None:  # plain weights: ImageNet's classes, or the data's, in its order
        imagenet = ImageNetInfo().label_names()
        of_imagenet = network.num_classes == len(imagenet) and set(names) <= set(imagenet)
        classes = imagenet if of_imagenet else names
        if len(classes) != network.num_classes:
            raise UserError(
                f"{network.path} is for {network.num_classes} classes, the data has {len(names)}"
            )
    if unknown := [name for name in names if name not in set(classes)]:
        raise UserError(
            f"{network.path} has no class {_first(unknown)}: "
            f"its {len(classes)} classes are {_first(classes)}"
        )
    place = {name: i for i, name in enumerate(classes)}
    return [place[name] for name in names]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
