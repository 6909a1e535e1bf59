"""The compiled exact sums over rows: of a generalised linear loss, and of columns and their products.

In a pass over a loss, a block of rows goes through short stages that each vectorise: predictor, loss
difference, slope, curvature; each stage's values are multiplied by columns of X, rounded to the grid and
added as integers at once, while the block is in the caches of the core. A column that is None is a block of
constants, which never leaves them.

A design is read where its columns are: scaling a column by a power of two is exact, so that eps and the grid
are scaled instead. (Only numbers near 2^-1022 could tell the difference.) Numba takes no list of arrays whose
length it does not know, so columns come as addresses. The caller holds the columns, and has checked their
length and that each is contiguous or one constant.
"""

from __future__ import annotations

import numpy as np

from fedtmle_core.exact import CHUNK, FINE_BITS, GRID_BITS
from fedtmle_core.kernels import BLOCK, CompiledRows, Fields, Grid, Query, SumTerms, _numpy
from fedtmle_core.kernels._elementary import (
    NEAR,
    exp,
    expit,
    gaussian_change,
    logistic_far,
    logistic_near,
    logistic_variance,
    poisson_far,
    poisson_near,
)
from fedtmle_core.kernels._jit import array_at, jit, pointer_to
from fedtmle_core.kernels._primitives import MAGIC, MAGIC_BITS, bits, from_bits, select
from fedtmle_core.parallel import shared
from fedtmle_core.types import Array, Bytes, Family, IntArray

LIMIT = 2.0**GRID_BITS
FINE = 2.0**FINE_BITS
TERM_ROWS = 384  # rows of a block of terms, each of which reads its columns again: first-level cache
SERIAL_ROWS = 1 << 17  # with fewer, starting threads costs about as much as they save
PAIRED_ROWS = 1 << 15  # with fewer, columns stay in the cache from one pass to the next
GAUSSIAN, LOGISTIC, POISSON = int(Family.GAUSSIAN), int(Family.LOGISTIC), int(Family.POISSON)


@jit
def column(places: IntArray, j: int, size: int) -> Array:
    """Rows of column j of a design, from where ``places`` says."""
    rows: Array = array_at(pointer_to(places[j]), size)
    return rows


@jit
def reading(fields: Fields, eps: Array, gathers: bool) -> tuple[Array, Array, Array, Array]:
    """Return how a pass reads the design: a block, and slopes, factors and magic numbers by column.

    Columns whose factors are powers of two are read where they are: the block is empty, the slopes are eps
    times the factors, and the magic number of a column rounds to units of 1/factor. Otherwise, and if the
    pass ``gathers`` them because it reads each column many times, the block has room for scaled columns.
    """
    rows, dim = CompiledRows(*fields), len(eps)
    if gathers or not rows.scales_exactly:
        return np.empty((dim, BLOCK)), eps, np.ones(dim), np.full(dim, MAGIC)
    return np.empty((0, BLOCK)), eps * rows.factors, rows.factors, MAGIC / rows.factors


@jit
def locate(fields: Fields, begin: int, size: int, block: Array, places: IntArray) -> None:
    """Fill ``places`` with addresses of the columns from row ``begin`` on, in the block if there is one."""
    rows = CompiledRows(*fields)
    for j in range(len(places)):
        places[j] = rows.addresses[j] + rows.strides[j] * begin
        if len(block):
            scale(column(places, j, size), rows.factors[j], block[j, :size])
            places[j] = block[j].ctypes.data


# The stages, for one block of rows: each loop vectorises.


