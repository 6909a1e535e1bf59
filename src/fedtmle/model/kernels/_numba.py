"""The compiled backend: drivers that share work among threads and call the serial kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtmle.model.concentration import Spread
from fedtmle.model.exact import CHUNK
from fedtmle.model.kernels import _compiled, _compiled_glm, _numpy
from fedtmle.model.kernels._backend import Query, Rows, shared
from fedtmle.model.types import Array, Bools, Bytes, Codes, IntArray

SERIAL_ROWS = 1 << 17  # below, starting threads costs about what they save
SERIAL_PAIRS = 1 << 18


def elementwise(name: str, x: Array) -> Array:
    """The elementary function of that name, of a flat array."""
    kernel = _compiled.ELEMENTWISE[name]
    result = np.empty_like(x)

    def work(first: int, last: int) -> bool:
        kernel(x[first:last], result[first:last])
        return True

    shared(work, len(x), serially=len(x) < SERIAL_ROWS)
    return result


def glm_chunks(query: Query) -> IntArray:
    """Sums of rounded contributions per chunk, shape (chunks, p)."""
    rows, grid, eps = tuple(query.rows.compiled), tuple(query.grid), query.eps
    sums = np.zeros((query.n_chunks, query.layout.width), dtype=np.int64)

    def work(first: int, last: int) -> bool:
        return _compiled_glm.chunks(rows, grid, eps, first, last, sums)

    if shared(work, query.n_chunks, serially=query.rows.n_rows < SERIAL_ROWS):
        return sums
    return _numpy.glm_chunks(query)  # some row is beyond its bound: the twin counts such rows and raises


def means(rows: Rows, eps: Array) -> Array:
    """mu(eps . X), shape (N,)."""
    compiled, result = tuple(rows.compiled), np.empty(rows.n_rows)

    def work(first: int, last: int) -> bool:
        _compiled_glm.means(compiled, eps, first, last, result)
        return True

    shared(work, rows.n_rows, serially=rows.n_rows < SERIAL_ROWS)
    return result


def spread(
    rows: Rows, eps: Array, until: Array, least: int, few: int, many: float
) -> tuple[Spread, int, bool]:
    """See `kernels.glm_spread`."""
    block = np.zeros((len(Spread._fields), rows.dim))
    n_read, enough = _compiled_glm.spread(tuple(rows.compiled), eps, until, least, few, many, block)
    return Spread(*block), n_read, enough


def add_multiple(total: Array, factor: float, values: Array) -> None:
    """Add a multiple of a column to another."""
    _compiled_glm.add_multiple(total, factor, values)


def chosen(values: Sequence[Array], codes: Codes) -> Array:
    """Row by row the value that its code is the place of."""
    result = values[0].copy()
    for code, column in enumerate(values[1:], start=1):
        _compiled.choose(column, codes, code, result)
    return result


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
    """The weights of some rows in one arm."""
    _compiled.weigh(numerator, probability, floor, codes, code, H, taken, below)


def bound(values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool:
    """Values inside their bounds, and their logits."""
    return _compiled.bound(values, low, high, bounded, logits)


def largest(column: Array) -> float:
    """The largest |x|, NaN if one is."""
    return _compiled_glm.largest(column)


def column_chunks(columns: Array, terms: IntArray, scale: Array, what: str) -> IntArray:
    """Coarse and fine sums per chunk, shape (chunks, 2 k)."""
    n_rows = columns.shape[1]
    sums = np.zeros((-(-n_rows // CHUNK), 2 * len(scale)), dtype=np.int64)

    def work(first: int, last: int) -> bool:
        return _compiled.chunks(columns, terms, scale, first, last, sums)

    if shared(work, len(sums), serially=n_rows < SERIAL_ROWS):
        return sums
    return _numpy.column_chunks(columns, terms, scale, what)  # it counts the rows beyond, and raises


def binned_chunks(columns: Array, bins: Bytes, count: int, scale: Array, what: str) -> IntArray:
    """The same of the rows of each bin, shape (chunks, bins, 2 p)."""
    sums = np.zeros((-(-columns.shape[1] // CHUNK), count, 2 * len(scale)), dtype=np.int64)
    if _compiled.binned(columns, scale, bins, sums):
        return sums
    return _numpy.binned_chunks(columns, bins, count, scale, what)


def softmax(logits: Array) -> Array:
    """exp(l_j - max_j l_j) over their sum, added in order of j."""
    result = np.empty_like(logits)

    def work(first: int, last: int) -> bool:
        _compiled.softmax(logits, first, last, result)
        return True

    shared(work, logits.shape[1], serially=logits.size < SERIAL_ROWS)
    return result


def log_mean_kernel(points: Array, centres: Array) -> Array:
    """log of the mean over centres of exp(-|p - c|^2/2)."""
    result = np.empty(points.shape[1])

    def work(first: int, last: int) -> bool:
        _compiled.log_mean_kernel(points, centres, first, last, result)
        return True

    shared(work, points.shape[1], serially=points.shape[1] * centres.shape[1] < SERIAL_PAIRS)
    return result
