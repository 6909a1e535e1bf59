"""Elementary functions and fused row sums: numba when it can be had, a numpy twin otherwise.

A function here checks its arguments and calls the backend in use. Both backends do the same IEEE operations
in the same order, so their results are the same bits, for any number of threads. Numba is imported by the
first call of a kernel, not by this package.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar, cast, final

import numpy as np

from fedtmle_core.errors import InputError
from fedtmle_core.exact import CHUNK, FINE_BITS, GRID_BITS, Layout, Sums, column_shifts, layout, total
from fedtmle_core.types import (
    Array,
    Bools,
    Bytes,
    Codes,
    Columns,
    Design,
    Family,
    IntArray,
    Part,
    Scaled,
    UnitScaled,
    scaled,
)

Real = TypeVar("Real", float, Array)

# What a pass over the rows of a generalised linear loss is given.

BLOCK = 1024  # rows of a compiled pass's block: long enough to fetch columns from memory at speed
_ABSENT = np.empty(0)  # a column that is None; the kernels test its length and never read it
LEAST_FACTOR = 2.0**-128  # smallest factor of a column that is read in place
LARGEST_POWER = 1000  # a shift beyond it needs two factors: 2^shift itself would overflow
OUTSIDE = 255  # the bin of a row that is in none


Fields = tuple[Any, ...]  # fields of a record as a plain tuple, which numba takes twice as fast


class CompiledRows(NamedTuple):
    """Rows as compiled loops take them.

    Column j of the design begins at ``addresses[j]`` and goes on by ``strides[j]`` bytes a row. A constant
    column has the stride 0, and its number repeated for one block of rows. ``scales_exactly`` says that
    factors are powers of two. ``reach`` bounds every |x| of the design, or is infinite. An offset, y or w
    that is None is empty.
    """

    family: int
    addresses: IntArray
    strides: IntArray
    factors: Array
    scales_exactly: bool
    reach: float
    n_rows: int
    offset: Array
    y: Array
    w: Array


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a generalised linear loss, checked: the kernels index without checking.

    ``compiled`` holds the same columns, which live as long as this value, and so do ``constants``.
    """

    family: Family
    X: Scaled
    offset: Array | None
    y: Array | None
    w: Array | None
    dim: int
    n_rows: int
    constants: tuple[Array, ...]
    compiled: CompiledRows


def glm_rows(
    family: Family, X: Design, offset: Array | None = None, y: Array | None = None, w: Array | None = None
) -> Rows:
    """Return the rows of a generalised linear loss, checked once for many passes.

    ``X`` has shape (d, N), as one array or as `Scaled` columns; ``offset``, ``y`` and ``w`` have shape
    (N,), None standing for zeros, zeros and ones. None of them may be written to meanwhile. Shapes that
    do not fit are an `InputError`.
    """
    if len(X.shape) != 2 or not len(X):
        raise InputError(f"X: expected shape (d, N), d >= 1, not {X.shape}")
    design = scaled(X) if isinstance(X, Scaled) else Scaled(tuple(_contiguous(X)), np.ones(len(X)))
    dim, n_rows = design.shape
    shape = (n_rows,)
    if any(column.shape != shape for column in design.columns) or design.factors.shape != (len(X),):
        raise InputError(f"X: expected {len(X)} columns of shape {shape}, and as many factors")
    for name, column in (("offset", offset), ("y", y), ("w", w)):
        if column is not None and np.shape(column) != shape:
            raise InputError(f"{name}: expected shape {shape}, not {np.shape(column)}")
    offset, y, w = (None if column is None else _contiguous(column) for column in (offset, y, w))
    located = _located(design.columns)
    compiled = CompiledRows(
        family=int(family),
        addresses=located.addresses,
        strides=located.strides,
        factors=design.factors,
        scales_exactly=all(map(_is_exact_factor, design.factors.tolist())),
        reach=design.reach,
        n_rows=n_rows,
        offset=_ABSENT if offset is None else offset,
        y=_ABSENT if y is None else y,
        w=_ABSENT if w is None else w,
    )
    return Rows(
        family=family,
        X=design,
        offset=offset,
        y=y,
        w=w,
        dim=dim,
        n_rows=n_rows,
        constants=located.constants,
        compiled=compiled,
    )


