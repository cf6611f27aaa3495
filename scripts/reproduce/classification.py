"""Reproduce the paper's rows at small scale, with paired seeds and fair controls.

    python scripts/reproduce/classification.py               # everything, a run on each core
    python scripts/reproduce/classification.py studies=[main] seeds=[0]
    python scripts/reproduce/classification.py train=false   # tables and plots of finished runs

Networks are trained on the embedded data, then tables and plots are made. Running the same command
again resumes it. Learning rate, initial gain and multipliers of the generators were chosen on the
validation split with other seeds, in the study `tuning`. The test split is used once, on finished
networks.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from study import (
    Measured,
    Row,
    check_known,
    jobs,
    mean_and_spread,
    measured,
    train_all,
    write_table,
)

from dkcls import cli
from dkcls.config import DataConfig
from dkcls.data import create_dataset
from dkcls.data.sets.deformed_fashion import DeformedFashion
from dkcls.engine.network import load
from dkcls.errors import UserError
from dkcls.files import write_atomically
from dkcls.models import PAPER
from dkcls.report.plots import plot_factors, plot_gains, plot_sweep
from dkcls.report.tables import compare
from dkcls.tasks.classification import Classification

# Edges go beyond the 0.4 to 1.1 and the 60 degrees of training: of the bins of scale, four are
# inside and three on either side.
SCALES = 0.4 * (1.1 / 0.4) ** (np.arange(-3, 8) / 4)
ROTATIONS = np.arange(0, 181, 30.0)
RANGES = (  # what it is called, and which bins it has
    ("scale 0.19 to 0.4", "by_scale", slice(0, 3)),
    ("0.4 to 1.1, as in training", "by_scale", slice(3, 7)),
    ("1.1 to 2.3", "by_scale", slice(7, 10)),
    ("rotation up to 60°, as in training", "by_rotation", slice(0, 2)),
    ("60° to 180°", "by_rotation", slice(2, 6)),
)


def row(
    name: str,
    label: str,
    model: dict[str, Any],
    *more: str,
    multiplier: float = 0.0,
    paper: str | None = None,
) -> Row:
    settings = [f"model.{key}={value}" for key, value in model.items()]
    return Row(
        name,
        label,
        (*settings, *([f"optim.generator_lr={multiplier}"] if multiplier else []), *more),
        paper,
    )


# Multipliers of the generators' learning rate, chosen on the validation split.
LOCAL, GLOBAL, DCN, POINT_GLOBAL = 0.01, 0.3, 0.003, 0.03
LOCAL_OTHERS, GLOBAL_OTHERS = (0.001, 0.003, 0.03, 0.1), (0.03, 0.1, 1.0)  # of the ablation
LOCAL4 = {"spatial": "local_dk", "scope": 4}
GLOBAL4 = {"spatial": "global_dk", "scope": 4}
POINT2, COND = {"pointwise": "global_dk"}, {"pointwise": "cond"}
MAIN = (
    row("rigid", "rigid", {}, paper=""),
    row("wide_parameters", "rigid, wider: parameters of local 4", {}, "model.kwargs.width=1.78"),
    row("wide_macs", "rigid, wider: multiply-adds of local 4", {}, "model.kwargs.width=1.88"),
    row("longer", "rigid, longer: CPU time of local 4", {}, "schedule.epochs=4"),
    row("static4", "static scope 4", {"spatial": "static", "scope": 4}),
    row("global4", "global 4", GLOBAL4, multiplier=GLOBAL, paper="_global4"),
    *(
        row(f"local{s}", f"local {s}", LOCAL4 | {"scope": s}, multiplier=LOCAL, paper=f"_local{s}")
        for s in (3, 4, 5, 9)
    ),
    row(
        "point2_global4",
        "1x1 global 2 + global 4",
        POINT2 | GLOBAL4,
        multiplier=POINT_GLOBAL,
        paper="_point2_global4",
    ),
    row(
        "point2_local4",
        "1x1 global 2 + local 4",
        POINT2 | LOCAL4,
        multiplier=LOCAL,
        paper="_point2_local4",
    ),
    row("dcn", "DCN", {"spatial": "dcn"}, multiplier=DCN, paper="_dcn"),
    row(
        "dcn_local4",
        "DCN + local 4",
        LOCAL4 | {"spatial": "dcn_local_dk"},
        multiplier=LOCAL,
        paper="_dcn_local4",
    ),
    row("cond", "cond", COND | {"spatial": "cond"}, paper="_cond"),
    row("cond_local4", "cond + local 4", COND | LOCAL4, multiplier=LOCAL, paper="_cond_local4"),
)
ABLATION = (
    row("local4_spread", "local 4, grid spread", LOCAL4 | {"grid": "spread"}, multiplier=LOCAL),
    row(
        "local9_spread",
        "local 9, grid spread",
        LOCAL4 | {"scope": 9, "grid": "spread"},
        multiplier=LOCAL,
    ),
    row(
        "local7_step2", "local 7, grid step 2", LOCAL4 | {"scope": 7, "grid": 2.0}, multiplier=LOCAL
    ),
    row(
        "local4_independent",
        "local 4, scope drawn independently",
        LOCAL4 | {"scope_init": "independent"},
        multiplier=LOCAL,
    ),
    row(
        "local4_projected",
        "local 4, projected gradient",
        LOCAL4 | {"clip": "projected"},
        multiplier=LOCAL,
    ),
    *(
        row(f"local4_times{m:g}", f"local 4, generators x {m:g}", LOCAL4, multiplier=m)
        for m in LOCAL_OTHERS
    ),
    *(
        row(f"global4_times{m:g}", f"global 4, generators x {m:g}", GLOBAL4, multiplier=m)
        for m in GLOBAL_OTHERS
    ),
)


def tuned(
    name: str,
    label: str,
    model: dict[str, Any],
    *,
    lr: float = 0.2,
    gain: float = 0.1,
    multiplier: float = 0.0,
) -> Row:
    words = f"{label}, learning rate {lr:g}, depthwise gain {gain:g}" + (
        f", generators x {multiplier:g}" if multiplier else ""
    )
    return row(
        f"tune_{name}",
        words,
        model | {"depthwise_gain": gain},
        f"optim.lr={lr}",
        multiplier=multiplier,
    )


# Two rounds: around a learning rate of 0.2 and a gain of 0.1, then at the gain that was best over
# rigid and local.
DCN_MODEL = {"spatial": "dcn"}
TUNING = (
    tuned("rigid", "rigid", {}),
    *(tuned(f"rigid_lr{lr:g}", "rigid", {}, lr=lr) for lr in (0.1, 0.4)),
    *(tuned(f"rigid_gain{gain:g}", "rigid", {}, gain=gain) for gain in (0.01, 0.03, 0.3, 1.0)),
    tuned("local4", "local 4", LOCAL4, multiplier=0.01),
    *(tuned(f"local4_lr{lr:g}", "local 4", LOCAL4, lr=lr, multiplier=0.01) for lr in (0.1, 0.4)),
    *(
        tuned(f"local4_gain{gain:g}", "local 4", LOCAL4, gain=gain, multiplier=0.01)
        for gain in (0.01, 0.03, 0.3, 1.0)
    ),
    *(tuned(f"local4_times{m:g}", "local 4", LOCAL4, multiplier=m) for m in (0.003, 0.03, 0.1)),
    tuned("global4", "global 4", GLOBAL4, multiplier=0.1),
    *(tuned(f"global4_times{m:g}", "global 4", GLOBAL4, multiplier=m) for m in (0.03, 0.3, 1.0)),
    tuned("dcn", "DCN", DCN_MODEL, multiplier=0.01),
    *(tuned(f"dcn_times{m:g}", "DCN", DCN_MODEL, multiplier=m) for m in (0.003, 0.03, 0.1)),
    *(
        tuned(f"global4_gain0.03_times{m:g}", "global 4", GLOBAL4, gain=0.03, multiplier=m)
        for m in (0.1, 0.3)
    ),
    *(
        tuned(f"dcn_gain0.03_times{m:g}", "DCN", DCN_MODEL, gain=0.03, multiplier=m)
        for m in (0.003, 0.01)
    ),
    *(
        tuned(
            f"point2_times{m:g}",
            "1x1 global 2 + global 4",
            POINT2 | GLOBAL4,
            gain=0.03,
            multiplier=m,
        )
        for m in (0.03, 0.3)
    ),
)
STUDIES = {"tuning": TUNING, "main": MAIN, "ablation": ABLATION}
SEEDS = {"tuning": [100, 101], "main": [0, 1, 2, 3, 4], "ablation": [0, 1, 2]}
QUESTIONS = (
    ("Does local DK beat rigid?", "local4", "rigid"),
    ("... the static scope?", "local4", "static4"),
    ("... a rigid network with its parameters?", "local4", "wide_parameters"),
    ("... with its multiply-adds?", "local4", "wide_macs"),
    ("... trained for its CPU time?", "local4", "longer"),
    ("Does global DK beat rigid?", "global4", "rigid"),
    ("... the static scope?", "global4", "static4"),
    ("Does local DK beat global DK?", "local4", "global4"),
    ("Does DCN beat rigid?", "dcn", "rigid"),
    ("Does local DK beat DCN?", "local4", "dcn"),
    ("Does local DK add to DCN?", "dcn_local4", "dcn"),
    ("Does CondConv beat rigid?", "cond", "rigid"),
    ("Does local DK add to CondConv?", "cond_local4", "cond"),
    ("Do 1x1 DK add to global DK?", "point2_global4", "global4"),
    ("... to local DK?", "point2_local4", "local4"),
    ("Scope 4 or 3?", "local4", "local3"),
    ("Scope 4 or 5?", "local4", "local5"),
    ("Scope 4 or 9?", "local4", "local9"),
    ("Grid from end to end, scope 4?", "local4_spread", "local4"),
    ("... scope 9?", "local9_spread", "local9"),
    ("Scope 7 with a step of 2?", "local7_step2", "local4"),
    ("Scope drawn independently?", "local4_independent", "local4"),
    ("Projected gradient at the clip?", "local4_projected", "local4"),
)
CURVES = ("rigid", "static4", "global4", "local4", "dcn", "dcn_local4", "cond", "wide_macs")


@dataclass
class Arguments:
    out: Path = Path("runs/reproduce")  # the runs; tables and plots go to OUT/report
    studies: list[str] = field(default_factory=lambda: list(STUDIES))
    rows: list[str] = field(default_factory=list)  # only these networks
    # None: 0 to 4; 0 to 2 for the ablation, 100 and 101 for tuning.
    seeds: list[int] = field(default_factory=list)
    jobs: int = 0  # at once; 0: one per core
    overrides: list[str] = field(default_factory=list)  # of every run: ['train.device=cuda']
    train: bool = True  # false: only tables and plots


def main(arguments: Arguments) -> None:
    check_known("study", arguments.studies, STUDIES)
    check_known("row", arguments.rows, [r.name for rows in STUDIES.values() for r in rows])
    for study in arguments.studies if arguments.train else ():
        then = None if study == "tuning" else test_once
        seeds = arguments.seeds or SEEDS[study]
        runs = jobs(
            "reproduce", arguments.out, STUDIES[study], seeds, arguments.rows, arguments.overrides
        )
        train_all(list(runs), arguments.jobs, then)
    report(arguments)


def test_once(run: Path, cpu_seconds: float | None) -> None:
    """Write test.json beside a run's result, unless it is there."""
    file = run / "test.json"
    if file.exists():
        return
    network = load(str(run / "last.pt"), task="classification")
    model, data = network.model, network.config.data
    metrics: dict[str, Any] = {"cpu_seconds": cpu_seconds, "test": 100 * hits(model, data).mean()}
    wide, turned = (
        replace(data, options=data.options | {name: values})
        for name, values in (
            ("object_scale", [float(SCALES[0]), float(SCALES[-1])]),
            ("object_rotation", [-180.0, 180.0]),
        )
    )
    metrics["by_scale"] = by_factor(model, wide, "scale", SCALES)
    metrics["by_rotation"] = by_factor(model, turned, "rotation", ROTATIONS)
    write_atomically(file, json.dumps(metrics).encode())


