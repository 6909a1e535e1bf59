"""The few operations that numpy arrays and numba scalars spell differently: here, the numpy spelling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedtmle_core.types import Array, IntArray

MAGIC = 6755399441055744.0  # 1.5 * 2^52: adding it rounds |x| <= 2^51 half to even, into the low bits
MAGIC_BITS = 0x4338000000000000


def select(condition: NDArray[np.bool_], yes: Array | float, no: Array | float) -> Array:
    """``yes`` where the condition holds, else ``no``; both are computed."""
    return np.where(condition, yes, no)


def bits(x: Array) -> IntArray:
    """The bit patterns of floats, as integers."""
    return x.view(np.int64)


def from_bits(pattern: IntArray) -> Array:
    """The floats with these bit patterns."""
    return pattern.view(np.float64)
