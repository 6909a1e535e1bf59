"""The compiled pass over the rows of a generalised linear loss, chunk by chunk.

A block of rows goes through short stages that each vectorise: predictor, loss difference, slope,
curvature; each stage's values are multiplied by columns of X, rounded to the grid and added as
integers at once, while the block is in the first-level cache.
"""

from __future__ import annotations

import numpy as np

from fedtmle.model.exact import CHUNK, GRID_BITS
from fedtmle.model.families import Family
from fedtmle.model.kernels import _rows
from fedtmle.model.kernels import _scalar  # noqa: F401 - registers _elementary and _rows with numba
from fedtmle.model.kernels._elementary import exp, expit
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import MAGIC, MAGIC_BITS, bits
from fedtmle.model.types import Array, IntArray

BLOCK = 512
LIMIT = 2.0**GRID_BITS
GAUSSIAN, LOGISTIC, POISSON = int(Family.GAUSSIAN), int(Family.LOGISTIC), int(Family.POISSON)


@jit
def _round_sum(values: Array, first: float, second: float) -> tuple[int, bool]:
    """The sum of values * 2^shift, each rounded half to even, and whether all are within 2^50."""
    units, within = 0, True
    for i in range(len(values)):
        scaled = values[i] * first * second
        within &= abs(scaled) <= LIMIT  # False for NaN
        units += bits(scaled + MAGIC)
    return units - len(values) * MAGIC_BITS, within  # modulo 2^64, in which the sum itself fits


@jit
def _round_product_sum(values: Array, column: Array, first: float, second: float) -> tuple[int, bool]:
    """The same for values * column."""
    units, within = 0, True
    for i in range(len(values)):
        scaled = values[i] * column[i] * first * second
        within &= abs(scaled) <= LIMIT
        units += bits(scaled + MAGIC)
    return units - len(values) * MAGIC_BITS, within  # modulo 2^64, in which the sum itself fits


@jit
def _predict(base: Array, eps: Array, X: Array, begin: int, eta: Array) -> None:
    """eta = base + eps . X, added from left to right."""
    size = len(eta)
    column = X[0, begin : begin + size]
    for i in range(size):
        eta[i] = base[i] + eps[0] * column[i]
    for j in range(1, len(eps)):
        column = X[j, begin : begin + size]
        for i in range(size):
            eta[i] = eta[i] + eps[j] * column[i]


@jit
def _weigh(w: Array, begin: int, values: Array) -> None:
    if len(w):
        weights = w[begin : begin + len(values)]
        for i in range(len(values)):
            values[i] = weights[i] * values[i]


@jit
def _replace_far(family: int, base: Array, eta: Array, delta: Array, change: Array) -> None:
    """The plain difference where delta is large."""
    for i in range(len(change)):
        if abs(delta[i]) > _rows.NEAR:
            if family == LOGISTIC:
                change[i] = _rows.logistic_far(base[i], eta[i])
            else:
                change[i] = _rows.poisson_far(base[i], eta[i])


@jit
def _change(family: int, base: Array, y: Array, begin: int, eta: Array, delta: Array, change: Array) -> None:
    """rho(eta) - rho(base), without cancellation."""
    size = len(change)
    outcome = y[begin : begin + size]
    if family == GAUSSIAN:
        for i in range(size):
            change[i] = _rows.gaussian_change(base[i], outcome[i] if len(y) else 0.0, delta[i])
        return
    if family != LOGISTIC and family != POISSON:
        for i in range(size):
            change[i] = delta[i]
        return
    near = True
    for i in range(size):
        near &= abs(delta[i]) <= _rows.NEAR
    if family == LOGISTIC:
        for i in range(size):
            change[i] = _rows.logistic_near(base[i], eta[i], delta[i])
    else:
        for i in range(size):
            change[i] = _rows.poisson_near(base[i], delta[i])
    if not near:  # rare, and a loop of its own: LLVM would compute both formulas for every row
        _replace_far(family, base, eta, delta, change)
    if len(y):
        for i in range(size):
            change[i] = change[i] - outcome[i] * delta[i]


@jit
def _slope(family: int, y: Array, begin: int, eta: Array, slope: Array) -> None:
    """rho'(eta)."""
    size = len(eta)
    if family == LOGISTIC:
        for i in range(size):
            slope[i] = expit(eta[i])
    elif family == POISSON:
        for i in range(size):
            slope[i] = exp(eta[i])
    elif family == GAUSSIAN:
        for i in range(size):
            slope[i] = eta[i]
    else:
        for i in range(size):
            slope[i] = 1.0
        return
    if len(y):
        outcome = y[begin : begin + size]
        for i in range(size):
            slope[i] = slope[i] - outcome[i]


@jit
def _curvature(family: int, eta: Array, curvature: Array) -> None:
    """rho''(eta)."""
    if family == LOGISTIC:
        for i in range(len(eta)):
            curvature[i] = _rows.logistic_variance(eta[i])
    elif family == POISSON:
        for i in range(len(eta)):
            curvature[i] = exp(eta[i])
    else:
        constant = 1.0 if family == GAUSSIAN else 0.0
        for i in range(len(eta)):
            curvature[i] = constant


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

    Sum s is scaled by first[s] * second[s] = 2^shifts[s]; an empty column stands for None.
    """
    dim, n_rows = X.shape
    zeros, etas, deltas = np.zeros(BLOCK), np.empty(BLOCK), np.empty(BLOCK)
    buffer, products = np.empty(BLOCK), np.empty(BLOCK)
    within = True
    for chunk in range(first_chunk, last_chunk):
        stop = min((chunk + 1) * CHUNK, n_rows)
        for begin in range(chunk * CHUNK, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            size = end - begin
            base = offset[begin:end] if len(offset) else zeros[:size]
            eta, delta, values = etas[:size], deltas[:size], buffer[:size]
            _predict(base, eps, X, begin, eta)
            s = 0
            if loss:
                _predict(zeros, eps, X, begin, delta)
                _change(family, base, y, begin, eta, delta, values)
                _weigh(w, begin, values)
                units, fits = _round_sum(values, first[s], second[s])
                sums[chunk, s] += units
                within &= fits
                s += 1
            if gradient:
                _slope(family, y, begin, eta, values)
                _weigh(w, begin, values)
                for j in range(dim):
                    units, fits = _round_product_sum(values, X[j, begin:end], first[s], second[s])
                    sums[chunk, s] += units
                    within &= fits
                    s += 1
            if hessian:
                _curvature(family, eta, values)
                _weigh(w, begin, values)
                product = products[:size]
                for j in range(dim):
                    column = X[j, begin:end]
                    for i in range(size):
                        product[i] = values[i] * column[i]
                    for k in range(j, dim):
                        units, fits = _round_product_sum(product, X[k, begin:end], first[s], second[s])
                        sums[chunk, s] += units
                        within &= fits
                        s += 1
    return within
