"""Effects of every config key: one row for each, seen on the objects that make up a run.

A row has a value other than the default, and a function that looks at what the key is for. The
function's result must differ between the two values, and be what the row says where that is known.
A row that is a string names the test that checks the key's effect.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from dkcls.config import Config, EvalConfig, ModelConfig, task_config, valid_keys
from dkcls.config.convert import to_config
from dkcls.data import create_dataset
from dkcls.engine import distributed, run
from dkcls.engine import evaluate as evaluating
from dkcls.engine.distributed import World
from dkcls.engine.evaluate import data_for
from dkcls.engine.network import Weights, create_network, network_config
from dkcls.engine.run import build_trainer, train
from dkcls.engine.run_directory import RunDirectory
from dkcls.engine.task import TASKS, Card, Input
from dkcls.engine.trainer import StopRequest, Trainer
from dkcls.errors import UserError
from dkcls.tasks.detection.task import create_detector
from tests.data.common import make_folder
from tests.data.sets.test_coco import content_of
from tests.data.sets.test_coco import write as write_coco
from tests.engine.checkpoints import write_checkpoint
from tests.engine.common import ROOT, run_here, same_bits
from tests.models.common import awake, images, stir

CPU = World(torch.device("cpu"))
UNKNOWN = object()
TINY = {
    "name": "small",
    "model.name": "mobilenetv2_nano",
    "model.spatial": "rigid",
    "data.name": "synthetic",
    "data.workers": 0,
    "data.image_size": 16,
    "data.options": {"length": 24, "num_classes": 10},
    "train.batch_size": 8,
    "schedule.epochs": 2,
    "schedule.warmup_epochs": 0.0,
    "log.to": [],
    "optim.lr": 0.1,
}


@dataclass(frozen=True)
class Row:
    """A value for a key, and a function that sees its effect.

    `given` has other keys that the effect needs; `before` and `after` are seen at the default and
    with the value.
    """

    value: Any
    see: Callable[..., Any]
    before: Any = UNKNOWN
    after: Any = UNKNOWN
    given: dict[str, Any] = field(default_factory=dict)


def config_with(kind: type, keys: dict[str, Any]) -> Any:
    task = task_config(keys.get("task.name", "classification"))
    config = OmegaConf.structured(Config(task=task()) if kind is Config else kind)
    for key, value in keys.items():
        OmegaConf.update(config, key, value, force_add=True)
    return to_config(config)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders of photographs, weights, and checkpoints with and without a moving average."""
    folder = tmp_path_factory.mktemp("files")
    make_folder(folder / "photos", train=6, val=4)
    make_folder(folder / "more", train=9, val=5)
    rows = content_of()
    rows["images"][1]["id"] = "99"
    write_coco(folder / "coco", rows)
    weights = create_network(ModelConfig("mobilenetv2_nano"), 10, 3, seed=7).state_dict()
    save_file(weights, folder / "w.safetensors")
    state = torch.load(write_checkpoint(folder / "plain.pt"), weights_only=True)
    average = {name: torch.ones_like(value) for name, value in state["model"].items()}
    torch.save(state | {"ema": average}, folder / "a.pt")
    torch.save(state | {"ema": average}, folder / "b.pt")
    return folder


# What is seen of networks.


def network(config: Config) -> nn.Module:
    return create_network(config.model, 10, 1)


def logits(config: Config) -> torch.Tensor:
    """With offsets that are large enough to leave the scope."""
    with torch.no_grad():
        return stir(awake(network(config)), 0.5)(images())


def kind_of(name: str) -> Callable[[Config], str]:
    return lambda config: type(network(config).get_submodule(name)).__name__


def shape_of(name: str) -> Callable[[Config], list[int]]:
    return lambda config: list(network(config).get_parameter(name).shape)


def depthwise_scale(config: Config) -> float:
    """Of the initial weights, relative to the same draws without a gain."""
    name = "blocks.1.0.conv_dw.weight"
    plain = create_network(ModelConfig("mobilenetv2_nano", spatial="rigid"), 10, 1).get_parameter(
        name
    )
    return (network(config).get_parameter(name) / plain).mean().item()


def pool(config: Config) -> str:
    return network(config).global_pool.pool_type


