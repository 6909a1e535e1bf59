"""Multiple imputation by chained regressions, fitted over all silos, and Rubin's rules for the estimates.

In each of m data sets, sweep after sweep, every variable with missing values is regressed on the outcome, the
treatment and all other covariates, on the records that have it, over all silos. Coefficients are drawn from
their normal posterior (and the residual variance of a number from its scaled inverse chi^2), and then a value
for each missing one:

    binary     1 with the probability of a logistic regression
    number     normal around a linear regression, then moved to the nearest end of the declared range
    count      Poisson around a log-linear regression, then moved likewise
    category   a level with the probabilities of a multinomial regression

The first sweep uses only variables that are complete or imputed before, so no start value matters. How a
model reads the outcome is in `programs.missing`.

With treatment over time every column of a period is a variable of its own: a model uses the treatments and
the covariates of all periods, before and after. The value of a period is regressed among those at risk in it.
In the columns of periods after a person's exit a constant takes the place of the value that does not exist.
The density of a history is a product over the periods at risk, so that on the scale of the regressions the
periods after exit add a constant, which goes with the period of exit.

All parties draw coefficients by the same public rule. A record's draws depend on the study's seed, the data
set, the sweep, the variable and the record's number in the pooled order: silos in the order of the roster,
records as each silo has them. So the result is the same for any partition that keeps this order, as for the
pooled rows; rows in another order get other draws, of the same law.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, final

import numpy as np
from scipy.special import ndtri, pdtr, pdtrik

from fedtmle.algorithms.base import Run
from fedtmle.errors import FitError, NumericalError
from fedtmle.initial.design import Ranges, column_names
from fedtmle.initial.glm import GLM, AbstractRegressionModel, AbstractResponse, FittedGLM, FittedMultinomial
from fedtmle.initial.superlearner import formulas
from fedtmle.initial.syntax import Categorical, Formula, Name, Term, TermVariable
from fedtmle.model.budget import chi_square, normals, stream_key, uniform_stream, uniforms
from fedtmle.model.linear import cholesky, invert_lower, multiply
from fedtmle.model.problem import Estimate, KnownPeople
from fedtmle.model.table import (
    ROW,
    AbstractBoundedColumns,
    AnyTable,
    Factor,
    PerTable,
    Result,
    StreamedTable,
    Table,
    over_blocks,
    seen_through,
)
from fedtmle.programs.missing import (
    AbstractOutcomeColumns,
    Filled,
    Levels,
    MissingCounts,
    columns_over_time,
    has_left,
    is_missing,
    levels_over_time,
)
from fedtmle.programs.nuisance import Regression, fit_exactly, fit_model, fitted_model
from fedtmle.programs.study import Study
from fedtmle.protocol.flows import through, together
from fedtmle.protocol.query import Flow, Phase, View
from fedtmle.protocol.sites import OwnEstimate, OwnStatus
from fedtmle.protocol.sums import TallyQuery
from fedtmle_core.types import Array, Family, IntArray, Part, Response, unpack

# Rubin's rules: one estimate from those of m completed data sets.
#
# With Q_j the estimates and U_j their variances, Q the mean of Q_j, U that of U_j, and B the variance of Q_j
# with divisor m - 1:
#
#     T      = U + (1 + 1/m) B
#     lambda = (1 + 1/m) B / T
#     nu     = 1 / (1/nu_old + 1/nu_obs),   nu_old = (m - 1) / lambda^2,
#              nu_obs = (nu_com + 1) / (nu_com + 3) nu_com (1 - lambda)        (Barnard and Rubin, 1999)
#     fmi    = (r + 2 / (nu + 3)) / (r + 1),   r = (1 + 1/m) B / U
#
# nu_com are the degrees of freedom of the complete data, fmi is the fraction of missing information.


@dataclass(frozen=True, kw_only=True)
class MultiplyImputed:
    """One number over m data sets: its estimate and variance T, and how much of T is due to imputation."""

    estimate: float
    variance: float
    df: float
    missing_information: float
    increase: float  # r: the relative increase in variance


def combine(estimates: Sequence[float], variances: Sequence[float], complete_df: float) -> MultiplyImputed:
    """Return the estimate of m data sets by Rubin's rules, with Barnard and Rubin's degrees of freedom."""
    m = len(estimates)
    mean, within = math.fsum(estimates) / m, math.fsum(variances) / m
    between = math.fsum((each - mean) ** 2 for each in estimates) / (m - 1)
    added = (1.0 + 1.0 / m) * between
    total = within + added
    share = added / total if total > 0 else 0.0
    observed = (complete_df + 1) / (complete_df + 3) * complete_df * (1.0 - share)
    inverse = share * share / (m - 1) + (1.0 / observed if observed > 0 else math.inf)
    df = 1.0 / inverse if inverse > 0 else math.inf
    increase = added / within if within > 0 else math.inf if added > 0 else 0.0
    information = (increase + 2.0 / (df + 3.0)) / (increase + 1.0) if math.isfinite(increase) else 1.0
    return MultiplyImputed(
        estimate=mean,
        variance=total,
        df=df,
        missing_information=information if added > 0 else 0.0,
        increase=increase,
    )


def pool_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of psi and the matrix T over the data sets."""
    psi = np.stack([each.psi for each in estimates])
    mean = psi.mean(axis=0)
    gaps = (psi - mean).T.tolist()
    # Sums by `fsum`, not a matrix product: every party finds the same bits.
    products = [[math.fsum(a * b for a, b in zip(one, two, strict=True)) for two in gaps] for one in gaps]
    spread = np.array(products) / (len(psi) - 1)
    within = np.mean([each.covariance for each in estimates], axis=0)
    return Estimate(psi=mean, covariance=within + (1.0 + 1.0 / len(psi)) * spread)


