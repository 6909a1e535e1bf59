"""What both backends are given, which of them runs, and how many threads it may use.

The kernels release the interpreter's lock and write to disjoint ranges, so the number of threads
cannot change a result.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol, TypeVar, cast, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.concentration import RowSpread
from fedtmle.model.exact import CHUNK, Layout, layout
from fedtmle.model.families import Family
from fedtmle.model.types import (
    Array,
    Bools,
    Bytes,
    Codes,
    Design,
    IntArray,
    Part,
    Scaled,
    scaled,
)

Item = TypeVar("Item")
Result = TypeVar("Result")

# What a pass over the rows of a generalised linear loss is given.

_NO_MATRIX = np.empty((0, 0))
_ABSENT = np.empty(0)  # a column that is None; the kernels test its length and never read it
LARGEST_POWER = 1000  # a shift beyond it needs two factors: 2^shift itself would overflow


Fields = tuple[Any, ...]  # of a record: numba takes a plain tuple twice as fast, and makes the record itself


class CompiledRows(NamedTuple):
    """Rows as compiled loops take them.

    ``matrix`` is the design if it is one array, else empty; ``addresses`` says where each of its columns
    is, and ``constant`` whether it is one number. ``reach`` bounds every |x| of the design, or is infinite.
    A column that is None is empty.
    """

    family: int
    matrix: Array
    addresses: IntArray
    constant: Bools
    factors: Array
    reach: float
    n_rows: int
    offset: Array
    y: Array
    w: Array


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows of a generalised linear loss, checked: the kernels index without checking.

    ``compiled`` holds the same columns, which live as long as this value.
    """

    family: Family
    X: Scaled
    offset: Array | None
    y: Array | None
    w: Array | None
    dim: int
    n_rows: int
    compiled: CompiledRows


def rows_of(family: Family, X: Design, offset: Array | None, y: Array | None, w: Array | None) -> Rows:
    """Return `Rows` whose shapes fit; `InputError` otherwise."""
    if len(X.shape) != 2 or not len(X):
        raise InputError(f"X: expected shape (d, N), d >= 1, not {X.shape}")
    if isinstance(X, Scaled):
        matrix, design = _NO_MATRIX, scaled(X)
    else:
        matrix = _contiguous(X)
        design = Scaled(tuple(matrix), np.ones(len(matrix)))
    dim, n_rows = design.shape
    shape = (n_rows,)
    if any(column.shape != shape for column in design.columns) or design.factors.shape != (len(X),):
        raise InputError(f"X: expected {len(X)} columns of shape {shape}, and as many factors")
    for name, column in (("offset", offset), ("y", y), ("w", w)):
        if column is not None and np.shape(column) != shape:
            raise InputError(f"{name}: expected shape {shape}, not {np.shape(column)}")
    offset, y, w = (None if column is None else _contiguous(column) for column in (offset, y, w))
    compiled = CompiledRows(
        family=int(family),
        matrix=matrix,
        addresses=_addresses(matrix, design),
        constant=np.array([column.strides == (0,) for column in design.columns]),
        factors=design.factors,
        reach=design.reach,
        n_rows=n_rows,
        offset=_ABSENT if offset is None else offset,
        y=_ABSENT if y is None else y,
        w=_ABSENT if w is None else w,
    )
    return Rows(family=family, X=design, offset=offset, y=y, w=w, dim=dim, n_rows=n_rows, compiled=compiled)


def _addresses(matrix: Array, design: Scaled) -> IntArray:
    """Return where each column of a design is in memory, shape (d,)."""
    columns = (matrix,) if len(matrix) else design.columns
    places = np.array([column.__array_interface__["data"][0] for column in columns], dtype=np.int64)
    if len(matrix):  # its rows stand one after the other
        places = places + matrix.strides[0] * np.arange(len(matrix))
    return places


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


def query(rows: Rows, eps: Array, parts: Part, shifts: tuple[int, ...]) -> Query:
    """Return a `Query` whose shapes fit; `InputError` otherwise."""
    places, grid = _grid(rows.dim, parts, shifts)
    return Query(rows=rows, eps=checked_eps(rows, eps), layout=places, grid=grid)


def checked_eps(rows: Rows, eps: Array) -> Array:
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


def _contiguous(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float64)


# How many threads the compiled kernels use, and how a range of work is divided among them.

