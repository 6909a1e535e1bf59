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
from fedtmle.model.types import Array, IntArray, Part
from fedtmle.privacy.charts import AbstractChart, Tangent, chart_of, row_terms
from fedtmle.targets.effects.moments import ClosingLayout, MomentColumns
from fedtmle.targets.regimes.problem import RegimeLaw, RegimeProblem
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
        problem = self.problem
        clusters = problem.clusters(base)
        return _closing(problem.whole(law, rows), problem.whole(law, base), clusters.cluster)


@final
@dataclass(frozen=True)
class RegimeChart(Numeric, AbstractChart[RegimeLaw, Table]):
    """The chart of a problem of treatment over time that a study prepared."""

    problem: RegimeProblem

    def submodel(self, law: RegimeLaw, rows: Table) -> AbstractRowsSubmodel:
        return grouped(self.problem.submodel(law, rows))

    def closing_terms(self, law: RegimeLaw, rows: Table, base: Table) -> Array:
        problem = self.problem
        return _closing(problem.whole(law, rows), problem.whole(law, base), problem.clusters(base).cluster)


def _closing(columns: MomentColumns, before: MomentColumns, cluster: IntArray | None) -> Array:
    """Return each row's share in the closing sums; ``before`` are the columns of the true rows.

    With clusters, a row's share uses its cluster's totals: those of ``before`` plus the row's difference.
    """
    if cluster is not None:
        totals = np.stack([np.bincount(cluster, weights=column)[cluster] for column in before.flat])
        columns = MomentColumns(columns.stacked - before.stacked + totals.reshape(before.stacked.shape))
    terms = ClosingLayout(len(columns.u)).terms()
    sums = [np.prod(columns.flat[list(term)], axis=0) for term in terms]
    return np.stack([*sums, np.ones(columns.stacked.shape[2])])


chart_of.register(TimeProblem, TimeChart)
chart_of.register(RegimeProblem, RegimeChart)


def grouped(submodel: object) -> GroupedLinear:
    """Return the submodel; raise TypeError if it is not grouped by person."""
    if not isinstance(submodel, GroupedLinear):
        raise TypeError("the submodel of a model over person-periods must be a GroupedLinear")
    return submodel


@row_terms.register
def _(submodel: GroupedLinear, eps: Array, parts: Part) -> Array:
    pieces = submodel.over(lambda piece: piece.by_person(row_terms(piece.design, eps, parts)))
    return np.concatenate(list(pieces), axis=1)
