"""The compiled pass over the rows of a generalised linear loss, chunk by chunk.

A block of rows goes through short stages that each vectorise: predictor, loss difference, slope,
curvature; each stage's values are multiplied by columns of X, rounded to the grid and added as
integers at once, while the block is in the first-level cache. A column that is None is a block of
constants, which never leaves that cache.
"""

from __future__ import annotations

import numpy as np

from fedtmle.model.exact import CHUNK, GRID_BITS
from fedtmle.model.families import Family
from fedtmle.model.kernels import _scalar  # noqa: F401 - registers what follows with numba
from fedtmle.model.kernels._elementary import exp, expit
from fedtmle.model.kernels._jit import jit, jit_unordered
from fedtmle.model.kernels._primitives import MAGIC, MAGIC_BITS, bits
from fedtmle.model.kernels._rows import (
    NEAR,
    gaussian_change,
    logistic_far,
    logistic_near,
    logistic_variance,
    poisson_far,
    poisson_near,
)
from fedtmle.model.types import Array, IntArray

BLOCK = 192
LIMIT = 2.0**GRID_BITS
GAUSSIAN, LOGISTIC, POISSON = int(Family.GAUSSIAN), int(Family.LOGISTIC), int(Family.POISSON)


@jit
def _predict(base: Array, eps: Array, X: Array, begin: int, eta: Array) -> None:
    """eta = base + eps . X, added from left to right, three columns at a time."""
    dim, size = len(eps), len(eta)
    end, start = begin + size, base
    for j in range(0, dim - 2, 3):
        e, f, g = eps[j], eps[j + 1], eps[j + 2]
        x, y, z = X[j, begin:end], X[j + 1, begin:end], X[j + 2, begin:end]
        for i in range(size):
            eta[i] = start[i] + e * x[i] + f * y[i] + g * z[i]
        start = eta
    for j in range(dim - dim % 3, dim):
        e, x = eps[j], X[j, begin:end]
        for i in range(size):
            eta[i] = start[i] + e * x[i]
        start = eta


@jit
def _change(family: int, base: Array, y: Array, eta: Array, delta: Array, change: Array) -> None:
    """rho(eta) - rho(base), without cancellation."""
    size = len(change)
    near = True
    if family == LOGISTIC:
        for i in range(size):
            near &= abs(delta[i]) <= NEAR
            change[i] = logistic_near(base[i], eta[i], delta[i]) - y[i] * delta[i]
    elif family == POISSON:
        for i in range(size):
            near &= abs(delta[i]) <= NEAR
            change[i] = poisson_near(base[i], delta[i]) - y[i] * delta[i]
    elif family == GAUSSIAN:
        for i in range(size):
            change[i] = gaussian_change(base[i], y[i], delta[i])
    else:
        for i in range(size):
            change[i] = delta[i]
    if not near:  # rare, and outside the loops above, or LLVM would compute both formulas everywhere
        for i in range(size):
            if abs(delta[i]) > NEAR:
                far = logistic_far(base[i], eta[i]) if family == LOGISTIC else poisson_far(base[i], eta[i])
                change[i] = far - y[i] * delta[i]


@jit
def _slope(family: int, y: Array, eta: Array, scale: float, slope: Array) -> None:
    """rho'(eta), times the scale."""
    size = len(slope)
    if family == LOGISTIC:
        for i in range(size):
            slope[i] = (expit(eta[i]) - y[i]) * scale
    elif family == POISSON:
        for i in range(size):
            slope[i] = (exp(eta[i]) - y[i]) * scale
    elif family == GAUSSIAN:
        for i in range(size):
            slope[i] = (eta[i] - y[i]) * scale
    else:
        for i in range(size):
            slope[i] = scale


@jit
def _curvature(family: int, eta: Array, scale: float, curvature: Array) -> None:
    """rho''(eta), times the scale."""
    size = len(curvature)
    if family == LOGISTIC:
        for i in range(size):
            curvature[i] = logistic_variance(eta[i]) * scale
    elif family == POISSON:
        for i in range(size):
            curvature[i] = exp(eta[i]) * scale
    else:
        constant = scale if family == GAUSSIAN else 0.0
        for i in range(size):
            curvature[i] = constant


