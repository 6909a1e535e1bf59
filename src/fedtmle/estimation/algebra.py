"""Dense linear algebra in a fixed order, so that every hospital computes the same bits.

BLAS may add in another order, or fuse a product into a sum, on another processor. Here a matrix is changed by
one product of a column and a row after the other, elementwise: each entry is one rounded product and one
rounded difference, on every processor. Matrices of 150 columns take milliseconds.
"""

from __future__ import annotations

import math

import numpy as np

from fedtmle_core.types import Array


def multiply(A: Array, B: Array) -> Array:
    """Return A B, for B a matrix or a vector, summed over the inner index in its order."""
    result = np.zeros((len(A), *B.shape[1:]))
    for k in range(len(B)):
        result += np.multiply.outer(A[:, k], B[k])
    return result


def dot(x: Array, y: Array) -> float:
    """Return x . y."""
    return math.fsum((x * y).tolist())


def norm(x: Array) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(dot(x, x))


def congruence(C: Array, H: Array) -> Array:
    """Return C H C^T for a symmetric H; the result is symmetric to the last bit."""
    product = multiply(multiply(C, H), C.T)
    upper = np.triu(product)
    return upper + np.triu(product, 1).T


def cholesky(matrix: Array, *, shift: float = 0.0, floor: float = 0.0) -> Array | None:
    """Return the lower factor L of matrix + shift I = L L^T, or None if a pivot is not above ``floor``."""
    rest = np.array(matrix, dtype=np.float64)
    rest[np.diag_indices(len(rest))] += shift
    L = np.zeros_like(rest)
    for k in range(len(rest)):
        pivot = float(rest[k, k])
        if not pivot > floor:
            return None
        column = rest[k:, k] / math.sqrt(pivot)
        L[k:, k] = column
        rest[k + 1 :, k + 1 :] -= np.multiply.outer(column[1:], column[1:])
    return L


def solve_lower(L: Array, B: Array) -> Array:
    """Return L^-1 B for a lower triangular L, and B a matrix or a vector."""
    result = np.array(B, dtype=np.float64)
    for k in range(len(L)):
        result[k] /= L[k, k]
        result[k + 1 :] -= np.multiply.outer(L[k + 1 :, k], result[k])
    return result


def solve_upper(L: Array, B: Array) -> Array:
    """Return L^-T B for a lower triangular L."""
    result = np.array(B, dtype=np.float64)
    for k in reversed(range(len(L))):
        result[k] /= L[k, k]
        result[:k] -= np.multiply.outer(L[k, :k], result[k])
    return result


def solve_factored(L: Array, b: Array) -> Array:
    """Return x with L L^T x = b."""
    return solve_upper(L, solve_lower(L, b))


def invert_lower(L: Array) -> Array:
    """Return the inverse of a lower triangular matrix."""
    return solve_lower(L, np.eye(len(L)))


def newton_direction(hessian: Array, gradient: Array) -> Array:
    """Return -(H + tau I)^-1 g with the first tau in 0, s, 4s, 16s, ... that makes it positive definite."""
    scale = max(abs(float(entry)) for entry in np.diag(hessian)) or 1.0
    tau = 0.0
    while True:
        factor = cholesky(hessian, shift=tau, floor=1e-12 * scale)
        if factor is not None:
            return -solve_factored(factor, gradient)
        tau = 4.0 * tau if tau else 1e-3 * scale


def on_grid(values: Array, bits: int = 44) -> Array:
    """Return numbers rounded to some significant bits: the public grid of what enters a question.

    44 bits move a linear predictor by at most 2^-44 of its size, far less than a fit is solved to.
    """
    fractions, exponents = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(np.ldexp(fractions, bits)), exponents - bits))
