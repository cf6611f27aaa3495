"""Train rigid, local DK and DCN detectors at small scale, with paired seeds.

    python scripts/reproduce/classification.py studies=[tuning,main]     # the classifiers
    python scripts/reproduce/detection.py
    python scripts/reproduce/detection.py train=false     # tables of finished runs

Detectors start from scratch and from a classifier. Running the same command again resumes it. The
learning rate was chosen on the validation split with another seed, in the study `tuning`. The test
split is used once, on finished detectors.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

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
from dkcls.config import EvalConfig
from dkcls.engine.distributed import World
from dkcls.engine.evaluate import evaluate
from dkcls.errors import UserError
from dkcls.files import write_atomically
from dkcls.models.zoo import PAPER_DETECTION
from dkcls.report.tables import compare

NETWORKS = {  # label, overrides, how its name ends in the paper's tables
    "rigid": ("rigid", ("model.spatial=rigid",), ""),
    "local4": ("local 4", ("model.spatial=local_dk", "model.scope=4"), "_local4"),
    "dcn": ("DCN", ("model.spatial=dcn", "optim.generator_lr=0.003"), "_dcn"),
}
STARTS = {"scratch": "from scratch", "pretrained": "from its classifier"}
RATES = (0.01, 0.02, 0.05)  # tried in the study `tuning`; det_quickstart has the one that was best
CLASSIFIERS = {  # for tuning: runs of scripts/reproduce/classification.py
    "rigid": "tune_rigid_gain0.03",
    "local4": "tune_local4_gain0.03",
    "dcn": "tune_dcn_gain0.03_times0.003",
}
SEEDS = {"tuning": [100], "main": [0, 1, 2, 3, 4]}
METRICS = {
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "small",
    "ap_medium": "medium",
    "ap_large": "large",
}


@dataclass
class Arguments:
    out: Path = Path("runs/detection")  # the runs; tables go to OUT/report
    classifiers: Path = Path(
        "runs/reproduce"
    )  # with the runs NETWORK-SEED of scripts/reproduce/classification.py
    studies: list[str] = field(default_factory=lambda: list(SEEDS))
    seeds: list[int] = field(default_factory=list)  # none: 0 to 4; 100 for tuning
    rows: list[str] = field(default_factory=list)  # only these detectors
    jobs: int = 0  # at once; 0: one per core
    overrides: list[str] = field(default_factory=list)  # of every run: ['train.device=cuda']
    train: bool = True  # false: only tables


def main(arguments: Arguments) -> None:
    studies = {
        "tuning": list(tuning(arguments.classifiers)),
        "main": list(detectors(arguments.classifiers)),
    }
    check_known("study", arguments.studies, studies)
    check_known("row", arguments.rows, [row.name for rows in studies.values() for row in rows])
    for study in arguments.studies if arguments.train else ():
        seeds = arguments.seeds or SEEDS[study]
        runs = jobs(
            "det_quickstart",
            arguments.out,
            studies[study],
            seeds,
            arguments.rows,
            arguments.overrides,
        )
        train_all(list(runs), arguments.jobs, None if study == "tuning" else test_once)
    tuned = measured(arguments.out, studies["tuning"], "result.json")
    found = measured(arguments.out, studies["main"], "result.json", "test.json")
    if not tuned and not found:
        raise UserError(f"there is no finished run in {arguments.out}")
    if tuned:
        write_table(arguments.out / "report/tuning", [tuning_row(each) for each in tuned.values()])
    if found:
        write_table(
            arguments.out / "report/detection", [table_row(each, found) for each in found.values()]
        )
        write_table(arguments.out / "report/questions", list(answers(found)))


def detectors(classifiers: Path) -> Iterator[Row]:
    for start, words in STARTS.items():
        for name, (label, overrides, paper) in NETWORKS.items():
            yield Row(
                f"{name}_{start}",
                f"{label}, {words}",
                (*overrides, *weights(start, classifiers / name)),
                paper,
            )


def tuning(classifiers: Path) -> Iterator[Row]:
    for start, words in STARTS.items():
        for rate in RATES:
            for name, (label, overrides, _) in NETWORKS.items():
                own = (
                    *overrides,
                    f"optim.lr={rate}",
                    *weights(start, classifiers / CLASSIFIERS[name]),
                )
                yield Row(
                    f"tune_{name}_{start}_lr{rate:g}",
                    f"{label}, {words}, learning rate {rate:g}",
                    own,
                )


def weights(start: str, classifier: Path) -> tuple[str, ...]:
    return (f"model.pretrained={classifier}-{{seed}}/last.pt",) if start == "pretrained" else ()


def test_once(run: Path, cpu_seconds: float | None) -> None:
    """Write test.json beside a run's result, unless it is there."""
    file = run / "test.json"
    if not file.exists():
        config = EvalConfig(split="test", batch_size=20)
        metrics = evaluate(str(run / "last.pt"), config, World(torch.device("cpu")))
        values = {"cpu_seconds": cpu_seconds, **{f"test_{k}": metrics[k] for k in METRICS}}
        write_atomically(file, json.dumps(values).encode())


def tuning_row(each: Measured) -> dict[str, Any]:
    return {"detector": each.row.label, "seeds": len(each.results)} | mean_and_spread(
        "val AP", each.values("ap")
    )


def table_row(each: Measured, found: dict[str, Measured]) -> dict[str, Any]:
    some = next(iter(each.results.values()))
    values: dict[str, Any] = {
        "detector": each.row.label,
        "seeds": len(each.results),
        "parameters": some["parameters"],
    }
    times = [n.values("cpu_seconds") for n in (each, found.get("rigid_scratch", each))]
    values["CPU time of rigid's"] = fmean(times[0]) / fmean(times[1]) if all(times) else None
    values |= mean_and_spread("val AP", each.values("ap"))
    for metric, words in METRICS.items():
        values |= mean_and_spread(f"test {words}", each.values(f"test_{metric}"))
    for words, base in (
        ("paper: R50-DW", "resnet50_dw"),
        ("paper: MobileNet-V2", "mobilenetv2_100"),
    ):
        values[words] = next(
            f"{row.map}" for row in PAPER_DETECTION if row.name == f"{base}{each.row.paper}"
        )
    return values


def answers(found: dict[str, Measured]) -> Iterator[dict[str, Any]]:
    pairs = [
        (f"{name}_{start}", f"rigid_{start}")
        for start in ("scratch", "pretrained")
        for name in ("local4", "dcn")
    ]
    pairs += [(f"{name}_pretrained", f"{name}_scratch") for name in NETWORKS]
    for a, b in pairs:
        if a in found and b in found:
            row: dict[str, Any] = {"difference": f"{found[a].row.label} - {found[b].row.label}"}
            for metric in ("ap", "ap_small", "ap_medium", "ap_large"):
                result = compare(found[a].of(f"test_{metric}"), found[b].of(f"test_{metric}"))
                row[f"test {METRICS[metric]}, points"] = str(result)
            yield row


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