@jit
def predict(base: Array, slopes: Array, places: IntArray, eta: Array) -> None:
    """eta = base + slopes . X, added from left to right: six columns at once if there are, then three."""
    dim, size, first = len(slopes), len(eta), 0
    if dim >= 6:
        first = 6
        _predict_by_six(base, slopes, places, eta)
    for j in range(first, dim - 2, 3):
        e, f, g = slopes[j], slopes[j + 1], slopes[j + 2]
        x, y, z = column(places, j, size), column(places, j + 1, size), column(places, j + 2, size)
        if j:  # a loop of its own: LLVM does not vectorise one over arrays that may overlap
            for i in range(size):
                eta[i] = eta[i] + e * x[i] + f * y[i] + g * z[i]
        else:
            for i in range(size):
                eta[i] = base[i] + e * x[i] + f * y[i] + g * z[i]
    if dim < 3:
        for i in range(size):
            eta[i] = base[i]
    for j in range(dim - dim % 3, dim):
        e, x = slopes[j], column(places, j, size)
        for i in range(size):
            eta[i] = eta[i] + e * x[i]


@jit
def _predict_by_six(base: Array, slopes: Array, places: IntArray, eta: Array) -> None:
    """eta = base + the first six terms of slopes . X, which registers still hold."""
    size = len(eta)
    d, e, f, g, h, k = slopes[0], slopes[1], slopes[2], slopes[3], slopes[4], slopes[5]
    u, v, w = column(places, 0, size), column(places, 1, size), column(places, 2, size)
    x, y, z = column(places, 3, size), column(places, 4, size), column(places, 5, size)
    for i in range(size):
        eta[i] = base[i] + d * u[i] + e * v[i] + f * w[i] + g * x[i] + h * y[i] + k * z[i]


@jit
def set_mean(family: int, eta: Array, mean: Array) -> None:
    """mu(eta): of the logistic and the Poisson loss, whose three parts all need it."""
    if family == LOGISTIC:
        for i in range(len(mean)):
            mean[i] = expit(eta[i])
    elif family == POISSON:
        for i in range(len(mean)):
            mean[i] = exp(eta[i])


@jit
def set_change(
    family: int, base: Array, start: Array, y: Array, eta: Array, mean: Array, delta: Array, change: Array
) -> None:
    """rho(eta) - rho(base), without cancellation; ``start`` is mu(base) for the logistic loss."""
    size = len(change)
    near = True
    if family == LOGISTIC:
        for i in range(size):
            near &= abs(delta[i]) <= NEAR
            lower = select(delta[i] < 0.0, mean[i], start[i])
            change[i] = logistic_near(lower, delta[i]) - y[i] * delta[i]
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
def set_slope(family: int, y: Array, eta: Array, mean: Array, scale: float, slope: Array) -> None:
    """rho'(eta), times the scale; a ``mean`` that no other part needs is empty, and made on the way."""
    size = len(slope)
    if family in (LOGISTIC, POISSON) and len(mean):
        for i in range(size):
            slope[i] = (mean[i] - y[i]) * scale
    elif family == LOGISTIC:
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
def set_curvature(family: int, mean: Array, scale: float, curvature: Array) -> None:
    """rho''(eta), times the scale."""
    size = len(curvature)
    if family == LOGISTIC:
        for i in range(size):
            curvature[i] = logistic_variance(mean[i]) * scale
    elif family == POISSON:
        for i in range(size):
            curvature[i] = mean[i] * scale
    else:
        constant = scale if family == GAUSSIAN else 0.0
        for i in range(size):
            curvature[i] = constant


@jit
def multiply(values: Array, factor: Array, product: Array) -> None:
    for i in range(len(product)):
        product[i] = factor[i] * values[i]


@jit
def add_multiple(total: Array, factor: float, values: Array) -> None:
    for i in range(len(total)):
        total[i] = total[i] + factor * values[i]


@jit
def scale(values: Array, factor: float, product: Array) -> None:
    for i in range(len(product)):
        product[i] = values[i] * factor


@jit
def largest(values: Array) -> float:
    """The largest |x|, NaN if one is: bit patterns are ordered as magnitudes are, with NaN above all."""
    top = 0
    for i in range(len(values)):
        top = max(top, bits(abs(values[i])))  # type: ignore[assignment]  # scalars when compiled
    return from_bits(top)  # type: ignore[arg-type, return-value]


# Exact sums of a stage's values times columns. A magic number of 1.5 * 2^52 * m rounds to units of m.


