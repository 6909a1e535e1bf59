"""The compiled pass over the rows of a generalised linear loss, chunk by chunk.

A block of rows goes through short stages that each vectorise: predictor, loss difference, slope,
curvature; each stage's values are multiplied by columns of X, rounded to the grid and added as
integers at once, while the block is in the first-level cache. A column that is None is a block of
constants, which never leaves that cache.
"""

from __future__ import annotations

import numpy as np

from fedtmle.model.exact import CHUNK, GRID_BITS
from fedtmle.model.kernels._compiled_gather import gather
from fedtmle.model.kernels._compiled_stages import (
    largest,
    multiply,
    predict,
    scale,
    set_change,
    set_curvature,
    set_mean,
    set_slope,
)
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import MAGIC, MAGIC_BITS, bits
from fedtmle.model.types import Array, Bools, IntArray

BLOCK = 384
LIMIT = 2.0**GRID_BITS


@jit
def _round_and_sum(values: Array, factor: Array, second: float) -> tuple[int, bool]:
    """The sum of values * factor * second, each rounded half to even; whether all are within 2^50."""
    units, within = 0, True
    for i in range(len(values)):
        scaled = values[i] * factor[i] * second
        within &= abs(scaled) <= LIMIT  # False for NaN
        units += bits(scaled + MAGIC)  # type: ignore[assignment]  # a scalar when compiled
    return units - len(values) * MAGIC_BITS, within  # modulo 2^64, in which the sum itself fits


