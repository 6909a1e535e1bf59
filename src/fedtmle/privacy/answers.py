"""What a query's answer is made of, row by row: the link from a transcript to section 4.3.

Every answer here is, up to public terms and rounding, a mean over the silo's rows of a function of one
row. `explain` says which function, how rounding boxes it, and by how much the number that was sent differs
from the mean itself. Answers that are no such means (levels, exponents, whole models) give None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedtmle.model.scaled import matrix
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import Array, Part, unpack
from fedtmle.privacy import effects as _effects  # noqa: F401 - registers the charts of tables
from fedtmle.privacy.charts import closing_terms, closing_terms_tangent, submodel_tangent
from fedtmle.privacy.rowwise import Tangent, row_tangents, row_terms
from fedtmle.protocol.coded import CalibrationQuery, Curvature, RoundedGradientQuery, SiloCurvature
from fedtmle.protocol.fits import FitAnswer, FitQuery
from fedtmle.protocol.lattice import floating
from fedtmle.protocol.query import AbstractQuery, Local
from fedtmle.protocol.sums import AbstractSums, MomentsQuery, SumsQuery
from fedtmle.protocol.tables import TallyQuery
from fedtmle.targets.effects.problem import EffectProblem

STEP = 1e-4  # of a column's spread, for the few sums whose columns are known by their values alone


@final
@dataclass(frozen=True, kw_only=True)
class Answered:
    """A query and what this silo answered, in order."""

    query: AbstractQuery[Any, Any]
    answer: Any


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


def single(answered: Sequence[Answered]) -> list[Answered]:
    """The same answers, rounds that held several queries taken apart."""
    return [
        Answered(query=query, answer=answer)
        for asked in answered
        for query, answer in asked.query.members(asked.answer)
    ]


def explain(asked: Answered, local: Local, rows: Any, submodels: Submodels) -> Explained | None:
    """The answer as a mean over rows; None where it is none."""
    query = asked.query
    found: Explained | None = None
    if isinstance(query, SumsQuery):
        found = _sums(query, local, submodels)
    elif isinstance(query, RoundedGradientQuery):
        found = _rounded(query, asked.answer, rows, submodels)
    elif isinstance(query, FitQuery):
        found = _fit(query, asked.answer, local, submodels)
    elif isinstance(query, CalibrationQuery):
        found = _calibration(query, asked.answer, rows, submodels)
    elif isinstance(query, MomentsQuery):
        found = _moments(query, rows)
    elif isinstance(query, TallyQuery):
        found = _tally(query)
    return found


def _sums(query: SumsQuery, local: Local, submodels: Submodels) -> Explained:
    counts: Array | None = None
    if query.batch is not None:  # rows outside the batch have no share in it
        counts = np.bincount(local.batch(query.batch), minlength=local.n_rows).astype(np.float64)

    def chosen(terms: Array) -> Array:
        return terms if counts is None else terms * counts

    def terms(rows: Any) -> Array:
        submodel, _ = submodels.at(query.problem, query.law, rows)
        return chosen(row_terms(submodel, query.eps, query.parts))

    def tangents(rows: Any, name: str) -> Array:
        return chosen(_tangents(submodels, query.problem, query.law, rows, name, query.eps, query.parts))

    label = "+".join(part.name.lower() for part in query.parts if part.name) + (
        " of a batch" if counts is not None else ""
    )
    return Explained(label=label, terms=terms, tangents=tangents, **_exact(query))


def _rounded(
    query: RoundedGradientQuery, answer: tuple[int, ...], rows: Any, submodels: Submodels
) -> Explained:
    C, h = floating(query.lattice.C), float(query.lattice.h)

    def terms(rows: Any) -> Array:
        submodel, _ = submodels.at(query.problem, query.law, rows)
        return np.asarray(C @ row_terms(submodel, query.eps, Part.GRADIENT))

    def tangents(rows: Any, name: str) -> Array:
        moved = _tangents(submodels, query.problem, query.law, rows, name, query.eps, Part.GRADIENT)
        return np.asarray(C @ moved)

    mean = terms(rows).mean(axis=1) + C @ query.problem.normaliser(query.law).gradient(query.eps)
    residual = np.clip(mean - h * np.array(answer, dtype=np.float64), -h / 2, h / 2)
    return Explained(
        label="rounded gradient",
        terms=terms,
        tangents=tangents,
        box=np.full(len(C), h / 2),
        residual=residual,
    )


def _fit(query: FitQuery, answer: FitAnswer, local: Local, submodels: Submodels) -> Explained:
    """A minimiser says that the gradient there is zero, which is as much as a gradient query there."""
    points = [answer.eps, np.zeros(query.dim)] if answer.eps.any() else [np.zeros(query.dim)]

    def terms(rows: Any) -> Array:
        submodel, _ = submodels.at(query.problem, query.law, rows)
        return np.concatenate([row_terms(submodel, eps, Part.GRADIENT) for eps in points])

    def tangents(rows: Any, name: str) -> Array:
        moved = [
            _tangents(submodels, query.problem, query.law, rows, name, eps, Part.GRADIENT) for eps in points
        ]
        return np.concatenate(moved)

    fine = 2.0 ** -np.array(query.shifts, dtype=np.float64)
    coarse = np.zeros(query.dim)
    if (
        query.rule.lattice is not None
    ):  # the fit was rounded: its gradient is zero within beta lambda sqrt(d)/2
        beta = float(np.linalg.norm(local.submodel(query.problem, query.law).curvature_ceiling(), 2))
        coarse += beta * query.rule.lattice * np.sqrt(query.dim) / 2
    box = np.concatenate([fine + coarse, fine]) if len(points) == 2 else fine
    return Explained(label="local fit", terms=terms, tangents=tangents, box=box, residual=np.zeros(len(box)))


def _calibration(
    query: CalibrationQuery, answer: SiloCurvature, rows: Any, submodels: Submodels
) -> Explained:
    """A curvature, rounded; of a norm, the part along its eigenvector: how it moves to first order."""
    dim, size = query.dim, query.sent_dim
    upper, lower = np.triu_indices(dim)
    C = np.eye(dim) if query.C is None else floating(query.C)
    ceiling = query.curvature is Curvature.CEILING

    def packed(rows: Any) -> Array:
        submodel, _ = submodels.at(query.problem, query.law, rows)
        if not ceiling:
            return row_terms(submodel, np.zeros(dim), Part.HESSIAN)
        weight = np.ones(submodel.n_rows) if submodel.w is None else submodel.w
        bend = submodel.family.curvature_ceiling or 0.0
        X = matrix(submodel.X)
        return np.asarray(bend * weight * X[upper] * X[lower])

    if size == dim:
        wide = [C.T @ _symmetric(index, dim) @ C for index in range(len(upper))]
    else:
        vectors = np.linalg.eigh(C @ unpack(packed(rows).mean(axis=1), dim) @ C.T)[1]
        along = C.T @ vectors[:, -1]
        wide = [np.outer(along, along)]
    # An entry of C H C^T is a combination of H's upper triangle; off the diagonal both halves count.
    mix = np.array(
        [[m[j, k] * (1.0 if j == k else 2.0) for j, k in zip(upper, lower, strict=True)] for m in wide]
    )

    def tangents(rows: Any, name: str) -> Array:
        if ceiling:
            return mix @ _differences(packed, rows, name)
        zero = np.zeros(dim)
        return np.asarray(
            mix @ _tangents(submodels, query.problem, query.law, rows, name, zero, Part.HESSIAN)
        )

    box = np.full(len(mix), 2.0 ** (answer.exponent - 1))
    return Explained(
        label="curvature" if size == dim else "curvature's norm",
        terms=lambda rows: mix @ packed(rows),
        tangents=tangents,
        box=box,
        residual=np.zeros(len(mix)),
    )


def _symmetric(index: int, dim: int) -> Array:
    """The matrix whose inner product with H is entry ``index`` of its upper triangle."""
    found = np.zeros((dim, dim))
    j, k = (int(side[index]) for side in np.triu_indices(dim))
    found[j, k] += 0.5
    found[k, j] += 0.5
    return found


def _moments(query: MomentsQuery, base: Any) -> Explained:
    return Explained(
        label="closing sums",
        terms=lambda rows: closing_terms(query.problem, query.law, rows, base),
        tangents=lambda rows, name: closing_terms_tangent(query.problem, query.law, rows, name),
        **_exact(query),
    )


def _tally(query: TallyQuery) -> Explained:
    def terms(rows: Any) -> Array:
        return np.concatenate(list(query.over(rows, query.columns)), axis=1)

    return Explained(
        label="tally",
        terms=terms,
        tangents=lambda rows, name: _differences(terms, rows, name),
        **_exact(query),
    )


def _exact(query: AbstractSums) -> dict[str, Array]:
    """Exact sums: each row is rounded to a public grid, so a mean is known within half a unit of it."""
    box = 2.0 ** -np.array(query.shifts, dtype=np.float64)
    return {"box": box, "residual": np.zeros(len(box))}


def _tangents(
    submodels: Submodels, model: Any, law: Any, rows: Any, name: str, eps: Array, parts: Part
) -> Array:
    submodel, tangent = submodels.at(model, law, rows, name)
    if tangent is None:
        raise AssertionError("a coordinate was named")
    return row_tangents(submodel, eps, parts, tangent)


def _differences(terms: Callable[[Any], Array], rows: Any, name: str) -> Array:
    """Central differences, for sums whose columns are a function known by its values alone."""
    column = rows.numeric[name]
    step = STEP * max(float(np.nanstd(column)), 1e-8)
    ahead = terms(rows.with_numeric(name, column + step))
    return np.asarray((ahead - terms(rows.with_numeric(name, column - step))) / (2 * step))