class _Located(NamedTuple):
    """Where columns are: `CompiledRows` says how compiled loops read them. ``constants`` must live on."""

    addresses: IntArray
    strides: IntArray
    constants: tuple[Array, ...]


def _located(columns: Sequence[Array]) -> _Located:
    """Return where columns are that are contiguous, or constants of stride 0."""
    constants = {
        j: np.full(BLOCK, column[0])
        for j, column in enumerate(columns)
        if column.strides == (0,) and len(column)
    }
    read = [constants.get(j, column) for j, column in enumerate(columns)]
    addresses = [column.__array_interface__["data"][0] for column in read]
    return _Located(
        addresses=np.array(addresses, dtype=np.int64),
        strides=np.array([0 if j in constants else 8 for j in range(len(columns))], dtype=np.int64),
        constants=tuple(constants.values()),
    )


def _is_exact_factor(factor: float) -> bool:
    """Return whether to multiply by a factor is exact: a power of two, not so large that numbers overflow."""
    return LEAST_FACTOR <= factor <= 1.0 / LEAST_FACTOR and math.frexp(factor)[0] == 0.5


class Grid(NamedTuple):
    """Which parts are summed, and on which grid: 2^shifts[s] = first[s] * second[s], both exact floats."""

    loss: bool
    gradient: bool
    hessian: bool
    first: Array
    second: Array


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What is summed where, checked."""

    rows: Rows
    eps: Array
    layout: Layout
    grid: Grid

    @property
    def n_chunks(self) -> int:
        return -(-self.rows.n_rows // CHUNK)


def _checked_eps(rows: Rows, eps: Array) -> Array:
    """Return eps as a contiguous array of shape (d,); `InputError` if it has another shape."""
    eps = _contiguous(eps)
    if eps.shape != (rows.dim,):
        raise InputError(f"eps: expected shape ({rows.dim},), not {eps.shape}")
    return eps


@lru_cache(maxsize=256)
def _grid(dim: int, parts: Part, shifts: tuple[int, ...]) -> tuple[Layout, Grid]:
    """Return the layout and the grid of a query; they are shared by queries and must not be written to."""
    places = layout(dim, parts)
    if places.width != len(shifts):
        raise InputError(f"shifts: expected {places.width} for the requested parts, not {len(shifts)}")
    if any(len(set(shifts[place])) > 1 for place in places):
        raise InputError("shifts: the sums of one part share one grid")
    low = [max(min(shift, LARGEST_POWER), -LARGEST_POWER) for shift in shifts]
    first = np.array([math.ldexp(1.0, power) for power in low])
    second = np.array([math.ldexp(1.0, s - power) for s, power in zip(shifts, low, strict=True)])
    loss, gradient, hessian = Part.LOSS in parts, Part.GRADIENT in parts, Part.HESSIAN in parts
    return places, Grid(loss=loss, gradient=gradient, hessian=hessian, first=first, second=second)


def _contiguous(values: Array | float) -> Array:
    return np.ascontiguousarray(values, dtype=np.float64)


# Which backend runs: FEDTMLE_BACKEND, read once, else numba where it can be imported, else numpy.


_MODULES = {"numba": "_numba", "numpy": "_numpy"}
_chosen_backend: str | None = None  # by `using_backend`


class Backend(Protocol):
    """The functions of a backend module; their arguments are checked, contiguous float64 arrays."""

    def elementwise(self, name: str, x: Array) -> Array: ...

    def glm_chunks(self, query: Query) -> IntArray: ...

    def glm_chunks_of_two(self, first: Query, second: Query) -> tuple[IntArray, IntArray]: ...

    def means(self, rows: Rows, eps: Array) -> Array: ...

    def add_multiple(self, total: Array, factor: float, values: Array) -> None: ...

    def chosen(self, values: Sequence[Array], codes: Codes) -> Array: ...

    def weigh(
        self,
        numerator: Array,
        probability: Array,
        floor: float,
        codes: Codes,
        code: int,
        H: Array,
        taken: Array,
        below: Bools,
        chance: Array,
    ) -> None: ...

    def bound(self, values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool: ...

    def largest(self, column: Array) -> float: ...

    def column_chunks(self, terms: SumTerms, what: str) -> IntArray:
        """Return the sums of the terms for each chunk of rows and each bin, shape (chunks, bins, 2 k).

        A term is scaled, rounded, and summed as two integers: units, then what they leave in units of 2^-40.
        """
        ...

    def bins_between(self, edges: Array, values: Array) -> Bytes: ...

    def count_bins(self, bins: Bytes) -> IntArray: ...

    def count_values(self, values: Array, known: Array, bins: Bytes) -> IntArray: ...

    def softmax(self, logits: Array) -> Array: ...


def backend() -> str:
    """Return the name of the backend in use: 'numba' or 'numpy'."""
    return _chosen_backend or _default()


@cache
def _default() -> str:
    """Return the default backend; cached, because every kernel call needs it."""
    given = os.environ.get("FEDTMLE_BACKEND")
    if given is not None:
        return _checked(given)
    try:
        _imported("numba")
    except ImportError:  # not there, or it refuses to be imported: often a numpy too new for it
        return "numpy"
    return "numba"


@contextmanager
def using_backend(name: str) -> Iterator[None]:
    """Run the body with the named backend; for tests and comparisons."""
    global _chosen_backend  # noqa: PLW0603 - one setting of the process, like the environment variable
    before, _chosen_backend = _chosen_backend, _checked(name)
    try:
        yield
    finally:
        _chosen_backend = before


def _module() -> Backend:
    """Return the backend in use, imported when it is first needed."""
    return _imported(_chosen_backend or _default())


@cache
def _imported(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"fedtmle_core.kernels.{_MODULES[name]}"))


def _checked(name: str) -> str:
    if name not in _MODULES:
        raise InputError(f"backend: expected one of {sorted(_MODULES)}, not '{name}'")
    return name


# The kernels.


def load() -> None:
    """Load all kernels now, on a row or two each, so that no later call waits until one is loaded.

    Numba takes some 5 ms to load a kernel from its cache, and about a second to compile one.
    """
    one, two, codes, bins = np.ones(1), np.full((2, 1), 0.5), np.zeros(1, np.int16), np.zeros(1, np.uint8)
    fixed = one.copy()
    fixed.flags.writeable = False  # of another type to numba, as is a column that is broadcast
    for name in ("exp", "log", "expit", "softplus", "logit"):
        _elementwise(name, one / 2.0)
    query = glm_query(glm_rows(Family.GAUSSIAN, two), np.zeros(2), Part.GRADIENT, (0, 0))
    _module().glm_chunks(query)
    glm_means(query.rows, query.eps)
    column_sums(two, (0, 0), what="row")
    binned_sums(two, bins, 1, (0, 0), what="row")
    add_multiple(one, 0.0, fixed)
    add_multiple(one, 0.0, one.copy())
    chosen(two, codes)
    for numerator in (one, fixed):
        weigh(numerator, one, 0.5, codes, 0, one.copy(), one.copy(), np.zeros(1, bool))
    bound(one, 0.25, 0.75, one.copy(), one.copy())
    largest(one.copy())
    largest(fixed)
    bins_between((0.5,), one)
    count_bins(bins, 1)
    count_values(one, one, bins, 1)
    softmax(two)


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
    values = _contiguous(x)
    result = _module().elementwise(name, values.reshape(-1))
    return cast(Real, result.reshape(np.shape(x)) if np.ndim(x) else result.item())


def glm_query(rows: Rows, eps: Array, parts: Part, shifts: tuple[int, ...]) -> Query:
    """What `glm_sums` sums, checked."""
    places, grid = _grid(rows.dim, parts, shifts)
    return Query(rows=rows, eps=_checked_eps(rows, eps), layout=places, grid=grid)


def glm_sums(rows: Rows, eps: Array, parts: Part, shifts: tuple[int, ...]) -> tuple[int, ...]:
    """Exact sums over rows of w rho(offset + eps . X, y): its change from eps = 0, slope and curvature.

    Sum s is in units of 2^-shifts[s], in the order of `exact.query_shifts`. A row beyond 2^(50-shifts[s]),
    or not a number, is a `ContributionError`.
    """
    return total(_module().glm_chunks(glm_query(rows, eps, parts, shifts)))


def glm_sums_of_two(first: Query, second: Query) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`glm_sums` of two losses of as many rows, chunk by chunk: columns that both have are read once."""
    if first.rows.n_rows != second.rows.n_rows:
        raise InputError(f"second: expected {first.rows.n_rows} rows, not {second.rows.n_rows}")
    one, two = _module().glm_chunks_of_two(first, second)
    return total(one), total(two)


