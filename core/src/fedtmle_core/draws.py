"""Random draws by public rules: each is a function of a stream and a place alone."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fedtmle_core.types import Array

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, odd
_MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64's


def stream_key(name: str) -> int:
    """Return the 64-bit key of a stream, from SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(f"fedtmle draw:{name}".encode()).digest()[:8], "big")


def uniforms(key: int, numbers: Array) -> Array:
    """Return one draw in (0, 1) for each number, shape (N,): two rounds of SplitMix64's mixer.

    The numbers are whole and below 2^53. A draw is an odd multiple of 2^-54.
    """
    words = numbers.astype(np.uint64)
    for round_key in (key, key ^ _GOLDEN):
        words = _mixed(words * np.uint64(_GOLDEN) + np.uint64(round_key))
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIXERS:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
