"""Finished runs, found, grouped by what differs between them, and summarised over their seeds."""

import glob
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from dkcls.config import FREE, flat
from dkcls.engine.errors import UserError

FIGURES = (
    "top1",
    "top5",
    "loss",
    "seconds",
)  # summarised by mean and standard deviation; those that a run has
SCOPE = "model.scope"
WITHOUT_SCOPE = (None, "rigid", "dcn", "cond")  # depthwise operators


@dataclass(frozen=True)
class Run:
    """A run that came to its end."""

    path: Path
    config: dict[str, Any]  # flat: dotted keys
    result: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone."""

    settings: dict[str, Any]  # what sets it apart from the other groups
    runs: list[Run]

    @property
    def seeds(self) -> list[int]:
        return [run.config["seed"] for run in self.runs]

    def values(self, figure: str) -> list[float]:
        return [run.result[figure] for run in self.runs if figure in run.result]

    def label(self, *without: str) -> str:
        """What sets it apart, some keys left out."""
        shown = {key: value for key, value in self.settings.items() if key not in without}
        return (
            ", ".join(f"{key.split('.')[-1]} {value}" for key, value in shown.items()) or "all runs"
        )


def find_runs(places: str | Iterable[str]) -> list[Run]:
    """Of folders, or patterns such as runs/quickstart-*, each a run or with runs in it. Unfinished ones do not count."""
    patterns = [places] if isinstance(places, str) else list(places)
    folders = [Path(match) for pattern in patterns for match in sorted(glob.glob(pattern))]
    if not folders:
        raise UserError(f"there is nothing at {', '.join(patterns)}")
    files = sorted({file for folder in folders for file in folder.rglob("result.json")})
    if not files:
        raise UserError(f"there is no finished run (result.json) in {', '.join(patterns)}")
    return [_read(file.parent) for file in files]


def _read(path: Path) -> Run:
    try:
        config = yaml.safe_load((path / "config.yaml").read_text())
        return Run(path, dict(flat(config)), json.loads((path / "result.json").read_text()))
    except (OSError, ValueError, yaml.YAMLError, AttributeError) as error:
        raise UserError(f"{path} is not a run that can be read: {error}") from error


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """By all that differs but seeds and what does not make another run. In the order of their settings."""
    keys = [key for run in runs for key in run.config if key != "seed" and key not in FREE]
    differ = [
        key for key in dict.fromkeys(keys) if len({repr(run.config.get(key)) for run in runs}) > 1
    ]
    groups: dict[str, Group] = {}
    for run in sorted(runs, key=lambda run: run.config["seed"]):
        settings = {key: run.config.get(key) for key in differ}
        groups.setdefault(repr(settings), Group(settings, [])).runs.append(run)
    return sorted(
        groups.values(), key=lambda group: [_order(value) for value in group.settings.values()]
    )


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, then the rest by name."""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def summarize(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row per group: its settings, seeds, parameters, multiply-adds, and mean and standard deviation of the figures."""
    rows = []
    for group in groups:
        row: dict[str, Any] = {**group.settings, "seeds": " ".join(map(str, group.seeds))}
        row |= {
            name: group.runs[0].result[name]
            for name in ("parameters", "macs")
            if name in group.runs[0].result
        }
        for figure in FIGURES:
            if values := group.values(figure):
                row |= {
                    figure: fmean(values),
                    f"{figure}_std": stdev(values) if len(values) > 1 else None,
                }
        rows.append(row)
    return rows


def over_scopes(
    groups: Sequence[Group], label: Callable[[Group], str]
) -> tuple[dict[str, dict[float, list[float]]], dict[str, list[float]]]:
    """Top-1 of all seeds by label and scope; and by label alone, of networks that have no scope."""
    series: dict[str, dict[float, list[float]]] = {}
    baselines: dict[str, list[float]] = {}
    for group in groups:
        config = group.runs[0].config
        if config["model.spatial"] in WITHOUT_SCOPE or config[SCOPE] is None:
            baselines[label(group)] = group.values("top1")
        else:
            series.setdefault(label(group), {})[config[SCOPE]] = group.values("top1")
    return series, baselines
