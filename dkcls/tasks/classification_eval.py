"""Figures of classifiers: the network, the data set and its transforms are in them."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from timm.data import ImageNetInfo

from dkcls.classification.figures import Figures
from dkcls.config import DataConfig, EvalConfig
from dkcls.data.normalize import for_channels
from dkcls.engine.build import build_dataset
from dkcls.engine.distributed import World
from dkcls.engine.errors import UserError
from dkcls.engine.network import Network, load_network
from dkcls.engine.weights import Weights
from dkcls.tasks.evaluation import data_of, evaluate_on


def evaluate_checkpoint(
    config: EvalConfig, weights: Weights | None, overrides: Iterable[str], world: World
) -> dict[str, Any]:
    """The figures of config.model.pretrained, whose content `weights` are (None: ONNX).

    `overrides` are the command line's, which tell what was asked of the data.
    """
    with world.together():
        network = load_network(config.model, config.weights, weights)
        data = evaluation_data(network, config.data, overrides)
        dataset = build_dataset(data, config.split, network.run.seed)
        outputs = outputs_of(network, dataset.class_names)
    layout = torch.channels_last if network.run.train.channels_last else torch.contiguous_format
    model = network.model.to(world.device, memory_format=layout)  # type: ignore[call-overload]
    task = figures_of(network, data, outputs, world, flip=config.flip)
    result = evaluate_on(dataset, data, task, model, network.path, config, world)
    tables: dict[str, Any] = {
        name: result.pop(name) for name in ("per_class", "confusion") if name in result
    }
    return {**result, "classes": list(dataset.class_names), **tables}


def evaluation_data(network: Network, asked: DataConfig, overrides: Iterable[str]) -> DataConfig:
    """Return `data_of` with what the network takes, unless the command line gives other values."""
    taken = {
        key: getattr(network.input, key)
        for key in ("image_size", "crop_ratio", "interpolation", "mean", "std")
    }
    return data_of(
        network.run.data if network.classes is not None else None, asked, overrides, **taken
    )


def figures_of(
    network: Network, data: DataConfig, outputs: Sequence[int], world: World, flip: bool = False
) -> Figures:
    """Return the figures of these outputs, of images that are normalised as `evaluation_data` says."""
    assert data.mean is not None
    assert data.std is not None
    mean, std = (for_channels(values, network.input.channels) for values in (data.mean, data.std))
    return Figures(
        mean,
        std,
        len(outputs),
        world.device,
        channels_last=network.run.train.channels_last,
        outputs=outputs,
        flip=flip,
    )


def outputs_of(network: Network, names: list[str]) -> list[int]:
    """The network's output for each of the data's classes, which may be some of the network's own."""
    classes = network.classes
    if classes is None:  # plain weights: ImageNet's classes, or the data's, in its order
        imagenet = ImageNetInfo().label_names()
        classes = (
            imagenet
            if network.num_classes == len(imagenet) and set(names) <= set(imagenet)
            else names
        )
        if len(classes) != network.num_classes:
            raise UserError(
                f"{network.path} is for {network.num_classes} classes, the data has {len(names)}"
            )
    if unknown := [name for name in names if name not in set(classes)]:
        raise UserError(
            f"{network.path} has no class {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}: "
            f"its {len(classes)} classes are {', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''}"
        )
    place = {name: i for i, name in enumerate(classes)}
    return [place[name] for name in names]
