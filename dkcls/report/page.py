"""HTML pages of text, tables and pictures, each a single file."""

import base64
import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from dkcls.report.style import png

TEMPLATE = Template(files("dkcls.report").joinpath("page.html").read_text())


class Section(NamedTuple):
    """A section of the page; `content` is HTML."""

    title: str
    content: str


def page(title: str, lead: str, sections: Sequence[Section], footer: str = "") -> str:
    """Return the whole page; `lead` is the sentence under the title."""
    links = "".join(f'<a href="#part-{i}">{_text(s.title)}</a>' for i, s in enumerate(sections))
    parts = [
        f'<section id="part-{i}"><h2>{_text(s.title)}</h2>\n{s.content}</section>'
        for i, s in enumerate(sections)
    ]
    words = {"title": _text(title), "lead": _text(lead), "footer": _text(footer)}
    return TEMPLATE.substitute(words, links=links, sections="\n".join(parts))


def paragraph(words: str, quiet: bool = False) -> str:
    return f"<p{' class=quiet' if quiet else ''}>{_text(' '.join(words.split()))}</p>\n"


def heading(words: str) -> str:
    return f"<h3>{_text(words)}</h3>\n"


def chart(figure: Figure | bytes, words: str) -> str:
    """Return a picture as wide as the page allows; on a dark screen its white becomes dark.

    `words` say what the picture shows.
    """
    return f'<figure><img class="chart" src="{_data(figure)}" alt="{_text(words)}"></figure>\n'


def tiles(pictures: Sequence[tuple[Figure, str]]) -> str:
    """Return small pictures side by side, as many as fit, with a few words under each."""
    parts = [
        f'<figure><img src="{_data(figure)}" alt="{_text(words)}">'
        f"<figcaption>{_text(words)}</figcaption></figure>"
        for figure, words in pictures
    ]
    return f'<div class="tiles">{"".join(parts)}</div>\n'


def highlights(values: Mapping[str, str]) -> str:
    """Return a few values in large letters, each with its name above it."""
    parts = [f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in values.items()]
    return f"<dl>{''.join(parts)}</dl>\n"


def table(rows: Sequence[Mapping[str, Any]], best: int | None = None) -> str:
    """Return a table with numbers to the right, in which row `best` stands out."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    numeric = {name for name in names if all(_is_number(row.get(name, 0)) for row in rows)}
    head = "".join(f"<th{_number(name in numeric)}>{_text(name)}</th>" for name in names)
    lines = [
        f"<tr{' class=best' if i == best else ''}>"
        + "".join(
            f"<td{_number(name in numeric)}>{_text(str(row.get(name, '')))}</td>" for name in names
        )
        + "</tr>"
        for i, row in enumerate(rows)
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>\n"
    )


def folded(title: str, text: str) -> str:
    """Return text in fixed width, shown by a click on its title."""
    return f"<details><summary>{_text(title)}</summary><pre>{_text(text)}</pre></details>\n"


def _is_number(value: Any) -> bool:
    return not isinstance(value, str) or value[:1].isdigit() or value[:1] in "+-"


def _number(yes: bool) -> str:
    return " class=number" if yes else ""


def _text(words: str) -> str:
    return html.escape(words)


def _data(figure: Figure | bytes) -> str:
    content = figure if isinstance(figure, bytes) else png(figure)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
