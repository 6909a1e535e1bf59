"""Charts of tables: nuisance regressions and effect problems, in any numeric column of the study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.glm import GLMModel
from fedtmle.initial.tangent import design_tangent, prediction_tangent
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Codes, IntArray
from fedtmle.privacy.charts import Tangent, closing_terms, closing_terms_tangent, submodel_tangent
from fedtmle.targets.effects.components import InArm
from fedtmle.targets.effects.moments import closing_terms as summed_terms
from fedtmle.targets.effects.moments import moment_columns
from fedtmle.targets.effects.prepare import Q_MARGIN, Preparation
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.rows import EffectRows

LARGEST = 50_000_000  # numbers held at once for clusters that span silos


@submodel_tangent.register
def _(problem: GLMModel, law: None, rows: Table, name: str) -> Tangent:  # noqa: ARG001 - there is no law
    # Response and weight are affine in every column, so a difference is the derivative.
    y, w = problem.response.of(rows)
    moved = rows.with_numeric(name, rows.numeric[name] + 1.0)
    y_moved, w_moved = problem.response.of(moved)
    X = None
    if name in problem.formula.numeric_names:
        X = design_tangent(problem.formula, rows, problem.levels, name)
        X = X * np.exp2(-np.array(problem.scales, dtype=np.float64))[:, None]
    return Tangent(X=X, y=y_moved - y, w=w_moved - w)


@final
@dataclass(frozen=True, kw_only=True)
class Moved:
    """Derivatives of an `EffectRows` in one column: y, q (arms, N) and each term's H."""

    y: Array
    q: Array
    H: tuple[tuple[Array, ...], ...]


def rows_tangent(problem: EffectProblem, table: Table, name: str) -> Moved:
    """How outcome, initial regression and inverse probabilities move with a numeric column."""
    prepare, own = problem.prepare, problem.rows(table)
    if not isinstance(prepare, Preparation):
        raise InputError("the disclosure audit knows effect problems that a study prepared")
    columns = prepare.columns
    if name == columns.outcome:
        still = tuple(tuple(np.zeros(own.n_rows) for _ in terms) for terms in own.terms)
        return Moved(y=own.observed / problem.width, q=np.zeros_like(own.q), H=still)
    if name == columns.weights:
        raise InputError(f"attribute: '{name}' is the weight of the observations; audit another column")
    models = prepare.outcome if len(prepare.outcome) > 1 else prepare.outcome * len(columns.arms)
    dq = np.stack([prediction_tangent(m, columns.in_arm(table, a), name) for a, m in enumerate(models)])
    dq = np.where((own.q > Q_MARGIN) & (own.q < 1 - Q_MARGIN), dq, 0.0)
    return Moved(y=np.zeros(own.n_rows), q=dq, H=_weights_tangent(prepare, own, table, name))


def _weights_tangent(
    prepare: Preparation, own: EffectRows, table: Table, name: str
) -> tuple[tuple[Array, ...], ...]:
    """dH of every component and arm: a ratio E[v|W]/(g pi), constant where the bound holds it."""
    g, pi = prepare.propensities(table)
    dg, d_pi = _propensity_tangents(prepare, table, name)
    found = []
    for r, (component, terms) in enumerate(zip(prepare.components, own.terms, strict=True)):
        population = component.population
        slopes = []
        for term in terms:
            a = term.arm
            numerator, denominator = population.ratio(own.v[r] * prepare.shares[r], a, g, pi)
            d_numerator, d_denominator = np.zeros(own.n_rows), dg[a] * pi[a] + g[a] * d_pi[a]
            if isinstance(population, InArm):
                if a == population.code:
                    d_denominator = d_pi[a]
                else:
                    d_numerator = dg[population.code]
            free = denominator > prepare.g_floor
            bounded = prepare.bounded(denominator)
            slope = d_numerator / bounded - np.where(free, numerator * d_denominator / bounded**2, 0.0)
            slopes.append(term.d * slope / prepare.shares[r])
        found.append(tuple(slopes))
    return tuple(found)


def _propensity_tangents(prepare: Preparation, table: Table, name: str) -> tuple[Array, Array]:
    """dg_a and dpi_a, each of shape (arms, N)."""
    arms = len(prepare.columns.arms)
    left, d_left = np.ones(table.n_rows), np.zeros(table.n_rows)
    dg = np.zeros((arms, table.n_rows))
    for a, model in enumerate(prepare.treatment, start=1):
        share, d_share = model.predict(table), prediction_tangent(model, table, name)
        dg[a] = d_left * share + left * d_share
        left, d_left = left * (1.0 - share), d_left * (1.0 - share) - left * d_share
    if prepare.treatment:
        dg[0] = d_left
    if not prepare.missingness:
        return dg, np.zeros_like(dg)
    models = prepare.missingness * arms if len(prepare.missingness) == 1 else prepare.missingness
    d_pi = [prediction_tangent(m, prepare.columns.in_arm(table, a), name) for a, m in enumerate(models)]
    return dg, np.stack(d_pi)


def _taken(own: EffectRows, weights: tuple[tuple[Array, ...], ...], r: int) -> Array:
    """`EffectRows.taken` for other weights."""
    h = np.zeros(own.n_rows)
    for term, H in zip(own.terms[r], weights[r], strict=True):
        h += np.where(own.arm == term.arm, H, 0.0)
    return h * own.observed


