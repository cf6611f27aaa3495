"""Random numbers that are a function of (seed, epoch, index) alone, for a whole batch at once: the hash of splitmix64."""

import numpy as np

_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit integers under which neighbours have nothing in common."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, epoch: int, indices: np.ndarray) -> np.ndarray:
    """One uint64 per index."""
    key = np.zeros(1, np.uint64)
    for number in (np.array([seed]), np.array([epoch]), np.asarray(indices)):
        key = _mix(key + _STEP + number.astype(np.uint64) * _STEP)
    return key


def bits(keys: np.ndarray, first: int, count: int) -> np.ndarray:
    """uint64 [B, count]: the draws number first, first + 1, ... of each key."""
    return _mix(keys[:, None] + np.arange(first + 1, first + count + 1, dtype=np.uint64) * _STEP)


def uniforms(keys: np.ndarray, first: int, count: int) -> np.ndarray:
    """float64 [B, count] in [0, 1)."""
    return (bits(keys, first, count) >> np.uint64(11)) * 2.0**-53
