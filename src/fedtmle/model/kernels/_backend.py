"""Which backend runs: FEDTMLE_BACKEND, read once, else numba where it can be imported, else numpy."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Protocol, cast

from fedtmle.errors import InputError
from fedtmle.model.kernels._query import Query, Rows
from fedtmle.model.types import Array, Bools, Bytes, Codes, IntArray

_MODULES = {"numba": "_numba", "numpy": "_numpy"}
_chosen: str | None = None  # by `using_backend`


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
    return _chosen or _default()


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
    global _chosen  # noqa: PLW0603 - one setting of the process, like the environment variable
    before, _chosen = _chosen, _checked(name)
    try:
        yield
    finally:
        _chosen = before


def module() -> Backend:
    """The backend in force, imported when it is first needed."""
    return _imported(_chosen or _default())


@cache
def _imported(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"fedtmle.model.kernels.{_MODULES[name]}"))


def _checked(name: str) -> str:
    if name not in _MODULES:
        raise InputError(f"backend: expected one of {sorted(_MODULES)}, not '{name}'")
    return name
