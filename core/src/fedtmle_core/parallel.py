"""Threads: how many are used, and how work is divided among them.

The kernels release the interpreter's lock and write to disjoint ranges, so the number of threads
cannot change a result.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, lru_cache
from itertools import islice, pairwise
from typing import TypeVar

from fedtmle_core.errors import InputError

BLOCK = 65_536  # rows of a block: the interpreter's share is small, and temporaries stay in the cache

Item = TypeVar("Item")
Result = TypeVar("Result")

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
        return _cores()
    if not given.isdecimal() or int(given) < 1:
        raise InputError(f"FEDTMLE_THREADS: expected a positive number, not '{given}'")
    return int(given)


@cache  # the system reads a file to count them
def _cores() -> int:
    return os.cpu_count() or 1


def shared(work: Callable[[int, int], bool], length: int, *, serially: bool) -> bool:
    """Run work(first, last) over contiguous shares of range(length); return whether all returned True.

    A worker of `mapped` or `done` runs all of it itself, and so never waits for another worker.
    """
    workers = 1 if serially or _works() else min(threads(), length)
    if workers <= 1:
        return work(0, length)
    edges = [length * share // workers for share in range(workers + 1)]
    pool = _pool(threads(), os.getpid())
    others = [pool.submit(work, *share) for share in pairwise(edges[1:])]
    try:
        here = work(edges[0], edges[1])
    finally:
        wait(others)
    return all([here, *(other.result() for other in others)])


@lru_cache(maxsize=4)
def _pool(workers: int, process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked child has no threads
    """Return the pool of this process: to start threads for every pass would cost more than short passes."""
    return ThreadPoolExecutor(workers, initializer=_mark)


def _works() -> bool:
    """Return whether this thread is a worker."""
    return getattr(_here, "works", False)


def mapped(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield work(item) for each item, in order, computed in parallel; few items are held at a time.

    ``work`` may itself call this function, which then runs in the calling thread.
    """
    workers = threads()
    if workers == 1 or _works():
        yield from map(work, items)
        return
    rest = iter(items)
    ahead = deque(islice(rest, 2))
    if len(ahead) < 2:  # a thread costs more than most single items
        yield from map(work, ahead)
        return
    pool = _pool(workers, os.getpid())
    waiting: deque[Future[Result]] = deque(pool.submit(work, ahead.popleft()) for _ in range(2))
    try:
        for item in rest:
            waiting.append(pool.submit(work, item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # an error, or a caller that wants no more: nothing goes on in the background
        for future in waiting:
            future.cancel()
        wait(waiting)


def done(work: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Run work(item) for each item, for its side effect; each thread takes consecutive items.

    Threads that take turns would touch the same page of fresh memory at the same time, and each would
    have it cleared.
    """
    if threads() == 1 or _works():
        for item in items:
            work(item)
        return
    listed = list(items)

    def consecutive(first: int, last: int) -> bool:
        before = _works()
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


def pieces(n_rows: int) -> Iterator[slice]:
    """Yield consecutive rows, as many as stay in the cache."""
    return (slice(start, min(start + BLOCK, n_rows)) for start in range(0, n_rows, BLOCK))
