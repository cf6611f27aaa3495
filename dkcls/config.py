"""The config: one dataclass per group of configs/, which `register` makes Hydra's schema.

A misspelt key or a wrong type fails when the config is composed, a value out of range when it is
turned into objects. Keys in `FREE` may change when a run is resumed; all others make another run.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

PRECISIONS = ("fp32", "bf16", "fp16")
FREE = frozenset(
    {
        "name", "out", "resume",
        "data.root", "data.workers", "data.prefetch", "data.download", "data.bad_limit",
        "data.worker_restarts",
        "train.device", "train.dry_run", "train.timeout", "train.max_bad_steps",
        "train.on_save_error", "train.checkpoint_every", "train.keep",
        "log.every", "log.tensorboard", "log.images",
    }
)  # fmt: skip


# Without any of these, train.py trains the quickstart.
ASKS = ("experiment", "model", "model.name", "model.pretrained", "data", "data.name", "task")


@dataclass
class ModelConfig:
    """A network by its name in timm. What is null is left to the network's own default."""

    # ours: resnet50_dw, mobilenetv2_dw, mobilenetv2_nano; any of timm's; null: the checkpoint's
    name: str | None = None
    # a checkpoint or .safetensors to start from; rigid weights fit DK networks too
    pretrained: str | None = None
    # "backbone", all but the classifier; or the beginnings of names: [conv_stem,bn1,blocks.0]
    freeze: Any = None
    # depthwise: rigid, static, global_dk, local_dk, dcn, dcn_local_dk, cond
    spatial: str | None = None
    pointwise: str | None = None  # 1x1: rigid, global_dk, cond
    scope: int | None = None  # of the depthwise deformable kernels
    pointwise_scope: int | None = None
    experts: int | None = None  # of conditional convolutions
    grid: Any = None  # where taps start: centered, spread, or the step between them
    clip: str | None = None  # of kernel coordinates: hard, projected
    scope_init: str | None = None  # rigid, independent
    depthwise_gain: float | None = None  # scales the initial depthwise weights
    drop_rate: float | None = None  # dropout before the classifier
    drop_path_rate: float | None = None  # stochastic depth
    # further arguments of timm.create_model, as +model.kwargs.NAME=VALUE
    kwargs: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments for `timm.create_model`."""
        named = {
            key: value
            for key, value in vars(self).items()
            if key not in ("name", "pretrained", "freeze", "kwargs")
        }
        return {key: value for key, value in named.items() if value is not None} | self.kwargs


@dataclass
class DataConfig:
    """A data set and what is done to its images."""

    # imagefolder, tar, deformed_fashion, synthetic, cifar10, cifar100, fashion_mnist
    name: str | None = None
    root: str | None = None  # the folder with train/ and val/; the embedded sets have none
    image_size: int | None = None  # pixels; null: the set's own (ImageNet: 224)
    crop_ratio: float = 0.875  # evaluation: the part of the shorter side that the centre crop keeps
    # of resizing: bilinear, bicubic; null: as the pretrained weights have it, else bilinear
    interpolation: str | None = None
    # of the channels, from 0 to 1; null: the pretrained weights', else the data set's
    mean: list[float] | None = None
    std: list[float] | None = None  # what is divided by once the mean is subtracted; null: likewise
    # training: share of the area that a crop has
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    # training: aspect ratio of a crop
    ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    hflip: float = 0.5  # training: probability
    color_jitter: float = 0.4  # training: brightness, contrast and saturation by up to this share
    rand_augment: str | None = None  # timm's notation, such as rand-m9-mstd0.5
    erase_prob: float = 0.0  # random erasing
    mixup: float = 0.0  # alpha; 0: off
    cutmix: float = 0.0  # alpha; 0: off
    # deformed_*: sizes of an object, of its own; deformed_fashion: [0.4,1.1]
    object_scale: list[float] | None = None
    object_rotation: list[float] | None = None  # deformed_*: degrees, [-60,60]
    noise: float | None = None  # deformed_*: standard deviation, 0.1
    clutter: int | None = None  # deformed_fashion: patches of other objects, 0
    objects: list[int] | None = None  # deformed_detection: how many at least and at most
    # how many images: synthetic 1281167; deformed_*: the first so many of a split
    length: int | None = None
    num_classes: int | None = None  # synthetic: 1000
    # coco: rows of the annotations that cannot be used: stop (null), or skip them
    bad_rows: str | None = None
    download: bool = False  # torchvision's sets
    workers: int = 4  # processes per rank; 0: load in the training process
    prefetch: int = 2  # batches ahead per worker
    bad_limit: float = 0.001  # the run stops when more than this share of the files is bad
    # how often workers that died, killed for want of memory, are started again; 0: the run stops
    worker_restarts: int = 3

    def __post_init__(self) -> None:
        _check("data.workers", self.workers, self.workers >= 0, "at least 0")
        _check(
            "data.crop_ratio", self.crop_ratio, 0 < self.crop_ratio <= 1, "above 0 and at most 1"
        )
        filters, rules = (None, "bilinear", "bicubic"), (None, "stop", "skip")
        _check(
            "data.interpolation",
            self.interpolation,
            self.interpolation in filters,
            "bilinear, bicubic or null",
        )
        _check("data.bad_rows", self.bad_rows, self.bad_rows in rules, "stop, skip or null")
        for key, values in (("mean", self.mean), ("std", self.std)):
            good = values is None or (
                len(values) in (1, 3) and min(values) >= 0 and max(values) <= 1
            )
            _check(f"data.{key}", values, good, "one number or three, from 0 to 1, or null")
        _check("data.std", self.std, self.std is None or min(self.std) > 0, "above 0")
        for key, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            _check(f"data.{key}", alpha, alpha >= 0, "at least 0")
        for key, pair in (("scale", self.scale), ("ratio", self.ratio)):
            _check(
                f"data.{key}",
                pair,
                len(pair) == 2 and 0 < pair[0] <= pair[1],
                "two numbers, [low,high], above 0",
            )

    def dataset_arguments(self) -> dict[str, Any]:
        """Of `create_dataset`, but for the split."""
        names = (
            *(
                "name",
                "root",
                "image_size",
                "crop_ratio",
                "hflip",
                "color_jitter",
                "rand_augment",
                "erase_prob",
                "download",
            ),
            *("interpolation", "mean", "std"),
        )
        of_one_set = (
            "object_scale",
            "object_rotation",
            "noise",
            "clutter",
            "objects",
            "length",
            "num_classes",
            "bad_rows",
        )
        given = {
            name: getattr(self, name) for name in of_one_set if getattr(self, name) is not None
        }
        pairs = {"scale": (self.scale[0], self.scale[1]), "ratio": (self.ratio[0], self.ratio[1])}
        return {name: getattr(self, name) for name in names} | pairs | given


@dataclass
class OptimConfig:
    """SGD with momentum. The learning rate is lr, or base_lr per 256 images of the global batch."""

    lr: float | None = None  # null: base_lr * train.batch_size / 256
    base_lr: float = 0.1
    # multiplier of the learning rate of all offset generators (DK and DCN)
    generator_lr: float = 0.01
    # multiplier of the learning rate of all but the classifier, generators among them
    backbone_lr: float = 1.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 4e-5
    decay_norm: bool = False  # weight decay on the scale and shift of normalisation layers as well
    clip_grad: float | None = None  # largest norm of the gradient

    def __post_init__(self) -> None:
        for key in ("lr", "base_lr", "clip_grad"):
            value = getattr(self, key)
            _check(f"optim.{key}", value, value is None or value > 0, "above 0")
        for key in ("generator_lr", "backbone_lr", "weight_decay"):
            _check(f"optim.{key}", getattr(self, key), getattr(self, key) >= 0, "at least 0")
        _check("optim.momentum", self.momentum, 0 <= self.momentum < 1, "from 0 to below 1")


@dataclass
class ScheduleConfig:
    """Per step: linear warm-up from zero, then a cosine to zero, or the same rate with drops."""

    epochs: int = 90
    warmup_epochs: float = 5.0
    warmup_steps: int | None = None  # instead of warmup_epochs
    decay: str = "cosine"  # cosine, drops
    drop_epochs: list[int] = field(default_factory=lambda: [8, 11])  # drops: after so many
    gamma: float = 0.1  # drops: what the rate is multiplied by

    def __post_init__(self) -> None:
        _check("schedule.epochs", self.epochs, self.epochs >= 1, "at least 1")
        _check(
            "schedule.warmup_epochs",
            self.warmup_epochs,
            0 <= self.warmup_epochs < self.epochs,
            "from 0 to below epochs",
        )
        _check(
            "schedule.warmup_steps",
            self.warmup_steps,
            self.warmup_steps is None or self.warmup_steps >= 0,
            "at least 0",
        )
        _check("schedule.decay", self.decay, self.decay in ("cosine", "drops"), "cosine or drops")
        _check(
            "schedule.drop_epochs",
            self.drop_epochs,
            self.drop_epochs == sorted(self.drop_epochs),
            "in their order",
        )

    def steps(self, per_epoch: int) -> tuple[int, int]:
        """In all, and of warm-up."""
        total = self.epochs * per_epoch
        return total, round(self.warmup_epochs * per_epoch) if self.warmup_steps is None else min(
            self.warmup_steps, total - 1
        )

    def drops(self, per_epoch: int) -> list[int] | None:
        """The steps of the drops, None if there are none by design."""
        return [epoch * per_epoch for epoch in self.drop_epochs] if self.decay == "drops" else None


@dataclass
class TrainConfig:
    """How training runs."""

    batch_size: int = 256  # over all ranks and accumulation steps
    accumulation: int = 1  # steps of forward and backward per optimiser step
    # per rank; null: as many images as a training step has on a rank
    eval_batch_size: int | None = None
    eval_every: int = 1  # epochs
    label_smoothing: float = 0.0
    # of an exponential moving average of the weights, such as 0.9999
    ema_decay: float | None = None
    # fp32, bf16, fp16 (with loss scaling); auto: bf16 where the device has it, else fp32
    precision: str = "fp32"
    channels_last: bool = True
    compile: bool = False  # torch.compile
    sync_bn: bool = False  # batch statistics over all ranks; CUDA only
    freeze_bn: bool = False  # batch norm in evaluation mode throughout
    # only deterministic algorithms, on CUDA too; on the CPU runs repeat to the bit anyway
    deterministic: bool = False
    device: str = "auto"  # auto, cpu, cuda
    # steps between checkpoints, besides those at the end of every epoch; 0: none
    checkpoint_every: int = 0
    keep: int = 2  # how many of the newest checkpoints are kept, besides the best
    # steps in a row that may be skipped for a loss or gradient that is not finite
    max_bad_steps: int = 20
    on_save_error: str = "stop"  # when a checkpoint cannot be written, a full disk: stop, continue
    timeout: float = 600.0  # seconds that a rank waits for the others
    dry_run: bool = False  # build everything, run one step, say what the whole run would take, stop

    def __post_init__(self) -> None:
        for key in ("batch_size", "accumulation", "eval_every", "keep"):
            _check(f"train.{key}", getattr(self, key), getattr(self, key) >= 1, "at least 1")
        check_device("train.", self.device)
        _check(
            "train.precision",
            self.precision,
            self.precision in (*PRECISIONS, "auto"),
            f"{', '.join(PRECISIONS)} or auto",
        )
        _check(
            "train.on_save_error",
            self.on_save_error,
            self.on_save_error in ("stop", "continue"),
            "stop or continue",
        )
        _check(
            "train.label_smoothing",
            self.label_smoothing,
            0 <= self.label_smoothing < 1,
            "from 0 to below 1",
        )
        _check(
            "train.ema_decay",
            self.ema_decay,
            self.ema_decay is None or 0 < self.ema_decay < 1,
            "between 0 and 1",
        )
        _check("train.timeout", self.timeout, self.timeout > 0, "above 0")


@dataclass
class DetectorConfig:
    """Faster R-CNN with FPN over the network of `model`. Read by task=detection alone."""

    min_size: int = 800  # pixels: images are resized to this shorter side
    max_size: int = 1333  # but to no longer side than this
    # of the network's feature maps, finest first; null: those of strides 4 to 32
    levels: list[int] | None = None
    fpn_channels: int = 256
    box_channels: int = 1024  # of the box head's hidden layers
    # pixels: one per level, one for its pool
    anchor_sizes: list[float] = field(default_factory=lambda: [32, 64, 128, 256, 512])
    # per image and level before suppression, and per image after it, in training; in evaluation
    # half of it
    proposals: int = 2000
    box_samples: int = 512  # proposals per image that the box head trains on
    anchor_samples: int = 256  # anchors per image that the proposals train on
    score_threshold: float = 0.05
    nms_threshold: float = 0.5
    detections: int = 100  # per image, at most

    def __post_init__(self) -> None:
        _check(
            "detector.min_size",
            self.min_size,
            0 < self.min_size <= self.max_size,
            "above 0 and at most max_size",
        )
        for key in (
            "fpn_channels",
            "box_channels",
            "proposals",
            "box_samples",
            "anchor_samples",
            "detections",
        ):
            _check(f"detector.{key}", getattr(self, key), getattr(self, key) >= 1, "at least 1")
        for key in ("score_threshold", "nms_threshold"):
            _check(
                f"detector.{key}", getattr(self, key), 0 <= getattr(self, key) <= 1, "from 0 to 1"
            )


@dataclass
class LogConfig:
    """What is written while a run goes on, besides the results of evaluations."""

    every: int = 50  # steps between lines of metrics
    tensorboard: bool = True
    images: int = 32  # training images shown in TensorBoard, once; 0: none

    def __post_init__(self) -> None:
        _check("log.every", self.every, self.every >= 1, "at least 1")


@dataclass
class Config:
    """A run. Its directory is out/name, and the same command goes on with it."""

    name: str | None = None  # null: the experiment's, with what else was given on the command line
    out: str = "runs"
    seed: int = 0
    resume: str = "auto"  # auto: go on with what out/name holds; never: stop if it holds anything
    task: str = "classification"  # classification, detection
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        _check(
            "task",
            self.task,
            self.task in ("classification", "detection"),
            "classification or detection",
        )
        _check("resume", self.resume, self.resume in ("auto", "never"), "auto or never")
        _check("seed", self.seed, 0 <= self.seed < 2**31, "from 0 to 2147483647")
        if self.name is not None:
            _check(
                "name",
                self.name,
                bool(self.name) and not set(self.name) & set("=/\\ "),
                "without '=', '/', '\\' or spaces",
            )

    @property
    def learning_rate(self) -> float:
        return (
            self.optim.lr
            if self.optim.lr is not None
            else self.optim.base_lr * self.train.batch_size / 256
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class EvalConfig:
    """The config of eval.py.

    A checkpoint knows its network and its data; what is given of `data` goes on top.
    """

    # a path, or several as [a,b]; or an exported .safetensors or .onnx; short for model.pretrained
    checkpoint: Any = None
    # of weights that do not say what they are
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    split: str = "val"  # train, val, test
    weights: str = "auto"  # auto: the moving average if there is one; ema, model
    flip: bool = False  # the mean of the probabilities of an image and its mirror image
    batch_size: int = 256  # per rank
    precision: str = "fp32"  # fp32, bf16, fp16
    device: str = "auto"  # auto, cpu, cuda
    json: str | None = None  # a file for the figures
    per_class: str | None = None  # a .csv file for the figures of every class
    confusion: str | None = None  # a .png file for the confusion matrix, of at most 100 classes
    timeout: float = 600.0  # seconds that a rank waits for the others

    def __post_init__(self) -> None:
        check_weights(self.weights)
        check_device("", self.device)
        check_precision(self.precision)
        _check("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")


def check_weights(weights: str) -> None:
    _check("weights", weights, weights in ("auto", "ema", "model"), "auto, ema or model")


def check_device(prefix: str, device: str) -> None:
    """`prefix`: of the key."""
    _check(f"{prefix}device", device, device in ("auto", "cpu", "cuda"), "auto, cpu or cuda")


def check_precision(precision: str) -> None:
    _check("precision", precision, precision in PRECISIONS, ", ".join(PRECISIONS))


@cache
def register() -> None:
    """Tells Hydra of the schemas: `- schema` or `- eval_schema` in a defaults list."""
    ConfigStore.instance().store(name="schema", node=Config)
    ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def to_config(composed: DictConfig) -> Any:
    """Return typed objects, a Config or an EvalConfig. ValueError says which key is wrong."""
    kind = OmegaConf.get_type(composed) or Config
    valid = set(valid_keys(kind))
    for key, _ in flat(OmegaConf.to_container(composed)):  # type: ignore[arg-type]
        if key not in valid:
            raise ValueError(unknown_key(key, kind))
    return OmegaConf.to_object(composed)


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config that `Config.to_dict` came from, as in a checkpoint."""
    merged = OmegaConf.merge(OmegaConf.structured(Config), dict(values))
    return to_config(merged)  # type: ignore[arg-type]


