"""Charts of everything that a study asks: regressions, effects, times to an event, and targets of others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.glm import GLMModel, MultinomialModel
from fedtmle.initial.own import ProfiledModel
from fedtmle.initial.tangent import design_tangent, prediction_tangent
from fedtmle.model.submodel import AbstractRowsSubmodel, AbstractSubmodel, GeneralisedLinear
from fedtmle.model.submodels import Blocks, GroupedLinear, Multinomial
from fedtmle.model.table import AnyTable, Table
from fedtmle.privacy.charts import AbstractChart, Lift, Tangent, chart_of, held_view, row_tangents, row_terms
from fedtmle.programs.superlearner import OwnCoefficients
from fedtmle.protocol.query import View
from fedtmle.targets.effects.moments import ClosingLayout, EffectRows, MomentColumns
from fedtmle.targets.effects.prepare import Q_MARGIN, Preparation
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem, FluctuatedPart
from fedtmle.targets.regimes.problem import RegimeLaw, RegimeProblem
from fedtmle.targets.residuals import OnColumns, ResidualLaw, ResidualProblem
from fedtmle.targets.time.problem import TimeLaw, TimeProblem
from fedtmle_core import kernels
from fedtmle_core.types import Array, Codes, IntArray, Part, matrix, packed_size, unpack, upper_pairs

# Charts of regressions over person-periods and of time-to-event problems: a record is one person.
#
# A person's share in a sum is the sum over that person's long rows. Periods and events are discrete, so that
# the audit enumerates them; in a covariate it takes central differences of the shares.


class Numeric:
    """A chart without derivatives of its own."""

    is_numeric = True

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


# Charts of nuisance regressions and effect problems, in any numeric column of the study's tables.

LARGEST = 50_000_000  # numbers held at once for clusters that span silos


@final
@dataclass(frozen=True)
class RegressionChart(AbstractChart[None, Table]):
    """The chart of a nuisance regression; it has no closing sums."""

    model: GLMModel

    def submodel(self, law: None, rows: Table) -> GeneralisedLinear:  # noqa: ARG002 - there is no law
        return self.model.design(rows)

    def submodel_tangent(self, law: None, rows: Table, name: str) -> Tangent:  # noqa: ARG002 - as above
        # Response and weight are affine in every column, so a difference is the derivative.
        model = self.model
        y, w = model.response.of(rows)
        y_moved, w_moved = model.response.of(rows.with_numeric(name, rows.numeric[name] + 1.0))
        X = None
        if name in model.formula.numeric_names:
            X = design_tangent(model.formula, rows, model.levels, name)
            X = X * np.exp2(-np.array(model.scales, dtype=np.float64))[:, None]
        return Tangent(X=X, y=y_moved - y, w=w_moved - w)


@final
@dataclass(frozen=True, kw_only=True)
class RowsTangent:
    """Derivatives of an `EffectRows` in one column: y, q (arms, N), each term's H and each component's v."""

    y: Array
    q: Array
    H: tuple[tuple[Array, ...], ...]
    v: tuple[Array, ...]

    def taken(self, rows: EffectRows, component: int) -> Array:
        """Return the derivative of ``rows.taken(component)``."""
        h = np.zeros(rows.n_rows)
        for term, H in zip(rows.terms[component], self.H[component], strict=True):
            h += np.where(rows.arm == term.arm, H, 0.0)
        return h * rows.observed


@final
class EffectChart(AbstractChart[EffectLaw, Table]):
    """The chart of an effect problem that a study prepared.

    Nuisances are evaluated once for each table that the audit compares, and their derivatives once for each
    column.
    """

    def __init__(self, problem: EffectProblem) -> None:
        if not isinstance(problem.prepare, Preparation):
            raise InputError("the disclosure audit needs an effect problem that a study prepared")
        self._problem, self._prepare = problem, problem.prepare
        self._rows: dict[int, tuple[Table, EffectRows]] = {}  # holding a table keeps its id
        self._tangents: dict[tuple[int, str], RowsTangent] = {}

    def rows(self, table: Table) -> EffectRows:
        """Return the table's prepared rows."""
        if id(table) not in self._rows:
            self._rows[id(table)] = table, self._prepare(table)
        return self._rows[id(table)][1]

    def rows_tangent(self, table: Table, name: str) -> RowsTangent:
        """Return how outcome, initial regression and inverse probabilities move with a numeric column."""
        rows = self.rows(table)
        if (id(table), name) not in self._tangents:
            self._tangents[id(table), name] = self._derive(rows, table, name)
        return self._tangents[id(table), name]

    def submodel(self, law: EffectLaw, rows: Table) -> GeneralisedLinear | Blocks:
        return self._problem.design(law, self.rows(rows))

    def submodel_tangent(self, law: EffectLaw, rows: Table, name: str) -> tuple[Tangent, ...]:
        problem, prepared, moved = self._problem, self.rows(rows), self.rows_tangent(rows, name)
        taken = np.stack([moved.taken(prepared, r) for r in range(len(prepared.terms))])
        X = np.zeros((problem.dim, prepared.n_rows))
        if not problem.as_weight:  # else the covariate is a sign
            for k, row in enumerate(problem.combination):
                for r, share in enumerate(row):
                    X[k] += -problem.width * share * taken[r]
        return tuple(
            Tangent(
                X=X[list(part.coordinates)],
                offset=_factual(prepared.arm, self._linked_tangent(law, prepared, moved, part)),
                y=moved.y,
                w=prepared.weight * taken.sum(axis=0) if problem.as_weight else None,
            )
            for part in problem.parts
        )

    def closing_terms(self, law: EffectLaw, rows: Table, base: Table) -> Array:
        prepared, cluster = self.rows(rows), self.rows(base).cluster
        columns = self._problem.moment_columns(law, prepared)
        if cluster is not None:
            before = self._problem.moment_columns(law, self.rows(base))
            columns = MomentColumns(columns.stacked - before.stacked + _gathered(cluster, before).stacked)
        terms = ClosingLayout(len(columns.u)).terms()
        sums = [np.prod(columns.flat[list(term)], axis=0) for term in terms]
        return self._closed(prepared, np.stack([*sums, np.ones(prepared.n_rows)]), columns.u, columns.t)

    def closing_terms_tangent(self, law: EffectLaw, rows: Table, name: str) -> Array:
        problem, prepared, moved = self._problem, self.rows(rows), self.rows_tangent(rows, name)
        moments = problem.moment_columns(law, prepared)
        if prepared.cluster is not None:
            moments = _gathered(prepared.cluster, moments)
        u, t = moments.u, moments.t
        du, dt, dm = np.zeros_like(u), np.zeros_like(u), np.zeros_like(u)
        for part in problem.parts:
            q = np.stack(problem.regression(law, prepared, part))
            dq = self._linked_tangent(law, prepared, moved, part)
            dq = dq if problem.linear else q * (1.0 - q) * dq
            residual = problem.width * (prepared.y - _factual(prepared.arm, q))
            d_residual = problem.width * (moved.y - _factual(prepared.arm, dq))
            for r in part.components:
                dt[r] = prepared.weight * moved.v[r]
                for term in prepared.terms[r]:
                    mean = prepared.v[r] * dq[term.arm] + moved.v[r] * q[term.arm]
                    dm[r] += prepared.weight * problem.width * term.d * mean
                fluctuated = moved.taken(prepared, r) * residual + prepared.taken(r) * d_residual
                du[r] = prepared.weight * fluctuated + dm[r]
        upper, lower = np.triu_indices(len(u))
        d = len(u)
        columns = np.concatenate(
            [
                du,
                dt,
                dm,
                du[upper] * u[lower] + u[upper] * du[lower],
                (du[:, None] * t[None, :] + u[:, None] * dt[None, :]).reshape(d * d, -1),
                dt[upper] * t[lower] + t[upper] * dt[lower],
                np.zeros((1, prepared.n_rows)),
            ]
        )
        return self._closed(prepared, columns, du, dt)

    def _derive(self, rows: EffectRows, table: Table, name: str) -> RowsTangent:
        prepare, columns = self._prepare, self._prepare.columns
        if name == columns.outcome:
            still = tuple(tuple(np.zeros(rows.n_rows) for _ in terms) for terms in rows.terms)
            return RowsTangent(
                y=rows.observed / self._problem.width,
                q=np.zeros_like(rows.q),
                H=still,
                v=tuple(np.zeros(rows.n_rows) for _ in rows.v),
            )
        if name == columns.weights:
            raise InputError(f"attribute: '{name}' is the weight of the observations; audit another column")
        models = prepare.outcome if len(prepare.outcome) > 1 else prepare.outcome * len(columns.arms)
        dq = np.stack([prediction_tangent(m, columns.in_arm(table, a), name) for a, m in enumerate(models)])
        dq = np.where((rows.q > Q_MARGIN) & (rows.q < 1 - Q_MARGIN), dq, 0.0)
        H, v = _weights_tangent(prepare, rows, table, name)
        return RowsTangent(y=np.zeros(rows.n_rows), q=dq, H=H, v=v)

    def _linked_tangent(
        self, law: EffectLaw, rows: EffectRows, moved: RowsTangent, part: FluctuatedPart
    ) -> Array:
        """Return d link Q_a of one block at the law, (arms, N)."""
        problem = self._problem
        linked = moved.q.copy() if problem.linear else moved.q / (rows.q * (1.0 - rows.q))
        if not problem.as_weight:
            for r, shift in problem.shifts(law, part).items():
                for term, slope in zip(rows.terms[r], moved.H[r], strict=True):
                    linked[term.arm] += shift * slope
        return linked

    def _closed(self, rows: EffectRows, columns: Array, u: Array, t: Array) -> Array:
        """Leave clusters that span silos out of the products, and append the sums that are sent for them."""
        spanning = self._problem.spanning
        if not spanning or rows.cluster is None or rows.spanned is None:
            return columns
        layout, place = ClosingLayout(len(u)), rows.spanned[rows.cluster]
        columns = columns.copy()
        columns[layout.linear :] *= place < 0
        d, width = layout.d, layout.part_size
        if spanning * width * rows.n_rows > LARGEST:
            raise InputError("the audit cannot hold the sums of so many clusters that span silos")
        parts = np.zeros((spanning, width, rows.n_rows))
        here = np.flatnonzero(place >= 0)
        parts[place[here], :d, here] = u[:, here].T
        parts[place[here], d : 2 * d, here] = t[:, here].T
        return np.concatenate([columns, parts.reshape(spanning * width, rows.n_rows)])


