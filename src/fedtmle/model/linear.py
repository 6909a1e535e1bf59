"""Small dense linear algebra that gives all parties the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from itertools import starmap
from operator import mul
from typing import ParamSpec, TypeVar, cast

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle_core.types import Array

# Small dense linear algebra in plain floats, so that every party computes the same bits.
#
# BLAS and LAPACK may add in another order, or fuse a product into a sum, on another processor. Here every
# product is one rounded float, and every sum is correctly rounded (`math.fsum`), or is a single addition at a
# fixed place. The matrices are small: d is the number of coordinates of eps, or of columns of a regression.
#
# Silos that run in one process each derive the same matrices, so the last results are `remembered`.

Rows = list[list[float]]

MAX_SWEEPS = 60  # Jacobi's method converges quadratically: about ten are needed
REMEMBERED = 256  # results of each function: more than one round of a study has
LARGEST_REMEMBERED = 1 << 12  # entries of the arguments; larger ones are computed every time

Given = ParamSpec("Given")
Result = TypeVar("Result")


class _Call:
    """The arguments of a call, equal to those of another if they are the same bits."""

    __slots__ = ("_key", "args", "kwargs")

    def __init__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.args, self.kwargs = args, kwargs
        self._key = tuple(map(_bits, (*args, *kwargs, *kwargs.values())))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self._key == other._key


def _bits(argument: object) -> object:
    if isinstance(argument, np.ndarray):
        return argument.shape, argument.dtype.str, argument.tobytes()
    return argument


def remembered(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return the function with its last results kept; a matrix is returned as a copy of its own."""

    @lru_cache(maxsize=REMEMBERED)
    def computed(call: _Call) -> Result:
        return function(*call.args, **call.kwargs)  # type: ignore[arg-type]  # as they were given

    @wraps(function)
    def looked_up(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if sum([part.size for part in args if isinstance(part, np.ndarray)]) > LARGEST_REMEMBERED:
            return function(*args, **kwargs)
        result = computed(_Call(args, kwargs))
        return cast(Result, result.copy()) if isinstance(result, np.ndarray) else result

    return looked_up


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """Return sum_k a_k b_k: each product rounded, their sum correctly rounded."""
    return math.fsum(starmap(mul, zip(a, b, strict=True)))


def _dots(row: Array, rows: Array) -> list[float]:
    """Return `dot` of one row and each of others."""
    return list(map(math.fsum, (row * rows).tolist()))


@remembered
def multiply(A: Array, B: Array) -> Array:
    """Return the product A B of matrices of shapes (p, q) and (q, r)."""
    rows, columns = np.asarray(A), np.asarray(B).T
    if 0 < len(columns) < len(rows):  # the same products, and fewer calls: often B is one column
        return np.array(list(zip(*(_dots(column, rows) for column in columns), strict=True)))
    return np.array([_dots(row, columns) for row in rows])


@remembered
def congruence(C: Array, H: Array) -> Array:
    """Return C H C^T for a symmetric H; the result is symmetric to the last bit."""
    rows, left = np.asarray(C), multiply(C, H)
    result = np.empty((len(rows), len(rows)))
    for i, row in enumerate(left):
        result[i, i:] = result[i:, i] = _dots(row, rows[i:])
    return result


@remembered
def cholesky(matrix: Array, *, shift: float = 0.0, floor: float = 0.0) -> Array | None:
    """Return the lower factor L of matrix + shift I = L L^T, or None if a pivot is not above ``floor``."""
    A: Rows = np.asarray(matrix, dtype=np.float64).tolist()
    L: Rows = []  # rows of the lower triangle
    for i, row in enumerate(A):
        minus: list[float] = []  # -L[i]
        for entry, earlier in zip(row, L, strict=False):
            rest = math.fsum([entry + 0.0, *map(mul, minus, earlier)])  # over the columns before
            minus.append(-rest / earlier[-1])
        rest = math.fsum([row[i] + shift, *(-part * part for part in minus)])
        if not rest > floor:
            return None
        L.append([*(-part for part in minus), math.sqrt(rest)])
    return np.array([[*row, *[0.0] * (len(A) - len(row))] for row in L])


@remembered
def solve_factored(L: Array, b: Array) -> Array:
    """Return x with L L^T x = b for a lower triangular L and a vector b."""
    minus = -np.asarray(L)
    rows: Rows = minus.tolist()
    columns: Rows = minus.T.tolist()
    d, y = len(rows), np.asarray(b, dtype=np.float64).tolist()
    for i in range(d):
        y[i] = math.fsum([y[i], *map(mul, rows[i], y[:i])]) / -rows[i][i]
    for i in reversed(range(d)):
        y[i] = math.fsum([y[i], *map(mul, columns[i][i + 1 :], y[i + 1 :])]) / -rows[i][i]
    return np.array(y)


@remembered
def invert_lower(L: Array) -> Array:
    """Return the inverse of a lower triangular matrix, by forward substitution."""
    rows: Rows = np.asarray(L).tolist()
    inverse: Rows = [[0.0] * len(rows) for _ in rows]
    for j in range(len(rows)):
        for i in range(j, len(rows)):
            known = [-rows[i][k] * inverse[k][j] for k in range(j, i)]
            inverse[i][j] = math.fsum([float(i == j), *known]) / rows[i][i]
    return np.array(inverse)


def invert(matrix: Array) -> Array | None:
    """Return the inverse of a symmetric positive definite matrix, or None if it is not positive definite."""
    L = cholesky(matrix)
    if L is None:
        return None
    root = invert_lower(L).T
    return multiply(root, root.T)


def eigen(matrix: Array) -> tuple[Array, Array]:
    """Return the eigenvalues of a symmetric matrix, ascending, and its eigenvectors as columns."""
    d = len(matrix)
    V: Rows = [[float(i == j) for j in range(d)] for i in range(d)]
    values = _diagonalise(matrix, V)
    order = sorted(range(d), key=lambda j: values[j])
    return np.array([values[j] for j in order]), np.array([[row[j] for j in order] for row in V])


@remembered
def symmetric_norm(matrix: Array) -> float:
    """Return the operator norm of a symmetric matrix: its largest |eigenvalue|."""
    return max(map(abs, _diagonalise(matrix, [])))


def _diagonalise(matrix: Array, V: Rows) -> list[float]:
    """Return the eigenvalues in any order, and apply the rotations that lead to them to the rows of V.

    Cyclic Jacobi: it sweeps over the places above the diagonal, row by row, and each rotation sets one entry
    to zero. It ends with the first sweep in which every entry is negligible beside its two diagonal ones.
    """
    A: Rows = np.asarray(matrix, dtype=np.float64).tolist()
    if not all(math.isfinite(entry) for row in A for entry in row):
        raise NumericalError("a matrix has an entry that is not finite, so it has no eigenvalues")
    for _ in range(MAX_SWEEPS):
        is_diagonal = True
        for p in range(len(A)):
            for q in range(p + 1, len(A)):
                is_diagonal &= not _rotate(A, V, p, q)
        if is_diagonal:
            return [A[j][j] for j in range(len(A))]
    raise NumericalError("the eigenvalues of a matrix did not converge; its entries may be out of range")


def _rotate(A: Rows, V: Rows, p: int, q: int) -> bool:
    """Make A[p][q] zero by a rotation of rows and columns p and q; return False if it was negligible."""
    a_pp, a_qq, a_pq = A[p][p], A[q][q], A[p][q]
    if abs(a_pp) + abs(a_pq) == abs(a_pp) and abs(a_qq) + abs(a_pq) == abs(a_qq):
        A[p][q] = A[q][p] = 0.0
        return False
    theta = (a_qq - a_pp) / (2.0 * a_pq)
    t = math.copysign(1.0, theta) / (abs(theta) + math.sqrt(theta * theta + 1.0))
    cosine = 1.0 / math.sqrt(t * t + 1.0)
    sine = t * cosine
    A[p][p], A[q][q] = a_pp - t * a_pq, a_qq + t * a_pq
    A[p][q] = A[q][p] = 0.0
    for k in range(len(A)):
        if k not in (p, q):
            x, y = A[k][p], A[k][q]
            A[k][p] = A[p][k] = cosine * x - sine * y
            A[k][q] = A[q][k] = sine * x + cosine * y
    for row in V:
        x, y = row[p], row[q]
        row[p], row[q] = cosine * x - sine * y, sine * x + cosine * y
    return True


def operator_norm_squared(matrix: Array) -> float:
    """Return the largest eigenvalue of A A^T, the square of the operator norm of A."""
    return symmetric_norm(multiply(matrix, matrix.T))


def newton_direction(hessian: Array, gradient: Array) -> Array:
    """Return -(H + tau I)^-1 g with the first tau in 0, s, 4s, 16s, ... that makes it positive definite."""
    scale = max(abs(float(entry)) for entry in np.diag(hessian)) or 1.0
    tau = 0.0
    while True:
        factor = cholesky(hessian, shift=tau, floor=1e-12 * scale)
        if factor is not None:
            return -solve_factored(factor, gradient)
        tau = 4.0 * tau if tau else 1e-3 * scale
