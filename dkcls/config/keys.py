"""Keys of a config by their dotted names: which there are, what they mean, which differ.

A key is declared once, as a field of a dataclass. The comment after the field, or the lines of
comment above it, is its help.
"""

import ast
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from dkcls.config.run import Config
from dkcls.config.task import TASK_CONFIGS, TaskConfig, task_config

# Fields of free content: what is in them is checked against the signature that it goes to.
OPEN = ("kwargs", "options")
REQUIRED = "..."


@dataclass(frozen=True)
class Key:
    """A key with its default and its meaning; `group` is the dataclass that declares it."""

    name: str
    default: Any
    help: str
    group: type

    @property
    def is_open(self) -> bool:
        return self.name.split(".")[-1] in OPEN


def keys(kind: type = Config) -> list[Key]:
    """Return all keys of a dataclass and of those in it; of `task`, those of every task."""
    found: dict[str, Key] = {}
    for key in _keys(kind, ""):
        found.setdefault(key.name, key)  # that of the first task
    return list(found.values())


def _keys(kind: type, prefix: str) -> Iterator[Key]:
    comments = field_comments(kind)
    partial = getattr(kind, "PARTIAL", {})
    for field in fields(kind):
        name = prefix + field.name
        default = field.default_factory() if callable(field.default_factory) else field.default
        if field.name in partial:
            yield from _keys(partial[field.name], f"{name}.")
        elif isinstance(default, TaskConfig):
            for task in TASK_CONFIGS.values():
                yield from _keys(task, f"{name}.")
        elif is_dataclass(default):
            yield from _keys(type(default), f"{name}.")
        else:
            text = comments.get(field.name, "")
            yield Key(name, REQUIRED if default is MISSING else default, text, kind)


@cache
def field_comments(kind: type) -> dict[str, str]:
    """Return the comment of every field of a dataclass, "" where there is none."""
    found: dict[str, str] = {}
    for parent in reversed(kind.__mro__[:-1]):
        with suppress(OSError, TypeError):  # typed into an interpreter: no file, no comments
            source = inspect.cleandoc("".join(inspect.getsourcelines(parent)[0]))
            found |= dict(_comments(ast.parse(source).body[0], source.splitlines()))
    return found


def _comments(declaration: ast.stmt, lines: list[str]) -> Iterator[tuple[str, str]]:
    assert isinstance(declaration, ast.ClassDef)
    for statement in declaration.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.end_lineno or statement.lineno
            words = [_comment(lines[last - 1][statement.end_col_offset or 0 :])]
            above = statement.lineno - 2
            while lines[above].strip().startswith("#"):
                words.insert(0, _comment(lines[above]))
                above -= 1
            yield statement.target.id, " ".join(word for word in words if word)


def _comment(text: str) -> str:
    return text.strip().removeprefix("#").strip()


def valid_keys(kind: type = Config) -> list[str]:
    return [key.name for key in keys(kind)]


def free_keys(kind: type = Config) -> set[str]:
    """Return the keys that may change when a run is resumed; all others make another run."""
    return {
        key.name for key in keys(kind) if key.name.split(".")[-1] in getattr(key.group, "FREE", ())
    }


def unknown_key(key: str, kind: type = Config) -> str:
    """Return a sentence for a key that does not exist, with the nearest that does."""
    valid = valid_keys(kind)
    members = [name for name in valid if name.startswith(f"{key}.")]
    if members:
        return f"{key} is a group of keys, such as {members[0]}; --help lists them"
    if key in valid:
        tasks = [name for name, task in TASK_CONFIGS.items() if key in _names_of_task(task)]
        return f"{key} is a key of {' and '.join(f'task={name}' for name in tasks)}"
    last = key.split(".")[-1]
    near = [name for name in valid if name.split(".")[-1] == last]
    near = near or get_close_matches(key, valid, 1, 0.5) or get_close_matches(last, valid, 1, 0.3)
    return f"there is no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _names_of_task(task: type[TaskConfig]) -> set[str]:
    return {key.name for key in _keys(task, "task.")}


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value); a dictionary of free content is one value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in OPEN:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return "key: old -> new" for what makes two configs two runs.

    `old` is what a run's directory holds. ValueError if it does not have the keys of this version.
    """
    before, after = dict(flat(old)), dict(flat(new))
    task = before.get("task.name")
    expected = flat(Config(task=task_config(task)()).to_dict()) if task in TASK_CONFIGS else ()
    differing = {key for key, _ in expected} ^ before.keys()
    if differing:
        raise ValueError(", ".join(sorted(differing)))
    free = free_keys()
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in dict.fromkeys([*after, *before])
        if key not in free and before.get(key) != after.get(key)
    ]
