"""How the rows' contributions to a gradient spread, block by block, until enough of them were looked at."""

from __future__ import annotations

import numpy as np

from fedtmle.model.kernels._compiled_gather import gather
from fedtmle.model.kernels._compiled_glm import BLOCK
from fedtmle.model.kernels._compiled_stages import predict, set_slope
from fedtmle.model.kernels._jit import jit, jit_unordered
from fedtmle.model.kernels._primitives import bits, from_bits
from fedtmle.model.types import Array, Bools, IntArray


@jit_unordered
def _add_sums(slope: Array, weight: Array, column: Array, found: Array) -> None:
    """Add one column of a block to its sums and to its count."""
    total, squares, reach_total, count = 0.0, 0.0, 0.0, 0.0
    for i in range(len(slope)):
        reach = abs(column[i]) * abs(weight[i])
        size = reach * abs(slope[i])
        total += size
        squares += size * size
        reach_total += reach
        count += 1.0 if reach > 0.0 else 0.0
    found[0] += total
    found[1] += squares
    found[3] += reach_total
    found[6] += count


@jit
def _raise_largest(slope: Array, weight: Array, column: Array, found: Array) -> None:
    """Hold one column of a block against what was largest: bit patterns are ordered as magnitudes are."""
    largest, reach_largest, top = bits(found[2]), bits(found[4]), bits(found[5])
    for i in range(len(slope)):
        x = abs(column[i])
        reach = x * abs(weight[i])
        largest = max(largest, bits(reach * abs(slope[i])))
        reach_largest = max(reach_largest, bits(reach))
        top = max(top, bits(x))
    found[2], found[4], found[5] = from_bits(largest), from_bits(reach_largest), from_bits(top)


@jit
def _is_enough(found: Array, until: Array, least: int) -> bool:
    for j in range(len(until)):
        if not found[0, j] >= until[j]:  # nor where either is not a number
            return False
        if until[j] > 0.0 and found[6, j] < least:
            return False
    return True


@jit
def _is_far(found: Array, until: Array, seen: int, many: float) -> bool:
    """Whether more than ``many`` rows would be needed, if the others are like those that were seen."""
    far = False
    for j in range(len(until)):
        far |= not seen * until[j] <= many * found[0, j]
    return far and many < np.inf


@jit
def spread(
    family: int,
    matrix: Array,
    addresses: IntArray,
    constant: Bools,
    factors: Array,
    n_rows: int,
    offset: Array,
    y: Array,
    w: Array,
    eps: Array,
    until: Array,
    least: int,
    few: int,
    many: float,
    found: Array,
) -> tuple[int, bool]:
    """Fill ``found``, shape (7, d), from the first rows: see `concentration.Concentration`.

    How many, and whether they were enough.
    """
    X = matrix if len(matrix) else np.empty((len(addresses), BLOCK))
    zeros, ones = np.zeros(BLOCK), np.ones(BLOCK)
    etas, slopes = np.empty(BLOCK), np.empty(BLOCK)
    begin, enough, looked_ahead = 0, _is_enough(found, until, least), False
    while begin < n_rows and not (enough and begin >= few):
        if begin >= few and not looked_ahead:
            if _is_far(found, until, begin, many):
                break
            looked_ahead = True
        end = min(begin + BLOCK, n_rows)
        size = end - begin
        eta, slope = etas[:size], slopes[:size]
        if len(matrix):
            at = begin
        else:
            at = 0
            gather(addresses, constant, factors, begin, size, X)
        predict(offset[begin:end] if len(offset) else zeros[:size], eps, X, at, eta)
        set_slope(family, y[begin:end] if len(y) else zeros[:size], eta, zeros[:0], 1.0, slope)
        weight = w[begin:end] if len(w) else ones[:size]
        for j in range(len(eps)):
            _add_sums(slope, weight, X[j, at : at + size], found[:, j])
            _raise_largest(slope, weight, X[j, at : at + size], found[:, j])
        begin, enough = end, _is_enough(found, until, least)
    return begin, enough
