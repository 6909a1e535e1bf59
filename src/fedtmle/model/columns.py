"""Exact sums of given columns: for the closing sums, counts and tables, which keep every digit of a double.

What the 50-bit grid leaves of each row is summed too, on a grid 2^-40 finer, so that a generous bound
costs no digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, total
from fedtmle.model.types import Array, Bytes, IntArray


def column_sums(
    columns: Array, exponents: Sequence[int], *, what: str, terms: Sequence[tuple[int, ...]] | None = None
) -> Sums:
    """Exact sums of columns, shape (p, N), or of ``terms``: a column's number, or two for their product.

    Term j, a product once rounded to a float, is bounded by 2^exponents[j]; a row beyond is a
    `ContributionError`.
    """
    asked = [(j,) for j in range(len(columns))] if terms is None else terms
    places = np.array([(*term, -1)[:2] for term in asked], dtype=np.int64).reshape(-1, 2)
    chunks = kernels.column_chunks(columns, places, _scale(exponents), what)
    return Sums(_units(chunks), column_shifts(exponents))


def binned_sums(
    columns: Array, bins: Bytes, count: int, exponents: Sequence[int], *, what: str
) -> list[Sums]:
    """`column_sums` of the rows of each of ``count`` bins; ``bins`` has each row's, shape (N,)."""
    chunks = kernels.binned_chunks(columns, bins, count, _scale(exponents), what)
    shifts = column_shifts(exponents)
    return [Sums(_units(chunks[:, b]), shifts) for b in range(count)]


def _scale(exponents: Sequence[int]) -> Array:
    return np.exp2(GRID_BITS - np.array(exponents, dtype=np.float64))


def _units(chunks: IntArray) -> tuple[int, ...]:
    """Coarse and fine sums per chunk, side by side, as one integer each."""
    parts = total(chunks)
    return tuple((c << FINE_BITS) + f for c, f in zip(parts[::2], parts[1::2], strict=True))
