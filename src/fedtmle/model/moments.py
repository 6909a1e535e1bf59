"""First and second moments of EIF terms, as the additive sums that close a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fedtmle.model.columns import column_sums
from fedtmle.model.exact import Sums, column_shifts
from fedtmle.model.types import Array, unpack, upper_pairs


def second_moment_shifts(exponents: Sequence[int]) -> tuple[int, ...]:
    """The grid of `second_moments` for columns bounded by 2^exponents[j]."""
    return column_shifts(_with_products(exponents))


def second_moments(columns: Array, exponents: Sequence[int]) -> Sums:
    """Exact sums of m_j and of m_j m_k, j <= k, over the rows of ``columns``, shape (d, N).

    The products are rounded to floats, so a caller whose m lies far from zero subtracts a public
    centre first: the covariance is the same and keeps its digits.
    """
    d = len(columns)
    terms = [*((j,) for j in range(d)), *upper_pairs(d)]
    return column_sums(columns, _with_products(exponents), what="EIF term", terms=terms)


def _with_products(exponents: Sequence[int]) -> list[int]:
    return [*exponents, *(exponents[j] + exponents[k] for j, k in upper_pairs(len(exponents)))]


def mean_and_covariance(sums: Sums, dim: int, n: int) -> tuple[Array, Array]:
    """The mean of m and the covariance of that mean, cov(m)/n with divisor n - 1.

    Computed from the sums in exact rationals and rounded once. One row says nothing of its
    spread: the covariance is then infinite.
    """
    total = sums.fractions()
    first, second = total[:dim], total[dim:]
    pairs = zip(*np.triu_indices(dim), second, strict=True)
    scatter = [s - first[j] * first[k] / n for j, k, s in pairs]
    covariance = np.array([float(s / (Fraction(n) * (n - 1))) if n > 1 else math.inf for s in scatter])
    return np.array([float(f / n) for f in first]), unpack(covariance, dim)
