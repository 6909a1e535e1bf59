"""Compiled exact sums of columns, of their products, and of columns by bin.

What the 50-bit grid leaves of a row is rounded to a grid 2^-40 finer and added up too. Products are made
in registers, and never leave them.
"""

from __future__ import annotations

from fedtmle.model.exact import CHUNK, FINE_BITS, GRID_BITS
from fedtmle.model.kernels import _scalar  # noqa: F401 - registers what follows with numba
from fedtmle.model.kernels._jit import jit
from fedtmle.model.kernels._primitives import MAGIC, MAGIC_BITS, bits, select
from fedtmle.model.types import Array, Bytes, Codes, IntArray

BLOCK = 512
LIMIT = 2.0**GRID_BITS
FINE = 2.0**FINE_BITS


@jit
def _one(values: Array, scale: float) -> tuple[int, int, bool]:
    """The sum of values * scale in units, of what they leave in units of 2^-40, and whether all fit."""
    coarse, fine, within = 0, 0, True
    for i in range(len(values)):
        scaled = values[i] * scale
        within &= abs(scaled) <= LIMIT  # False for NaN
        rounded = scaled + MAGIC
        coarse += bits(rounded)  # type: ignore[assignment]  # a scalar when compiled
        fine += bits((scaled - (rounded - MAGIC)) * FINE + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return coarse - shift, fine - shift, within  # modulo 2^64, in which the sums themselves fit


@jit
def _two(values: Array, factor: Array, scale: float) -> tuple[int, int, bool]:
    """The same of values * factor."""
    coarse, fine, within = 0, 0, True
    for i in range(len(values)):
        scaled = values[i] * factor[i] * scale
        within &= abs(scaled) <= LIMIT
        rounded = scaled + MAGIC
        coarse += bits(rounded)  # type: ignore[assignment]
        fine += bits((scaled - (rounded - MAGIC)) * FINE + MAGIC)  # type: ignore[assignment]
    shift = len(values) * MAGIC_BITS
    return coarse - shift, fine - shift, within


@jit
def chunks(
    columns: Array, terms: IntArray, scale: Array, first_chunk: int, last_chunk: int, sums: IntArray
) -> bool:
    """Fill rows first_chunk to last_chunk of ``sums``; False if a contribution is beyond the bound.

    Sum s, of which there are two, is of the product of columns ``terms[s]``, or of one of them before a -1.
    """
    n_rows = columns.shape[1]
    everywhere = True
    for chunk in range(first_chunk, last_chunk):
        stop = min((chunk + 1) * CHUNK, n_rows)
        for begin in range(chunk * CHUNK, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            for s in range(len(scale)):
                values, other = columns[terms[s, 0], begin:end], terms[s, 1]
                if other < 0:
                    coarse, fine, within = _one(values, scale[s])
                else:
                    coarse, fine, within = _two(values, columns[other, begin:end], scale[s])
                sums[chunk, 2 * s] += coarse
                sums[chunk, 2 * s + 1] += fine
                everywhere &= within
    return everywhere


@jit
def binned(columns: Array, scale: Array, bins: Bytes, sums: IntArray) -> bool:
    """Add to ``sums``, shape (chunks, bins, 2 p), the rows of each bin; False if one is beyond the bound."""
    everywhere = True
    for j in range(len(columns)):
        values = columns[j]
        for i in range(len(values)):
            scaled = values[i] * scale[j]
            everywhere &= abs(scaled) <= LIMIT
            rounded = scaled + MAGIC
            chunk, b = i // CHUNK, bins[i]
            sums[chunk, b, 2 * j] += bits(rounded) - MAGIC_BITS
            sums[chunk, b, 2 * j + 1] += bits((scaled - (rounded - MAGIC)) * FINE + MAGIC) - MAGIC_BITS
    return everywhere


@jit
def choose(values: Array, codes: Codes, code: int, result: Array) -> None:
    """Put the values of the rows that have the code into the result."""
    for i in range(len(result)):
        result[i] = select(codes[i] == code, values[i], result[i])
