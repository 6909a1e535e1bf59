"""The compiled backend: serial loops, and drivers that divide their work among threads.

What passes over the rows of a generalised linear loss is in `_compiled_glm`. Here are the elementary
functions, the softmax, the rows of an effect, and exact sums of columns. Rows are taken in blocks that stay
in the first-level cache; each inner loop is a single pass over a block, which LLVM vectorises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedtmle.model.exact import FINE_BITS
from fedtmle.model.kernels import _numpy
from fedtmle.model.kernels._compiled_glm import (
    LIMIT,
    SERIAL_ROWS,
    add_multiple,
    glm_chunks,
    largest,
    means,
)
from fedtmle.model.kernels._elementary import exp, expit, log, logit, logit_inside, softplus
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import MAGIC, MAGIC_BITS, bits, select
from fedtmle.model.parallel import shared
from fedtmle.model.types import Array, Bools, Codes, IntArray

__all__ = [
    "add_multiple",
    "bound",
    "chosen",
    "column_chunks",
    "elementwise",
    "glm_chunks",
    "largest",
    "means",
    "softmax",
    "weigh",
]

BLOCK = 512
FINITE = 1.7976931348623157e308  # the largest float
FINE = 2.0**FINE_BITS


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


@jit
def _choose(values: Array, codes: Codes, code: int, result: Array) -> None:
    """Put the values of the rows that have the code into the result."""
    for i in range(len(result)):
        result[i] = select(codes[i] == code, values[i], result[i])


def chosen(values: Sequence[Array], codes: Codes) -> Array:
    """Row by row the value that its code is the place of."""
    result = values[0].copy()
    for code, column in enumerate(values[1:], start=1):
        _choose(column, codes, code, result)
    return result


# Exact sums of columns and of their products. The remainder of a row on the 50-bit grid
# is rounded to a grid 2^-40 finer and added up too. Products are made in registers, and never leave them.


@jit
def _one(values: Array, scale: float) -> tuple[int, int, bool]:
    """The sum of values * scale in units, of what they leave in units of 2^-40, and whether all fit."""
    coarse, fine, within = 0, 0, True
    for i in range(len(values)):
        scaled = values[i] * scale
        within &= abs(scaled) <= LIMIT  # False for NaN
        rounded = scaled + MAGIC
        coarse += bits(rounded)  # type: ignore[assignment]  # a scalar when compiled
        fine += bits((scaled - (rounded - MAGIC)) * FINE + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return coarse - shift, fine - shift, within  # modulo 2^64, in which the sums themselves fit


@jit
def _two(values: Array, factor: Array, scale: float) -> tuple[int, int, bool]:
    """The same of values * factor."""
    coarse, fine, within = 0, 0, True
    for i in range(len(values)):
        scaled = values[i] * factor[i] * scale
        within &= abs(scaled) <= LIMIT
        rounded = scaled + MAGIC
        coarse += bits(rounded)  # type: ignore[assignment]
        fine += bits((scaled - (rounded - MAGIC)) * FINE + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return coarse - shift, fine - shift, within


@jit
def _column_chunks(
    columns: Array,
    terms: IntArray,
    scale: Array,
    edges: IntArray,
    first_chunk: int,
    last_chunk: int,
    sums: IntArray,
) -> bool:
    """Fill rows first_chunk to last_chunk of ``sums``; False if a contribution is beyond the bound.

    Sum s, of which there are two, is of the product of columns ``terms[s]``, or of one of them before a -1.
    """
    everywhere = True
    for chunk in range(first_chunk, last_chunk):
        stop = edges[chunk + 1]
        for begin in range(edges[chunk], stop, BLOCK):
            end = min(begin + BLOCK, stop)
            for s in range(len(scale)):
                values, other = columns[terms[s, 0], begin:end], terms[s, 1]
                if other < 0:
                    coarse, fine, within = _one(values, scale[s])
                else:
                    coarse, fine, within = _two(values, columns[other, begin:end], scale[s])
                sums[chunk, 2 * s] += coarse
                sums[chunk, 2 * s + 1] += fine
                everywhere &= within
    return everywhere


def column_chunks(columns: Array, terms: IntArray, scale: Array, edges: IntArray, what: str) -> IntArray:
    """Coarse and fine sums per chunk, shape (chunks, 2 k)."""
    sums = np.zeros((len(edges) - 1, 2 * len(scale)), dtype=np.int64)

    def work(first: int, last: int) -> bool:
        return _column_chunks(columns, terms, scale, edges, first, last, sums)

    if shared(work, len(sums), serially=columns.shape[1] < SERIAL_ROWS):
        return sums
    return _numpy.column_chunks(columns, terms, scale, edges, what)  # it counts the rows beyond, and raises