def valid_keys(kind: type = Config) -> list[str]:
    return [key for key, _ in flat(asdict(kind()))]


def unknown_key(key: str, kind: type = Config) -> str:
    """A sentence for a key that there is not."""
    valid = valid_keys(kind)
    near = get_close_matches(key, valid, 1, 0.5) or get_close_matches(
        key.split(".")[-1], valid, 1, 0.3
    )
    return f"there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value), dictionaries of free content as one value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "kwargs":
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """'key: old -> new' for what makes two configs two runs."""
    before, after = (
        dict(flat(Config().to_dict())) | dict(flat(old)),
        dict(flat(new)),
    )  # a key that is new was at its default
    keys = [key for key in after if key not in FREE and before.get(key) != after[key]]
    return [f"{key}: {before.get(key)} -> {after[key]}" for key in keys]


def asks_for_nothing(words: Iterable[str]) -> bool:
    """Return whether a command line leaves network and data open: the quickstart is meant."""
    return not any("=" in word and word.lstrip("+~").partition("=")[0] in ASKS for word in words)


def run_name(experiment: str | None, overrides: Iterable[str]) -> str:
    """The experiment, and those overrides that make it another run: quickstart-model.scope-5."""
    parts = [experiment] if experiment is not None else []
    for override in sorted(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        if key not in FREE and key != "experiment" and not key.startswith("hydra"):
            parts.append(f"{key}-{''.join(c if c.isalnum() or c in '._' else '_' for c in value)}")
    return "-".join(parts)


def _check(key: str, value: Any, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{key} must be {expected}, got {value!r}")
