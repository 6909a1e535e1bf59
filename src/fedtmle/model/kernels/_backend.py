"""How many threads the compiled kernels may use, and how a range of work is shared among them.

The kernels release the interpreter's lock and write to disjoint ranges, so the number of threads
cannot change a result.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import islice, pairwise
from typing import Protocol, TypeVar, cast

from fedtmle.errors import InputError
from fedtmle.model.kernels._query import Query, Rows
from fedtmle.model.types import Array, Bools, Bytes, Codes, IntArray

Item = TypeVar("Item")
Result = TypeVar("Result")

_chosen_threads: int | None = None
_here = threading.local()  # whether this thread is one of those that `mapped` shares its work among


def set_threads(n: int | None) -> None:
    """Use n threads; None returns to FEDTMLE_THREADS or, without it, to all cores."""
    global _chosen_threads  # noqa: PLW0603 - one setting of the process, like the environment variable
    if n is not None and n < 1:
        raise InputError(f"threads: expected a positive number, not {n}")
    _chosen_threads = n


def threads() -> int:
    """The number of threads in force."""
    if _chosen_threads is not None:
        return _chosen_threads
    given = os.environ.get("FEDTMLE_THREADS")
    if given is None:
        return os.cpu_count() or 1
    if not given.isdecimal() or int(given) < 1:
        raise InputError(f"FEDTMLE_THREADS: expected a positive number, not '{given}'")
    return int(given)


def shared(work: Callable[[int, int], bool], length: int, *, serially: bool) -> bool:
    """Run work(first, last) over contiguous shares of range(length); whether all returned True.

    The pool lives for one call: starting threads costs some 50 microseconds, and a pool kept for
    later would not survive a fork.
    """
    workers = 1 if serially else min(threads(), length)
    if workers <= 1:
        return work(0, length)
    edges = [length * share // workers for share in range(workers + 1)]
    with ThreadPoolExecutor(workers - 1) as pool:
        others = [pool.submit(work, *share) for share in pairwise(edges[1:])]
        own = work(edges[0], edges[1])
        return all([own, *(other.result() for other in others)])


def mapped(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """work(item) of each, in order, side by side; few items are held at a time.

    What is mapped may itself map: it then does so in the thread that it has.
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
    """work(item) of each, for what it does: each thread goes over consecutive items.

    Two threads that take turns would touch the same page of fresh memory at the same time, and each would
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
    """What a backend module offers; arguments are checked, contiguous float64 arrays."""

    def elementwise(self, name: str, x: Array) -> Array: ...

    def glm_chunks(self, query: Query) -> IntArray: ...

    def means(self, rows: Rows, eps: Array) -> Array: ...

    def spread(
        self, rows: Rows, eps: Array, until: Array, least: int, few: int, many: float
    ) -> tuple[Array, int, bool]: ...

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
    """The name of the backend in force: 'numba' or 'numpy'."""
    return _chosen_backend or _default()


@cache
def _default() -> str:
    """Found out once: every kernel call asks."""
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
    """The backend in force, imported when it is first needed."""
    return _imported(_chosen_backend or _default())


@cache
def _imported(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"fedtmle.model.kernels.{_MODULES[name]}"))


def _checked(name: str) -> str:
    if name not in _MODULES:
        raise InputError(f"backend: expected one of {sorted(_MODULES)}, not '{name}'")
    return name
