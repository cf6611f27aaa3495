"""Pages of help: groups and keys, with the comments of the dataclasses in dkcls/config."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dkcls.config import keys

WIDTH, COLUMN = 100, 34
KEYS = (
    "Keys: KEY=VALUE, here with the default. A recipe or an experiment may have another value;\n"
    "--cfg job prints what a command line comes to."
)


def page(about: str, kind: type, groups: Mapping[str, Iterable[str]]) -> str:
    """Return a page of help: what a command does, what can be chosen, and every key."""
    lines = [about.strip(), "", "Groups: GROUP=NAME"]
    lines += rows((group, ", ".join(names)) for group, names in groups.items())
    return "\n".join([*lines, "", KEYS, *key_lines(kind)])


def rows(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return lines of a name and a text beside it."""
    return [line for name, text in pairs for line in _row(f"  {name}", text)]


def key_lines(kind: type) -> Iterator[str]:
    """Yield a line or more for each key: its name, default and meaning, under its group."""
    group = None
    for key in keys(kind):
        if key.group is not group:
            group = key.group
            yield ""
            about = (group.__doc__ or "").split("\n\n")[0]
            if not about.startswith(f"{group.__name__}("):  # a dataclass's own, if it has none
                yield from textwrap.wrap(about, WIDTH)
        yield from _row(f"  {key.name}={_word(key.default)}", key.help)


def _row(name: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - COLUMN) or [""]
    beside = len(name) < COLUMN
    first = [f"{name:<{COLUMN}}{lines[0]}".rstrip()] if beside else [name, " " * COLUMN + lines[0]]
    return [*first, *(" " * COLUMN + line for line in lines[1:])]


def _word(value: Any) -> str:
    """Return a value as one types it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_word(each) for each in value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return {"???": "..."}.get(str(value), str(value))