@jit
def _offset(magic: float, size: int) -> int:
    """Return the sum of the bit patterns of the first ``size`` magic numbers."""
    return size * bits(magic)  # type: ignore[arg-type, return-value]  # a scalar when compiled


@jit
def _round_and_sum(values: Array, factor: Array, second: float, magic: float) -> tuple[int, bool]:
    """The sum of values * factor * second, each rounded half to even; whether all are within 2^50 units."""
    units, within = 0, True
    limit = magic * (LIMIT / MAGIC)
    for i in range(len(values)):
        scaled = values[i] * factor[i] * second
        within &= abs(scaled) <= limit  # False for NaN
        units += bits(scaled + magic)  # type: ignore[assignment]  # a scalar when compiled
    return units - _offset(magic, len(values)), within  # modulo 2^64, in which the sum itself fits


@jit
def _round_and_sum_three(
    values: Array, x: Array, y: Array, z: Array, f: float, g: float, h: float
) -> tuple[int, int, int, bool]:
    """As `_round_and_sum`, for three factors with a magic number each; only ``values`` are scaled."""
    u, v, w, within, size = 0, 0, 0, True, len(values)
    f_limit, g_limit, h_limit = f * (LIMIT / MAGIC), g * (LIMIT / MAGIC), h * (LIMIT / MAGIC)
    for i in range(size):
        a, b, c = values[i] * x[i], values[i] * y[i], values[i] * z[i]
        within &= abs(a) <= f_limit
        within &= abs(b) <= g_limit
        within &= abs(c) <= h_limit
        u += bits(a + f)  # type: ignore[assignment]
        v += bits(b + g)  # type: ignore[assignment]
        w += bits(c + h)  # type: ignore[assignment]
    return u - _offset(f, size), v - _offset(g, size), w - _offset(h, size), within


@jit
def _sum_three(
    values: Array, x: Array, y: Array, z: Array, f: float, g: float, h: float
) -> tuple[int, int, int]:
    """As `_round_and_sum_three`, if all products are known to be within 2^50 units."""
    u, v, w, size = 0, 0, 0, len(values)
    for i in range(size):
        u += bits(values[i] * x[i] + f)  # type: ignore[assignment]
        v += bits(values[i] * y[i] + g)  # type: ignore[assignment]
        w += bits(values[i] * z[i] + h)  # type: ignore[assignment]
    return u - _offset(f, size), v - _offset(g, size), w - _offset(h, size)


@jit
def _sum_two(values: Array, x: Array, y: Array, f: float, g: float) -> tuple[int, int]:
    u, v, size = 0, 0, len(values)
    for i in range(size):
        u += bits(values[i] * x[i] + f)  # type: ignore[assignment]
        v += bits(values[i] * y[i] + g)  # type: ignore[assignment]
    return u - _offset(f, size), v - _offset(g, size)


@jit
def _add_products(
    values: Array, places: IntArray, j: int, magics: Array, second: float, sums: IntArray
) -> bool:
    """Add to sums[0], sums[1], ... the products of the scaled values with columns j, j + 1, ... of X."""
    dim, size, s, everywhere = len(places), len(values), 0, True
    while second == 1.0 and j + 3 <= dim:
        x, y, z = column(places, j, size), column(places, j + 1, size), column(places, j + 2, size)
        u, v, w, within = _round_and_sum_three(values, x, y, z, magics[j], magics[j + 1], magics[j + 2])
        sums[s] += u
        sums[s + 1] += v
        sums[s + 2] += w
        everywhere &= within
        j, s = j + 3, s + 3
    while j < dim:
        units, within = _round_and_sum(values, column(places, j, size), second, magics[j])
        sums[s] += units
        everywhere &= within
        j, s = j + 1, s + 1
    return everywhere


