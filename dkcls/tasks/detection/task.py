"""Detection: from a config to the parts of a run, and from batches to losses and precisions."""

import logging
import math
from typing import Any

import timm
import torch
from torch import Tensor, nn

from dkcls.config import Config, DataConfig, DetectionConfig, EvalConfig, ModelConfig
from dkcls.data import Dataset, DetectionBatch, DetectionDataset, create_dataset, for_channels
from dkcls.engine.distributed import World
from dkcls.engine.network import (
    BUILD_ERRORS,
    Network,
    Weights,
    arguments_of,
    check_fit,
    check_name,
    create_network,
    explain,
    load_,
    read_weights,
    start_from,
)
from dkcls.engine.optim import freeze_
from dkcls.engine.task import TASKS, Card, Input, Parts, Task
from dkcls.errors import UserError
from dkcls.models.weights import classes_and_channels
from dkcls.tasks.detection.coco_map import coco_map, result_rows
from dkcls.tasks.detection.detector import Detector, freeze_norms_, pyramid_levels

logger = logging.getLogger(__name__)

# torchvision's names.
LOSSES = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")


@TASKS.register("detection")
class Detection(Task):
    """The sum of Faster R-CNN's four losses, and COCO's average precision on `dataset`."""

    best = "ap"
    shown = ("loss", "ap")
    sums = ("images", "loss", *LOSSES)
    input_keys = ("mean", "std")

    def __init__(self, dataset: DetectionDataset, device: torch.device):
        self.dataset = dataset
        self.device = device

    @classmethod
    def build(cls, config: Config, world: World) -> Parts:
        """Return the parts of a run; model.pretrained is a classifier's, for the backbone."""
        own = config.task
        assert isinstance(own, DetectionConfig)
        for key in ("mixup", "cutmix"):
            if getattr(config.augment, key):
                raise UserError(
                    f"augment.{key} is for classification, and must be 0 with task=detection"
                )
        path = config.model.pretrained
        weights = read_weights(path) if path is not None else None
        if weights is None and config.model.freeze:
            logger.warning(
                "model.freeze keeps weights that nobody trained: model.pretrained=FILE is not given"
            )
        config = start_from(config, weights, ("mean", "std"))
        train_set = create_dataset(
            config.data, "train", config.seed, augment=config.augment, training=True
        )
        val_set = create_dataset(config.data, "val", config.seed)
        if not isinstance(train_set, DetectionDataset) or not isinstance(val_set, DetectionDataset):
            raise UserError(
                "task=detection needs data with boxes, coco or deformed_detection, "
                f"got data.name={config.data.name}"
            )
        taken = detector_input(config.data, own, train_set)
        logger.info("images: %s", taken)
        classes = train_set.num_classes
        model = create_detector(config.model, own, classes, taken, config.seed)
        if weights is not None:
            load_backbone_(model.body, config, weights, taken.channels)
        if config.train.freeze_bn:
            freeze_norms_(model.body)
        freeze_(model, config.model.freeze)
        task = cls(val_set, world.device)
        card = Card(config, list(train_set.class_names), taken)
        size = (taken.channels, own.min_size, own.min_size)
        return Parts(config, task, model, train_set, val_set, card, model.body, size)

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, path: str) -> Network:
        card = weights.card
        assert card is not None
        run, own = card.config, card.config.task
        assert isinstance(own, DetectionConfig)

        def create() -> Detector:
            return create_detector(run.model, own, len(card.classes), card.input)

        check_fit(create, weights, path)
        model = create()
        model.load_state_dict(weights.tensors)
        return Network(path, model, len(card.classes), card.input, run, card.classes)

    @classmethod
    def evaluation_of(
        cls,
        network: Network,
        dataset: Dataset[Any],
        data: DataConfig,
        config: EvalConfig,
        device: torch.device,
    ) -> "AveragePrecision":
        if config.flip or config.per_class or config.confusion:
            raise UserError(
                "flip, per_class and confusion are for classification, "
                f"{network.path} is a detector"
            )
        if not isinstance(dataset, DetectionDataset):
            raise UserError(f"{network.path} is a detector: it needs data with boxes")
        if list(dataset.class_names) != network.classes:
            found = ", ".join(network.class_names())
            raise UserError(
                f"{network.path} finds {found}; the data has {', '.join(dataset.class_names)}"
            )
        transform: Any = network.model.transform
        channels = network.input.channels
        transform.image_mean = for_channels(data.mean or [], channels)
        transform.image_std = for_channels(data.std or [], channels)
        return cls(dataset, device).evaluation()

    def images(self, batch: DetectionBatch) -> list[Tensor]:
        """Return a batch's images as the detector takes them, float [C, H, W] from 0 to 1."""
        return [image.to(self.device, non_blocking=True).float() / 255 for image in batch.images]

    def loss(self, model: nn.Module, batch: DetectionBatch) -> tuple[Tensor, Tensor]:
        targets = [
            {name: value.to(self.device, non_blocking=True) for name, value in target.items()}
            for target in batch.targets
        ]
        losses = model(self.images(batch), targets)
        parts = torch.stack([losses[name] for name in LOSSES])
        total = parts.sum()
        means = torch.cat([total.new_tensor([1.0]), total.detach()[None], parts.detach()])
        return total, means * len(batch.images)

    def metrics(self, sums: list[float]) -> dict[str, Any]:
        images, *losses = sums
        means = {
            name: value / max(images, 1) for name, value in zip(self.sums[1:], losses, strict=True)
        }
        return {**means, "images": int(images)}

    def evaluation(self) -> "AveragePrecision":
        return AveragePrecision(self)


