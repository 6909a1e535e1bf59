"""A query's answer row by row: the link from a transcript to section 4.3.

Queries state their answers as means over the silo's rows (`protocol.query`). `explain` evaluates the
terms of each row and their derivatives in a coordinate of the records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import Array, matrix
from fedtmle.privacy import effects as _effects  # noqa: F401 - registers the charts of tables
from fedtmle.privacy.charts import (
    Tangent,
    closing_terms,
    closing_terms_tangent,
    row_tangents,
    row_terms,
    submodel_tangent,
)
from fedtmle.protocol.query import (
    AnsweredQuery,
    ClosingTerms,
    ColumnTerms,
    CurvatureBound,
    Derivatives,
    Local,
    RowTerms,
)
from fedtmle.targets.effects.problem import EffectProblem

STEP = 1e-4  # of a column's spread, for the few sums whose columns are known by their values alone


@final
@dataclass(frozen=True, kw_only=True)
class Explained:
    """One answer: G = N_m^-1 sum of ``terms`` over rows, |G - sent| <= box, and residual = G - sent."""

    label: str
    terms: Callable[[Any], Array]  # rows -> (p, N)
    tangents: Callable[[Any, str], Array]  # rows, coordinate -> (p, N)
    box: Array  # (p,)
    residual: Array  # (p,)


@final
class Submodels:
    """Submodels and their tangents at the latest laws, built once per law, rows and coordinate."""

    def __init__(self) -> None:
        self._law: tuple[Any, Any] | None = None
        self._kept: dict[int, tuple[Any, GeneralisedLinear]] = {}
        self._tangents: dict[tuple[int, str], Tangent] = {}
        self._prepared: dict[int, tuple[Any, Any, EffectProblem]] = {}

    def at(self, model: Any, law: Any, rows: Any, name: str = "") -> tuple[GeneralisedLinear, Tangent | None]:
        if self._law is None or self._law[0] is not model or self._law[1] is not law:
            self._law, self._kept, self._tangents = (model, law), {}, {}
        own, key = self._own(model, rows), id(rows)
        if key not in self._kept:
            self._kept[key] = (rows, own.submodel(law, rows))  # the rows too, so that their id stays theirs
        if name and (key, name) not in self._tangents:
            self._tangents[key, name] = submodel_tangent(own, law, rows, name)
        return self._kept[key][1], self._tangents.get((key, name))

    def _own(self, model: Any, rows: Any) -> Any:
        """An effect problem keeps the nuisances of one table; here each table has a copy of its own."""
        if not isinstance(model, EffectProblem):
            return model
        kept = self._prepared.get(id(rows))
        if kept is None or kept[1] is not model:
            kept = self._prepared[id(rows)] = (rows, model, replace(model, _prepared=[]))
        return kept[2]


def single(answered: Sequence[AnsweredQuery]) -> list[AnsweredQuery]:
    """Return the same answers, with rounds that held several queries taken apart."""
    return [
        AnsweredQuery(query=query, answer=answer)
        for asked in answered
        for query, answer in zip(asked.query.members, asked.query.split(asked.answer), strict=True)
    ]


def explain(asked: AnsweredQuery, local: Local, rows: Any, submodels: Submodels) -> Explained | None:
    """Return the answer as a mean over rows, or None if it is none."""
    means = asked.query.row_means(asked.answer, local)
    if means is None:
        return None
    parts = [_part(term, local, rows, submodels) for term in means.terms]

    def mixed(values: list[Array]) -> Array:
        together = np.concatenate(values)
        return together if means.mix is None else np.asarray(means.mix @ together)

    def terms(moved: Any) -> Array:
        return mixed([part.terms(moved) for part in parts])

    residual = np.zeros(len(means.box))
    if means.is_rounded and means.sent is not None:
        residual = np.clip(terms(rows).mean(axis=1) - means.sent, -means.box, means.box)
    return Explained(
        label=means.label,
        terms=terms,
        tangents=lambda moved, name: mixed([part.tangents(moved, name) for part in parts]),
        box=means.box,
        residual=residual,
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Terms of a row and their derivatives, before they are mixed."""

    terms: Callable[[Any], Array]
    tangents: Callable[[Any, str], Array]


def _part(term: RowTerms, local: Local, base: Any, submodels: Submodels) -> _Part:
    match term:
        case Derivatives():
            return _derivatives(term, local, submodels)
        case CurvatureBound():
            return _numeric(lambda rows: _curvature_bound(term, rows, submodels))
        case ClosingTerms():
            return _Part(
                terms=lambda rows: closing_terms(term.problem, term.law, rows, base),
                tangents=lambda rows, name: closing_terms_tangent(term.problem, term.law, rows, name),
            )
        case ColumnTerms():
            columns = term.columns
            return _numeric(lambda rows: np.concatenate(list(columns.over(rows, columns.evaluate)), axis=1))


def _derivatives(term: Derivatives, local: Local, submodels: Submodels) -> _Part:
    counts: Array | None = None
    if term.batch is not None:  # rows outside the batch have no share in it
        counts = np.bincount(local.batch(term.batch), minlength=local.n_rows).astype(np.float64)

    def chosen(values: Array) -> Array:
        return values if counts is None else values * counts

    def terms(rows: Any) -> Array:
        submodel, _ = submodels.at(term.model, term.law, rows)
        return chosen(row_terms(submodel, term.eps, term.parts))

    def tangents(rows: Any, name: str) -> Array:
        submodel, tangent = submodels.at(term.model, term.law, rows, name)
        if tangent is None:
            raise AssertionError("a coordinate was named")
        return chosen(row_tangents(submodel, term.eps, term.parts, tangent))

    return _Part(terms=terms, tangents=tangents)


def _curvature_bound(term: CurvatureBound, rows: Any, submodels: Submodels) -> Array:
    submodel, _ = submodels.at(term.model, term.law, rows)
    weight = np.ones(submodel.n_rows) if submodel.w is None else submodel.w
    bend = submodel.family.curvature_ceiling or 0.0
    X = matrix(submodel.X)
    upper, lower = np.triu_indices(len(X))
    return np.asarray(bend * weight * X[upper] * X[lower])


def _numeric(terms: Callable[[Any], Array]) -> _Part:
    """Return terms that are known by their values alone, with central differences as derivatives."""

    def tangents(rows: Any, name: str) -> Array:
        column = rows.numeric[name]
        step = STEP * max(float(np.nanstd(column)), 1e-8)
        ahead = terms(rows.with_numeric(name, column + step))
        return np.asarray((ahead - terms(rows.with_numeric(name, column - step))) / (2 * step))

    return _Part(terms=terms, tangents=tangents)