@jit
def _add_bounded(values: Array, places: IntArray, j: int, magics: Array, sums: IntArray) -> None:
    """As `_add_products`, where all products are known to be within, and nothing is left to scale."""
    dim, size, s = len(places), len(values), 0
    while j + 3 <= dim:
        x, y, z = column(places, j, size), column(places, j + 1, size), column(places, j + 2, size)
        u, v, w = _sum_three(values, x, y, z, magics[j], magics[j + 1], magics[j + 2])
        sums[s] += u
        sums[s + 1] += v
        sums[s + 2] += w
        j, s = j + 3, s + 3
    if j < dim:
        last = min(j + 1, dim - 1)
        x, y = column(places, j, size), column(places, last, size)
        u, v = _sum_two(values, x, y, magics[j], magics[last])
        sums[s] += u
        if last > j:
            sums[s + 1] += v


@jit
def _reach(values: Array, places: IntArray, factors: Array, reach: float) -> float:
    """Return ``reach``, the largest |x| of all rows, if it is finite; otherwise that of this block."""
    if reach < np.inf:
        return reach
    top = 0.0
    for j in range(len(places)):
        column_top = largest(column(places, j, len(values))) * factors[j]
        top = column_top if column_top > top or np.isnan(column_top) else top
    return top


@jit
def _add_gradient(
    values: Array, places: IntArray, magics: Array, reach: float, second: float, sums: IntArray
) -> bool:
    """Add the products of the scaled slopes with each column; whether all are within."""
    # Rounding keeps the order, so that this bounds every product of a value and a column.
    if second == 1.0 and reach < np.inf and largest(values) * reach <= LIMIT:
        _add_bounded(values, places, 0, magics, sums)
        return True
    return _add_products(values, places, 0, magics, second, sums)


@jit
def _add_hessian(
    values: Array,
    places: IntArray,
    factors: Array,
    magics: Array,
    reach: float,
    second: float,
    product: Array,
    sums: IntArray,
) -> bool:
    """Add the products of the scaled curvatures with two columns, upper triangle; whether all are within."""
    dim, s, everywhere = len(places), 0, True
    top = _reach(values, places, factors, reach)
    bounded = second == 1.0 and largest(values) * top * top <= LIMIT
    for j in range(dim):
        multiply(values, column(places, j, len(values)), product)
        if bounded:
            _add_bounded(product, places, j, magics, sums[s:])
        else:
            everywhere &= _add_products(product, places, j, magics, second, sums[s:])
        s += dim - j
    return everywhere


# The pass itself.


def _space() -> Array:
    """Return room for a block of zeros, one of ones, and six stages: one allocation for all chunks."""
    space = np.zeros((8, BLOCK))
    space[1] = 1.0
    return space


