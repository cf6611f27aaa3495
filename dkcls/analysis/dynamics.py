"""What a network decides per image, offsets and routing, and how much of it is class and how much is the object's scale.

Whatever is read off a layer's features carries class and scale with it. So every number has a control beside it: the same
number for random projections of the features that the generator saw, with as many dimensions as its output.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.manifold import TSNE
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from dkcls.analysis.erf import evaluating
from dkcls.layers import OffsetGenerator
from dkcls.layers.generators import Routing

GROUPS = 10  # of equal numbers of objects, by scale


@dataclass
class Dynamics:
    """Of one generator: what it said of each image, and the features that it said it from, means over the positions."""

    values: np.ndarray  # [N, D]
    features: np.ndarray  # [N, C]

    def control(self, seed: int) -> np.ndarray:
        """[N, D]: a random projection of the features."""
        return self.features @ np.random.default_rng(seed).standard_normal(
            (self.features.shape[1], self.values.shape[1])
        )


@torch.no_grad()
def collect_dynamics(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Dynamics]:
    """By the generators' names, over all images."""
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
    """Shares of the variance that groups of equal class, or of nearly equal scale, account for; and what linear models, fitted
    on every second image, read off the others: the class (share that is right) and the logarithm of the scale (R2)."""

    class_share: float
    scale_share: float
    class_accuracy: float
    scale_r2: float


def explain(values: np.ndarray, classes: np.ndarray, scales: np.ndarray) -> Explained:
    """`values` [N, D] by class and scale, [N] each."""
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
    """The mean over random projections."""
    results = [explain(dynamics.control(seed), classes, scales) for seed in seeds]
    return Explained(
        *(
            float(np.mean([getattr(r, name) for r in results]))
            for name in Explained.__dataclass_fields__
        )
    )


def beside(own: Explained, control: Explained) -> dict[str, str]:
    """Cells of a table, the control's in brackets."""
    names = ("variance by class", "variance by scale", "class accuracy", "R2 of log scale")
    pairs = zip(names, asdict(own).values(), asdict(control).values(), strict=True)
    return {name: f"{a:.2f} ({b:.2f})" for name, a, b in pairs}


def variance_share(values: np.ndarray, groups: np.ndarray) -> float:
    """The variance between groups over the total, dimensions summed."""
    mean = values.mean(0)
    between = sum(
        (groups == g).sum() * ((values[groups == g].mean(0) - mean) ** 2).sum()
        for g in np.unique(groups)
    )
    return float(between / ((values - mean) ** 2).sum())


def embed(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """[N, 2] by t-SNE, dimensions standardised."""
    perplexity = min(30.0, (len(values) - 1) / 3)
    return TSNE(random_state=seed, init="pca", perplexity=perplexity).fit_transform(
        StandardScaler().fit_transform(values)
    )