def architecture(config: Config) -> str:
    return network(config).pretrained_cfg["architecture"]


# What is seen of a run's parts.


def parts(config: Config) -> Any:
    return TASKS[config.task.name].build(config, CPU)


def starts_from(config: Config, files: Path) -> bool:
    """Whether the network has the weights of w.safetensors."""
    expected = create_network(ModelConfig("mobilenetv2_nano"), 10, 3, seed=7)
    return torch.equal(parts(config).model.conv_stem.weight, expected.conv_stem.weight)


def trained_names(config: Config) -> list[str]:
    return [name for name, p in parts(config).model.named_parameters() if p.requires_grad]


class Spy(nn.Module):
    """Keeps what it is fed, and says the same of every image."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.images = images
        return torch.tensor([[3.0, 1.0] + 8 * [0.0]]).expand(len(images), -1)


def loss_and_images(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    built, spy = parts(config), Spy()
    batch = built.train_set.load(np.zeros(4, dtype=np.int64) + [0, 0, 1, 1]).batch
    np.random.seed(0)
    loss, _ = built.task.loss(spy, batch)
    return loss, spy.images


def loss(config: Config) -> float:
    return loss_and_images(config)[0].item()


def fed(config: Config) -> torch.Tensor:
    return loss_and_images(config)[1]


def white(config: Config) -> float:
    """The red of a white pixel, as the network gets it."""
    batch = parts(config).val_set.load(np.arange(1)).batch
    return (
        parts(config)
        .task.images(batch._replace(images=torch.full_like(batch.images, 255)))[0, 0, 0, 0]
        .item()
    )


def first_weights(config: Config) -> torch.Tensor:
    return parts(config).model.conv_stem.weight.detach()


# What is seen of data.


def dataset(config: Config, training: bool = True) -> Any:
    split = "train" if training else "val"
    return create_dataset(
        config.data, split, config.seed, augment=config.augment, training=training
    )


def augmented(config: Config, files: Path) -> torch.Tensor:
    config.data.root = str(files / config.data.root)
    return dataset(config).load(np.arange(3)).batch.images


def whole(config: Config, files: Path) -> list[bool]:
    """Return whether the images are as without augmentation, and whether they are mirrored."""
    plain = config_with(Config, TINY | STILL)
    seen, unchanged = augmented(config, files), augmented(plain, files)
    return [torch.equal(seen, unchanged), torch.equal(seen, unchanged.flip(-1))]


def evaluated(config: Config, files: Path) -> torch.Tensor:
    config.data.root = str(files / config.data.root)
    return dataset(config, training=False).load(np.arange(3)).batch.images


def files_found(config: Config, files: Path) -> int:
    config.data.root = str(files / config.data.root)
    return len(dataset(config))


def rows_used(config: Config, files: Path) -> str:
    """How many images, or the end of the sentence that refuses them."""
    try:
        return f"{files_found(config, files)} images"
    except UserError as error:
        return str(error).split("; ")[-1]


def scales(config: Config) -> list[float]:
    return sorted({round(float(s), 6) for s in dataset(config).factors(np.arange(5)).scale})


def rotations(config: Config) -> list[float]:
    return sorted({round(float(s), 6) for s in dataset(config).factors(np.arange(5)).rotation})


def dark_pixels(config: Config) -> float:
    """Return the standard deviation of the background, from 0 to 1.

    Only noise is there, and half of it is cut off.
    """
    drawn = dataset(config).load(np.arange(20)).batch.images / 255
    return drawn[:, :, 0, 0].square().mean().sqrt().item()


def strewn(config: Config) -> torch.Tensor:
    return dataset(config).load(np.arange(5)).batch.images


def objects_each(config: Config) -> set[int]:
    return {len(target["labels"]) for target in dataset(config).load(np.arange(20)).batch.targets}


def downloads(config: Config, monkeypatch: pytest.MonkeyPatch) -> bool:
    asked = []

    def read(root: str, train: bool, download: bool) -> SimpleNamespace:
        asked.append(download)
        pixels = np.zeros((2, 32, 32, 3), np.uint8)
        return SimpleNamespace(data=pixels, targets=[0, 1], classes=["a", "b"])

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", read)
    dataset(config)
    return asked[0]


# What is seen of the trainer.


def trainer(config: Config) -> Trainer:
    return build_trainer(config, CPU)


def workers(config: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Return number, batches ahead, restarts and limit of bad files of both loaders' workers.

    No worker is started.
    """
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    loaders = trainer(config).loaders
    told = [
        (x._loader.num_workers, x._loader.prefetch_factor, x.worker_restarts, x.bad_files.limit)
        for x in loaders
    ]
    assert told[0] == told[1]
    return told[0]


