"""Elementary functions and fused row sums: numba when it can be had, a numpy twin otherwise.

Both backends do the same IEEE operations in the same order, so their results are the same bits,
for any number of threads. Numba is imported by the first call of a kernel, not by this package.
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.concentration import RowSpread
from fedtmle.model.exact import total
from fedtmle.model.families import Family
from fedtmle.model.kernels._backend import (
    Rows,
    backend,
    checked_eps,
    done,
    mapped,
    module,
    query,
    rows_of,
    set_threads,
    threads,
    using_backend,
)
from fedtmle.model.types import Array, Bools, Bytes, Codes, Design, IntArray, Part

__all__ = [
    "Rows",
    "add_multiple",
    "backend",
    "binned_chunks",
    "bound",
    "chosen",
    "column_chunks",
    "done",
    "exp",
    "expit",
    "glm_means",
    "glm_rows",
    "glm_spread",
    "glm_sums",
    "largest",
    "log",
    "log_mean_kernel",
    "logit",
    "mapped",
    "set_threads",
    "softmax",
    "softplus",
    "threads",
    "using_backend",
    "weigh",
]

Real = TypeVar("Real", float, Array)


def exp(x: Real) -> Real:
    """e^x, within 0.6 ulp; 0 below -708 (the result would be subnormal or nearly so)."""
    return _elementwise("exp", x)


def log(x: Real) -> Real:
    """log x, within 1 ulp; -infinity at 0, NaN below."""
    return _elementwise("log", x)


def expit(x: Real) -> Real:
    """1/(1 + e^-x), within 2.6 ulp at both ends; 0 below -709.43."""
    return _elementwise("expit", x)


def softplus(x: Real) -> Real:
    """log(1 + e^x), to relative accuracy; 0 below -708."""
    return _elementwise("softplus", x)


def logit(p: Real) -> Real:
    """log(p/(1-p)), to relative accuracy; -+infinity at 0 and 1, NaN outside."""
    return _elementwise("logit", p)


def _elementwise(name: str, x: Real) -> Real:
    values = np.ascontiguousarray(x, dtype=np.float64)
    result = module().elementwise(name, values.reshape(-1))
    return cast(Real, result.reshape(np.shape(x)) if np.ndim(x) else result.item())


def glm_rows(
    family: Family, X: Design, offset: Array | None = None, y: Array | None = None, w: Array | None = None
) -> Rows:
    """Rows of a generalised linear loss, checked once for many passes; not to be written to meanwhile.

    ``X`` has shape (d, N), as one array or as `Scaled` columns; ``offset``, ``y`` and ``w`` have shape
    (N,), None standing for zeros, zeros and ones.
    """
    return rows_of(family, X, offset, y, w)


def glm_sums(rows: Rows, eps: Array, parts: Part, shifts: tuple[int, ...]) -> tuple[int, ...]:
    """Exact sums over rows of w rho(offset + eps . X, y): its change from eps = 0, slope and curvature.

    Sum s is in units of 2^-shifts[s], in the order of `exact.query_shifts`. A row beyond 2^(50-shifts[s]),
    or not a number, is a `ContributionError`.
    """
    return total(module().glm_chunks(query(rows, eps, parts, shifts)))


def glm_means(rows: Rows, eps: Array) -> Array:
    """The mean of a generalised linear model row by row, mu(eps . X), columns added in order; shape (N,)."""
    return module().means(rows, checked_eps(rows, eps))


def glm_spread(
    rows: Rows,
    eps: Array,
    until: Array | None = None,
    least: int = 0,
    *,
    few: int = 1,
    many: float = np.inf,
) -> tuple[RowSpread, int, bool]:
    """Return how the contributions to the gradient spread over the rows, by plain floating-point sums.

    A silo compares these with its own thresholds and sends them to nobody. The pass reads ``few`` rows, and
    stops if by these more than ``many`` would be needed; else some time after every total has reached
    ``until``, shape (d,), with at least ``least`` rows in each coordinate whose ``until`` is not 0. The other
    results are the number of rows read, and whether they were enough.
    """
    until = np.full(rows.dim, np.inf) if until is None else until
    return module().spread(rows, checked_eps(rows, eps), until, least, few, many)


def add_multiple(total: Array, factor: float, values: Array) -> None:
    """total += factor * values, each of shape (N,), without a copy between; ``total`` is contiguous."""
    if total.shape != values.shape:
        raise InputError(f"values: expected shape {total.shape}, not {values.shape}")
    if values.strides == (0,):  # a constant
        total += factor * values[:1]
    else:
        module().add_multiple(total, factor, np.ascontiguousarray(values, dtype=np.float64))


def chosen(values: Array, codes: Codes) -> Array:
    """values[codes[i], i] for each row i; shapes (J, N) and (N,), codes from 0 to J - 1."""
    columns = [np.ascontiguousarray(column, dtype=np.float64) for column in values]
    if any(column.shape != codes.shape for column in columns) or codes.ndim != 1 or not columns:
        raise InputError(f"values, codes: expected shapes (J, N) and (N,), not {values.shape}, {codes.shape}")
    return module().chosen(columns, np.ascontiguousarray(codes))


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
    """Fill H = numerator / max(probability, floor), ``taken`` with H in the rows that have the code, and
    ``below``, where the probability is less than the floor; shape (N,) each, or (1,) of a constant."""
    numerators = np.ascontiguousarray(numerator, dtype=np.float64)
    if len(numerators) not in (1, len(H)):
        raise InputError(f"numerator: expected one value or {len(H)}, not {len(numerators)}")
    probabilities = np.ascontiguousarray(np.broadcast_to(probability, H.shape), dtype=np.float64)
    if not codes.shape == taken.shape == below.shape == H.shape:
        raise InputError("codes, taken, below: expected the shape of H")
    module().weigh(numerators, probabilities, floor, codes, code, H, taken, below)


def bound(values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool:
    """Fill ``bounded`` with the values kept from low to high, 0 < 2^-60 <= low, high <= 1 - 2^-60, and
    ``logits`` with their logits; whether all values are finite. Shape (N,) each."""
    if not values.shape == bounded.shape == logits.shape or not 2.0**-60 <= low <= high <= 1 - 2.0**-60:
        raise InputError("values, bounded, logits: expected one shape, and bounds inside (0, 1)")
    return module().bound(np.ascontiguousarray(values, dtype=np.float64), low, high, bounded, logits)


def largest(column: Array) -> float:
    """The largest magnitude in a column, 0 if it has no rows, NaN if one is not a number."""
    distinct = column[:1] if column.strides == (0,) else column  # a constant takes no memory, nor time
    return module().largest(np.ascontiguousarray(distinct, dtype=np.float64))


def column_chunks(columns: Array, terms: IntArray, scale: Array, what: str) -> IntArray:
    """Per chunk of rows, exact sums of products of columns: ``terms``, shape (k, 2), says of which two.

    A -1 in the second place stands for no second one. Term s is scaled by scale[s], rounded, and summed as
    two integers: units, then what they leave in units of 2^-40; shape (chunks, 2 k). A row beyond 2^50
    units, or not a number, is a `ContributionError` that says ``what``.
    """
    columns = np.ascontiguousarray(columns, dtype=np.float64)
    inside = terms.min(initial=0, axis=0) >= (0, -1)
    if not (columns.ndim == 2 and inside.all() and terms.max(initial=-1) < len(columns)):
        raise InputError("columns, terms: expected shape (p, N), and terms of columns that are there")
    if terms.shape != (len(scale), 2):
        raise InputError(f"terms: expected shape ({len(scale)}, 2), not {terms.shape}")
    return module().column_chunks(columns, terms, scale, what)


def binned_chunks(columns: Array, bins: Bytes, count: int, scale: Array, what: str) -> IntArray:
    """`column_chunks` of every column by bin, shape (chunks, ``count``, 2 p); ``bins`` has each row's."""
    columns, bins = np.ascontiguousarray(columns, dtype=np.float64), np.ascontiguousarray(bins, np.uint8)
    inside = int(bins.max(initial=0)) < count
    if columns.ndim != 2 or bins.shape != columns.shape[1:] or not inside or len(scale) != len(columns):
        raise InputError("columns, bins: expected shapes (p, N) and (N,), bins below their count, p scales")
    return module().binned_chunks(columns, bins, count, scale, what)


def softmax(logits: Array) -> Array:
    """exp(l_j) / sum_j exp(l_j) for each column of ``logits``, shape (J, N), J >= 1."""
    logits = np.ascontiguousarray(logits, dtype=np.float64)
    if logits.ndim != 2 or not len(logits):
        raise InputError(f"logits: expected shape (J, N) with J >= 1, not {logits.shape}")
    return module().softmax(logits)


def log_mean_kernel(points: Array, centres: Array) -> Array:
    """log((1/n0) sum_i exp(-|p - c_i|^2/2)) at each of N points; shapes (q, N), (q, n0) to (N,)."""
    points = np.ascontiguousarray(points, dtype=np.float64)
    centres = np.ascontiguousarray(centres, dtype=np.float64)
    if points.ndim != 2 or centres.ndim != 2 or len(points) != len(centres) or not centres.size:
        raise InputError(
            f"points, centres: expected shapes (q, N) and (q, n0), n0 >= 1, "
            f"not {points.shape} and {centres.shape}"
        )
    return module().log_mean_kernel(points, centres)