@final
@dataclass(frozen=True)
class ProfiledChart(AbstractChart[None, Table]):
    """The chart of a regression with a block of the silo's own coefficients.

    The block moves with every row: dc = -H_cc^-1 d(w s o)_i for a change of row i's slope s, so that the
    row's share in a gradient is w s z, z = x - C o with C = H_bc H_cc^-1, and in a curvature w rho'' z z^T,
    both to first order. The block and C are those of the first rows that are asked for, which are the silo's.
    """

    model: ProfiledModel
    _known: dict[bytes, tuple[Array, Array]] = field(default_factory=dict, compare=False)

    @property
    def _whole(self) -> AbstractChart[None, Table]:
        return chart_of(self.model.whole)

    @property
    def is_numeric(self) -> bool:
        return self._whole.is_numeric

    def submodel(self, law: None, rows: Table) -> AbstractRowsSubmodel:
        return self._whole.submodel(law, rows)

    def submodel_tangent(self, law: None, rows: Table, name: str) -> Tangent | tuple[Tangent, ...]:
        return self._whole.submodel_tangent(law, rows, name)

    def lift(self, eps: Array, parts: Part, rows: Table) -> Lift:
        key = eps.tobytes()
        if key not in self._known:
            (silo,) = self.model.submodel(None, rows).silos
            point, own, common = silo.point(eps), list(silo.own), silo.common
            sums = silo.whole.sums(point, Part.HESSIAN)
            hessian = unpack(sums.values(rows.n_rows), len(point))
            centring = np.zeros((len(common), len(point)))
            centring[:, common] = np.eye(len(common))
            block = np.linalg.pinv(hessian[np.ix_(own, own)], rcond=1e-12, hermitian=True)
            centring[:, own] = -hessian[np.ix_(common, own)] @ block
            self._known[key] = point, centring
        point, centring = self._known[key]
        blocks = []
        if Part.GRADIENT in parts:
            blocks.append(centring)
        if Part.HESSIAN in parts:
            units = (unpack(unit, len(point)) for unit in np.eye(packed_size(len(point))))
            upper = upper_pairs(len(centring))
            moved = [[(centring @ unit @ centring.T)[j, k] for j, k in upper] for unit in units]
            blocks.append(np.array(moved).T.reshape(len(upper), -1))
        mix = np.zeros(np.sum([block.shape for block in blocks], axis=0))
        at, across = 0, 0
        for block in blocks:
            mix[at : at + len(block), across : across + block.shape[1]] = block
            at, across = at + len(block), across + block.shape[1]
        return Lift(point, mix)


