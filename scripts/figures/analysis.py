"""Draw the pictures of docs/analysis.md from networks, and print the metrics behind them.

    python scripts/figures/analysis.py checkpoint=[runs/rigid/best.pt,runs/local/best.pt]
    python scripts/figures/analysis.py figure=radius checkpoint=[...]

The networks are trained on the embedded data, and objects are those of its test split. Pictures:

    sizes         ERFs over small, medium and large objects
    deformations  ERFs over the same object, turned and scaled
    taps          where taps read the scope
    radius        the radius of ERFs over the objects' scale
    dynamics      t-SNE of offsets and routing
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from omegaconf import MISSING
from torch import Tensor

from dkcls import cli
from dkcls.analysis import erf
from dkcls.analysis.dynamics import (
    Explained,
    beside,
    collect_dynamics,
    embed,
    explain,
    explain_control,
    moves,
    read_scopes,
)
from dkcls.analysis.probes import Probe, first_of_classes, middle, place, probe_fields, turned_back
from dkcls.data import Normalize, create_dataset
from dkcls.data.sets.deformed_fashion import CLASS_NAMES, DeformedFashion
from dkcls.engine.network import Network, load
from dkcls.errors import UserError
from dkcls.layers import LAYERS
from dkcls.report.network_plots import (
    Cloud,
    FieldRow,
    clouds,
    field_table,
    radius_over_scale,
    taps_over_images,
)
from dkcls.report.style import save
from dkcls.report.tables import markdown_table

SIZES = {"small": 0.42, "medium": 0.7, "large": 1.05}
SHOWN = {"small": "Ankle boot", "medium": "Bag", "large": "Ankle boot"}
DEFORMATIONS = {
    "as is": (0.65, 45.0),
    "turned by -90°": (0.65, -45.0),
    "scaled by 1.5": (0.975, 45.0),
}
DEPTHS = {"middle stage": "blocks.1", "last stage": None}
COMPARED = ("rigid", "dcn", "local_dk", "dcn_local_dk")  # side by side in the paper
WORDS = {"local_dk": "offsets", "cond": "weights"}  # of the networks whose dynamics the paper shows
KINDS = {"kernel_generator": "DK offsets", "image_generator": "DCN offsets", "routing": "routing"}
Rows = list[dict[str, Any]]


@dataclass
class Arguments:
    # Of networks with one layout, [a,b]; each operator at most once.
    checkpoint: list[str] = MISSING
    figure: str = "all"  # or sizes, deformations, taps, radius, dynamics
    output: Path = Path("docs/figures")
    images: int = 1000  # of the test split, for the numbers


@dataclass
class Study:
    """The networks by their operator, and what they look at."""

    networks: dict[str, Network]
    dataset: DeformedFashion
    indices: np.ndarray

    def compared(self) -> dict[str, Network]:
        return {name: self.networks[name] for name in COMPARED if name in self.networks}

    def __post_init__(self) -> None:
        model = next(iter(self.networks.values())).model
        self.looks = {
            depth: middle(model, self.dataset, module) for depth, module in DEPTHS.items()
        }

    def place(
        self, indices: np.ndarray, scale: Any, rotation: Any, depth: str = "last stage"
    ) -> Probe:
        return place(self.looks[depth], self.dataset, indices, scale, rotation)

    def normalized(self, images: Tensor) -> Tensor:
        return Normalize(self.dataset.mean, self.dataset.std)(images)


def main(arguments: Arguments) -> None:
    figures: dict[str, Callable[[Study], tuple[Figure, Rows]]] = {
        "sizes": sizes,
        "deformations": deformations,
        "taps": taps,
        "radius": radius,
        "dynamics": dynamics,
    }
    if arguments.figure not in ("all", *figures):
        raise UserError(f"figure must be all, {', '.join(figures)}, got {arguments.figure!r}")
    study = load_study(arguments.checkpoint, arguments.images)
    for name in figures if arguments.figure == "all" else [arguments.figure]:
        figure, rows = figures[name](study)
        print(
            f"{save(figure, arguments.output / f'{name}.png')}\n\n{markdown_table(rows)}",
            flush=True,
        )


def load_study(paths: Sequence[str], images: int) -> Study:
    networks: dict[str, Network] = {}
    for path in paths:
        network = load(path, task="classification")
        spatial = network.config.model.spatial or "rigid"
        if spatial in networks:
            raise UserError(
                f"{path} and {networks[spatial].path} are both {LAYERS.label(spatial)}; "
                "give one of them"
            )
        networks[spatial] = network
        network.model.eval()
    if not networks:
        raise UserError("checkpoint=[a,b] must name one checkpoint at least")
    dataset = create_dataset(network.config.data, "test", network.config.seed)
    if not isinstance(dataset, DeformedFashion):
        raise UserError(
            f"the figures need networks that were trained on deformed_fashion, "
            f"got {network.config.data.name}"
        )
    ordered = {name: networks[name] for name in (*LAYERS, *networks) if name in networks}
    return Study(ordered, dataset, np.arange(min(images, len(dataset))))


def sizes(study: Study) -> tuple[Figure, Rows]:
    return fields_of_probes(
        study,
        {
            name: (
                study.place(
                    first_of_classes(study.dataset, [CLASS_NAMES.index(SHOWN[name])]), scale, 20.0
                ),
                study.place(
                    study.indices[:200], scale, study.dataset.factors(study.indices[:200]).rotation
                ),
            )
            for name, scale in SIZES.items()
        },
    )


def fields_of_probes(study: Study, probes: dict[str, tuple[Probe, Probe]]) -> tuple[Figure, Rows]:
    """Draw one object of each probe, and return the metrics of many objects as a table."""
    drawn, table = [], []
    for title, (shown, many) in probes.items():
        fields = {
            LAYERS.label(n): probe_fields(network.model, study.dataset, shown)[0]
            for n, network in study.compared().items()
        }
        notes = {
            name: f"radius {erf.radius(field):.1f}, "
            f"{100 * erf.share_inside(field, shown.masks[0]):.0f} % inside"
            for name, field in fields.items()
        }
        image, mask = shown.images[0, 0].numpy() / 255, shown.masks[0].numpy()
        drawn.append(
            FieldRow(
                title, image, mask, {name: field.numpy() for name, field in fields.items()}, notes
            )
        )
        for name, network in study.compared().items():
            table.append(
                {"object": title, "network": LAYERS.label(name), **numbers(study, network, many)}
            )
    return field_table(drawn, shown.look.point), table


def numbers(study: Study, network: Network, probe: Probe) -> dict[str, float]:
    fields = probe_fields(network.model, study.dataset, probe, projections=16)
    inside = erf.share_inside(fields, probe.masks)
    values = {
        "radius": erf.radius(fields),
        "area above 5 %": erf.area(fields),
        "anisotropy": erf.anisotropy(fields),
        "share inside": inside,
        "over the object's share of the area": inside / probe.masks.float().mean((1, 2)),
        "overlap": erf.overlap(fields, probe.masks),
    }
    return {name: float(value.mean()) for name, value in values.items()}


def deformations(study: Study) -> tuple[Figure, Rows]:
    boot = first_of_classes(study.dataset, [CLASS_NAMES.index("Ankle boot")])
    many = study.indices[:200]
    placed = {
        name: (study.place(boot, *how), study.place(many, *how))
        for name, how in DEFORMATIONS.items()
    }
    figure, _ = fields_of_probes(study, placed)
    rows = []
    for name, network in study.compared().items():
        fields = {
            how: probe_fields(network.model, study.dataset, probe, projections=16)
            for how, (_, probe) in placed.items()
        }
        still, turned, scaled = fields.values()
        point = placed["as is"][1].look.point
        square = turned_back(still, point, 0)
        rows.append(
            {
                "network": LAYERS.label(name),
                "radius, scaled over as is": float((erf.radius(scaled) / erf.radius(still)).mean()),
                "similarity to the turned object's ERF": cosine(
                    square, turned_back(turned, point, 0)
                ),
                "the same, turned back": cosine(square, turned_back(turned, point, 1)),
            }
        )
    return figure, rows


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.cosine_similarity(a.flatten(1), b.flatten(1)).mean())


def taps(study: Study) -> tuple[Figure, Rows]:
    name = next((name for name in ("local_dk", "dcn_local_dk") if name in study.networks), None)
    if name is None:
        raise UserError("the figure taps needs a checkpoint with local deformable kernels")
    boot = first_of_classes(study.dataset, [CLASS_NAMES.index("Ankle boot")])
    pair = {size: study.place(boot, SIZES[size], 20.0).images for size in ("small", "large")}
    model = study.networks[name].model
    shown = read_scopes(model, study.normalized(torch.cat(list(pair.values()))))
    many = read_scopes(
        model, study.normalized(study.dataset.load(study.indices[:200]).batch.images)
    )
    # The last layer of each resolution.
    by_size = {scope.coordinates.shape[-1]: scope for scope in shown}
    images = {f"a {size} object": image[0, 0].numpy() / 255 for size, image in pair.items()}
    return taps_over_images(images, list(by_size.values()), many), [
        {"layer": scope.name} | moves(scope) for scope in many
    ]


def radius(study: Study) -> tuple[Figure, Rows]:
    factors = study.dataset.factors(study.indices)
    radii: dict[str, dict[str, np.ndarray]] = {}
    correlations: dict[str, dict[str, float]] = {}
    rows = []
    for depth in DEPTHS:
        probe = study.place(study.indices, factors.scale, factors.rotation, depth)
        for name, network in study.networks.items():
            values = erf.radius(
                probe_fields(network.model, study.dataset, probe, projections=16)
            ).numpy()
            r = float(np.corrcoef(np.log(factors.scale), values)[0, 1])
            radii.setdefault(depth, {})[LAYERS.label(name)] = values
            correlations.setdefault(depth, {})[LAYERS.label(name)] = r
            slope = float(np.polyfit(np.log2(factors.scale), values, 1)[0])
            rows.append(
                {
                    "depth": depth,
                    "network": LAYERS.label(name),
                    "mean radius": float(values.mean()),
                    "correlation with log scale": r,
                    "pixels per doubling": slope,
                }
            )
    return radius_over_scale(factors.scale, radii, correlations), rows


def dynamics(study: Study) -> tuple[Figure, Rows]:
    classes, scales = (
        study.dataset.targets[study.indices],
        study.dataset.factors(study.indices).scale,
    )
    batches = study.normalized(study.dataset.load(study.indices).batch.images).split(250)
    panels, rows = [], []
    for name, network in study.networks.items():
        found = collect_dynamics(network.model, batches)
        layers = list(dict.fromkeys(generator.rpartition(".")[0] for generator in found))
        for generator, said in found.items():
            own, control = (
                explain(said.values, classes, scales),
                explain_control(said, classes, scales),
            )
            layer, _, kind = generator.rpartition(".")
            about = {
                "network": LAYERS.label(name),
                "layer": layers.index(layer) + 1,
                "what": KINDS[kind],
            }
            rows.append(about | beside(own, control))
        if name in WORDS:  # the last layer's
            panels += [
                panel(
                    f"{LAYERS.label(name)}: {said.values.shape[1]} {WORDS[name]}", said.values, own
                )
            ]
            panels += [
                panel("its control", said.control(0), explain(said.control(0), classes, scales))
            ]
    if not panels:
        raise UserError(
            "the figure dynamics needs a checkpoint with local deformable kernels or CondConv"
        )
    return clouds(panels, classes, scales, CLASS_NAMES), rows


def panel(title: str, values: np.ndarray, explained: Explained) -> Cloud:
    return Cloud(
        title,
        embed(values),
        f"{100 * explained.class_share:.0f} % of variance, "
        f"accuracy {100 * explained.class_accuracy:.0f} %",
        f"{100 * explained.scale_share:.0f} % of variance, R2 {explained.scale_r2:.2f}",
    )


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