def combined_silos(by_set: Sequence[Sequence[OwnEstimate]]) -> tuple[OwnEstimate, ...]:
    """Return each silo's own estimate over the data sets; one without an estimate in some has none."""
    found = []
    for own in zip(*by_set, strict=True):
        failed = [each for each in own if not each.status.has_estimate]
        if failed:
            found.append(failed[0])
            continue
        parts = [
            Estimate(psi=each.psi, covariance=each.covariance)
            for each in own
            if each.psi is not None and each.covariance is not None
        ]
        pooled = pool_estimates(parts)
        penalised = any(each.status is OwnStatus.PENALISED for each in own)
        status = OwnStatus.PENALISED if penalised else OwnStatus.SENT
        found.append(OwnEstimate(status=status, psi=pooled.psi, covariance=pooled.covariance))
    return tuple(found)


RIDGE = 1e-6  # keeps collinear columns and separation from stopping imputation models
LARGEST_RESIDUAL = 64.0  # squared, on the unit scale of the declared range

Form = Literal["binary", "number", "count", "category"]
KIND: dict[Form, Response] = {
    "binary": "binary",
    "number": "continuous",
    "count": "count",
    "category": "binary",
}
FAMILY = {"binary": Family.LOGISTIC, "number": Family.GAUSSIAN, "count": Family.POISSON}


@dataclass(frozen=True, kw_only=True)
class ImputedVariable:
    """A variable with missing values: the form of its regression, its range, and its levels if a factor."""

    name: str
    form: Form
    low: float
    high: float
    levels: tuple[str, ...] = ()

    @property
    def width(self) -> float:
        """The unit of the response: the range of a number, the largest count."""
        return {"number": self.high - self.low, "count": self.high}.get(self.form, 1.0)

    def read(self, table: Table) -> Array:
        """Return the values on the unit scale, or the codes of the levels, shape (N,)."""
        if self.levels:
            return table.factors[self.name].recode(self.levels).astype(np.float64)
        column = table.numeric[self.name]
        return (column - self.low) / self.width if self.form == "number" else column / self.width

    def write(self, table: Table, rows: IntArray, values: Array) -> Table:
        """Return the table with the values of some rows replaced: codes of a factor, else numbers."""
        if self.levels:
            codes = np.array(table.factors[self.name].recode(self.levels))
            codes[rows] = values.astype(np.int64)
            table = table.with_factor(self.name, Factor(codes, self.levels))
        if self.name in table.numeric:
            column = np.array(table.numeric[self.name])
            column[rows] = values
            table = table.with_numeric(self.name, column)
        return table


