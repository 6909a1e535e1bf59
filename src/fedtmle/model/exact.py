"""Arithmetic that gives all parties the same bits: exact sums over rows, and small dense linear algebra."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, wraps
from itertools import starmap
from operator import mul
from typing import NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model.types import Array, IntArray, Part, RowBound, packed_size

# Exact sums: each row is rounded to a public grid, then integers are added.
#
# Integer addition is associative, so threads, chunks, the order of rows, their partition into
# silos and the backend cannot change a bit. A row bounded by 2^c is rounded to the grid
# 2^-(50-c), half to even; at most 4,096 such integers fit an int64, and totals are Python
# integers. The mean's error is at most 2^c 2^-51. The grid is fixed by the plan, never by the
# data: a shift chosen from the data would leak and would break the invariance.

GRID_BITS = 50
CHUNK = 4096
FINE_BITS = 40


@dataclass(frozen=True, slots=True)
class Sums:
    """Exact sums over rows: entry j is ``units[j] * 2^-shifts[j]``."""

    units: tuple[int, ...]
    shifts: tuple[int, ...]

    def __add__(self, other: Sums) -> Sums:
        if self.shifts != other.shifts:
            raise ValueError("sums on different grids cannot be added")
        return Sums(tuple(a + b for a, b in zip(self.units, other.units, strict=True)), self.shifts)

    def joined(self, other: Sums) -> Sums:
        """These sums followed by ``other``'s."""
        return Sums(self.units + other.units, self.shifts + other.shifts)

    def rounded(self, shifts: Sequence[int]) -> Sums:
        """The sums on a coarser grid, or the same: each rounded half to even."""
        if tuple(shifts) == self.shifts:
            return self
        drops = [fine - coarse for fine, coarse in zip(self.shifts, shifts, strict=True)]
        units = [nearest(unit, drop) for unit, drop in zip(self.units, drops, strict=True)]
        return Sums(tuple(units), tuple(shifts))

    def __getitem__(self, part: slice) -> Sums:
        return Sums(self.units[part], self.shifts[part])

    def chosen(self, places: Sequence[int]) -> Sums:
        """Some of the sums, in the given order."""
        return Sums(tuple(self.units[j] for j in places), tuple(self.shifts[j] for j in places))

    def fractions(self, divisor: int = 1) -> list[Fraction]:
        """The sums, or means when ``divisor`` is the number of rows, as exact rationals."""
        return [
            Fraction(unit, divisor) / Fraction(2) ** shift
            for unit, shift in zip(self.units, self.shifts, strict=True)
        ]

    def values(self, divisor: int = 1) -> Array:
        """The sums or means of `fractions`, each correctly rounded to a float."""
        # Division of integers is correctly rounded, and much faster than making fractions.
        return np.array(
            [
                unit / (divisor << shift) if shift >= 0 else (unit << -shift) / divisor
                for unit, shift in zip(self.units, self.shifts, strict=True)
            ]
        )


def nearest(value: int, shift: int) -> int:
    """Return value / 2^shift, rounded half to even; a negative shift multiplies."""
    if shift <= 0:
        return value << -shift
    quotient, remainder, half = value >> shift, value & (1 << shift) - 1, 1 << shift - 1
    return quotient + (remainder > half or (remainder == half and quotient % 2 == 1))


def zero_sums(shifts: Sequence[int]) -> Sums:
    """The sum over no rows."""
    return Sums((0,) * len(shifts), tuple(shifts))


class Layout(NamedTuple):
    """Where the sums of each part of a query stand: the loss, the gradient, then the Hessian."""

    loss: slice
    gradient: slice
    hessian: slice

    @property
    def width(self) -> int:
        """The number of sums."""
        return int(self.hessian.stop)


@lru_cache(maxsize=256)
def layout(dim: int, parts: Part) -> Layout:
    """Return the layout of the requested parts for eps of shape (dim,); the place of any other is empty."""
    gradient = 1 if Part.LOSS in parts else 0
    hessian = gradient + (dim if Part.GRADIENT in parts else 0)
    stop = hessian + (packed_size(dim) if Part.HESSIAN in parts else 0)
    return Layout(slice(0, gradient), slice(gradient, hessian), slice(hessian, stop))


def query_shifts(bound: RowBound, eps: Array, parts: Part) -> tuple[int, ...]:
    """The public grid of a query's sums: a function of the plan, the law and eps alone."""
    dim = len(eps)
    shifts: tuple[int, ...] = ()
    if Part.LOSS in parts:
        reach = math.fsum(abs(float(e)) for e in eps)
        shifts += (GRID_BITS - bound.gradient - (math.frexp(reach)[1] if reach else 0),)
    if Part.GRADIENT in parts:
        shifts += (GRID_BITS - bound.gradient,) * dim
    if Part.HESSIAN in parts:
        shifts += (GRID_BITS - bound.curvature,) * packed_size(dim)
    return shifts


def total(chunks: IntArray) -> tuple[int, ...]:
    """Column totals of per-chunk int64 sums, shape (chunks, p), as unbounded integers."""
    if len(chunks) == 1:
        return tuple(chunks[0].tolist())
    high = (chunks >> 32).sum(axis=0)
    low = (chunks & 0xFFFFFFFF).sum(axis=0)
    return tuple((int(h) << 32) + int(v) for h, v in zip(high, low, strict=True))


def column_shifts(exponents: Sequence[int]) -> tuple[int, ...]:
    """The grid of `kernels.column_sums`."""
    return tuple(GRID_BITS + FINE_BITS - c for c in exponents)


def beyond_bound(rows: int, what: str) -> str:
    """The message of a `ContributionError`: a count, never a value."""
    return (
        f"{rows} row(s) exceed the declared bound on one row's {what}; "
        "check the data against the study's declared ranges, or declare wider ones"
    )


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
