"""Figures of checkpoints: the network, the data set and its transforms are in them."""

import time
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from dkcls.classification import Classification
from dkcls.config import EvalConfig, from_dict
from dkcls.data import create_loader
from dkcls.engine.build import build_dataset, build_model
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.evaluate import evaluate
from dkcls.engine.weights import read_checkpoint


def evaluate_checkpoint(path: str, config: EvalConfig, world: World) -> dict[str, Any]:
    """The figures on the split, each image counted exactly once over all ranks."""
    with world.together():
        state = read_checkpoint(path)
        weights = state["ema"] if config.weights != "model" else None
        if weights is None and config.weights == "ema":
            raise UserError(f"{path} has no moving average of the weights; weights=model or auto would use its own")
        trained = from_dict(state["config"])
        names = ("root", "image_size", "crop_ratio", "workers")
        asked: dict[str, Any] = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
        data = replace(trained.data, **asked)
        dataset = build_dataset(data, config.split, trained.seed)
        if list(dataset.class_names) != state["classes"]:
            raise UserError(
                f"{path} was trained for {len(state['classes'])} classes ({', '.join(state['classes'][:3])}, ...), "
                f"the data has {dataset.num_classes} ({', '.join(dataset.class_names[:3])}, ...)"
            )
        model = build_model(replace(trained.model, pretrained=None), dataset.num_classes, dataset.channels, trained.seed)
        model.load_state_dict(weights or state["model"])
    layout = {"memory_format": torch.channels_last} if trained.train.channels_last else {}
    model = model.to(world.device, **layout)  # type: ignore[call-overload]
    facts = state["input"]
    task = Classification(
        facts["mean"], facts["std"], dataset.num_classes, world.device, channels_last=trained.train.channels_last
    )
    loader = create_loader(
        dataset, config.batch_size, training=False, rank=world.rank, world_size=world.size, workers=data.workers,
        pin_memory=world.device.type == "cuda",
    )  # fmt: skip
    batches = tqdm(loader, path, leave=False, disable=None if world.is_main else True)
    started = time.perf_counter()
    result = evaluate(task, model, batches, world, config.precision)
    speed = result["images"] / (time.perf_counter() - started)
    return {"checkpoint": path, "split": config.split, **result, "images_per_s": speed}