@final
@dataclass(frozen=True, kw_only=True)
class VariableResponse(AbstractResponse):
    """A variable as the response of its imputation model, among the records that have it."""

    variable: ImputedVariable
    missing: int  # records of all silos
    sums: int = 1  # by which completed data sets differ in these records alone
    is_over_time: bool = False  # whether people who left before its period have no value of it

    @property
    def known_people(self) -> tuple[KnownPeople, ...]:
        # Sums over two completed data sets differ by the records with missing values alone.
        return (KnownPeople(f"missing({self.variable.name})", self.missing, self.sums),)

    def of(self, table: Table) -> tuple[Array, Array]:
        name = self.variable.name
        weight = 1.0 - table.numeric[is_missing(name)]
        return self.variable.read(table), weight - table.numeric[
            has_left(name)
        ] if self.is_over_time else weight


@final
@dataclass(frozen=True, kw_only=True)
class ResidualColumns(AbstractBoundedColumns[Table]):
    """Whether a record has the variable, and the square of its residual on the unit scale."""

    names = ("records", "squared residual")

    response: VariableResponse
    fit: FittedGLM

    @property
    def label(self) -> str:
        return f"squared residuals of the imputation model of {self.response.variable.name}"

    @property
    def exponents(self) -> tuple[int, ...]:
        return (1, 1 + int(math.log2(LARGEST_RESIDUAL)))

    def roots(self, piece: Table) -> Array:
        y, w = self.response.of(piece)
        return np.stack([w, w * (y - self.fit.predict(piece))])

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        y, w = self.response.of(piece)
        residual = y - self.fit.predict(piece)
        return np.stack([w, w * np.minimum(residual * residual, LARGEST_RESIDUAL)])


@final
@dataclass(frozen=True, kw_only=True)
class Draw:
    """One step of a chain: values of a variable, drawn from a regression with drawn coefficients."""

    variable: ImputedVariable
    fit: FittedGLM | FittedMultinomial
    spread: float  # the standard deviation of a number, on the unit scale
    key: int

    def fill(self, table: Table) -> Table:
        """Return the table with new values where the variable is missing."""
        rows = np.flatnonzero(table.numeric[is_missing(self.variable.name)])
        if not len(rows):
            return table
        part = table.take(rows)
        return self.variable.write(table, rows, self._values(part, uniforms(self.key, part.numeric[ROW])))

    def _values(self, part: Table, u: Array) -> Array:
        variable, mean = self.variable, self.fit.predict(part)
        match variable.form:
            case "binary":
                values = (u > 1.0 - mean).astype(np.float64)
            case "category":
                values = (u > np.cumsum(mean[:-1], axis=0)).sum(axis=0).astype(np.float64)
            case "number":
                drawn = variable.low + variable.width * (mean + self.spread * ndtri(u))
                values = np.clip(drawn, variable.low, variable.high)
            case "count":
                most = 2.0 * variable.high  # a larger mean would be moved to the end of the range anyway
                drawn = _poisson_quantile(u, np.minimum(variable.width * mean, most))
                values = np.clip(drawn, variable.low, variable.high)
        return np.asarray(values, dtype=np.float64)


def _poisson_quantile(u: Array, mean: Array) -> Array:
    """Return the smallest counts whose Poisson distribution function is at least u, 0 < u < 1.

    This is `scipy.stats.poisson.ppf`, whose module takes a second to import.
    """
    above = np.ceil(pdtrik(u, mean))
    below = np.maximum(above - 1.0, 0.0)
    return np.asarray(np.where(pdtr(below, mean) >= u, below, above), dtype=np.float64)


@final
@dataclass(frozen=True, kw_only=True)
class Completed:
    """A view: the rows as another view shows them, with one more variable drawn."""

    before: View
    draw: Draw
    cache: PerTable[Table] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    def of(self, rows: AnyTable) -> AnyTable:
        if isinstance(rows, StreamedTable):
            return seen_through(self.cache, self.before.of(rows), self.draw.fill)
        return self.cache.of(rows, self._completed)

    def _completed(self, rows: Table) -> Table:
        seen = self.before.of(rows)
        if not isinstance(seen, Table):
            raise TypeError("a view of a table in memory is one")
        if isinstance(self.before, Completed):
            self.before.cache.forget(rows)  # the chain goes on from here
        return self.draw.fill(seen)