def batches(config: Config) -> tuple[int, int]:
    """Images in a batch of training and of evaluation."""
    return tuple(len(next(iter(loader)).targets) for loader in trainer(config).loaders)


def group(key: str, name: str = "weights") -> Callable[[Config], Any]:
    return lambda config: {g["name"]: g for g in trainer(config).optimizer.param_groups}[name][key]


def rates(config: Config) -> list[float]:
    """The learning rate of every step."""
    made = trainer(config)
    found = []
    for step in range(made.total_steps):
        made.schedule.step_update(step)
        found.append(round(made.optimizer.param_groups[0]["lr"], 6))
    return found


def average_decay(config: Config) -> float | None:
    ema = trainer(config).ema
    return ema and ema.decay


def layout(config: Config) -> bool:
    return trainer(config).model.conv_stem.weight.is_contiguous(memory_format=torch.channels_last)


def compiles(config: Config, monkeypatch: pytest.MonkeyPatch) -> bool:
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    trainer(config)
    return bool(compiled)


def refusal(config: Config) -> str:
    with suppress(UserError):
        trainer(config)
        return ""
    with pytest.raises(UserError) as refused:
        trainer(config)
    return str(refused.value)


def norms_in_training(config: Config) -> set[bool]:
    made = trainer(config)
    made.set_train_mode()
    return {
        module.training for module in made.model.modules() if isinstance(module, nn.BatchNorm2d)
    }


def precision_of_a_step(config: Config) -> tuple[torch.dtype, bool]:
    """What the network gives in a step, and whether the loss is scaled."""
    made = trainer(config)
    given = []
    made.model.register_forward_hook(lambda module, args, out: given.append(out.dtype))
    made.set_train_mode()
    made.train_step(iter(made.train_loader))
    return given[0], made.scaler.is_enabled()


class Recorder:
    """In the place of a log or of the checkpoints: what it was asked for."""

    loggers = ()

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []
        self.saved: list[int] = []

    def metrics(self, kind: str, step: int, epoch: int, values: dict[str, float]) -> None:
        self.lines.append((kind, step))

    def save(self, state: dict[str, Any], *, best: bool = False, trained: bool = False) -> None:
        self.saved.append(state["step"])

    def step(self) -> None: ...

    def sync(self) -> None: ...


def fitted(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, int]:
    """A run of steps that do nothing, and how many checkpoints it would have kept."""
    made, recorder, kept = trainer(config), Recorder(), []

    def step(self: Trainer, batches: Any) -> None:
        self.step += 1

    def checkpoints(path: Path, keep: int) -> Recorder:
        kept.append(keep)
        return recorder

    module = import_module("dkcls.engine.trainer")
    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(module, "Checkpoints", checkpoints)
    monkeypatch.setattr(module, "measure", lambda *_: {"top1": 1.0})
    made.fit(RunDirectory(tmp_path), recorder, StopRequest())
    return recorder, kept[0]


