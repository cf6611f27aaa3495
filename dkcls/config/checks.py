"""Checks of values, which say what was expected and what came."""

import math
from collections.abc import Sequence
from typing import Any

SHORT = 200  # characters of a value in a sentence
PRECISIONS = ("fp32", "bf16", "fp16")


def check(key: str, value: Any, good: bool, expected: str) -> None:
    """Raise ValueError unless `good`."""
    if not good:
        raise ValueError(f"{key} must be {expected}, got {short(value)}")


def short(value: Any) -> str:
    """Return a value in one line of a sentence, however large it is."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHORT else f"{text[:SHORT]} ..."


def check_choice(key: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    words = ["null" if choice is None else str(choice) for choice in choices]
    check(key, value, value in choices, f"{', '.join(words[:-1])} or {words[-1]}")


def check_least(key: str, value: float | None, least: float) -> None:
    """Raise ValueError for a number below `least`; None passes."""
    check(key, value, value is None or value >= least, f"at least {least}")


def check_above_zero(key: str, value: float | None) -> None:
    """Raise ValueError for a number that is not above 0; None passes."""
    check(key, value, value is None or value > 0, "above 0")


def check_range(key: str, pair: Sequence[float], top: float | None = None) -> None:
    """Raise ValueError unless the pair is (low, high), above 0 and up to `top`."""
    good = len(pair) == 2 and 0 < pair[0] <= pair[1] and (top is None or pair[1] <= top)
    limit = "" if top is None else f" and at most {top:g}"
    check(key, pair, good, f"two numbers, [low,high], above 0{limit}")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number, and not true or false."""
    return type(value) in (int, float) and math.isfinite(value)


def check_plain(key: str, value: Any, depth: int = 4) -> None:
    """Raise ValueError unless a value is of a size that a network's arguments have.

    Those are finite numbers up to 65536, words, and short lists and dictionaries of them.
    """
    if isinstance(value, (dict, list, tuple)) and depth and len(value) <= 256:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in pairs:
            check_plain(f"{key}.{name}", each, depth - 1)
        return
    good = value is None or (isinstance(value, str) and len(value) <= 256)
    good = good or isinstance(value, bool) or (is_number(value) and abs(value) <= 65536)
    check(key, value, good, "numbers up to 65536, words, and short lists of them")


def check_weights(weights: str) -> None:
    check_choice("weights", weights, ("auto", "ema", "model"))


def check_device(key: str, device: str) -> None:
    check_choice(key, device, ("auto", "cpu", "cuda"))


def check_precision(precision: str) -> None:
    check_choice("precision", precision, PRECISIONS)
