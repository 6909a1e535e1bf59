"""Charts of the problems that targets of other distributions are made of; a record is a row of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedtmle.model.submodel import AbstractRowsSubmodel, AbstractSubmodel
from fedtmle.model.table import Table
from fedtmle.model.types import Array, upper_pairs
from fedtmle.privacy.charts import AbstractChart, chart_of
from fedtmle.privacy.time import Numeric
from fedtmle.targets.on_columns import OnColumns
from fedtmle.targets.residuals import ResidualLaw, ResidualProblem


@final
@dataclass(frozen=True)
class ResidualChart(Numeric, AbstractChart[ResidualLaw, Table]):
    """The chart of a problem with several residuals per record."""

    problem: ResidualProblem

    def submodel(self, law: ResidualLaw, rows: Table) -> AbstractRowsSubmodel:
        return _of_rows(self.problem.submodel(law, rows))

    def closing_terms(self, law: ResidualLaw, rows: Table, base: Table) -> Array:  # noqa: ARG002 - no clusters
        u, m = np.split(self.problem.closing_columns(law, rows), 2)
        products = [u[j] * u[k] for j, k in upper_pairs(len(u))]
        return np.stack([*u, *products, *m])


@final
@dataclass(frozen=True)
class ColumnsChart(Numeric, AbstractChart[object, Table]):
    """The chart of a problem of arrays on columns of a table."""

    problem: OnColumns[Any]

    def submodel(self, law: object, rows: Table) -> AbstractRowsSubmodel:
        return _of_rows(self.problem.submodel(law, rows))

    def closing_terms(self, law: object, rows: Table, base: Table) -> Array:
        inner = chart_of(self.problem.problem)
        return inner.closing_terms(law, self.problem.rows(rows), self.problem.rows(base))


def _of_rows(submodel: AbstractSubmodel) -> AbstractRowsSubmodel:
    if not isinstance(submodel, AbstractRowsSubmodel):
        raise TypeError("the audit reads tables in memory")
    return submodel


chart_of.register(ResidualProblem, ResidualChart)
chart_of.register(OnColumns, ColumnsChart)