chart_of.register(ProfiledModel, ProfiledChart)


@held_view.register
def _(view: OwnCoefficients, rows: AnyTable) -> View:
    """Hold the silo's own coefficients, as if whoever attacks knew them."""
    return view.held(rows)


@chart_of.register
def _(model: GLMModel) -> AbstractChart[None, Table]:
    return PersonPeriodChart(model) if model.response.periods else RegressionChart(model)


chart_of.register(EffectProblem, EffectChart)


def _weights_tangent(
    prepare: Preparation, rows: EffectRows, table: Table, name: str
) -> tuple[tuple[tuple[Array, ...], ...], tuple[Array, ...]]:
    """Return dH of every component and arm, a ratio E[v|W]/(g pi), constant where it is truncated, and dv."""
    g, pi = prepare.propensities(table)
    dg, d_pi = _propensity_tangents(prepare, table, name)
    tangents = []
    for r, (component, terms) in enumerate(zip(prepare.components, rows.terms, strict=True)):
        population, v = component.population, rows.v[r] * prepare.shares[r]
        slopes = []
        for term in terms:
            numerator, denominator = population.ratio(v, term.arm, g, pi, prepare.g_floor)
            d_numerator, d_denominator = population.ratio_tangent(term.arm, g, pi, prepare.g_floor, dg, d_pi)
            free = denominator > prepare.g_floor
            bounded = prepare.bounded(denominator)
            slope = d_numerator / bounded - np.where(free, numerator * d_denominator / bounded**2, 0.0)
            slopes.append(term.d * slope / prepare.shares[r])
        tangents.append(tuple(slopes))
    indicators = tuple(
        component.population.indicator_tangent(rows.arm, g, dg) / share
        for component, share in zip(prepare.components, prepare.shares, strict=True)
    )
    return tuple(tangents), indicators


