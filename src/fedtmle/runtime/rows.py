"""A silo's rows behind the interface of queries, its own outcome of a personalised run, its fingerprint."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from fedtmle.errors import DataError
from fedtmle.model.problem import AbstractProblem, Estimate
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel, SumsAt, sums_of_two
from fedtmle.model.table import SILO, StreamedTable, Table, placed
from fedtmle.protocol.query import Derivatives, Local, Model, Problem, Retirement, View
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, IntArray

MOST_VIEWS = 32  # views kept at a time: more than the data sets that a study imputes
Result = TypeVar("Result")
Rows = TypeVar("Rows")

CACHED_NUMBERS = 1 << 25  # rows times columns of the models that are kept side by side: 256 MiB


def read_rows(problem: AbstractProblem[Any, Rows], name: str, rows: object) -> Rows:
    """Return the rows of silo ``name`` as ``problem`` reads and validates them; an error names the silo."""
    try:
        return problem.read(rows)
    except DataError as error:
        raise error.at(name) from None


@dataclass(frozen=True, kw_only=True)
class LocalOutcome:
    """A silo's own outcome of a personalised run, which stays at the silo.

    ``retired_at`` is the update at which the silo retired, None if it did not. ``gap_bound`` bounds the local
    targeting gap that a retirement on a lattice may leave.
    """

    law: object
    retired_at: int | None
    estimate: Estimate
    n_rows: int
    gap_bound: float | None


def local_outcome(
    local: Local, problem: Problem, law: object, retirement: Retirement | None = None
) -> LocalOutcome:
    """Return the silo's own outcome, which it keeps for itself, of a targeting that ended at ``law``."""
    return LocalOutcome(
        law=law,
        retired_at=None if retirement is None else retirement.update,
        estimate=local.estimate(problem, law),
        n_rows=local.n_rows,
        gap_bound=None if retirement is None else retirement.gap_bound(local),
    )


@dataclass
class _PerLaw:
    """Work that a silo does once per model and law, and once per batch; guard and answer share it."""

    model: Model
    law: object
    submodel: AbstractSubmodel
    normaliser: AbstractNormaliser
    of_batch: tuple[IntArray, AbstractSubmodel] | None = None
    computed: dict[Hashable, object] = field(default_factory=dict)


class LocalRows:
    """One silo's rows behind the interface `protocol.query.Local`."""

    def __init__(self, name: str, rows: object, n_rows: int, index: IntArray | None = None) -> None:
        self.name = name
        self.n_rows = n_rows
        self._rows = rows
        self._index = index
        self._first_row: int | None = None
        self._cached: list[_PerLaw] = []  # by model of the last rounds, the most recent last
        self._batch: tuple[IntArray, IntArray] | None = None  # the last one, as pooled and as local rows
        self._seen: list[tuple[View, LocalRows]] = []  # rows seen through views, the most recent last

    def place(self, first_row: int) -> None:
        """Set where the rows start in the pooled order; it is ignored if their owner numbered them."""
        if isinstance(self._rows, Table | StreamedTable):
            self._rows = placed(self._rows, first_row - (self._first_row or 0))
        self._first_row = first_row

    def submodel(self, model: Model, law: object, batch: IntArray | None = None) -> AbstractSubmodel:
        at = self._at(model, law)
        if batch is None:
            return at.submodel
        rows = self.batch(batch)
        if at.of_batch is None or at.of_batch[0] is not rows:
            at.of_batch = rows, at.submodel.take(rows)
        return at.of_batch[1]

    def sums(self, asked: Sequence[Derivatives]) -> list[Sums]:
        found: list[Sums] = []
        for begin in range(0, len(asked), 2):
            two = asked[begin : begin + 2]
            points = (SumsAt(self.submodel(at.model, at.law, at.batch), at.eps, at.parts) for at in two)
            if len(two) == 2 and self.n_rows * sum(at.model.dim for at in two) <= CACHED_NUMBERS:
                found += sums_of_two(*points)
            else:  # one submodel at a time
                found += [point.submodel.sums(point.eps, point.parts) for point in points]
        return found

    def normaliser(self, model: Model, law: object) -> AbstractNormaliser:
        return self._at(model, law).normaliser

    def moments(self, problem: Problem, law: object) -> Sums:
        return problem.moments(law, self._rows)

    def disclosed_columns(self, problem: Problem, law: object) -> Iterable[Array]:
        return problem.disclosed_columns(law, self._rows)

    def estimate(self, problem: Problem, law: object) -> Estimate:
        return problem.finish(law, self.moments(problem, law), self.n_rows)

    def once(self, model: Model, law: object, what: Hashable, compute: Callable[[], Result]) -> Result:
        computed = self._at(model, law).computed
        if what not in computed:
            computed[what] = compute()
        return cast(Result, computed[what])

    def evaluate(self, rule: Callable[[Any], Result]) -> Result:
        self._cached = []  # the last models' arrays are not needed any more
        return rule(self._rows)

    def part(self, silo: str) -> LocalRows | None:
        if silo == self.name:
            return self
        if not isinstance(self._rows, Table):
            return None
        factor = self._rows.factors.get(SILO)
        if factor is None or silo not in factor.levels:
            return None
        rows = self._rows.take(np.flatnonzero(factor.codes == factor.levels.index(silo)))
        return LocalRows(silo, rows, rows.n_rows)

    def batch(self, pooled: IntArray) -> IntArray:
        if self._batch is None or self._batch[0] is not pooled:
            self._batch = pooled, self._numbers(pooled)
        return self._batch[1]

    def _numbers(self, pooled: IntArray) -> IntArray:
        if self._index is None:  # consecutive rows: a list of their numbers might exceed memory
            if self._first_row is None:
                raise AssertionError("rows are placed before the first query")
            numbers = pooled - self._first_row
            return np.asarray(numbers[(numbers >= 0) & (numbers < self.n_rows)], dtype=np.int64)
        order = np.argsort(self._index, kind="stable")
        index = self._index[order]
        at = np.searchsorted(index, pooled)
        is_here = index[np.minimum(at, len(index) - 1)] == pooled
        return np.asarray(order[at[is_here]], dtype=np.int64)

    def through(self, view: View) -> LocalRows:
        for known, seen in self._seen:
            if known is view:
                return seen
        seen = LocalRows(self.name, view.of(self._rows), self.n_rows, self._index)
        seen._first_row = self._first_row
        self._seen = [*self._seen[1 - MOST_VIEWS :], (view, seen)]
        return seen

    def _at(self, model: Model, law: object) -> _PerLaw:
        """Return the work for a law, done once: the same law object is asked many times in a row."""
        for cached in self._cached:
            if cached.law is law and cached.model is model:
                return cached
        kept = [cached for cached in self._cached if cached.model is not model]
        while kept and self.n_rows * (model.dim + sum(cached.model.dim for cached in kept)) > CACHED_NUMBERS:
            kept.pop(0)
        self._cached = kept  # free the old one before the new one is built
        built = _PerLaw(model, law, model.submodel(law, self._rows), model.normaliser(law))
        kept.append(built)
        return built


def fingerprint(plan: bytes, name: str, rows: object) -> bytes:
    """Return a digest of plan, name and rows, which stays at the silo.

    It must be the same after a restart: answers computed before and after a change of the table would not
    belong together.
    """
    digest = hashlib.blake2b(plan + name.encode(), digest_size=32)
    _feed(digest, rows)
    return digest.digest()


def _feed(digest: hashlib.blake2b, value: object) -> None:
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, StreamedTable):
        digest.update(value.digest)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _feed(digest, getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key in sorted(value):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())