@jit
def _multiply(values: Array, factor: Array, product: Array) -> None:
    for i in range(len(product)):
        product[i] = factor[i] * values[i]


@jit
def _scale(values: Array, factor: float, product: Array) -> None:
    for i in range(len(product)):
        product[i] = values[i] * factor


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
def chunks(
    family: int,
    X: Array,
    offset: Array,
    y: Array,
    w: Array,
    eps: Array,
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
    before the values meet a column, by the second, nearly always 1, after. An empty column stands for None.
    """
    dim, n_rows = X.shape
    zeros, ones = np.zeros(BLOCK), np.ones(BLOCK)
    etas, deltas, buffer, products = np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    everywhere = True
    for chunk in range(first_chunk, last_chunk):
        stop = min((chunk + 1) * CHUNK, n_rows)
        for begin in range(chunk * CHUNK, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            size = end - begin
            base = offset[begin:end] if len(offset) else zeros[:size]
            outcome = y[begin:end] if len(y) else zeros[:size]
            weight = w[begin:end] if len(w) else ones[:size]
            eta, values, product = etas[:size], buffer[:size], products[:size]
            _predict(base, eps, X, begin, eta)
            s = 0
            if loss:
                delta = deltas[:size]
                _predict(zeros, eps, X, begin, delta)
                _change(family, base, outcome, eta, delta, values)
                _scale(values, first[s], values)
                units, within = _round_and_sum(values, weight, second[s])
                sums[chunk, s] += units
                everywhere &= within
                s += 1
            if gradient:
                _slope(family, outcome, eta, first[s], values)
                if len(w):
                    _multiply(values, weight, values)
                everywhere &= _add_products(values, X, 0, begin, end, second[s], sums[chunk, s:])
                s += dim
            if hessian:
                _curvature(family, eta, first[s], values)
                if len(w):
                    _multiply(values, weight, values)
                for j in range(dim):
                    _multiply(values, X[j, begin:end], product)
                    everywhere &= _add_products(product, X, j, begin, end, second[s], sums[chunk, s:])
                    s += dim - j
    return everywhere


@jit_unordered
def _spread(values: Array, column: Array) -> tuple[float, float, float]:
    """The sum, the sum of squares and the largest of |values * column|."""
    total, squares, largest = 0.0, 0.0, 0.0
    for i in range(len(values)):
        size = abs(values[i] * column[i])
        total += size
        squares += size * size
        largest = max(largest, size)
    return total, squares, largest


@jit
def spread(
    family: int, X: Array, offset: Array, y: Array, w: Array, eps: Array, first: int, last: int, found: Array
) -> bool:
    """Fill ``found``, shape (6, d), from some rows: see `concentration.Concentration`."""
    dim = len(eps)
    zeros, ones = np.zeros(BLOCK), np.ones(BLOCK)
    etas, buffer = np.empty(BLOCK), np.empty(BLOCK)
    for begin in range(first, last, BLOCK):
        end = min(begin + BLOCK, last)
        size = end - begin
        base = offset[begin:end] if len(offset) else zeros[:size]
        outcome = y[begin:end] if len(y) else zeros[:size]
        weight = w[begin:end] if len(w) else ones[:size]
        eta, values = etas[:size], buffer[:size]
        _predict(base, eps, X, begin, eta)
        _slope(family, outcome, eta, 1.0, values)
        _multiply(values, weight, values)
        for j in range(dim):
            column = X[j, begin:end]
            total, squares, largest = _spread(values, column)
            found[0, j] += total
            found[1, j] += squares
            found[2, j] = max(found[2, j], largest)
            total, squares, largest = _spread(ones[:size], column)
            found[5, j] = max(found[5, j], largest)
            if len(w):
                total, squares, largest = _spread(weight, column)
            found[3, j] += total
            found[4, j] = max(found[4, j], largest)
    return True