_chosen_threads: int | None = None
_here = threading.local()  # whether this thread is a worker of `mapped` or `done`


def set_threads(n: int | None) -> None:
    """Use n threads; None returns to FEDTMLE_THREADS or, without it, to all cores."""
    global _chosen_threads  # noqa: PLW0603 - one setting of the process, like the environment variable
    if n is not None and n < 1:
        raise InputError(f"threads: expected a positive number, not {n}")
    _chosen_threads = n


def threads() -> int:
    """Return the number of threads in use."""
    if _chosen_threads is not None:
        return _chosen_threads
    given = os.environ.get("FEDTMLE_THREADS")
    if given is None:
        return os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise InputError(f"FEDTMLE_THREADS: expected a positive number, not '{given}'")
    return int(given)


def shared(work: Callable[[int, int], bool], length: int, *, serially: bool) -> bool:
    """Run work(first, last) over contiguous shares of range(length); return whether all returned True.

    The pool lives for one call: starting threads costs some 50 microseconds, and a pool kept for
    later would not survive a fork.
    """
    workers = 1 if serially else min(threads(), length)
    if workers <= 1:
        return work(0, length)
    edges = [length * share // workers for share in range(workers + 1)]
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work, *share) for share in pairwise(edges[1:])]
        here = work(edges[0], edges[1])
        return all([here, *(other.result() for other in others)])


def mapped(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield work(item) for each item, in order, computed in parallel; few items are held at a time.

    ``work`` may itself call this function, which then runs in the calling thread.
    """
    workers = threads()
    if workers == 1 or getattr(_here, "works", False):
        yield from map(work, items)
        return
    rest = iter(items)
    ahead = deque(islice(rest, 2))
    if len(ahead) < 2:  # a thread costs more than most single items
        yield from map(work, ahead)
        return
    with ThreadPoolExecutor(workers, initializer=_mark) as pool:
        waiting: deque[Future[Result]] = deque(pool.submit(work, ahead.popleft()) for _ in range(2))
        for item in rest:
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


def done(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Run work(item) for each item, for its side effect; each thread takes consecutive items.

    Threads that take turns would touch the same page of fresh memory at the same time, and each would
    have it cleared.
    """
    if threads() == 1 or getattr(_here, "works", False):
        for item in items:
            work(item)
        return
    listed = list(items)

    def consecutive(first: int, last: int) -> bool:
        before = getattr(_here, "works", False)
        _here.works = True
        try:
            for item in listed[first:last]:
                work(item)
        finally:
            _here.works = before
        return True

    shared(consecutive, len(listed), serially=len(listed) < 2)


def _mark() -> None:
    _here.works = True


# Which backend runs: FEDTMLE_BACKEND, read once, else numba where it can be imported, else numpy.


_MODULES = {"numba": "_numba", "numpy": "_numpy"}
_chosen_backend: str | None = None  # by `using_backend`


class Backend(Protocol):
    """The functions of a backend module; their arguments are checked, contiguous float64 arrays."""

    def elementwise(self, name: str, x: Array) -> Array: ...

    def glm_chunks(self, query: Query) -> IntArray: ...

    def means(self, rows: Rows, eps: Array) -> Array: ...

    def spread(
        self, rows: Rows, eps: Array, until: Array, least: int, few: int, many: float
    ) -> tuple[RowSpread, int, bool]: ...

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
    ) -> None: ...

    def bound(self, values: Array, low: float, high: float, bounded: Array, logits: Array) -> bool: ...

    def largest(self, column: Array) -> float: ...

    def column_chunks(self, columns: Array, terms: IntArray, scale: Array, what: str) -> IntArray: ...

    def binned_chunks(self, columns: Array, bins: Bytes, count: int, scale: Array, what: str) -> IntArray: ...

    def softmax(self, logits: Array) -> Array: ...

    def log_mean_kernel(self, points: Array, centres: Array) -> Array: ...


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


def module() -> Backend:
    """Return the backend in use, imported when it is first needed."""
    return _imported(_chosen_backend or _default())


@cache
def _imported(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"fedtmle.model.kernels.{_MODULES[name]}"))


def _checked(name: str) -> str:
    if name not in _MODULES:
        raise InputError(f"backend: expected one of {sorted(_MODULES)}, not '{name}'")
    return name
