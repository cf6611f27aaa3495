"""Write a table of finished runs over their seeds, and a plot of accuracy over the scope.

    python train.py -m out=runs/scopes model.scope=3,4,5,9 seed=0,1,2
    python scripts/summarize_runs.py runs=runs/scopes
    python scripts/summarize_runs.py runs=[runs/quickstart-*,runs/other] output=summary

Runs are told apart by the settings that differ between them. Writes summary.md, summary.csv and
scope.png.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from dkcls import cli
from dkcls.files import write_atomically
from dkcls.report.plots import plot_sweep
from dkcls.report.runs import SCOPE, find_runs, group_runs, over_scopes, summarize
from dkcls.report.tables import csv_table, markdown_table


@dataclass
class Arguments:
    runs: Any = MISSING  # a folder or a pattern of folders, or several as [a,b]
    # A folder; none: the folder of runs, if it is one, else the current one.
    output: Path | None = None


def main(arguments: Arguments) -> None:
    groups = group_runs(find_runs(arguments.runs))
    folder = arguments.output or Path(arguments.runs if isinstance(arguments.runs, str) else ".")
    folder = folder if arguments.output or folder.is_dir() else Path(".")
    folder.mkdir(parents=True, exist_ok=True)
    rows = summarize(groups)
    write_atomically(folder / "summary.md", markdown_table(rows).encode())
    write_atomically(folder / "summary.csv", csv_table(rows).encode())
    print(markdown_table(rows))
    written = [folder / "summary.md", folder / "summary.csv"]
    if SCOPE in groups[0].settings:
        series, baselines = over_scopes(groups, lambda group: group.label(SCOPE))
        plot_sweep(
            series,
            folder / "scope.png",
            xlabel="scope",
            ylabel="validation top-1, %",
            baselines=baselines,
        )
        written.append(folder / "scope.png")
    print("written:", ", ".join(map(str, written)))


if __name__ == "__main__":
    sys.exit(cli.script(Arguments, main, __doc__))
