"""The numpy twin: the oracle of the compiled backend, and what runs where numba cannot.

It repeats the compiled backend's operations in the same order, one chunk of rows at a time, and
is about six times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from fedtmle_core.errors import ContributionError
from fedtmle_core.exact import CHUNK, FINE_BITS, GRID_BITS, beyond_bound
from fedtmle_core.kernels import Query, Rows, SumTerms, _elementary
from fedtmle_core.types import Array, Bools, Bytes, Codes, Family, IntArray, Part

MEAN: dict[Family, Callable[[Array], Array]] = {
    Family.LINEAR: np.ones_like,
    Family.GAUSSIAN: lambda eta: eta,
    Family.LOGISTIC: _elementary.expit,
    Family.POISSON: _elementary.exp,
}
VARIANCE: dict[Family, Callable[[Array], Array]] = {
    Family.LINEAR: np.zeros_like,
    Family.GAUSSIAN: np.ones_like,
    Family.LOGISTIC: lambda eta: _elementary.logistic_variance(_elementary.expit(eta)),
    Family.POISSON: _elementary.exp,
}


def elementwise(name: str, x: Array) -> Array:
    """The elementary function of that name, of a flat array."""
    function: Callable[[Array], Array] = getattr(_elementary, name)
    with np.errstate(all="ignore"):
        return function(x)


def glm_chunks(query: Query) -> IntArray:
    """Sums of rounded contributions per chunk, shape (chunks, p)."""
    sums = np.zeros((query.n_chunks, query.layout.width), dtype=np.int64)
    beyond = dict.fromkeys(Part, 0)
    with np.errstate(all="ignore"):
        for chunk in range(query.n_chunks):
            rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            for part, place, contributions in _contributions(query, rows):
                scaled = contributions * query.grid.second[place, None]
                outside = ~(np.abs(scaled) <= 2.0**GRID_BITS)  # written so that NaN is outside
                beyond[part] += int(outside.any(axis=0).sum())
                sums[chunk, place] = np.rint(scaled).astype(np.int64).sum(axis=1)
    names = {Part.LOSS: "loss", Part.GRADIENT: "gradient", Part.HESSIAN: "Hessian"}
    for part, rows_beyond in beyond.items():
        if rows_beyond:
            raise ContributionError(beyond_bound(rows_beyond, f"contribution to the {names[part]}"))
    return sums


def glm_chunks_of_two(first: Query, second: Query) -> tuple[IntArray, IntArray]:
    """`glm_chunks` of two queries."""
    return glm_chunks(first), glm_chunks(second)


def means(rows: Rows, eps: Array) -> Array:
    """mu(offset + eps . X), shape (N,), one chunk of rows at a time."""
    result = np.empty(rows.n_rows)
    with np.errstate(all="ignore"):
        for begin in range(0, rows.n_rows, CHUNK):
            chunk = slice(begin, begin + CHUNK)
            X = rows.X.part(chunk)
            base = np.zeros(X.shape[1]) if rows.offset is None else rows.offset[chunk]
            result[chunk] = MEAN[rows.family](_predictor(base, eps, X))
    return result


def add_multiple(total: Array, factor: float, values: Array) -> None:
    """Add a multiple of a column to another."""
    total += factor * values


def chosen(values: Sequence[Array], codes: Codes) -> Array:
    """Return values[codes[i]][i] for each row i."""
    return np.choose(codes, values)


def largest(column: Array) -> float:
    """The largest |x|, NaN if one is."""
    return float(np.abs(column).max(initial=0.0))


def weigh(
    numerator: Array,
    probability: Array,
    floor: float,
    codes: Codes,
    code: int,
    H: Array,
    taken: Array,
    below: Bools,
    chance: Array,
) -> None:
    """The weights of some rows in one arm."""
    with np.errstate(all="ignore"):
        np.less(probability, floor, out=below)
        np.divide(numerator, np.where(below, floor, probability), out=H)
        np.copyto(taken, H, where=codes == code)
        if len(chance):
            np.copyto(chance, probability, where=codes == code)


def bound(values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool:
    """Values inside their bounds, and their logits."""
    with np.errstate(all="ignore"):
        bounded[:] = np.where(values < low, low, np.where(values > high, high, values))
        logits[:] = _elementary.logit_inside(bounded)
    return bool(np.isfinite(values).all())


def column_chunks(terms: SumTerms, what: str) -> IntArray:
    """Coarse and fine sums per chunk and bin, shape (chunks, bins, 2 k)."""
    sums = np.zeros((terms.n_chunks, terms.n_bins, 2 * len(terms.scale)), dtype=np.int64)
    beyond = 0
    with np.errstate(all="ignore"):
        for chunk in range(len(sums)):
            rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            for b in range(terms.n_bins):
                in_bin = slice(None) if terms.bins is None else terms.bins[rows] == b
                block = [
                    (column[rows][in_bin] - low) / width
                    for column, low, width in zip(terms.columns, terms.lows, terms.widths, strict=True)
                ]
                products = [block[j] if k < 0 else block[j] * block[k] for j, k in terms.places]
                scaled = np.array(products).reshape(len(terms.scale), -1) * terms.scale[:, None]
                within = np.abs(scaled) <= 2.0**GRID_BITS  # False for NaN
                beyond += int((~within).any(axis=0).sum())
                coarse = np.rint(np.where(within, scaled, 0.0))
                sums[chunk, b, ::2] = coarse.astype(np.int64).sum(axis=1)
                fine = np.rint((scaled - coarse) * 2.0**FINE_BITS)
                sums[chunk, b, 1::2] = np.where(within, fine, 0.0).astype(np.int64).sum(axis=1)
    if beyond:
        raise ContributionError(beyond_bound(beyond, what))
    return sums


def bins_between(edges: Array, values: Array) -> Bytes:
    """The number of edges that each value has reached."""
    bins = np.zeros(values.shape, dtype=np.uint8)
    for edge in edges:
        bins += values >= edge
    return bins


def count_bins(bins: Bytes) -> IntArray:
    """The number of rows in each bin, shape (256,)."""
    return np.bincount(bins, minlength=256)


def count_values(values: Array, known: Array, bins: Bytes) -> IntArray:
    """The number of rows by bin and value, the last of none of the known ones, shape (256, values + 1)."""
    is_known = [values == value for value in known]
    others = ~np.any(is_known, axis=0) if is_known else np.ones(len(values), dtype=bool)
    return np.stack([count_bins(bins[rows]) for rows in (*is_known, others)], axis=1)


def _contributions(query: Query, chunk: slice) -> Iterator[tuple[Part, slice, Array]]:
    """Yield each requested part, its place, and the rows' contributions to it times ``first``.

    The contributions have shape (sums of the part, rows).
    """
    rows, places, grid, eps = query.rows, query.layout, query.grid, query.eps
    X = rows.X.part(chunk)
    zeros = np.zeros(X.shape[1])
    offset = zeros if rows.offset is None else rows.offset[chunk]
    y = zeros if rows.y is None else rows.y[chunk]
    w = np.ones(X.shape[1]) if rows.w is None else rows.w[chunk]
    eta = _predictor(offset, eps, X)
    if grid.loss:
        delta = _predictor(zeros, eps, X)
        change = _change(rows.family, offset, y, eta, delta) * grid.first[places.loss.start]
        yield Part.LOSS, places.loss, (change * w)[None]
    if grid.gradient:
        slope = _slope(rows.family, eta, y) * grid.first[places.gradient.start] * w
        yield Part.GRADIENT, places.gradient, slope * X
    if grid.hessian:
        j, k = np.triu_indices(len(X))
        variance = VARIANCE[rows.family](eta) * grid.first[places.hessian.start] * w
        yield Part.HESSIAN, places.hessian, variance * X[j] * X[k]


def _predictor(offset: Array, eps: Array, X: Array) -> Array:
    """offset + eps . X, added from left to right."""
    eta = offset
    for coefficient, column in zip(eps, X, strict=True):
        eta = eta + coefficient * column
    return eta


def _slope(family: Family, eta: Array, y: Array) -> Array:
    """rho'(eta): 1 for the tilt, else mean(eta) - y."""
    mean = MEAN[family](eta)
    return mean if family is Family.LINEAR else mean - y


def _change(family: Family, offset: Array, y: Array, eta: Array, delta: Array) -> Array:
    """rho(eta) - rho(offset), without cancellation."""
    if family is Family.LINEAR:
        return delta
    if family is Family.GAUSSIAN:
        return _elementary.gaussian_change(offset, y, delta)
    far = np.abs(delta) > _elementary.NEAR
    if family is Family.LOGISTIC:
        lower = _elementary.expit(np.where(delta < 0.0, eta, offset))
        change = _elementary.logistic_near(lower, delta)
        change[far] = _elementary.logistic_far(offset[far], eta[far])
    else:
        change = _elementary.poisson_near(offset, delta)
        change[far] = _elementary.poisson_far(offset[far], eta[far])
    return change - y * delta


def softmax(logits: Array) -> Array:
    """exp(l_j - max_j l_j) over their sum, added in order of j."""
    with np.errstate(all="ignore"):
        top = logits[0]
        for row in logits[1:]:
            top = np.where(row > top, row, top)
        powers = np.stack([_elementary.exp(row - top) for row in logits])
        total = powers[0]
        for row in powers[1:]:
            total = total + row
        return np.asarray(powers / total)
