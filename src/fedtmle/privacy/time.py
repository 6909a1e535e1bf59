"""Charts of regressions over person-periods and of time-to-event problems: a record is one person.

A person's share in a sum is the sum over that person's long rows. Periods and events are discrete, so that
the audit enumerates them; in a covariate it takes central differences of the shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.initial.glm import GLMModel
from fedtmle.model.grouped import GroupedLinear
from fedtmle.model.submodel import AbstractRowsSubmodel
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Part
from fedtmle.privacy.charts import AbstractChart, Tangent, chart_of, row_terms
from fedtmle.targets.effects.moments import ClosingLayout, MomentColumns
from fedtmle.targets.time.problem import TimeLaw, TimeProblem


class Numeric:
    """A chart without derivatives of its own."""

    @property
    def is_numeric(self) -> bool:
        return True

    def submodel_tangent(self, law: object, rows: Table, name: str) -> Tangent:  # noqa: ARG002
        raise TypeError("the audit takes central differences of this chart")


@final
@dataclass(frozen=True)
class PersonPeriodChart(Numeric, AbstractChart[None, Table]):
    """The chart of a hazard model; it has no closing sums."""

    model: GLMModel

    def submodel(self, law: None, rows: Table) -> AbstractRowsSubmodel:
        return grouped(self.model.submodel(law, rows))


@final
@dataclass(frozen=True)
class TimeChart(Numeric, AbstractChart[TimeLaw, Table]):
    """The chart of a time-to-event problem that a study prepared."""

    problem: TimeProblem

    def submodel(self, law: TimeLaw, rows: Table) -> AbstractRowsSubmodel:
        return grouped(self.problem.submodel(law, rows))

    def closing_terms(self, law: TimeLaw, rows: Table, base: Table) -> Array:
        columns, cluster = self.problem.whole(law, rows), self.problem.prepare.clusters(base).cluster
        if cluster is not None:  # a row is seen beside the cluster's other rows
            before = self.problem.whole(law, base)
            totals = np.stack([np.bincount(cluster, weights=column)[cluster] for column in before.flat])
            gathered = totals.reshape(before.stacked.shape)
            columns = MomentColumns(columns.stacked - before.stacked + gathered)
        terms = ClosingLayout(len(columns.u)).terms()
        sums = [np.prod(columns.flat[list(term)], axis=0) for term in terms]
        return np.stack([*sums, np.ones(rows.n_rows)])


chart_of.register(TimeProblem, TimeChart)


def grouped(submodel: object) -> GroupedLinear:
    """Return the submodel after a check that its rows are those of people."""
    if not isinstance(submodel, GroupedLinear):
        raise TypeError("a model over person-periods has a grouped submodel")
    return submodel


@row_terms.register
def _(submodel: GroupedLinear, eps: Array, parts: Part) -> Array:
    pieces = submodel.over(lambda piece: piece.by_person(row_terms(piece.design, eps, parts)))
    return np.concatenate(list(pieces), axis=1)