@jit
def _round_and_sum_three(values: Array, x: Array, y: Array, z: Array) -> tuple[int, int, int, bool]:
    """The same for three factors, whose scale is all in the values: one pass instead of three."""
    u, v, w, within = 0, 0, 0, True
    for i in range(len(values)):
        a, b, c = values[i] * x[i], values[i] * y[i], values[i] * z[i]
        within &= abs(a) <= LIMIT
        within &= abs(b) <= LIMIT
        within &= abs(c) <= LIMIT
        u += bits(a + MAGIC)  # type: ignore[assignment]
        v += bits(b + MAGIC)  # type: ignore[assignment]
        w += bits(c + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return u - shift, v - shift, w - shift, within


@jit
def _sum_three(values: Array, x: Array, y: Array, z: Array) -> tuple[int, int, int]:
    """The same where it is known that all are within."""
    u, v, w = 0, 0, 0
    for i in range(len(values)):
        u += bits(values[i] * x[i] + MAGIC)  # type: ignore[assignment]
        v += bits(values[i] * y[i] + MAGIC)  # type: ignore[assignment]
        w += bits(values[i] * z[i] + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return u - shift, v - shift, w - shift


@jit
def _sum_two(values: Array, x: Array, y: Array) -> tuple[int, int]:
    u, v = 0, 0
    for i in range(len(values)):
        u += bits(values[i] * x[i] + MAGIC)  # type: ignore[assignment]
        v += bits(values[i] * y[i] + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return u - shift, v - shift


@jit
def _add_products(
    values: Array, X: Array, j: int, begin: int, end: int, second: float, sums: IntArray
) -> bool:
    """Add to sums[0], sums[1], ... the products of the scaled values with columns j, j + 1, ... of X."""
    dim, s, everywhere = len(X), 0, True
    while second == 1.0 and j + 3 <= dim:
        u, v, w, within = _round_and_sum_three(
            values, X[j, begin:end], X[j + 1, begin:end], X[j + 2, begin:end]
        )
        sums[s] += u
        sums[s + 1] += v
        sums[s + 2] += w
        everywhere &= within
        j, s = j + 3, s + 3
    while j < dim:
        u, within = _round_and_sum(values, X[j, begin:end], second)
        sums[s] += u
        everywhere &= within
        j, s = j + 1, s + 1
    return everywhere


@jit
def _add_bounded(values: Array, X: Array, j: int, begin: int, end: int, sums: IntArray) -> None:
    """The same where it is known that all products are within, and nothing is left to scale."""
    dim, s = len(X), 0
    while j + 3 <= dim:
        u, v, w = _sum_three(values, X[j, begin:end], X[j + 1, begin:end], X[j + 2, begin:end])
        sums[s] += u
        sums[s + 1] += v
        sums[s + 2] += w
        j, s = j + 3, s + 3
    if j < dim:
        last = min(j + 1, dim - 1)
        u, v = _sum_two(values, X[j, begin:end], X[last, begin:end])
        sums[s] += u
        if last > j:
            sums[s + 1] += v


@jit
def _add_hessian(
    values: Array, X: Array, begin: int, end: int, reach: float, second: float, product: Array, sums: IntArray
) -> bool:
    """Add the products of the scaled curvatures with two columns, upper triangle; whether all are within."""
    top, s, everywhere = reach, 0, True
    if reach == np.inf:  # it is not known
        top = 0.0
        for j in range(len(X)):
            own = largest(X[j, begin:end])
            top = own if own > top or np.isnan(own) else top
    # Rounding keeps the order, so that this bounds every product of a value and two columns.
    bounded = second == 1.0 and largest(values) * top * top <= LIMIT
    for j in range(len(X)):
        multiply(values, X[j, begin:end], product)
        if bounded:
            _add_bounded(product, X, j, begin, end, sums[s:])
        else:
            everywhere &= _add_products(product, X, j, begin, end, second, sums[s:])
        s += len(X) - j
    return everywhere


@jit
def chunks(
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
    reach: float,
    loss: bool,
    gradient: bool,
    hessian: bool,
    first: Array,
    second: Array,
    first_chunk: int,
    last_chunk: int,
    sums: IntArray,
) -> bool:
    """Fill rows first_chunk to last_chunk of ``sums``; False if a contribution is beyond the bound.

    Sum s is scaled by first[s] * second[s] = 2^shifts[s], the same for all sums of a part: by the first
    before the values meet a column, by the second, nearly always 1, after. An empty column stands for None,
    an empty matrix for a design whose columns are gathered block by block; ``reach`` bounds every |x| of the
    design, or is infinite.
    """
    dim = len(addresses)
    X = matrix if len(matrix) else np.empty((dim, BLOCK))
    zeros, ones = np.zeros(BLOCK), np.ones(BLOCK)
    etas, means, deltas, starts = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    buffer, products = np.empty(BLOCK), np.empty(BLOCK)
    everywhere = True
    set_mean(family, zeros, starts)
    for chunk in range(first_chunk, last_chunk):
        stop = min((chunk + 1) * CHUNK, n_rows)
        for begin in range(chunk * CHUNK, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            size = end - begin
            base = offset[begin:end] if len(offset) else zeros[:size]
            outcome = y[begin:end] if len(y) else zeros[:size]
            weight = w[begin:end] if len(w) else ones[:size]
            eta, values, product = etas[:size], buffer[:size], products[:size]
            mean = means[:size] if loss or hessian else means[:0]
            if len(matrix):
                at = begin
            else:
                at = 0
                gather(addresses, constant, factors, begin, size, X)
            predict(base, eps, X, at, eta)
            set_mean(family, eta, mean)
            s = 0
            if loss:
                delta, start = eta, starts[:size]
                if len(offset):
                    delta = deltas[:size]
                    predict(zeros, eps, X, at, delta)
                    set_mean(family, base, start)
                set_change(family, base, start, outcome, eta, mean, delta, values)
                scale(values, first[s], values)
                units, within = _round_and_sum(values, weight, second[s])
                sums[chunk, s] += units
                everywhere &= within
                s += 1
            if gradient:
                set_slope(family, outcome, eta, mean, first[s], values)
                if len(w):
                    multiply(values, weight, values)
                everywhere &= _add_products(values, X, 0, at, at + size, second[s], sums[chunk, s:])
                s += dim
            if hessian:
                set_curvature(family, mean, first[s], values)
                if len(w):
                    multiply(values, weight, values)
                everywhere &= _add_hessian(
                    values, X, at, at + size, reach, second[s], product, sums[chunk, s:]
                )
    return everywhere


@jit
def means(
    family: int,
    addresses: IntArray,
    constant: Bools,
    factors: Array,
    eps: Array,
    first: int,
    last: int,
    result: Array,
) -> None:
    """Rows first to last of mu(eps . X): of the Gaussian family, the predictor itself."""
    X, zeros, etas = np.empty((len(eps), BLOCK)), np.zeros(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        mean, eta = result[begin:end], etas[: end - begin]
        gather(addresses, constant, factors, begin, end - begin, X)
        predict(zeros, eps, X, 0, eta)
        scale(eta, 1.0, mean)
        set_mean(family, eta, mean)