def glm_means(rows: Rows, eps: Array) -> Array:
    """The mean of a generalised linear model row by row, shape (N,): mu(offset + eps . X), added in order."""
    return _module().means(rows, _checked_eps(rows, eps))


def add_multiple(total: Array, factor: float, values: Array) -> None:
    """total += factor * values, each of shape (N,), without a copy between; ``total`` is contiguous."""
    if total.shape != values.shape:
        raise InputError(f"values: expected shape {total.shape}, not {values.shape}")
    if values.strides == (0,):  # a constant
        total += factor * values[:1]
    else:
        _module().add_multiple(total, factor, _contiguous(values))


def chosen(values: Columns, codes: Codes) -> Array:
    """values[codes[i]][i] for each row i; shapes (J, N) and (N,), codes from 0 to J - 1."""
    columns = [_contiguous(column) for column in values]
    if any(column.shape != codes.shape for column in columns) or codes.ndim != 1 or not columns:
        raise InputError(f"values, codes: expected J columns of the codes' shape, {codes.shape}")
    return _module().chosen(columns, np.ascontiguousarray(codes))


def weigh(
    numerator: Array,
    probability: Array,
    floor: float,
    codes: Codes,
    code: int,
    H: Array,
    taken: Array,
    below: Bools,
    chance: Array | None = None,
) -> None:
    """Fill H = numerator / max(probability, floor), ``below``, where the probability is less than the floor,
    and in the rows that have the code ``taken`` with H and ``chance`` with the probability; shape (N,) each,
    or (1,) of a constant."""
    numerators = _contiguous(numerator)
    if len(numerators) not in (1, len(H)):
        raise InputError(f"numerator: expected one value or {len(H)}, not {len(numerators)}")
    probabilities = _contiguous(np.broadcast_to(probability, H.shape))
    if not codes.shape == taken.shape == below.shape == H.shape or (
        chance is not None and chance.shape != H.shape
    ):
        raise InputError("codes, taken, below, chance: expected the shape of H")
    filled = _ABSENT if chance is None else chance
    _module().weigh(numerators, probabilities, floor, codes, code, H, taken, below, filled)


