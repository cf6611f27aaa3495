"""Finished runs: found, grouped by what differs between them, and summarised over their seeds."""

import glob
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from dkcls.config import flat, free_keys
from dkcls.engine.run_directory import RunDirectory
from dkcls.errors import UserError
from dkcls.layers import LAYERS
from dkcls.words import keywords

# Metrics that are summarised by mean and standard deviation, as far as a run has them.
METRICS = ("top1", "top5", "loss", "seconds")
SCOPE = "model.scope"


@dataclass(frozen=True)
class Run:
    """A run that came to its end."""

    path: Path
    config: dict[str, Any]  # flat: dotted keys
    result: dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone; `settings` is what sets them apart from the others."""

    settings: dict[str, Any]
    runs: list[Run]

    @property
    def seeds(self) -> list[int]:
        return [run.config["seed"] for run in self.runs]

    def values(self, metric: str) -> list[float]:
        """Return the metric of each run that has it."""
        return [run.result[metric] for run in self.runs if metric in run.result]

    def label(self, *without: str) -> str:
        """Return the settings as words, without some keys."""
        shown = {key: value for key, value in self.settings.items() if key not in without}
        words = [f"{key.split('.')[-1]} {value}" for key, value in shown.items()]
        return ", ".join(words) or "all runs"


def find_runs(patterns: str | Iterable[str]) -> list[Run]:
    """Return the finished runs in folders, or in those that match patterns such as runs/a-*.

    A folder is that of a run, or has runs in it. UserError if there is no finished run.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    folders = [Path(match) for pattern in patterns for match in sorted(glob.glob(pattern))]
    if not folders:
        raise UserError(f"there is nothing at {', '.join(patterns)}")
    files = sorted({file for folder in folders for file in folder.rglob("result.json")})
    if not files:
        raise UserError(f"there is no finished run (result.json) in {', '.join(patterns)}")
    return [_read(file.parent) for file in files]


def _read(path: Path) -> Run:
    run = RunDirectory(path)
    try:
        config = yaml.safe_load((path / "config.yaml").read_text())
        result = run.result()
        if type(config["seed"]) is not int or result is None:
            raise ValueError("its config.yaml needs a seed")
        return Run(path, dict(flat(config)), result)
    except (OSError, ValueError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a run that can be read: {error}") from error


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by all settings that differ but the seed, in the order of these settings.

    Keys that do not make another run (`free_keys`) do not count.
    """
    ignored = {"seed", *free_keys()}
    keys = [key for run in runs for key in run.config if key not in ignored]
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
    """Return a sorting key: numbers by size, then everything else by name."""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def summarize(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row per group: its settings, seeds, parameters, multiply-adds and metrics.

    A metric has its mean, and its standard deviation under NAME_std.
    """
    rows = []
    for group in groups:
        first = group.runs[0].result
        row: dict[str, Any] = {**group.settings, "seeds": " ".join(map(str, group.seeds))}
        row |= {name: first[name] for name in ("parameters", "macs") if name in first}
        for metric in METRICS:
            if values := group.values(metric):
                row[metric] = fmean(values)
                row[f"{metric}_std"] = stdev(values) if len(values) > 1 else None
        rows.append(row)
    return rows


def has_scope(spatial: str | None) -> bool:
    """Return whether depthwise operators of that name have a scope; None is rigid.

    A name that is not registered here has one, so that its runs are told apart by their scopes.
    """
    layer = LAYERS.get(spatial or "rigid")
    return layer is None or "scope" in keywords(layer)


def over_scopes(
    groups: Sequence[Group], label: Callable[[Group], str]
) -> tuple[dict[str, dict[float, list[float]]], dict[str, list[float]]]:
    """Return top-1 of all seeds, {label: {scope: values}}, and {label: values} without a scope."""
    series: dict[str, dict[float, list[float]]] = {}
    baselines: dict[str, list[float]] = {}
    for group in groups:
        config = group.runs[0].config
        if has_scope(config["model.spatial"]) and config[SCOPE] is not None:
            series.setdefault(label(group), {})[config[SCOPE]] = group.values("top1")
        else:
            baselines[label(group)] = group.values("top1")
    return series, baselines