def _propensity_tangents(prepare: Preparation, table: Table, name: str) -> tuple[Array, Array]:
    """Return dg_a and dpi_a, each of shape (arms, N)."""
    arms = len(prepare.columns.arms)
    dg = np.zeros((arms, table.n_rows))
    slopes = [prediction_tangent(model, table, name) for model in prepare.treatment]
    if slopes and slopes[0].ndim == 2:
        dg = slopes[0]
    elif len(slopes) < arms:
        for a, slope in enumerate(slopes, start=1):
            dg[a] = slope
            dg[0] -= slope
    else:  # g_a = p_a / sum_b p_b
        total = sum(model.predict(table) for model in prepare.treatment)
        g = prepare.scores(table)
        dg = (np.stack(slopes) - g * np.sum(slopes, axis=0)) / total
    if not prepare.missingness:
        return dg, np.zeros_like(dg)
    models = prepare.missingness * arms if len(prepare.missingness) == 1 else prepare.missingness
    d_pi = [prediction_tangent(m, prepare.columns.in_arm(table, a), name) for a, m in enumerate(models)]
    return dg, np.stack(d_pi)


def _factual(arm: Codes, per_arm: Array) -> Array:
    """Return the value of the arm taken, from a value for each arm, shape (arms, N)."""
    return np.asarray(np.take_along_axis(per_arm, arm[None, :], axis=0)[0])


def _gathered(cluster: IntArray, columns: MomentColumns) -> MomentColumns:
    """Return each row's cluster total."""
    totals: Array = np.stack([np.bincount(cluster, weights=column)[cluster] for column in columns.flat])
    return MomentColumns(totals.reshape(columns.stacked.shape))


# The chart of a multinomial regression: each record's share in its sums, and how it moves.


