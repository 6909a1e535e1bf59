"""Cross-fitting: folds drawn within a silo by a public seeded rule, one fit per left-out fold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from fedtmle.model.table import Table
from fedtmle.model.types import Array, IntArray


@final
@dataclass(frozen=True, kw_only=True)
class Folds:
    """``count`` folds of nearly equal size within each silo; rows of one cluster stay together."""

    count: int
    seed: int
    cluster: str | None = None

    def of(self, table: Table) -> IntArray:
        """The fold of each row."""
        units = (
            np.arange(table.n_rows)
            if self.cluster is None
            else np.unique(table.factors[self.cluster].codes, return_inverse=True)[1]
        )
        size = int(units.max(initial=-1)) + 1
        rng = np.random.Generator(np.random.Philox(key=[self.seed, size]))
        return np.asarray((rng.permutation(size) % self.count)[units])


class Fitted(Protocol):
    """A fitted regression: the mean of its response, shape (N,)."""

    def predict(self, table: Table) -> Array: ...


@final
@dataclass(frozen=True, kw_only=True)
class CrossFitted:
    """Predicts each row by the model that was fitted without its fold."""

    models: tuple[Fitted, ...]
    folds: Folds

    def predict(self, table: Table) -> Array:
        predictions = np.stack([model.predict(table) for model in self.models])
        return np.asarray(np.take_along_axis(predictions, self.folds.of(table)[None, :], axis=0)[0])


@final
@dataclass(frozen=True)
class Column:
    """A prediction that the silo already has."""

    name: str
    low: float = 0.0
    width: float = 1.0

    def predict(self, table: Table) -> Array:
        return (table.numeric[self.name] - self.low) / self.width
