"""The rows of a study whose models have an intercept of each silo's own: what C(silo) is (`initial.own`).

A model predicts at a silo with the silo's own intercept, which is a column of the rows that this view shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

import numpy as np

from fedtmle.initial.crossfit import CrossFitted
from fedtmle.initial.glm import AbstractOwnIntercept, FittedGLM
from fedtmle.initial.own import by_silo
from fedtmle.initial.superlearner import SuperLearned
from fedtmle.model.table import SILO, AnyTable, StreamedTable, Table
from fedtmle.model.types import Array
from fedtmle.protocol.query import Flow
from fedtmle.protocol.views import through

Result = TypeVar("Result")


@final
@dataclass(frozen=True, kw_only=True)
class OwnIntercepts:
    """Shows rows with a column for each model that has an intercept of each silo's own.

    ``known`` are intercepts by column and silo; the others are those of the rows that are shown.
    """

    intercepts: tuple[AbstractOwnIntercept, ...]
    known: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def of(self, rows: AnyTable) -> AnyTable:
        known = self._of_rows(rows)
        if isinstance(rows, StreamedTable):
            read = rows.read
            return replace(rows, read=lambda: (self._shown(batch, known) for batch in read()))
        return self._shown(rows, known)

    def held(self, rows: AnyTable) -> OwnIntercepts:
        """Return the view whose intercepts stay those of these rows, whichever rows of the silos it shows."""
        return replace(self, known=self._of_rows(rows))

    def _of_rows(self, rows: AnyTable) -> dict[tuple[str, str], float]:
        known = dict(self.known)
        for silo, part in by_silo(rows):
            for each in self.intercepts:
                if (each.name, silo) not in known:
                    known[each.name, silo] = each.of(part)
        return known

    def _shown(self, table: Table, known: Mapping[tuple[str, str], float]) -> Table:
        factor = table.factors[SILO]
        for each in self.intercepts:
            of_silos: Array = np.array([known.get((each.name, silo), np.nan) for silo in factor.levels])
            table = table.with_numeric(each.name, of_silos[factor.codes])
        return table


def own_intercepts(models: Iterable[object]) -> Iterator[AbstractOwnIntercept]:
    """Yield the intercepts of the silos' own in fitted models, with those of which they consist."""
    for model in models:
        if isinstance(model, FittedGLM) and model.own is not None:
            yield model.own
        elif isinstance(model, CrossFitted | SuperLearned):
            yield from own_intercepts(model.models)


def own_view(models: Iterable[object]) -> OwnIntercepts | None:
    """Return the view of rows with which these models can predict, None if they need no other rows."""
    intercepts = tuple(own_intercepts(models))
    return OwnIntercepts(intercepts=intercepts) if intercepts else None


def seen(flow: Flow[Result], view: OwnIntercepts | None) -> Flow[Result]:
    """Return the flow over the rows that the view shows, if there is one."""
    return flow if view is None else through(flow, view)