@final
@dataclass(frozen=True)
class MultinomialChart(AbstractChart[None, Table]):
    """The chart of a multinomial regression; it has no closing sums."""

    model: MultinomialModel

    def submodel(self, law: None, rows: Table) -> Multinomial:  # noqa: ARG002 - there is no law
        return self.model.design(rows)

    def submodel_tangent(self, law: None, rows: Table, name: str) -> Tangent:  # noqa: ARG002 - as above
        # The weight is affine in every column, so a difference is the derivative; the arm does not move.
        model = self.model
        _, w = model.response.of(rows)
        _, w_moved = model.response.of(rows.with_numeric(name, rows.numeric[name] + 1.0))
        X = None
        if name in model.formula.numeric_names:
            X = design_tangent(model.formula, rows, model.levels, name)
            X = X * np.exp2(-np.array(model.scales, dtype=np.float64))[:, None]
        return Tangent(X=X, w=w_moved - w)


chart_of.register(MultinomialModel, MultinomialChart)


@row_terms.register
def _(submodel: Multinomial, eps: Array, parts: Part) -> Array:
    X, p, taken, w = _columns(submodel, eps)
    terms = []
    if Part.LOSS in parts:
        eta = eps.reshape(submodel.classes - 1, -1) @ X
        mass = kernels.log(1.0 + kernels.exp(eta).sum(axis=0)) - kernels.log(float(submodel.classes))
        terms.append((w * (mass - (taken * eta).sum(axis=0)))[None, :])
    if Part.GRADIENT in parts:
        terms.append(np.concatenate([w * slope * X for slope in p - taken]))
    if Part.HESSIAN in parts:
        terms.append(_hessian(w * _bends(p), X))
    return np.concatenate(terms)


@row_tangents.register
def _(submodel: Multinomial, eps: Array, parts: Part, tangents: tuple[Tangent, ...]) -> Array:
    (tangent,) = tangents
    X, p, taken, w = _columns(submodel, eps)
    dX = np.zeros_like(X) if tangent.X is None else tangent.X
    dw = np.zeros(submodel.n_rows) if tangent.w is None else tangent.w
    d_eta = eps.reshape(submodel.classes - 1, -1) @ dX
    dp = p * (d_eta - (p * d_eta).sum(axis=0))
    moved = []
    if Part.LOSS in parts:
        change = row_terms(submodel, eps, Part.LOSS)[0] / np.where(w, w, 1.0)
        moved.append((dw * change + w * ((p - taken) * d_eta).sum(axis=0))[None, :])
    if Part.GRADIENT in parts:
        slopes = zip(p - taken, dp, strict=True)
        moved.append(np.concatenate([(dw * s + w * ds) * X + w * s * dX for s, ds in slopes]))
    if Part.HESSIAN in parts:
        bends = _bends(p)
        cross = dp[:, None] * p[None, :] + p[:, None] * dp[None, :]
        d_bends = np.eye(len(p))[:, :, None] * dp[:, None] - cross
        moved.append(_hessian(dw * bends + w * d_bends, X) + _hessian(w * bends, X, dX))
    return np.concatenate(moved)


def _columns(submodel: Multinomial, eps: Array) -> tuple[Array, Array, Array, Array]:
    """Return X (p, N), the probabilities and indicators of classes 1..J-1, (J - 1, N), and w (N,)."""
    X = matrix(submodel.X)
    eta = eps.reshape(submodel.classes - 1, -1) @ X
    p = kernels.softmax(np.concatenate([np.zeros((1, submodel.n_rows)), eta]))[1:]
    taken = (submodel.y == np.arange(1, submodel.classes)[:, None]).astype(np.float64)
    return X, p, taken, np.broadcast_to(submodel.w, (submodel.n_rows,))


def _bends(p: Array) -> Array:
    """Return p_j 1{j = k} - p_j p_k, shape (J - 1, J - 1, N)."""
    return np.asarray(np.eye(len(p))[:, :, None] * p[:, None] - p[:, None] * p[None, :])


def _hessian(bends: Array, X: Array, dX: Array | None = None) -> Array:
    """Return bends_jk x_a x_b, or with ``dX`` bends_jk d(x_a x_b), upper triangle over (j, a), (k, b)."""
    p = len(X)
    terms = []
    for first, second in upper_pairs(len(bends) * p):
        (j, a), (k, b) = divmod(first, p), divmod(second, p)
        product = X[a] * X[b] if dX is None else dX[a] * X[b] + X[a] * dX[b]
        terms.append(bends[j, k] * product)
    return np.stack(terms)


# Charts of the problems that targets of other distributions are made of; a record is a row of the table.


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
