"""The compiled backend: serial loops, and drivers that divide their work among threads.

Exact sums over rows are in `_compiled_sums`. Here are the elementary functions, the softmax, the rows of an
effect, and the means of a model. Rows are taken in blocks that stay in the core's caches; each inner loop
is a single pass over a block, which LLVM vectorises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedtmle_core.kernels import BLOCK, CompiledRows, Fields, Rows
from fedtmle_core.kernels._compiled_sums import (
    SERIAL_ROWS,
    add_multiple,
    column_chunks,
    glm_chunks,
    glm_chunks_of_two,
    largest,
    locate,
    predict,
    reading,
    scale,
    set_mean,
)
from fedtmle_core.kernels._elementary import exp, expit, log, logit, logit_inside, softplus
from fedtmle_core.kernels._jit import jit
from fedtmle_core.kernels._primitives import select
from fedtmle_core.parallel import shared
from fedtmle_core.types import Array, Bools, Bytes, Codes, IntArray

__all__ = [
    "add_multiple",
    "bins_between",
    "bound",
    "chosen",
    "column_chunks",
    "count_bins",
    "count_values",
    "elementwise",
    "glm_chunks",
    "glm_chunks_of_two",
    "largest",
    "means",
    "softmax",
    "weigh",
]

FINITE = 1.7976931348623157e308  # the largest float


# Elementary functions.


@jit
def _exp(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = exp(x[i])


@jit
def _log(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = log(x[i])


@jit
def _expit(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = expit(x[i])


@jit
def _softplus(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = softplus(x[i])


@jit
def _logit(x: Array, result: Array) -> None:
    for i in range(len(x)):
        result[i] = logit(x[i])


ELEMENTWISE: dict[str, Callable[[Array, Array], None]] = {
    "exp": _exp,
    "log": _log,
    "expit": _expit,
    "softplus": _softplus,
    "logit": _logit,
}


def elementwise(name: str, x: Array) -> Array:
    """The elementary function of that name, of a flat array."""
    kernel = ELEMENTWISE[name]
    result = np.empty_like(x)

    def work(first: int, last: int) -> bool:
        kernel(x[first:last], result[first:last])
        return True

    shared(work, len(x), serially=len(x) < SERIAL_ROWS)
    return result


# The softmax.


@jit
def _softmax(logits: Array, first: int, last: int, result: Array) -> None:
    """Columns first to last of exp(l_j - max_j l_j) over their sum, added in order of j."""
    tops, totals = np.empty(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        size = end - begin
        top, total = tops[:size], totals[:size]
        values = logits[0, begin:end]
        for i in range(size):
            top[i] = values[i]
        for j in range(1, len(logits)):
            values = logits[j, begin:end]
            for i in range(size):
                top[i] = select(values[i] > top[i], values[i], top[i])
        for j in range(len(logits)):
            values, powers = logits[j, begin:end], result[j, begin:end]
            for i in range(size):
                powers[i] = exp(values[i] - top[i])
        powers = result[0, begin:end]
        for i in range(size):
            total[i] = powers[i]
        for j in range(1, len(logits)):
            powers = result[j, begin:end]
            for i in range(size):
                total[i] = total[i] + powers[i]
        for j in range(len(logits)):
            powers = result[j, begin:end]
            for i in range(size):
                powers[i] = powers[i] / total[i]


def softmax(logits: Array) -> Array:
    """exp(l_j - max_j l_j) over their sum, added in order of j."""
    result = np.empty_like(logits)

    def work(first: int, last: int) -> bool:
        _softmax(logits, first, last, result)
        return True

    shared(work, logits.shape[1], serially=logits.size < SERIAL_ROWS)
    return result


# The rows of an effect: weights, and predictions kept inside their bounds.


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
    chance: Array,
) -> None:
    """See `kernels.weigh`; a numerator of length 1 is that of every row, and ``chance`` may be empty."""
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
    for i in range(len(chance)):
        chance[i] = select(codes[i] == code, probability[i], chance[i])


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


@jit
def _choose_of_two(values: Array, others: Array, codes: Codes, result: Array) -> None:
    """Fill the result with the values of the rows that have code 1, and others in the other rows."""
    for i in range(len(result)):
        result[i] = select(codes[i] == 1, values[i], others[i])


@jit
def _choose(values: Array, codes: Codes, code: int, result: Array) -> None:
    """Put the values of the rows that have the code into the result."""
    for i in range(len(result)):
        result[i] = select(codes[i] == code, values[i], result[i])


def chosen(values: Sequence[Array], codes: Codes) -> Array:
    """Return values[codes[i]][i] for each row i."""
    if len(values) == 1:
        return values[0].copy()
    result = np.empty_like(values[0])
    _choose_of_two(values[1], values[0], codes, result)
    for code, column in enumerate(values[2:], start=2):
        _choose(column, codes, code, result)
    return result


# Bins of values, and counts by bin.


@jit
def _count_edges(edges: Array, values: Array, counts: IntArray, bins: Bytes) -> None:
    """Fill ``bins`` with the number of edges that each value has reached, a block of rows at a time."""
    for begin in range(0, len(values), BLOCK):
        end = min(begin + BLOCK, len(values))
        block, reached = values[begin:end], counts[: end - begin]
        reached[:] = 0
        for edge in edges:
            for i in range(len(block)):
                reached[i] += block[i] >= edge
        for i in range(len(block)):
            bins[begin + i] = reached[i]


def bins_between(edges: Array, values: Array) -> Bytes:
    """The number of edges that each value has reached."""
    bins = np.empty(len(values), dtype=np.uint8)
    _count_edges(edges, values, np.empty(BLOCK, dtype=np.int64), bins)
    return bins


@jit
def _count_bins(bins: Bytes, counts: IntArray) -> None:
    """Count in four tables by turns: a row need not wait until the one before is counted."""
    stop = len(bins) - len(bins) % 4
    for i in range(0, stop, 4):
        counts[0, bins[i]] += 1
        counts[1, bins[i + 1]] += 1
        counts[2, bins[i + 2]] += 1
        counts[3, bins[i + 3]] += 1
    for i in range(stop, len(bins)):
        counts[0, bins[i]] += 1


def count_bins(bins: Bytes) -> IntArray:
    """The number of rows in each bin, shape (256,)."""
    counts = np.zeros((4, 256), dtype=np.int64)
    _count_bins(bins, counts)
    return np.asarray(counts.sum(axis=0))


@jit
def _count_values(values: Array, known: Array, bins: Bytes, counts: IntArray) -> None:
    numbers = np.empty(BLOCK, dtype=np.int64)
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        numbers[:] = len(known)
        for k in range(len(known)):
            for i in range(len(block)):
                numbers[i] = k if block[i] == known[k] else numbers[i]
        for i in range(len(block)):
            counts[bins[begin + i], numbers[i]] += 1


def count_values(values: Array, known: Array, bins: Bytes) -> IntArray:
    """The number of rows by bin and value, the last of none of the known ones, shape (256, values + 1)."""
    counts = np.zeros((256, len(known) + 1), dtype=np.int64)
    _count_values(values, known, bins, counts)
    return counts


# The means of a generalised linear model.


@jit
def _means(rows_fields: Fields, eps: Array, first: int, last: int, result: Array) -> None:
    """Rows first to last of mu(offset + eps . X): of the Gaussian family, the predictor itself."""
    rows = CompiledRows(*rows_fields)
    places = np.empty(len(eps), dtype=np.int64)
    block, slopes, _, _ = reading(rows_fields, eps, False)
    zeros, etas = np.zeros(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        mean, eta = result[begin:end], etas[: end - begin]
        base = rows.offset[begin:end] if len(rows.offset) else zeros[: end - begin]
        locate(rows_fields, begin, end - begin, block, places)
        predict(base, slopes, places, eta)
        scale(eta, 1.0, mean)
        set_mean(rows.family, eta, mean)


def means(rows: Rows, eps: Array) -> Array:
    """mu(offset + eps . X), shape (N,)."""
    compiled, result = tuple(rows.compiled), np.empty(rows.n_rows)

    def work(first: int, last: int) -> bool:
        _means(compiled, eps, first, last, result)
        return True

    shared(work, rows.n_rows, serially=rows.n_rows < SERIAL_ROWS)
    return result