def bound(values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool:
    """Fill ``bounded`` with the values kept from low to high, 0 < 2^-60 <= low, high <= 1 - 2^-60, and
    ``logits`` with their logits; whether all values are finite. Shape (N,) each."""
    if not values.shape == bounded.shape == logits.shape or not 2.0**-60 <= low <= high <= 1 - 2.0**-60:
        raise InputError("values, bounded, logits: expected one shape, and bounds inside (0, 1)")
    return _module().bound(_contiguous(values), low, high, bounded, logits)


def largest(column: Array) -> float:
    """The largest magnitude in a column, 0 if it has no rows, NaN if one is not a number."""
    distinct = column[:1] if column.strides == (0,) else column  # a constant takes no memory, nor time
    return _module().largest(_contiguous(distinct))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SumTerms:
    """Products of columns to be summed, all of them or by bin, checked.

    ``places``, shape (k, 2), has the numbers of the two columns of each term; the second is -1 for a column
    by itself. Term s is scaled by scale[s]. Terms that are equal are summed once: the one that was asked for
    at s is term asked[s]. ``bins`` is None if there is one bin with all rows; else column j is
    (columns[j] - lows[j]) / widths[j].
    """

    columns: tuple[Array, ...]
    lows: Array
    widths: Array
    places: IntArray
    scale: Array
    asked: tuple[int, ...]
    bins: Bytes | None
    n_bins: int
    n_rows: int
    addresses: IntArray
    strides: IntArray
    constants: tuple[Array, ...]

    @property
    def n_chunks(self) -> int:
        return -(-self.n_rows // CHUNK)


def column_sums(
    columns: Columns, exponents: Sequence[int], *, what: str, terms: Sequence[tuple[int, ...]] | None = None
) -> Sums:
    """Exact sums of columns, shape (p, N), or of ``terms``: a column's number, or two for their product.

    The columns are read where they are; a constant of stride 0 takes no memory.

    Term j, a product once rounded to a float, is bounded by 2^exponents[j]; a row beyond, or not a number, is
    a `ContributionError` that says ``what``. These sums keep every digit of a double: what the 50-bit grid
    leaves of each row is summed too, on a grid 2^-40 finer, so that a generous bound costs no digits.
    """
    (sums,) = _sums(_terms(columns, terms, _scale(exponents)), exponents, what)
    return sums


def binned_sums(
    columns: Sequence[Array | UnitScaled] | Array,
    bins: Bytes,
    n_bins: int,
    exponents: Sequence[int],
    *,
    what: str,
    terms: Sequence[tuple[int, ...]] | None = None,
) -> list[Sums]:
    """`column_sums` of the rows of each bin, in any order; rows whose bin is `OUTSIDE` are in none."""
    _check_bins(bins, n_bins, len(columns[0]) if len(columns) else 0)
    asked = _terms(columns, terms, _scale(exponents), np.ascontiguousarray(bins), n_bins)
    return _sums(asked, exponents, what)


def term_sums(
    columns: Columns, terms: Sequence[tuple[int, ...]], shifts: tuple[int, ...], *, what: str
) -> tuple[int, ...]:
    """Exact sums of ``terms`` as in `column_sums`, each row rounded to the grid 2^-shifts[j] of a query."""
    scale = np.exp2(np.array(shifts, dtype=np.float64))
    asked = _terms(columns, terms, scale)
    sums = total(_module().column_chunks(asked, what)[:, 0])
    return tuple(sums[2 * s] for s in asked.asked)


def _terms(
    columns: Sequence[Array | UnitScaled] | Array,
    terms: Sequence[tuple[int, ...]] | None,
    scale: Array,
    bins: Bytes | None = None,
    n_bins: int = 1,
) -> SumTerms:
    used, places = _used(None if terms is None else tuple(terms), len(columns))
    if len(places) != len(scale):
        raise InputError(f"terms: expected {len(scale)}, one for each exponent, not {len(places)}")
    ranges = [
        (column.column, column.low, column.width) if isinstance(column, UnitScaled) else (column, 0.0, 1.0)
        for column in (columns[j] for j in used)
    ]
    n_rows = len(columns[0]) if len(columns) else 0
    if any(column.shape != (n_rows,) for column, _, _ in ranges):
        raise InputError("columns: expected shape (p, N)")
    held = scaled(Scaled(tuple(column for column, _, _ in ranges), _ABSENT)).columns
    located = _located(held)
    ones = frozenset(
        j
        for j, (column, low, width) in enumerate(ranges)
        if column.strides == (0,) and n_rows and column[0] == 1.0 and (low, width) == (0.0, 1.0)
    )
    different = _different(places, tuple(scale.tolist()), ones)
    return SumTerms(
        columns=held,
        lows=np.array([low for _, low, _ in ranges]),
        widths=np.array([width for _, _, width in ranges]),
        places=different.places,
        scale=different.scale,
        asked=different.asked,
        bins=bins,
        n_bins=n_bins,
        n_rows=n_rows,
        addresses=located.addresses,
        strides=located.strides,
        constants=located.constants,
    )


Pairs = tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def _used(terms: tuple[tuple[int, ...], ...] | None, n_columns: int) -> tuple[list[int], Pairs]:
    """Return the columns that occur in terms, and the terms as `SumTerms.places` among these."""
    asked = [(*term, -1)[:2] for term in terms or [(j,) for j in range(n_columns)]]
    used = sorted({j for pair in asked for j in pair if j != -1})
    if any(not 0 <= first < n_columns or not -1 <= second < n_columns for first, second in asked):
        raise InputError("columns, terms: expected terms of columns that are there")
    number = {-1: -1} | {j: place for place, j in enumerate(used)}
    return used, tuple((number[first], number[second]) for first, second in asked)


class _Different(NamedTuple):
    """Terms without repetition, and the place among them of each one that was asked for."""

    places: IntArray
    scale: Array
    asked: tuple[int, ...]


@lru_cache(maxsize=256)
def _different(terms: Pairs, scale: tuple[float, ...], ones: frozenset[int]) -> _Different:
    """Return terms and scales, equal ones once: the product of a column and one is the column itself."""
    reduced = []
    for term in terms:
        factors = [j for j in term if j != -1 and j not in ones]
        reduced.append((*(factors or [min(ones)]), -1)[:2])
    number = {term: place for place, term in enumerate(dict.fromkeys(zip(reduced, scale, strict=True)))}
    places = np.array([term for term, _ in number], dtype=np.int64).reshape(-1, 2)
    asked = tuple(number[term] for term in zip(reduced, scale, strict=True))
    return _Different(places, np.array([factor for _, factor in number]), asked)


def _check_bins(bins: Bytes, n_bins: int, n_rows: int) -> None:
    if bins.shape != (n_rows,) or bins.dtype != np.uint8 or not 1 <= n_bins <= OUTSIDE:
        raise InputError(f"bins: expected {n_rows} bytes, and from 1 to {OUTSIDE} bins")
    if ((bins >= n_bins) & (bins != OUTSIDE)).any():
        raise InputError(f"bins: expected numbers below {n_bins}, or {OUTSIDE} for no bin")


def bins_between(edges: Sequence[float], values: Array) -> Bytes:
    """How many of the edges, in rising order, each value has reached; any shape, at most 254 edges."""
    if len(edges) >= OUTSIDE:
        raise InputError(f"edges: expected fewer than {OUTSIDE}, not {len(edges)}")
    flat = _contiguous(values).reshape(-1)
    return _module().bins_between(np.array(edges, dtype=np.float64), flat).reshape(values.shape)


def count_bins(bins: Bytes, n_bins: int) -> list[int]:
    """How many rows are in each bin; those whose bin is `OUTSIDE` are in none."""
    _check_bins(bins, n_bins, len(bins))
    counts: list[int] = _module().count_bins(np.ascontiguousarray(bins))[:n_bins].tolist()
    return counts


def count_values(values: Array, known: Array, bins: Bytes, n_bins: int) -> IntArray:
    """How many rows of each bin have each of the known values, and last any other; shape (bins, values + 1).

    ``values`` and ``bins`` have shape (N,), and ``known`` has different numbers.
    """
    _check_bins(bins, n_bins, len(values))
    counts = _module().count_values(_contiguous(values), _contiguous(known), np.ascontiguousarray(bins))
    return np.asarray(counts[:n_bins])


def _scale(exponents: Sequence[int]) -> Array:
    return np.exp2(GRID_BITS - np.array(exponents, dtype=np.float64))


def _sums(terms: SumTerms, exponents: Sequence[int], what: str) -> list[Sums]:
    """Return the sums by bin, each from its coarse and fine integers per chunk, which stand side by side."""
    chunks = _module().column_chunks(terms, what)
    size, shifts = len(terms.scale), column_shifts(exponents)
    parts = total(chunks.reshape(len(chunks), 2 * terms.n_bins * size))
    units = [(c << FINE_BITS) + f for c, f in zip(parts[::2], parts[1::2], strict=True)]
    by_bin = (units[b * size : (b + 1) * size] for b in range(terms.n_bins))
    return [Sums(tuple(sums[s] for s in terms.asked), shifts) for sums in by_bin]


def softmax(logits: Array) -> Array:
    """exp(l_j) / sum_j exp(l_j) for each column of ``logits``, shape (J, N), J >= 1."""
    logits = _contiguous(logits)
    if logits.ndim != 2 or not len(logits):
        raise InputError(f"logits: expected shape (J, N) with J >= 1, not {logits.shape}")
    return _module().softmax(logits)