def imputed_variables(study: Study, counts: MissingCounts, levels: Levels) -> tuple[ImputedVariable, ...]:
    """Return the variables to impute, those with the fewest missing values first."""
    over_time, factors = columns_over_time(study), _factors(study)
    found = []
    for name in sorted(counts.affected(study, "impute"), key=lambda name: (counts.counts[name], name)):
        variable = study.variable_of(name)
        codes = levels[name] if over_time.get(name, name) in factors else ()
        low, high = variable.bounds or (0.0, 1.0)
        kind = variable.basic_kind
        form: Form = "category" if kind == "identifier" else kind
        if codes and len(codes) == 2:
            form = "binary"
        found.append(ImputedVariable(name=name, form=form, low=low, high=high, levels=codes))
    return tuple(found)


def _factors(study: Study) -> set[str]:
    """Return the factors of the study's formulas, a factor over time by its own name."""
    return {
        study.declared_name(name)
        for model in study.models.values()
        for formula in formulas(model)
        for name in formula.factor_names
    }


def predictors(study: Study, outcome: AbstractOutcomeColumns | None) -> dict[str, TermVariable]:
    """Return the terms of the imputation models by variable: outcome, treatment, covariates, indicators."""
    target, factors = study.target, _factors(study)
    terms: dict[str, TermVariable] = {}
    for name in (target.outcome,) if outcome is None else outcome.ranges:
        terms[name] = Name(name)
    over_time = columns_over_time(study)
    for column, variable in over_time.items():
        is_factor = variable in factors or (variable == target.treatment and not target.is_modified)
        terms[column] = Categorical(column) if is_factor else Name(column)
    if target.treatment is not None and not over_time:
        terms[target.treatment] = Categorical(target.treatment)
    for model in study.models.values():
        for formula in formulas(model):
            for name in filter(partial(_is_baseline, study), formula.factor_names):
                terms[name] = Categorical(name)
            for name in filter(partial(_is_baseline, study), formula.numeric_names):
                terms.setdefault(name, Name(name))
    return terms


def _is_baseline(study: Study, name: str) -> bool:
    """Return whether a name in a formula is neither the period nor a variable over time or its lag."""
    timeline = study.timeline
    return not study.is_period(name) and (timeline is None or timeline.lagged(name) is None)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """What the m chains have in common."""

    study: Study
    counts: MissingCounts
    levels: Levels
    outcome: AbstractOutcomeColumns | None
    n: int

    @property
    def ranges(self) -> Ranges:
        declared = self.study.variables.ranges
        columns = columns_over_time(self.study)
        over_time = {column: declared[name] for column, name in columns.items() if name in declared}
        return {**declared, **over_time, **({} if self.outcome is None else self.outcome.ranges)}


def impute(
    study: Study, counts: MissingCounts, base: Filled, levels: Levels, n: int
) -> Flow[tuple[View, ...]]:
    """Return the views of the m completed data sets; the chains go on in the same rounds."""
    every = levels_over_time(study, levels)
    common = Chains(study=study, counts=counts, levels=every, outcome=base.outcome, n=n)
    return tuple((yield from together([_chain(common, base, j) for j in range(study.imputations)])))


def _chain(common: Chains, base: Filled, number: int) -> Flow[View]:
    study = common.study
    variables = imputed_variables(study, common.counts, common.levels)
    terms = predictors(study, common.outcome)
    names = [variable.name for variable in variables]
    view: View = base
    for sweep in range(study.imputation_sweeps if len(variables) > 1 else 1):
        for k, variable in enumerate(variables):
            later = names[k + 1 :] if sweep == 0 else []
            used = [term for name, term in terms.items() if name != variable.name and name not in later]
            formula = Formula(intercept=True, terms=tuple((term,) for term in used))
            key = f"{study.seed}:{number}:{sweep}:{variable.name}"
            draw = yield from through(_regression(common, variable, formula, key), view)
            view = Completed(before=view, draw=draw)
    return view


