"""Elementary functions and fused row sums: numba when it can be had, a numpy twin otherwise.

Both backends do the same IEEE operations in the same order, so their results are the same bits,
for any number of threads. Numba is imported by the first call of a kernel, not by this package.
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.exact import total
from fedtmle.model.families import Family
from fedtmle.model.kernels._backend import backend, module, using_backend
from fedtmle.model.kernels._query import query
from fedtmle.model.kernels._threads import mapped, set_threads, threads
from fedtmle.model.types import Array, Part

__all__ = [
    "backend",
    "exp",
    "expit",
    "glm_spread",
    "glm_sums",
    "log",
    "log_mean_kernel",
    "logit",
    "mapped",
    "set_threads",
    "softmax",
    "softplus",
    "threads",
    "using_backend",
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


def glm_sums(
    family: Family,
    X: Array,
    offset: Array | None,
    y: Array | None,
    w: Array | None,
    eps: Array,
    parts: Part,
    shifts: tuple[int, ...],
) -> tuple[int, ...]:
    """Exact sums over rows of w rho(offset + eps . X, y): its change from eps = 0, slope and curvature.

    ``X`` has shape (d, N); ``offset``, ``y`` and ``w`` have shape (N,), None standing for zeros,
    zeros and ones. Sum s is in units of 2^-shifts[s], in the order of `exact.query_shifts`. A row
    beyond 2^(50-shifts[s]), or not a number, is a `ContributionError`.
    """
    return total(module().glm_chunks(query(family, X, offset, y, w, eps, parts, shifts)))


def glm_spread(
    family: Family,
    X: Array,
    offset: Array | None,
    y: Array | None,
    w: Array | None,
    eps: Array,
    until: float,
) -> tuple[Array, int]:
    """How the rows' contributions to the gradient spread: the six rows of `Concentration`, shape (6, d).

    Plain floating-point sums: what a silo compares with its own thresholds, and sends to nobody. It
    stops when every total has come to ``until``, and says how many rows it has seen.
    """
    shifts = (0,) * len(X)
    return module().spread(query(family, X, offset, y, w, eps, Part.GRADIENT, shifts), until)


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
