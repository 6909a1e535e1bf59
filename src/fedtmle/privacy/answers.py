"""One silo's answer as a mean over its rows: the link from a transcript to section 4.3.

Queries state their answers as means over the silo's rows (`protocol.query`). `explain` evaluates the
terms of each row and their derivatives in a coordinate of the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.submodel import AbstractRowsSubmodel
from fedtmle.model.table import Table
from fedtmle.privacy import problems as _problems  # noqa: F401 - registers the charts of all problems
from fedtmle.privacy.charts import (
    Chart,
    Tangent,
    blocks_of,
    chart_of,
    held_view,
    row_tangents,
    row_terms,
)
from fedtmle.protocol.query import (
    AnsweredQuery,
    ClosingTerms,
    ColumnTerms,
    CurvatureBound,
    Derivatives,
    Local,
    RowTerms,
    ViewedTerms,
)
from fedtmle_core.types import Array, Part, matrix

STEP = 1e-4  # step of central differences, relative to the column's standard deviation
Terms = Callable[[object], Array]  # rows -> (p, N)
Tangents = Callable[[object, str], Array]  # rows, coordinate -> (p, N)


@final
@dataclass(frozen=True, kw_only=True)
class Explained:
    """One answer: G = N_m^-1 sum of ``terms`` over rows, |G - sent| <= box, and residual = G - sent."""

    label: str
    terms: Terms
    tangents: Tangents
    box: Array  # (p,)
    residual: Array  # (p,)


@final
class Submodels:
    """The charts of all targets, and the submodels and tangents at the latest law, each built once."""

    def __init__(self) -> None:
        self._charts: dict[int, tuple[object, Chart]] = {}  # holding an object keeps its id
        self._law: object = None
        self._chart: Chart | None = None
        self._submodels: dict[int, tuple[object, AbstractRowsSubmodel]] = {}
        self._tangents: dict[tuple[int, str], tuple[Tangent, ...]] = {}

    def chart(self, model: object) -> Chart:
        """Return the chart of a target or nuisance regression."""
        if id(model) not in self._charts:
            self._charts[id(model)] = model, chart_of(model)
        return self._charts[id(model)][1]

    def submodel(self, model: object, law: object, rows: object) -> AbstractRowsSubmodel:
        """Return the submodel of the rows at the law."""
        chart = self._at(model, law)
        if id(rows) not in self._submodels:
            self._submodels[id(rows)] = rows, chart.submodel(law, rows)
        return self._submodels[id(rows)][1]

    def tangent(self, model: object, law: object, rows: object, name: str) -> tuple[Tangent, ...]:
        """Return the derivatives of each block's columns in coordinate ``name``."""
        self.submodel(model, law, rows)
        if (id(rows), name) not in self._tangents:
            moved = self.chart(model).submodel_tangent(law, rows, name)
            self._tangents[id(rows), name] = (moved,) if isinstance(moved, Tangent) else moved
        return self._tangents[id(rows), name]

    def _at(self, model: object, law: object) -> Chart:
        """Return the model's chart, and drop the submodels and tangents of another law."""
        chart = self.chart(model)
        if self._chart is not chart or self._law is not law:
            self._chart, self._law, self._submodels, self._tangents = chart, law, {}, {}
        return chart


def single(answered: Sequence[AnsweredQuery]) -> list[AnsweredQuery]:
    """Return the answers with one query each: rounds of several are split, declined queries left out."""
    return [
        AnsweredQuery(query=query, answer=answer)
        for asked in answered
        for query, answer in zip(asked.query.members, asked.query.split(asked.answer), strict=True)
        if not (query.is_declinable and answer is None)
    ]


