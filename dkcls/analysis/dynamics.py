"""Where taps read their scopes, and how much of offsets and routing class and scale explain.

Any function of a layer's features carries class and scale with it. So every metric has a control
beside it: the same metric for random projections of the features that the generator saw, with as
many dimensions as its output.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.manifold import TSNE
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from dkcls.analysis.erf import evaluating
from dkcls.layers import OffsetGenerator, record_offsets
from dkcls.layers.deform_kernel import ScopeConv2d
from dkcls.layers.generators import Routing
from dkcls.ops.geometry import grid_step, tap_grid

GROUPS = 10  # of equal numbers of objects, by scale


@dataclass
class Dynamics:
    """The outputs of a generator for N images and the features it saw, averaged over positions."""

    values: np.ndarray  # [N, D]
    features: np.ndarray  # [N, C]

    def control(self, seed: int) -> np.ndarray:
        """Return a random projection of the features, [N, D]."""
        return self.features @ np.random.default_rng(seed).standard_normal(
            (self.features.shape[1], self.values.shape[1])
        )


@torch.no_grad()
def collect_dynamics(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Dynamics]:
    """Return the dynamics of every generator by its name, over all images."""
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        for name, module in model.named_modules():
            if isinstance(module, (OffsetGenerator, Routing)):
                stack.callback(
                    module.register_forward_hook(
                        partial(_record, parts.setdefault(name, []))
                    ).remove
                )
        for images in batches:
            model(images)
    return {
        name: Dynamics(*(torch.cat(part).cpu().numpy() for part in zip(*said, strict=True)))
        for name, said in parts.items()
    }


def _record(
    said: list[tuple[Tensor, Tensor]], module: nn.Module, args: tuple[Tensor], out: Tensor
) -> None:
    said.append((out.flatten(2).mean(2) if out.ndim == 4 else out, args[0].mean((2, 3))))


@dataclass
class Explained:
    """How well class and object scale explain the values of N images.

    The shares are the variance that groups of equal class, or of nearly equal scale, account for.
    Accuracy (share that is right) and R2 are those of linear models that are fitted on every second
    image and predict the class, or the logarithm of the scale, of the others.
    """

    class_share: float
    scale_share: float
    class_accuracy: float
    scale_r2: float


def explain(values: np.ndarray, classes: np.ndarray, scales: np.ndarray) -> Explained:
    """Measure how well class and scale, [N] each, explain `values` [N, D]."""
    deciles = np.argsort(np.argsort(scales)) * GROUPS // len(scales)
    fit, held = slice(0, None, 2), slice(1, None, 2)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(
        values[fit], classes[fit]
    )
    regressor = make_pipeline(StandardScaler(), Ridge()).fit(values[fit], np.log(scales[fit]))
    return Explained(
        variance_share(values, classes),
        variance_share(values, deciles),
        classifier.score(values[held], classes[held]),
        regressor.score(values[held], np.log(scales[held])),
    )


def explain_control(
    dynamics: Dynamics, classes: np.ndarray, scales: np.ndarray, seeds: Sequence[int] = range(5)
) -> Explained:
    """Return the mean of `explain` over random projections of the features."""
    results = [explain(dynamics.control(seed), classes, scales) for seed in seeds]
    return Explained(
        *(
            float(np.mean([getattr(r, name) for r in results]))
            for name in Explained.__dataclass_fields__
        )
    )


def beside(own: Explained, control: Explained) -> dict[str, str]:
    """Return cells of a table, with the control's values in brackets."""
    names = ("variance by class", "variance by scale", "class accuracy", "R2 of log scale")
    pairs = zip(names, asdict(own).values(), asdict(control).values(), strict=True)
    return {name: f"{a:.2f} ({b:.2f})" for name, a, b in pairs}


def variance_share(values: np.ndarray, groups: np.ndarray) -> float:
    """Return the variance between groups over the total variance, dimensions summed."""
    mean = values.mean(0)
    between = sum(
        (groups == g).sum() * ((values[groups == g].mean(0) - mean) ** 2).sum()
        for g in np.unique(groups)
    )
    return float(between / ((values - mean) ** 2).sum())


def embed(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return the t-SNE of the values, dimensions standardised, [N, 2]."""
    perplexity = min(30.0, (len(values) - 1) / 3)
    return TSNE(random_state=seed, init="pca", perplexity=perplexity).fit_transform(
        StandardScaler().fit_transform(values)
    )


class Scope(NamedTuple):
    """The scope of one layer, and where its taps read it; all pairs are (y, x).

    `rest` has the taps at rest, [taps, 2]. `coordinates` has where they read,
    [N, taps, 2, Ho, Wo], clipped to the scope as in the operator; Ho and Wo are 1 for global
    kernels.
    """

    name: str
    sides: tuple[int, int]
    rest: np.ndarray
    coordinates: np.ndarray


@torch.no_grad()
def read_scopes(model: nn.Module, images: Tensor) -> list[Scope]:
    """Return the scope of every layer with kernel offsets, numbered in the network's order."""
    with evaluating(model), record_offsets(model) as records:
        model(images)
    layers = dict(model.named_modules())
    found = [
        (layers[name], record.kernel_offset)
        for name, record in records.items()
        if record.kernel_offset is not None
    ]
    return [
        _scope(f"layer {i}", layer, offset)  # type: ignore[arg-type]
        for i, (layer, offset) in enumerate(found, 1)
    ]


def _scope(name: str, layer: ScopeConv2d, kernel_offset: Tensor) -> Scope:
    pairs = zip(layer.kernel_size, layer.scope, strict=True)
    axes = [torch.tensor(tap_grid(k, s, grid_step(layer.grid, k, s))) for k, s in pairs]
    rest = torch.cartesian_prod(*axes).numpy()
    rest = rest.reshape(-1, 2)  # a single tap is given without its dimension
    positions = kernel_offset.shape[2:] or (1, 1)
    offset = kernel_offset.reshape(len(kernel_offset), -1, 2, *positions).cpu().numpy()
    last = np.array(layer.scope)[:, None, None] - 1
    return Scope(name, layer.scope, rest, np.clip(offset + rest[..., None, None], 0, last))


def moves(scope: Scope) -> dict[str, float]:
    """Return how far taps are from rest, root mean square, in entries of the scope.

    The distance has three parts: one is the same for all images and positions, one differs between
    images, and one differs between the positions of an image. Their squares add up to that of the
    whole.
    """
    apart = scope.coordinates - scope.rest[..., None, None]
    mean, of_image = apart.mean((0, 3, 4), keepdims=True), apart.mean((3, 4), keepdims=True)
    last = np.array(scope.sides)[:, None, None] - 1
    on_edge = (scope.coordinates == 0) | (scope.coordinates == last)
    return {
        "from rest": _size(apart),
        "the same for all": _size(mean),
        "between images": _size(of_image - mean),
        "between positions": _size(apart - of_image),
        "share on the scope's edge": float(on_edge.mean()),
    }


def _size(moved: np.ndarray) -> float:
    return float(np.sqrt((moved**2).sum(2).mean()))
