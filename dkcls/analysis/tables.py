"""Rows of figures as Markdown and CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A column NAME_std, if there is one, is joined to NAME as "mean ± std"."""
    names = [name for name in _columns(rows) if not name.endswith("_std")]
    lines = [names, ["---"] * len(names), *([_cell(row, name) for name in names] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(row: Mapping[str, Any], name: str) -> str:
    value, spread = row.get(name), row.get(f"{name}_std")
    text = (
        f"{value:.2f}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
    if value is None:
        return ""
    return text if spread is None else f"{text} ± {spread:.2f}"