def explain(asked: AnsweredQuery, local: Local, rows: object, submodels: Submodels) -> Explained | None:
    """Return the answer as a mean over ``rows``, or None if it is no such mean."""
    means = asked.query.row_means(asked.answer, local)
    if means is None:
        return None
    pieces = [_evaluated(term, local, rows, submodels) for term in means.terms]

    def mixed(values: list[Array]) -> Array:
        together = np.concatenate(values)
        return together if means.mix is None else np.asarray(means.mix @ together)

    def terms(moved: object) -> Array:
        return mixed([piece.terms(moved) for piece in pieces])

    residual = np.zeros(len(means.box))
    if means.is_rounded and means.sent is not None:
        residual = np.clip(terms(rows).mean(axis=1) - means.sent, -means.box, means.box)
    return Explained(
        label=means.label,
        terms=terms,
        tangents=lambda moved, name: mixed([piece.tangents(moved, name) for piece in pieces]),
        box=means.box,
        residual=residual,
    )


@dataclass(frozen=True, kw_only=True)
class _Evaluated:
    """Terms of a row and their derivatives, before they are mixed."""

    terms: Terms
    tangents: Tangents


def _evaluated(term: RowTerms, local: Local, base: object, submodels: Submodels) -> _Evaluated:
    match term:
        case Derivatives():
            return _derivatives(term, local, submodels)
        case CurvatureBound():
            return _numeric(lambda rows: _curvature_bound(submodels.submodel(term.model, term.law, rows)))
        case ClosingTerms():
            chart = submodels.chart(term.problem)
            if chart.is_numeric:
                return _numeric(lambda rows: chart.closing_terms(term.law, rows, base))
            return _Evaluated(
                terms=lambda rows: chart.closing_terms(term.law, rows, base),
                tangents=lambda rows, name: chart.closing_terms_tangent(term.law, rows, name),
            )
        case ViewedTerms():
            # A view may use all values of a row, so its derivatives are central differences.
            seen, view = local.through(term.view), held_view(term.view, base)
            inner = _evaluated(term.terms, seen, view.of(base), submodels)
            return _numeric(lambda rows: inner.terms(view.of(rows)))
        case ColumnTerms():
            columns = term.columns
            return _numeric(lambda rows: np.concatenate(list(columns.over(rows, columns.disclosed)), axis=1))


def _derivatives(term: Derivatives, local: Local, submodels: Submodels) -> _Evaluated:
    counts: Array | None = None
    if term.batch is not None:  # rows outside the batch have no share in it
        counts = np.bincount(local.batch(term.batch), minlength=local.n_rows).astype(np.float64)

    def chosen(values: Array) -> Array:
        return values if counts is None else values * counts

    chart = submodels.chart(term.model)

    def terms(rows: object) -> Array:
        lift = chart.lift(term.eps, term.parts, rows)
        shares = row_terms(submodels.submodel(term.model, term.law, rows), lift.eps, term.parts)
        return chosen(lift.mixed(shares))

    if chart.is_numeric:
        return _numeric(terms)

    def tangents(rows: object, name: str) -> Array:
        submodel = submodels.submodel(term.model, term.law, rows)
        tangent = submodels.tangent(term.model, term.law, rows, name)
        lift = chart.lift(term.eps, term.parts, rows)
        return chosen(lift.mixed(row_tangents(submodel, lift.eps, term.parts, tangent)))

    return _Evaluated(terms=terms, tangents=tangents)


def _curvature_bound(submodel: AbstractRowsSubmodel) -> Array:
    whole, bounds = blocks_of(submodel), []
    for block in whole.blocks:
        weight = np.ones(block.n_rows) if block.w is None else block.w
        bend = block.family.curvature_ceiling or 0.0
        X = matrix(block.X)
        upper, lower = np.triu_indices(len(X))
        bounds.append(np.asarray(bend * weight * X[upper] * X[lower]))
    return whole.joined(Part.HESSIAN, bounds)


def _numeric(terms: Terms) -> _Evaluated:
    """Return terms of a table whose derivatives are central differences."""

    def tangents(rows: object, name: str) -> Array:
        if not isinstance(rows, Table):
            raise TypeError("columns are differentiated in tables only")
        column = rows.numeric[name]
        step = STEP * max(float(np.nanstd(column)), 1e-8)
        ahead = terms(rows.with_numeric(name, column + step))
        return np.asarray((ahead - terms(rows.with_numeric(name, column - step))) / (2 * step))

    return _Evaluated(terms=terms, tangents=tangents)
