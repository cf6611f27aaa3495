"""Report on finished runs: a page, or a table, and the accuracy over the scope.

  dkcls report runs=runs/quickstart             runs/quickstart/report.html
  dkcls report runs=runs/scopes                 every finished run in a folder, such as a sweep's
  dkcls report runs=[runs/a-*,runs/b] output=ab.md

The ending of `output` chooses: .html is a page with results, curves, ERFs, dynamics and config; .md
and .csv are tables of the runs over their seeds, with the plot of accuracy over the scope beside
them. Runs are told apart by the settings that differ between them. Only the networks of the best
six settings are looked into, one run of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from dkcls import __version__, cli
from dkcls.cli.arguments import REQUIRED
from dkcls.data import ImageDataset, create_dataset
from dkcls.engine.network import load
from dkcls.errors import UserError
from dkcls.files import write_output
from dkcls.layers import LAYERS
from dkcls.report.page import Section, chart, folded, highlights, page, paragraph, table
from dkcls.report.plots import plot_sweep
from dkcls.report.runs import (
    SCOPE,
    Group,
    find_runs,
    group_runs,
    has_scope,
    over_scopes,
    summarize,
)
from dkcls.report.sections import Subject, curves_section, dynamics_section, fields_section
from dkcls.report.tables import csv_table, markdown_table

MOST = 6  # settings whose networks are looked into
METRICS = {"top1": "top-1, %", "top5": "top-5, %", "loss": "loss"}
RESULTS = (
    "On validation images: the share that the network names right (top-1), the share for which "
    "the right name is among\n"
    "its five best guesses (top-5), and the loss, lower is better."
)
SPREAD = (
    "± is the standard deviation over runs that differ in their random seed alone; "
    "a difference below it may be chance."
)
SCOPES = (
    "A deformable kernel reads its small kernel from a larger square of weights, the scope. "
    "A larger scope leaves it\n"
    "more room to adapt. Dots are single runs, lines their means, bars standard deviations; "
    "dashed lines have no scope."
)


@dataclass
class Arguments:
    """Runs, and the file about them."""

    # a run's folder or one with runs in it, a pattern such as runs/a-*, or several as [a,b]
    runs: Any = REQUIRED
    # a file that ends in .html, .md or .csv; null: report.html in that folder
    output: Path | None = None


def main() -> int:
    return cli.script(Arguments, report, __doc__)


def report(arguments: Arguments) -> None:
    groups = group_runs(find_runs(arguments.runs))
    folder = Path(arguments.runs if isinstance(arguments.runs, str) else ".")
    output = arguments.output or (folder if folder.is_dir() else Path(".")) / "report.html"
    writers = {".html": write_page, ".md": write_table, ".csv": write_table}
    if output.suffix not in writers:
        raise UserError(f"output must end in {', '.join(writers)}, got {output}")
    writers[output.suffix](groups, output)


def write_page(groups: Sequence[Group], output: Path) -> None:
    ranked = sorted(groups, key=lambda group: -mean_top1(group))
    sections = [
        results(groups, ranked[0]),
        scopes(groups),
        *networks(ranked[:MOST]),
        settings(ranked[0]),
    ]
    text = page(
        title(groups),
        lead(groups, ranked[0]),
        [s for s in sections if s],
        f"Made by dkcls {__version__}.",
    )
    write_output(output, text.encode())
    print(f"{output}: {sum(len(group.runs) for group in groups)} runs, {len(text) / 2**20:.1f} MB")


def write_table(groups: Sequence[Group], output: Path) -> None:
    """Write and print the table, and draw accuracy over the scope if several were tried."""
    rows = summarize(groups)
    markdown = markdown_table(rows)
    write_output(output, (csv_table(rows) if output.suffix == ".csv" else markdown).encode())
    print(markdown)
    written = [output]
    if SCOPE in groups[0].settings:
        series, baselines = over_scopes(groups, lambda group: group.label(SCOPE))
        plot_sweep(
            series,
            output.with_suffix(".png"),
            xlabel="scope",
            ylabel="validation top-1, %",
            baselines=baselines,
        )
        written.append(output.with_suffix(".png"))
    print("written:", ", ".join(map(str, written)))


def mean_top1(group: Group) -> float:
    return fmean(group.values("top1") or [0.0])


def label(group: Group, *without: str) -> str:
    """Return the operator's label and the group's other settings, without some keys."""
    if not group.settings:
        return group.runs[0].path.name
    spatial = group.runs[0].config["model.spatial"]
    hidden = {"model.spatial", *without, *([] if has_scope(spatial) else [SCOPE])}
    words = [LAYERS.label(spatial or "rigid")]
    for key, value in group.settings.items():
        if value is not None and key not in hidden:
            words.append(f"{key.split('.')[-1]} {value}")
    return ", ".join(words)


def title(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    return f"Training report: {runs[0].path.name if len(runs) == 1 else f'{len(runs)} runs'}"


def lead(groups: Sequence[Group], best: Group) -> str:
    config, count = best.runs[0].config, sum(len(group.runs) for group in groups)
    what = "One network" if count == 1 else f"{count} networks, in {len(groups)} settings,"
    words = (
        f"{what} of the kind {config['model.name']} learnt to name "
        f"what is in the images of {config['data.name']}. "
    )
    if len(groups) == 1:
        return words + (
            f"{mean_top1(best):.1f} % of the validation images, which were never trained on, "
            "get the right name."
        )
    return words + (
        f"With the best setting, {label(best)}, "
        f"{mean_top1(best):.1f} % of the validation images get the right name."
    )


def results(groups: Sequence[Group], best: Group) -> Section:
    rows = []
    for group, summary in zip(groups, summarize(groups), strict=True):
        row: dict[str, Any] = {"setting": label(group), "runs": str(len(group.runs))}
        for name, words in METRICS.items():
            if name in summary:
                spread = summary.get(f"{name}_std")
                row[words] = f"{summary[name]:.2f}" + (
                    f" ± {spread:.2f}" if spread is not None else ""
                )
        rows.append(
            row
            | {
                "parameters": f"{summary['parameters']:,}",
                "minutes": f"{summary['seconds'] / 60:.1f}",
            }
        )
    if len(rows) == 1:
        del rows[0]["setting"]
        return Section("Result", paragraph(RESULTS) + highlights(rows[0]))
    return Section(
        "Results",
        paragraph(f"{RESULTS} {SPREAD}")
        + table(rows, [group is best for group in groups].index(True)),
    )


def scopes(groups: Sequence[Group]) -> Section | None:
    """Draw accuracy over the scope, if several scopes were tried."""
    series, baselines = over_scopes(groups, lambda group: label(group, SCOPE))
    if max(map(len, series.values()), default=0) < 2:
        return None
    with TemporaryDirectory() as folder:
        picture = plot_sweep(
            series,
            Path(folder) / "scopes.png",
            xlabel="scope",
            ylabel="validation top-1, %",
            baselines=baselines,
        )
        return Section(
            "Accuracy over the scope",
            paragraph(SCOPES) + chart(picture.read_bytes(), "accuracy over the scope"),
        )


def networks(groups: Sequence[Group]) -> list[Section | None]:
    """Look into the network of each group's first run, or say why that is not possible."""
    subjects = []
    try:
        for group in groups:
            run = group.runs[0]
            network = load(str(run.path / "best.pt"), task="classification")
            dataset = create_dataset(network.config.data, "val", network.config.seed)
            assert isinstance(dataset, ImageDataset)
            subjects.append(
                Subject(label(group), network.model.eval(), dataset, run.path / "metrics.jsonl")
            )
    except UserError as error:
        return [Section("The networks", paragraph(f"They could not be looked into: {error}."))]
    return [curves_section(subjects), fields_section(subjects), dynamics_section(subjects)]


def settings(group: Group) -> Section:
    words = (
        f"Everything that was set for {label(group)}; what is not listed was left to its default."
    )
    text = "\n".join(
        f"{key}: {value}" for key, value in group.runs[0].config.items() if value not in (None, {})
    )
    return Section("Config", paragraph(words) + folded("all keys", text))