@jit
def _chunks(
    rows_fields: Fields,
    grid_fields: Fields,
    eps: Array,
    first_chunk: int,
    last_chunk: int,
    sums: IntArray,
    space: Array,
) -> bool:
    """Fill rows first_chunk to last_chunk of ``sums``; False if a contribution is beyond the bound.

    Sum s is scaled by first[s] * second[s] = 2^shifts[s], the same for all sums of a part: by the first
    before the values meet a column, by the second, nearly always 1, after.
    """
    rows, grid = CompiledRows(*rows_fields), Grid(*grid_fields)
    family, n_rows, offset, y, w = rows.family, rows.n_rows, rows.offset, rows.y, rows.w
    first, second = grid.first, grid.second
    dim = len(eps)
    places = np.empty(dim, dtype=np.int64)
    block, slopes, factors, magics = reading(rows_fields, eps, grid.hessian or not (second == 1.0).all())
    zeros, ones, etas, means = space[0], space[1], space[2], space[3]
    deltas, starts, buffer, products = space[4], space[5], space[6], space[7]
    everywhere = True
    if grid.loss:
        set_mean(family, zeros, starts)
    for chunk in range(first_chunk, last_chunk):
        stop = min((chunk + 1) * CHUNK, n_rows)
        for begin in range(chunk * CHUNK, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            size = end - begin
            base = offset[begin:end] if len(offset) else zeros[:size]
            outcome = y[begin:end] if len(y) else zeros[:size]
            weight = w[begin:end] if len(w) else ones[:size]
            eta, values, product = etas[:size], buffer[:size], products[:size]
            mean = means[:size] if grid.loss or grid.hessian else means[:0]
            locate(rows_fields, begin, size, block, places)
            predict(base, slopes, places, eta)
            set_mean(family, eta, mean)
            s = 0
            if grid.loss:
                delta, start = eta, starts[:size]
                if len(offset):
                    delta = deltas[:size]
                    predict(zeros, slopes, places, delta)
                    set_mean(family, base, start)
                set_change(family, base, start, outcome, eta, mean, delta, values)
                scale(values, first[s], values)
                units, within = _round_and_sum(values, weight, second[s], MAGIC)
                sums[chunk, s] += units
                everywhere &= within
                s += 1
            if grid.gradient:
                set_slope(family, outcome, eta, mean, first[s], values)
                if len(w):
                    multiply(values, weight, values)
                everywhere &= _add_gradient(values, places, magics, rows.reach, second[s], sums[chunk, s:])
                s += dim
            if grid.hessian:
                set_curvature(family, mean, first[s], values)
                if len(w):
                    multiply(values, weight, values)
                everywhere &= _add_hessian(
                    values, places, factors, magics, rows.reach, second[s], product, sums[chunk, s:]
                )
    return everywhere


def glm_chunks(query: Query) -> IntArray:
    """Sums of rounded contributions per chunk, shape (chunks, p)."""
    rows, grid, eps = tuple(query.rows.compiled), tuple(query.grid), query.eps
    sums = np.zeros((query.n_chunks, query.layout.width), dtype=np.int64)

    def work(first: int, last: int) -> bool:
        return _chunks(rows, grid, eps, first, last, sums, _space())

    if shared(work, query.n_chunks, serially=query.rows.n_rows < SERIAL_ROWS):
        return sums
    return _numpy.glm_chunks(query)  # some row is beyond its bound: the twin counts such rows and raises


@jit
def _chunks_of_two(
    rows: Fields,
    grid: Fields,
    eps: Array,
    sums: IntArray,
    other_rows: Fields,
    other_grid: Fields,
    other_eps: Array,
    other_sums: IntArray,
    first_chunk: int,
    last_chunk: int,
    space: Array,
) -> bool:
    """`_chunks` of two losses by turns: a chunk of the columns is in the cache when the second reads it."""
    everywhere = True
    for chunk in range(first_chunk, last_chunk):
        everywhere &= _chunks(rows, grid, eps, chunk, chunk + 1, sums, space)
        everywhere &= _chunks(other_rows, other_grid, other_eps, chunk, chunk + 1, other_sums, space)
    return everywhere


def glm_chunks_of_two(first: Query, second: Query) -> tuple[IntArray, IntArray]:
    """`glm_chunks` of two queries about as many rows."""
    if first.rows.n_rows < PAIRED_ROWS:
        return glm_chunks(first), glm_chunks(second)
    sums = [np.zeros((query.n_chunks, query.layout.width), dtype=np.int64) for query in (first, second)]
    one, two = (
        (tuple(query.rows.compiled), tuple(query.grid), query.eps, own)
        for query, own in zip((first, second), sums, strict=True)
    )

    def work(begin: int, end: int) -> bool:
        return _chunks_of_two(*one, *two, begin, end, _space())

    if shared(work, first.n_chunks, serially=first.rows.n_rows < SERIAL_ROWS):
        return sums[0], sums[1]
    return _numpy.glm_chunks_of_two(first, second)  # it raises, as above


# Exact sums of columns and of their products. The remainder of a row on the 50-bit grid
# is rounded to a grid 2^-40 finer and added up too. Products are made in registers, and never leave them.


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
    """As `_one`, for values * factor."""
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
def _add_terms(places: IntArray, terms: IntArray, scale: Array, size: int, sums: IntArray) -> bool:
    """Add the terms of some rows to ``sums``, coarse and fine by turns; whether all are within the bound.

    Term s is the product of the two columns ``terms[s]``, or the first of them if the second is -1.
    """
    everywhere = True
    for s in range(len(scale)):
        values, other = column(places, terms[s, 0], size), terms[s, 1]
        if other < 0:
            coarse, fine, within = _one(values, scale[s])
        else:
            coarse, fine, within = _two(values, column(places, other, size), scale[s])
        sums[2 * s] += coarse
        sums[2 * s + 1] += fine
        everywhere &= within
    return everywhere


@jit
def _column_chunks(
    addresses: IntArray,
    strides: IntArray,
    n_rows: int,
    terms: IntArray,
    scale: Array,
    first_chunk: int,
    last_chunk: int,
    sums: IntArray,
) -> bool:
    """Fill rows first_chunk to last_chunk of ``sums``; False if a contribution is beyond the bound."""
    places, everywhere = np.empty(len(addresses), dtype=np.int64), True
    for chunk in range(first_chunk, last_chunk):
        stop = min((chunk + 1) * CHUNK, n_rows)
        for begin in range(chunk * CHUNK, stop, TERM_ROWS):
            for j in range(len(places)):
                places[j] = addresses[j] + strides[j] * begin
            everywhere &= _add_terms(places, terms, scale, min(TERM_ROWS, stop - begin), sums[chunk, 0])
    return everywhere


@jit
def _sort(bins: Bytes, n_bins: int, order: IntArray, starts: IntArray) -> None:
    """Fill ``order`` with the rows by bin; bin b has those from starts[b] to starts[b + 1]."""
    starts[:] = 0
    for i in range(len(bins)):
        starts[bins[i] + 1] += 1
    for b in range(n_bins):
        starts[b + 1] += starts[b]
    free = starts.copy()
    for i in range(len(bins)):
        b = bins[i]
        if b < n_bins:
            order[free[b]] = i
            free[b] += 1


@jit
def _binned_chunks(
    addresses: IntArray,
    strides: IntArray,
    n_rows: int,
    terms: IntArray,
    scale: Array,
    lows: Array,
    widths: Array,
    bins: Bytes,
    n_bins: int,
    first_chunk: int,
    last_chunk: int,
    sums: IntArray,
) -> bool:
    """As `_column_chunks`, by bin: the rows of a chunk are sorted by bin, and each bin's terms are added."""
    places, everywhere = np.empty(len(addresses), dtype=np.int64), True
    order, starts = np.empty(CHUNK, dtype=np.int64), np.empty(257, dtype=np.int64)
    ordered = np.empty((len(addresses), CHUNK))
    for chunk in range(first_chunk, last_chunk):
        begin, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, n_rows)
        _sort(bins[begin:stop], n_bins, order, starts)
        for j in range(len(places)):
            places[j] = addresses[j] + strides[j] * begin
            target = ordered[j, : starts[n_bins]]
            low, width = lows[j], widths[j]
            if strides[j]:
                values = column(places, j, stop - begin)
                for i in range(len(target)):
                    target[i] = values[order[i]]
            else:
                target[:] = column(places, j, 1)[0]
            if low != 0.0 or width != 1.0:
                for i in range(len(target)):
                    target[i] = (target[i] - low) / width
        for b in range(n_bins):
            for at in range(starts[b], starts[b + 1], TERM_ROWS):
                for j in range(len(places)):
                    places[j] = ordered[j, at:].ctypes.data
                size = min(TERM_ROWS, starts[b + 1] - at)
                everywhere &= _add_terms(places, terms, scale, size, sums[chunk, b])
    return everywhere


def column_chunks(terms: SumTerms, what: str) -> IntArray:
    """Coarse and fine sums per chunk and bin, shape (chunks, bins, 2 k)."""
    sums = np.zeros((terms.n_chunks, terms.n_bins, 2 * len(terms.scale)), dtype=np.int64)
    read = terms.addresses, terms.strides, terms.n_rows, terms.places, terms.scale

    def work(first: int, last: int) -> bool:
        if terms.bins is None:
            return _column_chunks(*read, first, last, sums)
        return _binned_chunks(*read, terms.lows, terms.widths, terms.bins, terms.n_bins, first, last, sums)

    if shared(work, len(sums), serially=terms.n_rows < SERIAL_ROWS):
        return sums
    return _numpy.column_chunks(terms, what)  # it counts the rows beyond, and raises