@submodel_tangent.register
def _(problem: EffectProblem, law: EffectLaw, rows: Table, name: str) -> Tangent:
    own, moved = problem.rows(rows), rows_tangent(problem, rows, name)
    taken = np.stack([_taken(own, moved.H, r) for r in range(len(own.terms))])
    X = np.zeros((problem.dim, own.n_rows))
    if not problem.as_weight:  # else the covariate is a sign
        for k, row in enumerate(problem.combination):
            for r, share in enumerate(row):
                X[k] += -problem.width * share * taken[r]
    return Tangent(
        X=X,
        offset=_factual(own.arm, _linked_tangent(problem, law, own, moved)),
        y=moved.y,
        w=own.weight * taken.sum(axis=0) if problem.as_weight else None,
    )


def _linked_tangent(problem: EffectProblem, law: EffectLaw, own: EffectRows, moved: Moved) -> Array:
    """d link Q_a at the law, (arms, N)."""
    linked = moved.q.copy() if problem.linear else moved.q / (own.q * (1.0 - own.q))
    total = np.array(law.history).sum(axis=0) if law.history else np.zeros(problem.dim)
    for r, terms in enumerate(own.terms):
        shift = -problem.width * float(sum(problem.combination[k][r] * total[k] for k in range(problem.dim)))
        for term, slope in zip(terms, moved.H[r], strict=True):
            if not problem.as_weight:
                linked[term.arm] += shift * slope
    return linked


def _factual(arm: Codes, per_arm: Array) -> Array:
    return np.asarray(np.take_along_axis(per_arm, arm[None, :], axis=0)[0])


def _regression(problem: EffectProblem, law: EffectLaw, own: EffectRows) -> Array:
    """Q_a at the law on the unit scale."""
    return problem._regression(law, own)


@closing_terms.register
def _(problem: EffectProblem, law: EffectLaw, rows: Table, base: Table) -> Array:
    u, t, m = _closing(problem, law, rows)
    own = problem.rows(rows)
    cluster = problem.rows(base).cluster
    if cluster is not None:
        old = _closing(problem, law, base)
        u, t, m = (
            new - before + _gathered(cluster, before) for new, before in zip((u, t, m), old, strict=True)
        )
    flat = np.concatenate([u, t, m])
    columns = np.stack(
        [*(np.prod(flat[list(term)], axis=0) for term in summed_terms(len(u))), np.ones(own.n_rows)]
    )
    return _closed(problem, own, columns, u, t)


@closing_terms_tangent.register
def _(problem: EffectProblem, law: EffectLaw, rows: Table, name: str) -> Array:
    own, moved = problem.rows(rows), rows_tangent(problem, rows, name)
    q = _regression(problem, law, own)
    dq = _linked_tangent(problem, law, own, moved)
    dq = dq if problem.linear else q * (1.0 - q) * dq
    u, t, m = _closing(problem, law, rows)
    if own.cluster is not None:
        u, t, m = (_gathered(own.cluster, columns) for columns in (u, t, m))
    residual = problem.width * (own.y - _factual(own.arm, q))
    d_residual = problem.width * (moved.y - _factual(own.arm, dq))
    du, dm = np.zeros_like(u), np.zeros_like(m)
    for r, terms in enumerate(own.terms):
        for term in terms:
            dm[r] += own.weight * own.v[r] * problem.width * term.d * dq[term.arm]
        du[r] = own.weight * (_taken(own, moved.H, r) * residual + own.taken(r) * d_residual) + dm[r]
    upper, lower = np.triu_indices(len(u))
    d = len(u)
    columns = np.concatenate(
        [
            du,
            np.zeros_like(t),
            dm,
            du[upper] * u[lower] + u[upper] * du[lower],
            (du[:, None] * t[None, :]).reshape(d * d, -1),
            np.zeros((len(upper) + 1, own.n_rows)),
        ]
    )
    return _closed(problem, own, columns, du, np.zeros_like(t))


def _closed(problem: EffectProblem, own: EffectRows, columns: Array, u: Array, t: Array) -> Array:
    """Clusters that span silos stay out of the products; their parts are sent as sums of their own."""
    if not problem.spanning or own.cluster is None or own.spanned is None:
        return columns
    d, place = len(u), own.spanned[own.cluster]
    columns = columns.copy()
    columns[3 * d :] *= place < 0
    width = 2 * d + 1
    if problem.spanning * width * own.n_rows > LARGEST:
        raise InputError("the audit cannot hold the sums of so many clusters that span silos")
    parts = np.zeros((problem.spanning, width, own.n_rows))
    here = np.flatnonzero(place >= 0)
    parts[place[here], :d, here] = u[:, here].T
    parts[place[here], d : 2 * d, here] = t[:, here].T
    return np.concatenate([columns, parts.reshape(problem.spanning * width, own.n_rows)])


def _closing(problem: EffectProblem, law: EffectLaw, table: Table) -> Array:
    """u, t and m, shape (3, components, N)."""
    own = problem.rows(table)
    return moment_columns(own, _regression(problem, law, own), problem.width)


def _gathered(cluster: IntArray, columns: Array) -> Array:
    """Each row's cluster total."""
    return np.stack([np.bincount(cluster, weights=column)[cluster] for column in columns])
