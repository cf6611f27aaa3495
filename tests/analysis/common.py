"""Scopes with two taps, for tests of numbers and of pictures."""

import numpy as np

from dkcls.analysis.dynamics import Scope


def scope_of(coordinates) -> Scope:
    """Return a scope of 5 x 9 with two taps, at rest at (1, 2) and (3, 6).

    `coordinates` are (y, x) of the first tap, then of the second, one pair after the other.
    """
    return Scope(
        "layer 1",
        (5, 9),
        np.array([[1.0, 2.0], [3.0, 6.0]]),
        np.array(coordinates, float).reshape(-1, 2, 2, 1, 1),
    )