def saved_steps(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    return set(fitted(config, tmp_path, monkeypatch)[0].saved)


def evaluated_steps(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return [step for kind, step in fitted(config, tmp_path, monkeypatch)[0].lines if kind == "val"]


def logged_steps(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return [
        step for kind, step in fitted(config, tmp_path, monkeypatch)[0].lines if kind == "train"
    ]


def kept(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    return fitted(config, tmp_path, monkeypatch)[1]


# What is seen of a whole run, up to the point where its parts are built, or without its training.


class Enough(Exception):
    """Nothing more is to be seen."""


def begun(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return which task builds, where the run is held, on which device, and its timeout."""
    seen: dict[str, Any] = {}

    def builder(task: str) -> Callable[..., Any]:
        def build(cls: type, config: Config, world: World) -> Any:
            held = [str(file.parent) for file in Path().rglob(".lock")]
            exact = torch.are_deterministic_algorithms_enabled()
            seen.update(task=task, held=held, device=world.device.type, exact=exact)
            raise Enough

        return build

    start = distributed.start
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(
        distributed, "start", lambda *told: seen.update(timeout=told[1]) or start(*told)
    )
    for name, task in TASKS.items():
        monkeypatch.setattr(task, "build", classmethod(builder(name)))
    try:
        with pytest.raises(Enough):
            train(config)
    finally:
        torch.use_deterministic_algorithms(False)
    return seen


def begins(name: str) -> Callable[..., Any]:
    def see(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        return begun(config, tmp_path, monkeypatch)[name]

    return see


def board(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int] | None:
    """The size of the picture of training images in TensorBoard; None without its files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Trainer, "fit", lambda *_: {})
    monkeypatch.setattr(run, "count_macs", lambda *_: 0)
    train(config)
    found = EventAccumulator(str(tmp_path / "runs/small/tensorboard"))
    if not (tmp_path / "runs/small/tensorboard").exists():
        return None
    found.Reload()
    [picture] = found.Images("train")
    return picture.width, picture.height


# What is seen of detectors.


def detector(path: str) -> dict[str, Any]:
    """The attribute of that path, of a detector."""

    def see(config: Config) -> Any:
        taken = Input(1, config.task.min_size, 1.0, "bilinear", [0.15], [0.25])
        found: Any = create_detector(config.model, config.task, 10, taken)
        for name in path.split("."):
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        return found() if inspect.ismethod(found) else found

    return {"see": see, "given": SMALL_DETECTOR}


# What is seen of evaluations.


def looked_at(
    config: EvalConfig, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What eval.py's configuration makes it evaluate, and how; nothing is."""
    seen: dict[str, Any] = {}

    def measure(
        evaluation: Any, model: nn.Module, batches: Any, world: World, precision: str
    ) -> dict[str, Any]:
        loader = batches.iterable
        seen.update(
            precision=precision,
            batch=loader.sampler.batch_size,
            images=len(loader.dataset),
            flip=evaluation.flip,
            all_ones=bool((model.conv_stem.weight == 1).all()),
        )
        return {"images": 1}

    monkeypatch.chdir(files)
    monkeypatch.setattr(evaluating, "measure", measure)
    result = evaluating.evaluate(config.checkpoint, config, CPU)
    return seen | {"path": result["checkpoint"]}


def looks(name: str) -> Callable[..., Any]:
    def see(
        config: EvalConfig, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Any:
        return looked_at(config, files, tmp_path, monkeypatch)[name]

    return see


def told_to_start(
    config: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> str:
    """The device and the seconds that eval.py asks for."""

    def start(device: str, timeout: float) -> Any:
        raise UserError(f"{device} {timeout}")

    monkeypatch.setattr(distributed, "start", start)
    assert (
        run_here(
            monkeypatch,
            tmp_path,
            f"device={config.device}",
            f"timeout={config.timeout}",
            script="eval.py",
        )
        == 1
    )
    return capsys.readouterr().err.strip()


PHOTOS = {"data.name": "folder", "data.root": "photos", "data.options": {}}
COCO = PHOTOS | {
    "data.name": "coco",
    "data.root": "coco",
    "data.image_size": None,
    "task.name": "detection",
}
STILL = PHOTOS | {
    "augment.color_jitter": 0.0,
    "augment.scale": [1.0, 1.0],
    "augment.ratio": [61 / 47, 61 / 47],
    "augment.hflip": 0.0,
}
FASHION = {"data.name": "deformed_fashion", "data.options": {}, "data.image_size": 32}
CANVASES = {"data.name": "deformed_detection", "data.options": {}, "data.image_size": 96}
LOCAL = {"model.spatial": "local_dk"}
TWO_EPOCHS = {"data.options": {"length": 32, "num_classes": 10}}  # of 4 steps each
DROPS = {"schedule.name": "drops", "schedule.drop_epochs": [1]}
BOARD = {"log.to": ["tensorboard"]}
SMALL_DETECTOR = {
    "task.name": "detection",
    "task.fpn_channels": 8,
    "task.box_channels": 16,
    "task.anchor_sizes": [8.0, 16.0, 32.0],
}
COSINE = [round(0.05 * (1 + math.cos(math.pi * step / 8)), 6) for step in range(8)]
LOSS = math.log(math.e**3 + math.e + 8)  # of the spy's logits, before the target's is taken off

ROWS: dict[str, Row | str] = {
    "name": Row("other", begins("held"), ["runs/small"], ["runs/other"]),
    "out": Row("elsewhere", begins("held"), ["runs/small"], ["elsewhere/small"]),
    "seed": Row(1, first_weights),
    "resume": "tests/engine/test_train.py::test_what_is_the_users_to_put_right",
    "model.name": Row(
        "test_resnet", architecture, "mobilenetv2_nano", "test_resnet", {"model.spatial": None}
    ),
    "model.pretrained": Row("w.safetensors", starts_from, False, True),
    "model.freeze": Row("backbone", trained_names, after=["classifier.weight", "classifier.bias"]),
    "model.spatial": Row(
        "local_dk", kind_of("blocks.1.0.conv_dw"), "Conv2d", "LocalDeformKernel2d"
    ),
    "model.pointwise": Row("cond", kind_of("blocks.1.0.conv_pw"), "Conv2d", "CondConv2d"),
    "model.scope": Row(
        6, lambda config: shape_of("blocks.1.0.conv_dw.weight")(config)[2:], [4, 4], [6, 6], LOCAL
    ),
    "model.pointwise_scope": Row(
        3,
        lambda config: shape_of("blocks.1.0.conv_pw.weight")(config)[2:],
        [2, 2],
        [3, 3],
        {"model.pointwise": "global_dk"},
    ),
    "model.experts": Row(
        5,
        lambda config: network(config).blocks[1][0].conv_pw.experts,
        8,
        5,
        {"model.pointwise": "cond"},
    ),
    "model.grid": Row("spread", logits, given=LOCAL),
    "model.clip": Row(
        "projected",
        lambda config: network(config).blocks[1][0].conv_dw.clip,
        "hard",
        "projected",
        LOCAL,
    ),
    "model.scope_init": Row("independent", logits, given=LOCAL),
    "model.depthwise_gain": Row(0.5, depthwise_scale, pytest.approx(1.0), pytest.approx(0.5)),
    "model.drop_rate": (
        "tests/engine/test_options.py::test_what_is_dropped_is_dropped_in_training_alone"
    ),
    "model.drop_path_rate": (
        "tests/engine/test_options.py::test_what_is_dropped_is_dropped_in_training_alone"
    ),
    "model.options": Row(
        {"backend": "reference"},
        lambda config: network(config).blocks[1][0].conv_dw.backend,
        None,
        "reference",
        LOCAL,
    ),
    "model.kwargs": Row({"global_pool": "max"}, pool, "avg", "max"),
    "data.name": Row(
        "deformed_fashion",
        lambda config: type(dataset(config)).__name__,
        given={"data.options": {}},
    ),
    "data.root": Row("more", files_found, 6, 9, PHOTOS),
    "data.image_size": Row(
        20, lambda config: list(fed(config).shape), [4, 3, 16, 16], [4, 3, 20, 20]
    ),
    "data.crop_ratio": Row(0.5, evaluated, given=PHOTOS),
    "data.interpolation": Row("bicubic", evaluated, given=PHOTOS | {"data.image_size": 32}),
    "data.mean": Row([0.25], white, pytest.approx(0.515 / 0.229), pytest.approx(0.75 / 0.229)),
    "data.std": Row([0.5], white, pytest.approx(0.515 / 0.229), pytest.approx(0.515 / 0.5)),
    "augment.scale": Row([0.1, 0.2], whole, [True, False], [False, False], STILL),
    "augment.ratio": Row([0.5, 0.6], whole, [True, False], [False, False], STILL),
    "augment.hflip": Row(1.0, whole, [True, False], [False, True], STILL),
    "augment.color_jitter": Row(0.4, whole, [True, False], [False, False], STILL),
    "augment.rand_augment": Row("rand-m9-mstd0.5", augmented, given=STILL),
    "augment.erase_prob": Row(1.0, augmented, given=STILL),
    "augment.mixup": Row(1.0, fed),
    "augment.cutmix": Row(1.0, fed),
    "data.options": Row({"length": 16, "num_classes": 10}, lambda c: len(dataset(c)), 24, 16),
    "data.download": Row(True, downloads, False, True, PHOTOS | {"data.name": "cifar10"}),
    "data.workers": Row(3, workers, (0, None, 3, 0.001), (3, 2, 3, 0.001)),
    "data.prefetch": Row(5, workers, (1, 2, 3, 0.001), (1, 5, 3, 0.001), {"data.workers": 1}),
    "data.bad_limit": Row(0.5, workers, (0, None, 3, 0.001), (0, None, 3, 0.5)),
    "data.max_pixels": Row(99, lambda c: dataset(c).max_pixels, 89_478_485, 99, PHOTOS),
    "data.worker_restarts": Row(1, workers, (0, None, 3, 0.001), (0, None, 1, 0.001)),
    "optim.lr": Row(0.3, group("lr"), 0.1, 0.3),
    "optim.base_lr": Row(3.2, group("lr"), 0.1 / 32, 0.1, {"optim.lr": None}),
    "optim.generator_lr": Row(0.5, group("lr", "generators"), pytest.approx(0.001), 0.05, LOCAL),
    "optim.backbone_lr": Row(0.5, group("lr"), 0.1, 0.05),
    "optim.momentum": Row(0.5, group("momentum"), 0.9, 0.5),
    "optim.nesterov": Row(True, group("nesterov"), False, True),
    "optim.weight_decay": Row(0.01, group("weight_decay"), 4e-5, 0.01),
    "optim.decay_norm": Row(True, group("weight_decay", "norms"), 0.0, 4e-5),
    "optim.clip_grad": (
        "tests/engine/test_options.py::test_weights_after_two_steps_are_those_on_paper"
    ),
    "schedule.epochs": Row(3, lambda config: trainer(config).total_steps, 6, 9),
    "schedule.warmup_epochs": Row(
        0.5, lambda config: rates(config)[:3], COSINE[:3], [0.0, 0.05, 0.1], TWO_EPOCHS
    ),
    "schedule.warmup_steps": Row(
        4, lambda config: rates(config)[:5], COSINE[:5], [0.0, 0.025, 0.05, 0.075, 0.1], TWO_EPOCHS
    ),
    "schedule.name": Row(
        "drops", rates, COSINE, 4 * [0.1] + 4 * [0.01], TWO_EPOCHS | {"schedule.drop_epochs": [1]}
    ),
    "schedule.drop_epochs": Row([], rates, 4 * [0.1] + 4 * [0.01], 8 * [0.1], TWO_EPOCHS | DROPS),
    "schedule.gamma": Row(
        0.5, rates, 4 * [0.1] + 4 * [0.01], 4 * [0.1] + 4 * [0.05], TWO_EPOCHS | DROPS
    ),
    "train.batch_size": Row(4, batches, (8, 8), (4, 4)),
    "train.accumulation": Row(2, batches, (8, 8), (4, 4)),
    "train.eval_batch_size": Row(3, batches, (8, 8), (8, 3)),
    "train.eval_every": Row(2, evaluated_steps, [3, 6, 9, 12], [6, 12], {"schedule.epochs": 4}),
    # The targets' logits, of two images of class 0 and two of class 1, are 2 on average, and those
    # of all classes 0.4.
    "task.name": Row("detection", begins("task"), "classification", "detection"),
    "task.label_smoothing": Row(
        0.1, loss, pytest.approx(LOSS - 2), pytest.approx(LOSS - 0.9 * 2 - 0.1 * 0.4)
    ),
    "train.ema_decay": Row(0.25, average_decay, None, 0.25),
    "train.precision": Row(
        "bf16", precision_of_a_step, (torch.float32, False), (torch.bfloat16, False)
    ),
    "train.channels_last": Row(False, layout, True, False),
    "train.compile": Row(True, compiles, False, True),
    "train.sync_bn": Row(
        True,
        refusal,
        "",
        "train.sync_bn=true needs CUDA: PyTorch has no synchronised batch norm on the CPU",
    ),
    "train.freeze_bn": Row(True, norms_in_training, {True}, {False}),
    "train.deterministic": Row(True, begins("exact"), False, True),
    "train.device": Row("cpu", begins("device"), "cuda", "cpu"),
    "train.checkpoint_every": Row(2, saved_steps, {3, 6}, {2, 3, 4, 6}),
    "train.keep": Row(5, kept, 2, 5),
    "train.max_bad_steps": "tests/engine/test_options.py::test_too_many_of_them_stop_the_run",
    "train.on_save_error": "tests/engine/test_options.py::test_a_checkpoint_that_cannot_be_written",
    "train.timeout": Row(5.0, begins("timeout"), 600.0, 5.0),
    "train.dry_run": "tests/config/test_configs.py::test_dry_run",
    "task.min_size": Row(400, **detector("transform.min_size"), before=(800,), after=(400,)),
    "task.max_size": Row(900, **detector("transform.max_size"), before=1333, after=900),
    "task.levels": Row(
        [0, 2], **detector("body.feature_info.reduction"), before=[4, 8], after=[2, 8]
    ),
    "task.fpn_channels": Row(12, **detector("backbone.out_channels"), before=8, after=12),
    "task.box_channels": Row(
        24, **detector("roi_heads.box_head.fc7.out_features"), before=16, after=24
    ),
    "task.anchor_sizes": Row(
        [4.0, 9.0, 25.0],
        **detector("rpn.anchor_generator.sizes"),
        before=((8.0,), (16.0,), (32.0,)),
        after=((4.0,), (9.0,), (25.0,)),
    ),
    "task.proposals": Row(
        40,
        **detector("rpn._post_nms_top_n"),
        before={"training": 2000, "testing": 1000},
        after={"training": 40, "testing": 20},
    ),
    "task.box_samples": Row(
        64, **detector("roi_heads.fg_bg_sampler.batch_size_per_image"), before=512, after=64
    ),
    "task.anchor_samples": Row(
        32, **detector("rpn.fg_bg_sampler.batch_size_per_image"), before=256, after=32
    ),
    "task.score_threshold": Row(0.2, **detector("roi_heads.score_thresh"), before=0.05, after=0.2),
    "task.nms_threshold": Row(0.7, **detector("roi_heads.nms_thresh"), before=0.5, after=0.7),
    "task.detections": Row(7, **detector("roi_heads.detections_per_img"), before=100, after=7),
    "log.every": Row(2, logged_steps, [], [2, 4, 6]),
    "log.to": Row(["tensorboard"], board, None),
    "log.images": Row(1, board, after=(16, 16), given=BOARD),
}

# What single data sets take, as data.options.NAME.
OPTION_ROWS: dict[str, Row] = {
    "data.options.object_scale": Row([0.7, 0.7], scales, after=[0.7], given=FASHION),
    "data.options.object_rotation": Row([10.0, 10.0], rotations, after=[10.0], given=FASHION),
    "data.options.noise": Row(
        0.0, dark_pixels, pytest.approx(0.1 / math.sqrt(2), rel=0.5), 0.0, FASHION
    ),
    "data.options.clutter": Row(3, strewn, given=FASHION),
    "data.options.objects": Row([1, 1], objects_each, after={1}, given=CANVASES),
    "data.options.length": Row(16, lambda config: len(dataset(config)), 24, 16),
    "data.options.num_classes": Row(5, lambda config: parts(config).model.num_classes, 10, 5),
    "data.options.bad_rows": Row(
        "skip", rows_used, "data.options.bad_rows=skip leaves such rows out", "7 images", COCO
    ),
}

EVALUATED = {"checkpoint": "a.pt", "data.workers": 0}
EVALUATION_ROWS: dict[str, Row | str] = {
    "checkpoint": Row("b.pt", looks("path"), "a.pt", "b.pt"),
    "split": Row("test", looks("images"), 4000, 5000),
    "weights": Row("model", looks("all_ones"), True, False),
    "flip": Row(True, looks("flip"), False, True),
    "batch_size": Row(7, looks("batch"), 256, 7),
    "precision": Row("bf16", looks("precision"), "fp32", "bf16"),
    "device": Row("cpu", told_to_start, "error: auto 600.0", "error: cpu 600.0"),
    "output": "tests/cli/test_eval.py::test_figures_are_those_of_the_training_run",
    "per_class": "tests/cli/test_eval.py::test_tables_and_picture",
    "confusion": "tests/cli/test_eval.py::test_tables_and_picture",
    "timeout": Row(5.0, told_to_start, "error: auto 600.0", "error: auto 5.0"),
}


def test_every_key_has_a_row():
    assert set(ROWS) == set(valid_keys())
    of_evaluations = valid_keys(EvalConfig)
    assert set(EVALUATION_ROWS) == {
        key for key in of_evaluations if not key.startswith(("model.", "data."))
    }
    assert {key for key in of_evaluations if key not in EVALUATION_ROWS} == {
        key for key in ROWS if key.startswith(("model.", "data."))
    }


def check(
    kind: type, key: str, row: Row | str, always: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    if isinstance(row, str):
        file, name = row.split("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text()
        return
    seen, needed = [], list(inspect.signature(row.see).parameters)[1:]
    for keys in (always | row.given, always | row.given | {key: row.value}):
        folder = request.getfixturevalue("tmp_path") / str(len(seen))
        folder.mkdir()
        with pytest.MonkeyPatch.context() as monkeypatch:
            own = {"monkeypatch": monkeypatch, "tmp_path": folder}
            shared = {name: request.getfixturevalue(name) for name in needed if name not in own}
            config = config_with(kind, keys)
            seen.append(
                row.see(config, **shared, **{name: own[name] for name in needed if name in own})
            )
    assert not same_bits(*seen), f"{key}={row.value} changes nothing"
    for got, expected in zip(seen, (row.before, row.after), strict=True):
        assert expected is UNKNOWN or got == expected


@pytest.mark.parametrize("key", ROWS)
def test_a_key_changes_what_it_says(key, files, request, monkeypatch):
    monkeypatch.chdir(files)
    check(Config, key, ROWS[key], TINY, request)


@pytest.mark.parametrize("key", OPTION_ROWS)
def test_an_option_of_a_data_set_changes_what_it_says(key, files, request):
    check(Config, key, OPTION_ROWS[key], TINY, request)


@pytest.mark.parametrize("key", EVALUATION_ROWS)
def test_a_key_of_an_evaluation_changes_what_it_says(key, files, request):
    check(EvalConfig, key, EVALUATION_ROWS[key], EVALUATED, request)


def test_all_that_an_evaluation_is_told_of_the_data_goes_on_top_of_the_checkpoints():
    """But its name: with a name, the checkpoint's data set is not asked."""
    given = {
        key.removeprefix("data."): row.value
        for key, row in ROWS.items()
        if key.startswith("data.") and isinstance(row, Row)
    }
    trained = config_with(Config, {"data.root": "before"}).data
    network = SimpleNamespace(config=Config(data=trained))
    task = SimpleNamespace(input_keys=())
    for key, value in given.items():
        asked = config_with(EvalConfig, {f"data.{key}": value}).data
        assert asked == {key: value}
        root = None if key == "name" else "before"
        assert vars(data_for(network, task, asked)) == vars(trained) | {"root": root, key: value}


def test_all_that_is_told_of_the_network_goes_on_top_of_the_checkpoints():
    """But its name: with a name, the checkpoint is not asked. And what it had frozen is free."""
    given = {
        key: row.value
        for key, row in ROWS.items()
        if key.startswith("model.") and isinstance(row, Row)
    }
    trained = config_with(
        Config, {"model.name": "mobilenetv2_nano", "model.scope": 3, "model.freeze": "backbone"}
    )
    card = Card(trained, ["a"], Input(1, 32, 1.0, "bilinear", [0.0], [1.0]))
    tensors = create_network(trained.model, 1, 1).state_dict()
    for key, value in given.items():
        asked = config_with(Config, {key: value}).model
        found = network_config(asked, Weights(tensors, card))
        assert found == asked if key == "model.name" else vars(found) == vars(trained.model) | {
            "freeze": None, key.removeprefix("model."): value
        }  # fmt: skip
