"""A silo's rows, behind the questions that a query may ask of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.errors import DataError
from fedtmle.initial.crossfit import POOLED_SILO
from fedtmle.model.exact import Sums
from fedtmle.model.problem import Estimate
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.table import Table
from fedtmle.model.types import IntArray
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import Model, Problem


def read_rows(problem: Problem, name: str, rows: object) -> Any:
    """Validated rows; an error names the silo."""
    try:
        return problem.read(rows)
    except DataError as error:
        raise error.at(name) from None


@dataclass
class _PerLaw:
    """What a silo computes once per model and law, and once per batch, which is asked and examined."""

    model: Model
    law: Any
    submodel: AbstractSubmodel
    normaliser: AbstractNormaliser
    of_batch: tuple[IntArray, AbstractSubmodel] | None = None


class LocalRows:
    """What queries see: `protocol.query.Local`."""

    def __init__(
        self, name: str, rows: Any, n_rows: int, index: IntArray | None, policy: Policy | None = None
    ) -> None:
        self.name = name
        self.n_rows = n_rows
        self.policy = policy or Policy.unguarded()
        self._rows = rows
        self._index = index
        self._first_row: int | None = None
        self._cached: _PerLaw | None = None
        self._batch: tuple[IntArray, IntArray] | None = None  # the last one, pooled and own rows

    def place(self, first_row: int) -> None:
        """Where the rows stand in the pooled order, unless their owner numbered them."""
        self._first_row = first_row

    def submodel(self, model: Model, law: Any, batch: IntArray | None = None) -> AbstractSubmodel:
        at = self._at(model, law)
        if batch is None:
            return at.submodel
        rows = self.batch(batch)
        if at.of_batch is None or at.of_batch[0] is not rows:
            at.of_batch = rows, at.submodel.take(rows)
        return at.of_batch[1]

    def normaliser(self, model: Model, law: Any) -> AbstractNormaliser:
        return self._at(model, law).normaliser

    def moments(self, problem: Problem, law: Any) -> Sums:
        return problem.moments(law, self._rows)

    def estimate(self, problem: Problem, law: Any) -> Estimate:
        return problem.finish(law, self.moments(problem, law), self.n_rows)

    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        self._cached = None  # what the last model needed is not needed now
        return function(self._rows)

    def part(self, silo: str) -> LocalRows | None:
        if silo == self.name:
            return self
        factor = self._rows.factors.get(POOLED_SILO) if isinstance(self._rows, Table) else None
        if factor is None or silo not in factor.levels:
            return None
        own = self._rows.take(np.flatnonzero(factor.codes == factor.levels.index(silo)))
        return LocalRows(silo, own, own.n_rows, None, self.policy)

    def batch(self, pooled: IntArray) -> IntArray:
        if self._batch is None or self._batch[0] is not pooled:
            self._batch = pooled, self._own(pooled)
        return self._batch[1]

    def _own(self, pooled: IntArray) -> IntArray:
        if self._index is None:  # consecutive: no list of their numbers, which may exceed memory
            if self._first_row is None:
                raise AssertionError("rows are placed before the first query")
            own = pooled - self._first_row
            return np.asarray(own[(own >= 0) & (own < self.n_rows)], dtype=np.int64)
        order = np.argsort(self._index, kind="stable")
        mine = self._index[order]
        at = np.searchsorted(mine, pooled)
        found = mine[np.minimum(at, len(mine) - 1)] == pooled
        return np.asarray(order[at[found]], dtype=np.int64)

    def _at(self, model: Model, law: Any) -> _PerLaw:
        """Per-law work is done once: the same law object is asked many times in a row."""
        cached = self._cached
        if cached is None or cached.law is not law or cached.model is not model:
            self._cached = cached = None  # the old one goes before the new one is built
            cached = _PerLaw(model, law, model.submodel(law, self._rows), model.normaliser(law))
            self._cached = cached
        return cached
