"""Cross-fitting: folds drawn within a silo by a public seeded rule, one fit per left-out fold."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.model.table import SILO, Factor, Table
from fedtmle_core.types import Array, IntArray

SUPPLIED_SLACK = 1e-6  # supplied probabilities of all arms may miss 1 by this


@final
@dataclass(frozen=True, kw_only=True)
class Folds:
    """``count`` folds of nearly equal size within each silo; rows of one cluster stay together.

    Where clusters span silos (``spanning``), a cluster's fold is drawn from its identifier, so that it
    is the same in all of them; sizes are then equal on average only.
    """

    count: int
    seed: int
    cluster: str | None = None
    spanning: bool = False

    @property
    def column(self) -> str:
        """The name of the column that holds the folds of a marked table."""
        return f"\0fold {self.count} {self.seed} {self.cluster} {self.spanning}"

    def mark(self, table: Table) -> Table:
        """Return a whole table with the fold of each row as a column, which its parts and long rows keep."""
        if self.column in table.factors:
            return table
        levels = tuple(str(fold) for fold in range(self.count))
        return table.with_factor(self.column, Factor(self.of(table), levels))

    def of(self, table: Table) -> IntArray:
        """Return the fold of each row, as a code from 0."""
        if self.column in table.factors:
            return table.factors[self.column].codes
        if self.spanning and self.cluster is not None:
            factor = table.factors[self.cluster]
            return np.array([self._drawn(label) for label in factor.levels], dtype=np.int64)[factor.codes]
        units = (
            np.arange(table.n_rows)
            if self.cluster is None
            else np.unique(table.factors[self.cluster].codes, return_inverse=True)[1]
        )
        silo = table.factors.get(SILO)
        if silo is None:
            return self._draw(units)
        folds = np.empty(table.n_rows, dtype=np.int64)
        for code in range(len(silo.levels)):
            here = silo.codes == code
            folds[here] = self._draw(np.unique(units[here], return_inverse=True)[1])
        return folds

    def _drawn(self, label: str) -> int:
        key = f"fedtmle fold:{self.seed}:{label}".encode()
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") % self.count

    def _draw(self, units: IntArray) -> IntArray:
        size = int(units.max(initial=-1)) + 1
        rng = np.random.Generator(np.random.Philox(key=[self.seed, size]))
        return np.asarray((rng.permutation(size) % self.count)[units])


class Fitted(Protocol):
    """A fitted regression: the mean of its response, shape (N,), or of each class, shape (J, N)."""

    def predict(self, table: Table) -> Array: ...


@final
@dataclass(frozen=True, kw_only=True)
class CrossFitted:
    """A fit per fold: each row is predicted by the model that was fitted without its fold."""

    models: tuple[Fitted, ...]
    folds: Folds

    def predict(self, table: Table) -> Array:
        predictions = np.stack([model.predict(table) for model in self.models])
        return chosen_fold(predictions, self.folds.of(table))


def chosen_fold(values: Array, folds: IntArray) -> Array:
    """Return, for each row, the value of the fold that it is in; shapes (folds, ..., N) and (N,)."""
    places = folds.reshape((1,) * (values.ndim - 1) + (-1,))
    return np.asarray(np.take_along_axis(values, places, axis=0)[0])


@final
@dataclass(frozen=True)
class SuppliedPrediction:
    """A prediction that the silo already has, in a column with the bounds ``low`` and ``low + width``."""

    name: str
    low: float = 0.0
    width: float = 1.0

    def predict(self, table: Table) -> Array:
        return (table.numeric[self.name] - self.low) / self.width


@final
@dataclass(frozen=True)
class SuppliedProbability:
    """A probability that the silo already has; with those of the columns ``others`` it is at most 1.

    If ``is_last``, they are the probabilities of all arms and add up to 1.
    """

    name: str
    others: tuple[str, ...] = ()
    is_last: bool = False

    def predict(self, table: Table) -> Array:
        given = table.numeric[self.name]
        total = given.copy()
        for name in self.others:
            total = total + table.numeric[name]
        largest = 1.0 + SUPPLIED_SLACK
        smallest = 1.0 - SUPPLIED_SLACK if self.is_last else 0.0
        within = (given >= 0) & (given <= largest) & (total <= largest) & (total >= smallest)
        outside = int(np.count_nonzero(~within))
        if outside:
            others = f", or with {' and '.join(map(repr, self.others))}" if self.others else ""
            rule = " it does not add up to 1" if self.is_last else " it is above 1"
            raise DataError(
                f"column '{self.name}' is not between 0 and 1{others and others + rule} in {outside} row(s)"
            )
        return np.clip(given, 0.0, 1.0)