@torch.inference_mode()
def hits(model: torch.nn.Module, data: DataConfig) -> np.ndarray:
    """Return for each test image whether the network is right."""
    dataset = create_dataset(data, "test")
    task = Classification(dataset.mean, dataset.std, dataset.num_classes, torch.device("cpu"))
    right = []
    model.eval()
    for indices in np.array_split(np.arange(len(dataset)), -(-len(dataset) // 250)):
        batch = dataset.load(indices).batch
        right.append((model(task.images(batch)).argmax(1) == batch.targets).numpy())
    return np.concatenate(right)


def by_factor(
    model: torch.nn.Module, data: DataConfig, factor: str, edges: np.ndarray
) -> list[float]:
    """Return the percentage of right images in each bin of the factor's size."""
    dataset = create_dataset(data, "test")
    assert isinstance(dataset, DeformedFashion)
    values = np.abs(getattr(dataset.factors(np.arange(len(dataset))), factor))
    bins, right = np.clip(np.digitize(values, edges) - 1, 0, len(edges) - 2), hits(model, data)
    return [100 * float(right[bins == i].mean()) for i in range(len(edges) - 1)]


def report(arguments: Arguments) -> None:
    folder = arguments.out / "report"
    if tuning := measured(arguments.out, TUNING, "result.json"):
        write_table(folder / "tuning", [tuning_row(network) for network in tuning.values()])
    networks = measured(arguments.out, MAIN + ABLATION, "result.json", "test.json")
    if "rigid" not in networks:
        if tuning:
            return
        raise UserError(f"there is no finished run of the rigid network in {arguments.out}")
    for study, rows in (("main", MAIN), ("ablation", ABLATION)):
        shown = [networks[r.name] for r in rows if r.name in networks]
        if shown:
            write_table(
                folder / study, [table_row(network, networks["rigid"]) for network in shown]
            )
    write_table(folder / "questions", list(answers(networks)))
    main_rows = {r.name: networks[r.name] for r in MAIN if r.name in networks}
    write_table(
        folder / "outside",
        [outside_row(network, networks["rigid"]) for network in main_rows.values()],
    )
    gains = {
        n.row.label: compare(n.of("test"), networks["rigid"].of("test")).differences
        for n in main_rows.values()
    }
    controls = [r.label for r in MAIN[:5]]
    plot_gains(
        {label: values for label, values in gains.items() if label != "rigid"},
        folder / "gains.png",
        xlabel="test top-1 over that of rigid, points",
        controls=controls,
    )
    test = {name: network.values("test") for name, network in networks.items()}
    baselines = {
        networks[name].row.label: test[name] for name in ("rigid", "static4") if name in test
    }
    scopes: dict[float, list[float]] = {
        s: test[f"local{s}"] for s in (3, 4, 5, 9) if f"local{s}" in test
    }
    plot_sweep(
        {"local DK": scopes},
        folder / "scope.png",
        xlabel="scope",
        ylabel="test top-1, %",
        baselines=baselines,
    )
    multipliers = {
        f"{kind} DK 4": {own: test[f"{kind}4"]}
        | {m: test[f"{kind}4_times{m:g}"] for m in others if f"{kind}4_times{m:g}" in test}
        for kind, own, others in (("local", LOCAL, LOCAL_OTHERS), ("global", GLOBAL, GLOBAL_OTHERS))
        if f"{kind}4" in test
    }
    plot_sweep(
        multipliers,
        folder / "multiplier.png",
        xlabel="learning rate of the generators, of the network's",
        ylabel="test top-1, %",
        baselines=baselines,
        logarithmic=True,
    )
    for metric, edges, trained, words in (
        ("by_scale", SCALES, (0.4, 1.1), "scale of the object"),
        ("by_rotation", ROTATIONS, (0.0, 60.0), "rotation of the object, degrees"),
    ):
        curves = {networks[n].row.label: networks[n].of(metric) for n in CURVES if n in networks}
        plot_factors(
            edges,
            curves,
            trained,
            folder / f"{metric}.png",
            xlabel=words,
            logarithmic=metric == "by_scale",
        )
    print(f"tables and plots are in {folder}")


def tuning_row(network: Measured) -> dict[str, Any]:
    top1 = network.values("top1")
    return {
        "network": network.row.label,
        "seeds": " ".join(map(str, network.results)),
        **mean_and_spread("val top-1", top1),
    }


def table_row(network: Measured, rigid: Measured) -> dict[str, Any]:
    some = next(iter(network.results.values()))
    values: dict[str, Any] = {"network": network.row.label, "seeds": len(network.results)}
    values |= {"parameters": some["parameters"], "M multiply-adds": some["macs"] / 1e6}
    times = [n.values("cpu_seconds") for n in (network, rigid)]
    values["CPU time of rigid's"] = fmean(times[0]) / fmean(times[1]) if all(times) else None
    for name, metric in (("val top-1", "top1"), ("test top-1", "test")):
        values |= mean_and_spread(name, network.values(metric))
    values["test, over rigid"] = (
        "" if network is rigid else str(compare(network.of("test"), rigid.of("test")))
    )
    if network.row.paper is not None:
        for name, base in (
            ("paper: R50-DW", "resnet50_dw"),
            ("paper: MobileNet-V2", "mobilenetv2_100"),
        ):
            values[name] = next(
                (f"{p.top1}" for p in PAPER if p.name == base + network.row.paper), ""
            )
    return values


def outside_row(network: Measured, rigid: Measured) -> dict[str, Any]:
    """Return the gains over the rigid network in ranges of the objects' factors.

    Gains are in points: mean and standard error over the seeds.
    """
    values: dict[str, Any] = {"network": network.row.label, "seeds": len(network.results)}
    for words, metric, bins in RANGES:
        own, base = network.of(metric), rigid.of(metric)
        gains = [np.mean(np.subtract(own[seed], base[seed])[bins]) for seed in own if seed in base]
        error = np.std(gains, ddof=1) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        values[words] = "" if network is rigid else f"{np.mean(gains):+.1f} ± {error:.1f}"
    return values


def answers(networks: dict[str, Measured]) -> Iterator[dict[str, Any]]:
    for question, a, b in QUESTIONS:
        if a in networks and b in networks:
            result = compare(networks[a].of("test"), networks[b].of("test"))
            seeds = " ".join(f"{difference:+.2f}" for difference in result.differences)
            difference = f"{networks[a].row.label} - {networks[b].row.label}"
            yield {
                "question": question,
                "difference": difference,
                "test top-1, points": str(result),
                "seed by seed": seeds,
            }


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