class AveragePrecision:
    """An evaluation: the detections in all images, and then their average precision."""

    def __init__(self, task: Detection):
        self.task = task
        self.rows: list[dict[str, Any]] = []
        self.seen: list[int] = []  # the images' ids

    def add(self, model: nn.Module, batch: DetectionBatch) -> None:
        dataset = self.task.dataset
        found = model(self.task.images(batch))
        for index, output in zip(batch.indices.tolist(), found, strict=True):
            self.rows += result_rows(output, dataset.image_id(index), dataset.category_id)
            self.seen.append(dataset.image_id(index))

    def metrics(self, world: World) -> dict[str, Any]:
        """Return COCO's metrics over the images that could be read, each of which is on one rank.

        A metric of objects that the data does not have is left out, `Detection.best` excepted.
        """
        gathered = world.gather((self.rows, self.seen))
        rows = [row for each, _ in gathered for row in each]
        seen = [image for _, each in gathered for image in each]
        dataset = self.task.dataset
        found = coco_map(dataset.coco(), rows, dataset.areas, seen)
        kept = {k: v for k, v in found.items() if k == self.task.best or not math.isnan(v)}
        return {**kept, "images": len(seen)}


def detector_input(data: DataConfig, config: DetectionConfig, dataset: DetectionDataset) -> Input:
    """Return what the detector takes, normalised as the config says, else as the data set."""
    mean, std = list(data.mean or dataset.mean), list(data.std or dataset.std)
    # As torchvision resizes.
    taken = Input(dataset.channels, config.min_size, 1.0, "bilinear", mean, std)
    return taken.with_channels(dataset.channels)


def create_detector(
    model: ModelConfig, config: DetectionConfig, num_classes: int, taken: Input, seed: int = 0
) -> Detector:
    """Return a detector with fresh weights."""
    name = check_name(model)
    options = {key: value for key, value in vars(config).items() if key not in ("name", "levels")}
    arguments: dict[str, Any] = {
        "in_chans": taken.channels,
        "features_only": True,
        **arguments_of(model),
    }
    try:
        with torch.device("meta"):  # only to be asked for its strides
            features = timm.create_model(name, **arguments).feature_info
        strides = features.reduction()  # type: ignore[operator,union-attr]
        levels = config.levels if config.levels is not None else pyramid_levels(strides)
        torch.manual_seed(seed)
        body = timm.create_model(name, out_indices=tuple(levels), **arguments)
        torch.manual_seed(seed)  # networks draw more or less; what is on top starts the same
        return Detector(body, num_classes, taken.mean, taken.std, **options)
    except BUILD_ERRORS as error:
        raise UserError(f"task: {explain(error, name)}") from error


def load_backbone_(body: nn.Module, config: Config, weights: Weights, channels: int) -> None:
    """Load a classifier's weights; rigid ones fit any variant, as in classification."""
    assert config.model.name is not None
    num_classes, _ = classes_and_channels(config.model.name, weights.tensors)
    classifier = create_network(config.model, num_classes, channels)
    load_(classifier, weights, config.model.pretrained)
    inner = getattr(body, "model", body)  # what timm wraps to get features of
    missing = inner.load_state_dict(classifier.state_dict(), strict=False).missing_keys
    if missing:
        raise UserError(
            f"model.pretrained={config.model.pretrained} has no weights for "
            f"{', '.join(missing[:3])}"
        )
