"""What people read: tables, and sentences that name what is near to a wrong name."""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of (name, value) under a title."""
    width = max(len(name) for name, _ in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)]))


def label(name: str) -> str:
    """Return a metric's name as people write it."""
    if name.startswith(("ap", "ar")):
        return name.upper().replace("_", " ")
    words = {"top1": "top-1", "top5": "top-5", "ece15": "calibration error"}
    words |= {"macs": "multiply-adds", "images_per_s": "images/s"}
    return words.get(name, name.replace("_", " "))


def metric(name: str, value: Any) -> str:
    """Return a metric as people read it: shares in percent with two decimals, times as they are."""
    if name.removeprefix("best_").startswith(("top", "ap", "ar", "ece")):
        return f"{value:.2f} %"
    if name == "seconds":
        minutes, seconds = divmod(round(value), 60)
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def some(names: Sequence[str]) -> str:
    """Return the first five names and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def near(name: str, valid: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the valid name that is nearest, or "" if none is near."""
    found = get_close_matches(name, list(valid), 1, 0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_keywords(
    where: str,
    given: Iterable[str],
    function: Callable[..., Any],
    name: str,
    left_out: Collection[str] = (),
) -> None:
    """Raise ValueError for a keyword that a function does not take.

    Args:
        where: the keys' prefix, such as data.options.
        name: what the function is called in the sentence.
        left_out: arguments that are given elsewhere.
    """
    valid = [keyword for keyword in keywords(function) if keyword not in left_out]
    for keyword in given:
        if keyword not in valid:
            listed = f"; it takes {', '.join(valid)}" if valid else "; it takes no options"
            raise ValueError(
                f"{where}.{keyword}: {name} takes no {keyword!r}{near(keyword, valid) or listed}"
            )


def keywords(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a function takes as keywords.

    A constructor with **options hands them on: a class takes what its base takes, too.
    """
    if isinstance(function, type):
        constructors = [
            vars(kind)["__init__"] for kind in function.__mro__ if "__init__" in vars(kind)
        ]
        signatures = [list(_parameters(each))[1:] for each in constructors]  # without self
    else:
        signatures = [list(_parameters(function))]
    found: list[str] = []
    for parameters in signatures:
        found += [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(dict.fromkeys(found))


def _parameters(function: Callable[..., Any]) -> Iterable[inspect.Parameter]:
    return inspect.signature(function).parameters.values()
