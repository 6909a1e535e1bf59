"""Compiled loops over the rows of an effect: weights, and predictions kept inside their bounds."""

from __future__ import annotations

from fedtmle.model.kernels import _scalar  # noqa: F401 - registers what follows with numba
from fedtmle.model.kernels._elementary import logit_inside
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import select
from fedtmle.model.types import Array, Bools, Codes

FINITE = 1.7976931348623157e308


@jit
def weigh(
    numerator: Array,
    probability: Array,
    floor: float,
    codes: Codes,
    code: int,
    H: Array,
    taken: Array,
    below: Bools,
) -> None:
    """See `kernels.weigh`; a numerator of length 1 is that of every row."""
    size = len(H)
    if len(numerator) == 1:
        constant = numerator[0]
        for i in range(size):
            H[i] = constant / select(probability[i] < floor, floor, probability[i])
    else:
        for i in range(size):
            H[i] = numerator[i] / select(probability[i] < floor, floor, probability[i])
    for i in range(size):
        below[i] = probability[i] < floor
    for i in range(size):
        taken[i] = select(codes[i] == code, H[i], taken[i])


@jit
def bound(values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool:
    """See `kernels.bound`."""
    finite = True
    for i in range(len(values)):
        value = values[i]
        finite &= abs(value) <= FINITE  # False for NaN
        value = select(value < low, low, select(value > high, high, value))
        bounded[i] = value
        logits[i] = logit_inside(value)
    return finite