def _regression(common: Chains, variable: ImputedVariable, formula: Formula, key: str) -> Flow[Draw]:
    """Fit the imputation model of a variable, and draw its coefficients."""
    counts = common.counts
    response = VariableResponse(
        variable=variable,
        missing=counts.counts[variable.name],
        sums=differing_sums(common.study, variable.name, counts, common.levels),
        is_over_time=variable.name in counts.at_risk,
    )
    is_category = variable.form == "category"
    glm = GLM(str(formula), ridge=RIDGE)
    label = f"imputation model of '{variable.name}'"
    regression = Regression(
        label=label,
        model=glm,
        kind=KIND[variable.form],
        response=response,
        weight_ceiling=1.0,
        family=None if is_category else FAMILY[variable.form],
        classes=variable.levels if is_category else (),
        ranges=common.ranges,
        constant=f"every record that has '{variable.name}' has the same value of it; leave it out",
    )
    draws = uniform_stream(stream_key(f"coefficients:{key}"))
    row_key = stream_key(f"records:{key}")
    try:
        # Use exact sums: a draw compares a probability with a number, so two fits that differ slightly would
        # give some record different values.
        fitted = yield from fit_exactly(regression, glm, common.levels, common.n)
        dispersion = {"number": 0.0, "count": 1.0 / variable.width}.get(variable.form, 1.0)
        if variable.form == "number" and isinstance(fitted, FittedGLM):
            columns = ResidualColumns(response=response, fit=fitted)
            records, squares = (yield TallyQuery(columns=columns, n=common.n)).values().tolist()
            df = max(records - len(fitted.coefficients), 1.0)
            dispersion = squares / chi_square(draws, df)
        drawn = yield from _draw_coefficients(regression, glm, fitted, dispersion, common, draws)
    except FitError as error:
        raise FitError(error.reason, f"{error}. Or declare another way for its missing values") from None
    return Draw(variable=variable, fit=drawn, spread=math.sqrt(dispersion), key=row_key)


def differing_sums(study: Study, name: str, counts: MissingCounts, levels: Levels) -> int:
    """Return in how many sums, at least, m data sets differ where one variable alone is imputed.

    They are the columns of one response's models that read it and no other imputed variable, times m - 1.
    """
    over_time, levels = columns_over_time(study), {**study.levels, **levels}
    imputed = {over_time.get(each, each) for each in counts.affected(study, "impute")}
    own, columns = over_time.get(name, name), [0]
    for model in study.models.values():
        terms = dict.fromkeys(term for formula in formulas(model) for term in formula.terms)
        alone = tuple(term for term in terms if _declared(study, term) & imputed == {own})
        columns.append(len(column_names(Formula(intercept=True, terms=alone), levels)) - 1)
    return (study.imputations - 1) * max(columns)


def _declared(study: Study, term: Term) -> set[str]:
    """Return the variables that a term reads, by the names that declare them."""
    formula = Formula(intercept=False, terms=(term,))
    return {study.declared_name(name) for name in (*formula.numeric_names, *formula.factor_names)}


def _draw_coefficients(
    regression: Regression,
    glm: GLM,
    fit: FittedGLM | FittedMultinomial,
    dispersion: float,
    common: Chains,
    draws: Iterator[float],
) -> Flow[FittedGLM | FittedMultinomial]:
    """Return the fit with coefficients from N(beta, dispersion (n H)^-1), H the mean Hessian at the fit."""
    model = fit_model(regression, glm, common.levels)
    eps = np.ldexp(np.array(fit.coefficients), np.array(model.scales)).reshape(-1)
    moved = yield from _posterior(model, eps, dispersion, common.n, draws)
    return fitted_model(regression, glm, common.levels, moved)


def _posterior(
    model: AbstractRegressionModel, eps: Array, dispersion: float, n: int, draws: Iterator[float]
) -> Flow[Array]:
    """Return eps plus a normal draw with covariance dispersion (n H)^-1: R' z, with H = L L', R = L^-1."""
    dim = model.dim
    run: Run[Any] = Run(model, n, Phase.NUISANCE)
    sums = yield from run.ask(None, eps, Part.GRADIENT | Part.HESSIAN)
    hessian = unpack(sums[dim:].values(n), dim) + model.normaliser(None).hessian(eps)
    factor = cholesky(hessian)
    if factor is None:
        raise NumericalError("the curvature of an imputation model is not positive definite")
    z = np.array(normals(draws, dim))[:, None]
    step = multiply(invert_lower(factor).T, z)[:, 0]
    return eps + math.sqrt(dispersion / n) * step
