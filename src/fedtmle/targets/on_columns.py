"""A problem of plain arrays, such as a mean or a density's functional, on columns of a study's table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.exact import Sums
from fedtmle.model.problem import AbstractProblem, ConvergenceBounds, Estimate, Law
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.table import AnyTable, PerTable, StreamedTable, Table
from fedtmle.model.types import Array, RowBound


@final
@dataclass(frozen=True, kw_only=True)
class OnColumns(AbstractProblem[Law, AnyTable], Generic[Law]):
    """``problem``, which reads an array of shape (N,) or (N, q), on these numeric columns of a table."""

    problem: AbstractProblem[Law, Any]
    columns: tuple[str, ...]
    _rows: PerTable[Any] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    def rows(self, table: AnyTable) -> Any:
        """Return the rows as the problem reads them; they are read once for a table."""
        if isinstance(table, StreamedTable):
            raise InputError("this target needs all rows at once; leave out stream in the silo file")
        return self._rows.of(table, self._read)

    def _read(self, table: Table) -> Any:
        values = np.stack([table.numeric[name] for name in self.columns], axis=1)
        return self.problem.read(values if len(self.columns) > 1 else values[:, 0])

    @property
    def names(self) -> tuple[str, ...]:
        return self.problem.names

    def read(self, rows: object) -> AnyTable:
        if not isinstance(rows, Table | StreamedTable):
            raise TypeError("this problem reads tables that the data layer made")
        self.rows(rows)
        return rows

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def submodel(self, law: Law, rows: AnyTable) -> AbstractSubmodel:
        return self.problem.submodel(law, self.rows(rows))

    def normaliser(self, law: Law) -> AbstractNormaliser:
        return self.problem.normaliser(law)

    def row_bound(self, law: Law) -> RowBound:
        return self.problem.row_bound(law)

    def losses(self, law: Law, rows: AnyTable) -> Array:
        return self.problem.losses(law, self.rows(rows))

    def eif(self, law: Law, rows: AnyTable, psi: Array) -> Array:
        return self.problem.eif(law, self.rows(rows), psi)

    def moments(self, law: Law, rows: AnyTable) -> Sums:
        return self.problem.moments(law, self.rows(rows))

    def moment_shifts(self, law: Law) -> tuple[int, ...]:
        return self.problem.moment_shifts(law)

    def finish(self, law: Law, pooled: Sums, n: int) -> Estimate:
        return self.problem.finish(law, pooled, n)

    def move(self, law: Law, eps: Array) -> Law:
        return self.problem.move(law, eps)

    def admits(self, law: Law, eps: Array) -> bool:
        return self.problem.admits(law, eps)

    def path(self, law: Law) -> tuple[tuple[float, ...], ...]:
        return self.problem.path(law)

    def convergence_bounds(self, law: Law) -> ConvergenceBounds | None:
        return self.problem.convergence_bounds(law)

    def envelope(self, law: Law) -> float | None:
        return self.problem.envelope(law)

    def displacement(self, law: Law) -> Array | None:
        return self.problem.displacement(law)

    def curvature(self, law: Law) -> Array | None:
        return self.problem.curvature(law)

    def accuracy(self, law: Law) -> float:
        return self.problem.accuracy(law)

    def accuracy_at(self, law: Law, eps: Array) -> float:
        return self.problem.accuracy_at(law, eps)

    @property
    def curvature_is_fixed(self) -> bool:
        return self.problem.curvature_is_fixed
