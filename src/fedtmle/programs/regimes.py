"""The parts of a study of treatment over time: counts, models of each period, the sequential regressions.

    counts -> treatment and censoring models of all periods | outcome model and fluctuation of the last period
           -> outcome model and fluctuation of the period before -> ... -> the joint problem -> adherence

Models of treatment and censoring do not wait for each other, and neither do the rules: they share rounds.
Only the outcome models of a rule go backwards in time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self, final

import numpy as np

from fedtmle.errors import FitError, InputError
from fedtmle.initial.crossfit import CrossFitted, Fitted, Folds
from fedtmle.initial.design import column_names, range_exponent
from fedtmle.initial.glm import GLM, FittedGLM, FittedMultinomial, GLMModel, OffsetResponse
from fedtmle.initial.superlearner import SuperLearner
from fedtmle.initial.syntax import Formula, parse_formula
from fedtmle.model.problem import Estimate
from fedtmle.programs.fitting import Fitting
from fedtmle.programs.missing import Levels, MissingCounts
from fedtmle.programs.nuisance import (
    GRADIENT_GOAL,
    MAX_STEPS,
    Regression,
    fit_exactly,
    fitted_model,
    regressions,
)
from fedtmle.programs.sites import ComparedSilos
from fedtmle.programs.study import NuisanceModel, Study
from fedtmle.programs.superlearner import OwnCoefficients, begin_fits, fit_together, own_view, seen
from fedtmle.protocol.bins import BinsQuery, PooledBin
from fedtmle.protocol.flows import ViewedQuery, through, together
from fedtmle.protocol.query import CountCell, Flow, JointQuery, Phase, Query
from fedtmle.protocol.sums import SumsQuery, TallyQuery
from fedtmle.targets.diagnostics import Balance
from fedtmle.targets.effects.components import AbstractPopulation, Component, PooledWeights
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect, Shift
from fedtmle.targets.regimes.problem import (
    ChainFit,
    PeriodScores,
    RegimeLaw,
    RegimeProblem,
    SequentialRules,
    SequentialStep,
)
from fedtmle.targets.regimes.statistics import (
    AdherenceBins,
    AmongAtRisk,
    CensoredInPeriod,
    Fluctuated,
    ModifiedRows,
    NextOutcome,
    RegimeCounts,
    RegimeTruncationBins,
    RegimeWeights,
    WeightBins,
)
from fedtmle.targets.regimes.timeline import PeriodView, Timeline
from fedtmle_core.exact import Sums
from fedtmle_core.types import Family, Part

SMALLEST_EXPONENT = -512  # a smaller exponent of weights leaves the range of a double
UNBOUNDED_CEILING = 4096.0  # declared for cumulative weights that are not bounded
NEARLY_SOLVED = 2.0**-22  # a step of a fluctuation shorter than this leaves an error of about 2^-44
LONGEST_STEP = 4.0  # longest step of a fluctuation on the logit scale
TAIL_STEP = 18.0  # step along which the loss falls for ever
FARTHEST = 64.0  # a fluctuation beyond this is a runaway


@dataclass(frozen=True, kw_only=True)
class RegimeTally:
    """Pooled counts: people by arm in period 1; in each period those at risk, censored and with an event."""

    arms: tuple[int, ...]
    at_risk: tuple[int, ...]
    censored: tuple[int, ...]
    events: tuple[int, ...]
    weight_mean: float
    weights: PooledWeights


@dataclass(frozen=True, kw_only=True)
class RegimeOverlap:
    """Overlap from pooled sums; ``truncated`` is over the silos that disclose theirs."""

    truncated: tuple[int, ...]  # people with a truncated weight, per rule
    disclosing: tuple[int, ...]
    effective_sizes: tuple[float, ...]  # (sum W)^2 / sum W^2, per mean


@dataclass(frozen=True, kw_only=True)
class Adherence:
    """Per rule and period, who has followed the rule so far, of those at risk, and a histogram of weights."""

    followers: tuple[tuple[PooledBin, ...], ...]
    weights: tuple[tuple[tuple[PooledBin, ...], ...], ...]


@dataclass(frozen=True, kw_only=True)
class RegimeDetails:
    """The results of a study of treatment over time besides its estimate; all are pooled and public."""

    problem: RegimeProblem
    components: tuple[Component, ...]
    levels: Mapping[str, tuple[str, ...]]
    tally: RegimeTally
    g_floor: float
    overlap: RegimeOverlap
    adherence: Adherence | None
    balance: tuple[Balance, ...] | None  # by arm in period 1; None without diagnostics or covariates
    nuisances: Mapping[str, tuple[Fitted, ...]]
    fit_labels: Mapping[str, tuple[str, ...]]  # the labels of these fits, by role
    strata: tuple[str, ...] = ()
    silos: ComparedSilos | None = None  # None without diagnostics
    missing: MissingCounts | None = None  # counts for covariates that may be missing
    omitted: int = 0  # records left out, because their treatment is missing
    imputed: tuple[Estimate, ...] = ()  # one per data set, if a covariate is imputed
    separated: Mapping[str, int] = field(default_factory=dict)  # see `count_separated`

    @property
    def start(self) -> RegimeLaw:
        """The law at which the joint problem begins."""
        return self.problem.start()

    @property
    def arm_counts(self) -> tuple[int, ...]:
        """The number of people, repeated for each rule."""
        return (self.tally.at_risk[0],) * len(self.overlap.truncated)

    @property
    def observed_counts(self) -> tuple[int, ...]:
        """The number of people who are never censored, repeated for each rule."""
        return (self.tally.at_risk[0] - sum(self.tally.censored),) * len(self.overlap.truncated)

    @property
    def groups(self) -> tuple[str, ...]:
        """The labels of the groups for which effective sample sizes are given."""
        return tuple(component.name for component in self.components)

    def fit_names(self, target: AbstractEffect, role: str) -> tuple[str, ...]:
        """Return a label for each fit of a role that has several."""
        del target
        return self.fit_labels[role]


def formula_at(formula: Formula, timeline: Timeline, period: int) -> Formula:
    """Return the formula of one period: without the terms whose lags reach back before period 1."""
    kept = []
    for term in formula.terms:
        alone = Formula(intercept=False, terms=(term,))
        names = (*alone.numeric_names, *alone.factor_names)
        if all(timeline.is_there(name, period) for name in names):
            kept.append(term)
    return Formula(intercept=formula.intercept, terms=tuple(kept))


def model_at(model: Any, timeline: Timeline, period: int) -> Any:
    """Return a nuisance model for one period."""
    if isinstance(model, GLM):
        return replace(model, formula=str(formula_at(model.parsed, timeline, period)))
    if isinstance(model, SuperLearner):
        return replace(model, learners=tuple(model_at(each, timeline, period) for each in model.learners))
    return model


def study_at(study: Study, timeline: Timeline, period: int) -> Study:
    """Return the study with the models of one period."""
    models: dict[str, NuisanceModel] = {
        f"{role}_model": model_at(model, timeline, period) for role, model in study.models.items()
    }
    return replace(study, **models)  # type: ignore[arg-type]  # the fields of models are models


def count_over_time(
    study: Study, target: AbstractRegimeEffect, columns: EffectColumns, timeline: Timeline, n: int
) -> Flow[RegimeTally]:
    """Ask who is at risk, censored and has an event in each period; one round."""
    exponent = 1
    if study.weights:
        exponent = max(range_exponent(study.variables.ranges[study.weights]), SMALLEST_EXPONENT)
    counts = RegimeCounts(columns=columns, timeline=timeline, weight_exponent=exponent)
    at = counts.layout.places
    pooled = yield TallyQuery(
        columns=counts,
        n=n,
        counts=(
            *(CountCell(k, is_arm=True) for k in at["arm"]),
            *(CountCell(k, floor="min_support", rest_floor="") for k in at["at risk"]),
            *(CountCell(k, floor="min_missing", rest_floor="") for k in at["censored"]),
            *(CountCell(k, floor="min_events", rest_floor="") for k in at["events"]),
            *(CountCell(k) for k in at["stratum"]),
        ),
    )
    sums = {name: part.tolist() for name, part in counts.layout.split(pooled.values()).items()}
    tally = RegimeTally(
        arms=tuple(map(int, sums["arm"])),
        at_risk=tuple(map(int, sums["at risk"])),
        censored=tuple(map(int, sums["censored"])),
        events=tuple(map(int, sums["events"])),
        weight_mean=sums["weight"][0] / n,
        weights=PooledWeights(total=sums["weight"][0], by_arm=(), by_stratum=tuple(sums["stratum weight"])),
    )
    if not tally.weight_mean > 0:
        raise InputError(f"weights: column '{study.weights}' is zero in every row")
    last = max(chain.horizon for chain in target.chains)
    for t in range(1, last + 1):
        if tally.at_risk[t - 1] <= tally.censored[t - 1]:
            raise InputError(
                f"over_time: nobody is at risk and uncensored in period {t}; check its columns, or "
                "leave it out"
            )
    if target.is_survival and not sum(tally.events[:last]):
        raise InputError(
            f"outcome: nobody has an event by the end of period {last}; check '{target.outcome}'"
        )
    if any(tally.censored) and study.censoring_model is None:
        raise InputError("censoring_model: some people are censored; give a model of censoring")
    return tally


@dataclass(frozen=True, kw_only=True)
class SequentialFits:
    """What the fits of all periods need: the study, the roles of columns, levels, and pooled counts."""

    study: Study
    target: AbstractRegimeEffect
    columns: EffectColumns
    timeline: Timeline
    levels: Levels
    tally: RegimeTally
    ceiling: float
    n: int
    completion: int = 0  # the number of the imputed data set, 0 if there is but one

    @property
    def last(self) -> int:
        """The last period of any mean."""
        return max(chain.horizon for chain in self.target.chains)

    @cached_property
    def populations(self) -> tuple[tuple[AbstractPopulation, float], ...]:
        """Everyone and each stratum, with their shares of the pooled weight."""
        found = []
        for population in self.target.populations(self.columns.strata_levels):
            share = population.share(self.tally.weights)
            if share <= 0:
                raise InputError(f"strata: no record with a positive weight is {population.label}")
            found.append((population, share))
        return tuple(found)

    def view(self, period: int) -> PeriodView:
        return self.views[period - 1]

    @cached_property
    def views(self) -> tuple[PeriodView, ...]:
        return self.sequence(()).views

    def sequence(self, scores: tuple[PeriodScores, ...]) -> SequentialRules:
        return SequentialRules(
            timeline=self.timeline,
            columns=self.columns,
            rules=self.target.rules,
            scores=scores,
            ceiling=self.ceiling,
            weight_mean=self.tally.weight_mean,
            completion=self.completion,
        )

    def fitted(self, view: PeriodView, asked: Sequence[Regression]) -> Flow[list[Fitted]]:
        """Fit regressions on the rows of one period, in shared rounds."""
        return (yield from through(self._fits(asked, self.study.outer_folds), view))

    def _fits(self, asked: Sequence[Regression], folds: Folds | None) -> Flow[list[Fitted]]:
        study = self.study
        coded = study.rounds_sums and not any(each.response.periods for each in asked)
        fitting = Fitting(levels=self.levels, n=self.n, accuracy=study.fit_accuracy if coded else None)
        begun = yield from begin_fits(asked, fitting, folds)
        return (yield from fit_together(asked, begun, folds))

    def _regression(self, role: str, period: int) -> partial[Regression]:
        study = self.study
        return partial(
            Regression,
            model=model_at(study.models[role], self.timeline, period),
            weight_ceiling=study.weight_ceiling if study.weights else 1.0,
            cluster=study.cluster,
            spanning=study.cluster_scope == "spanning",
            ranges=study.ranges,
            own=study.profiles_silo,
            view=self.view(period),
        )

    def scores_of(self, period: int) -> Flow[PeriodScores]:
        """Fit the models of treatment and censoring of one period."""
        flows: list[Flow[list[Fitted]]] = [self.fitted(self.view(period), self._treatment(period))]
        if self.tally.censored[period - 1]:
            flows.append(self.fitted(self.view(period), [self._censoring(period)]))
        treatment, *censoring = yield from together(flows)
        if not self.target.is_modified:
            return PeriodScores(treatment=tuple(treatment), censoring=censoring[0][0] if censoring else None)
        fits = iter(treatment)
        modified = tuple(None if _is_identity(rule) else next(fits) for rule in self.target.rules)
        return PeriodScores(modified=modified, censoring=censoring[0][0] if censoring else None)

    def _treatment(self, period: int) -> list[Regression]:
        study, mean = self.study, self.tally.weight_mean
        label = f"treatment model of period {period}"
        if self.target.is_modified:
            ranges = dict(study.ranges)
            regression = self._regression("treatment", period)
            return [
                regression(
                    label=f"{label}, rule '{rule.label}'",
                    kind="binary",
                    family=Family.LOGISTIC,
                    response=ModifiedRows(
                        columns=self.columns,
                        timeline=self.timeline,
                        period=period,
                        weight_mean=mean,
                        rule=rule,
                    ),
                    ranges={**ranges, str(self.target.treatment): self.reach},
                )
                for rule in self.target.rules
                if isinstance(rule, Shift) and not rule.is_identity
            ]
        asked = regressions(study_at(study, self.timeline, period), self.columns, mean)["treatment"]
        return [
            replace(
                each,
                label=each.label.replace("treatment model", label),
                response=AmongAtRisk(response=each.response, timeline=self.timeline, period=period),
                view=self.view(period),
                constant=f"everyone at risk in period {period} has the same treatment; check its column, or "
                "leave the period out",
            )
            for each in asked
        ]

    @property
    def reach(self) -> tuple[float, float]:
        """The range of observed and modified treatments."""
        bounds = self.study.variables.ranges[str(self.target.treatment)]
        ends = [rule.reach(bounds) for rule in self.target.rules if isinstance(rule, Shift)]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _censoring(self, period: int) -> Regression:
        regression: Regression = self._regression("censoring", period)(
            label=f"censoring model of period {period}",
            kind="binary",
            family=Family.LOGISTIC,
            response=CensoredInPeriod(
                columns=self.columns,
                timeline=self.timeline,
                period=period,
                weight_mean=self.tally.weight_mean,
            ),
            constant=f"everyone at risk in period {period} is censored in it, or nobody is",
        )
        return regression

    def outcome_regression(
        self, chain: ChainFit, scores: tuple[PeriodScores, ...], period: int
    ) -> Regression:
        """Return the regression of Z_{t+1} on the history of period t, for one mean."""
        study, target = self.study, self.target
        name = f"outcome model of period {period}, rule '{self._rule(chain)}', to {chain.horizon}"
        ranges = study.ranges
        if target.is_modified:
            ranges = {**ranges, str(target.treatment): self.reach}
        regression: Regression = self._regression("outcome", period)(
            label=name,
            kind=study.response,
            response=NextOutcome(sequence=self.sequence(scores), chain=chain, period=period),
            bounds=study.outcome_bounds,
            ranges=ranges,
            constant=f"the outcome is the same for everyone who is not censored in period {period}, so there "
            "is nothing to model",
        )
        return regression

    def step_back(self, chain: ChainFit, scores: tuple[PeriodScores, ...], period: int) -> Flow[ChainFit]:
        """Fit and fluctuate Q_t of one mean; return the chain with this step.

        A GLM is fitted by exact sums, starting from the coefficients of the next period, and the fluctuation
        is solved alongside the fit, one round behind. With ``sums = "rounded"``, and for other models, the
        fluctuation waits for the fit. An algorithm that fluctuates nothing leaves the prediction as it is.
        """
        regression, view = self.outcome_regression(chain, scores, period), self.view(period)
        model = regression.model
        fluctuates = self.study.algorithm.fluctuates
        fit: Fitted
        folds = self.study.outer_folds
        if folds is not None:
            fit = yield from through(self._cross_fitted(chain, scores, period, folds), view)
        elif isinstance(model, GLM) and self.study.sums != "rounded":
            exact = ExactFit.after(chain, regression, model, self.levels)
            if fluctuates:
                return (yield from through(self._beside(exact, chain, scores, period), view))
            fit = yield from through(exact.flow(self.n), view)
            return chain.before(SequentialStep(outcome=fit, eps=0.0))
        else:
            (fit,) = yield from self.fitted(view, [regression])
        eps = 0.0
        if fluctuates:
            eps = yield from through(self._fluctuation(chain, scores, period, fit, 0.0), view)
            self._require_variation(chain, period, eps)
        return chain.before(SequentialStep(outcome=fit, eps=eps))

    def _cross_fitted(
        self, chain: ChainFit, scores: tuple[PeriodScores, ...], period: int, folds: Folds
    ) -> Flow[CrossFitted]:
        """Fit Q_t once without each fold, on the outcomes that the fits without it predict; shared rounds."""
        parts = [
            replace(self.outcome_regression(chain.without(v), scores, period).without(folds, v), fold=v + 1)
            for v in range(folds.count)
        ]
        model = parts[0].model
        if not isinstance(model, GLM) or self.study.sums == "rounded":
            return CrossFitted(models=tuple((yield from self._fits(parts, None))), folds=folds)
        fits = (
            ExactFit.after(chain.without(v), part, model, self.levels).flow(self.n)
            for v, part in enumerate(parts)
        )
        return CrossFitted(models=tuple((yield from together(list(fits)))), folds=folds)

    def _beside(
        self, exact: ExactFit, chain: ChainFit, scores: tuple[PeriodScores, ...], period: int
    ) -> Flow[ChainFit]:
        """Run a fit by exact sums, and beside it Newton's method for the fluctuation of its last point."""
        fit, eps, pooled = exact.flow(self.n), 0.0, None
        last: FittedGLM | None = None  # the fit whose fluctuation is solved except for its last step
        while True:
            try:
                query = fit.send(pooled)
            except StopIteration as stop:
                fitted: FittedGLM = stop.value
                break
            at = exact.point(query)
            fluctuation = self._fluctuation_query(chain, scores, period, at, eps)
            pooled, sums = yield JointQuery((query, fluctuation))
            slope, bend = self._derivatives(sums, chain, period, eps)
            last = at if _is_solved(slope, bend) else None
            eps = _newton_step(eps, slope, bend)
        if last != fitted:
            eps = yield from self._fluctuation(chain, scores, period, fitted, eps)
        self._require_variation(chain, period, eps)
        return chain.before(SequentialStep(outcome=fitted, eps=eps))

    def _rule(self, chain: ChainFit) -> str:
        """Return the rule of a mean in words, with its population."""
        return f"{self.target.rules[chain.rule].label} {chain.population.label}".strip()

    def _require_variation(self, chain: ChainFit, period: int, eps: float) -> None:
        """Refuse a fluctuation without a finite solution, unless it is that of an event over time.

        If nobody who follows a rule has the event in the last period, zero is a valid estimate of its risk.
        """
        if abs(eps) > TAIL_STEP and self.timeline.event is None:
            raise FitError(
                "arm",
                f"rules: all who follow '{self._rule(chain)}' uncensored through period {period} have the "
                "same outcome; compare rules that more people follow, or fewer periods",
            )

    def _fluctuation_query(
        self, chain: ChainFit, scores: tuple[PeriodScores, ...], period: int, model: Fitted, eps: float
    ) -> Query:
        """Return the query for slope and curvature of the fluctuation's loss at eps, beside a prediction."""
        plain = chain.before(SequentialStep(outcome=model, eps=eps))
        loss = GLMModel(
            formula=parse_formula("1"),
            levels={},
            scales=(0,),
            family=Family.LOGISTIC,
            response=Fluctuated(sequence=self.sequence(scores), chain=plain, period=period),
            weight_ceiling=problem_ceiling(self.study, self.ceiling) / chain.share,
        )
        parts = Part.GRADIENT | Part.HESSIAN
        query = SumsQuery(
            problem=loss, law=None, eps=np.zeros(1), parts=parts, n=self.n, phase=Phase.NUISANCE
        )
        view = own_view([model])
        return query if view is None else ViewedQuery(query=query, view=view)

    def _derivatives(self, sums: Sums, chain: ChainFit, period: int, eps: float) -> tuple[float, float]:
        slope, bend = sums.values(self.n).tolist()
        if not bend > 0 and abs(eps) < LONGEST_STEP:
            raise FitError(
                "arm", f"rules: nobody follows '{self._rule(chain)}' uncensored through period {period}"
            )
        return slope, bend

    def _fluctuation(
        self, chain: ChainFit, scores: tuple[PeriodScores, ...], period: int, model: Fitted, eps: float
    ) -> Flow[float]:
        """Return eps_t of a fitted prediction, by Newton's method on exact sums from ``eps``.

        Near the solution the error squares from step to step, so that the last step needs no check; the
        targeting of the joint problem begins with one.
        """
        for _ in range(MAX_STEPS):
            sums = yield self._fluctuation_query(chain, scores, period, model, eps)
            slope, bend = self._derivatives(sums, chain, period, eps)
            if abs(eps) > FARTHEST or not bend > 0:
                return eps if abs(slope) <= GRADIENT_GOAL else self._refuse_fluctuation(chain, period)
            eps = _newton_step(eps, slope, bend)
            if _is_solved(slope, bend):
                return eps
        return self._refuse_fluctuation(chain, period)

    def _refuse_fluctuation(self, chain: ChainFit, period: int) -> float:
        raise FitError(
            "convergence",
            f"outcome model of period {period}, rule '{self._rule(chain)}': its fluctuation did not "
            "converge; compare rules that more people follow, or fewer periods",
        )


@dataclass(frozen=True, kw_only=True)
class PreparedRegimes:
    """A study of treatment over time before it is targeted: fitted models and the problem."""

    fits: SequentialFits
    scores: tuple[PeriodScores, ...]
    problem: RegimeProblem
    g_floor: float
    view: OwnCoefficients | None = None  # the rows with which the models predict, if not the study's


def _newton_step(eps: float, slope: float, bend: float) -> float:
    """Return the next eps: at most `LONGEST_STEP` away, so that a flat loss does not throw it far off.

    If all who follow a rule have the outcome 0 (or 1), the loss falls exponentially for ever, and Newton's
    steps are all of length 1. Then a long step ends where the predictions are 0 (or 1) to some digits.
    """
    if abs(slope) <= GRADIENT_GOAL:
        return eps
    step = slope / bend
    if abs(eps) > LONGEST_STEP and 0.75 < abs(step) < 1.25 and step * eps < 0:
        return eps - math.copysign(TAIL_STEP, step)
    return eps - max(-LONGEST_STEP, min(step, LONGEST_STEP))


def _is_solved(slope: float, bend: float) -> bool:
    """Return whether the next Newton step solves a fluctuation, or its equation holds already."""
    return abs(slope) <= max(NEARLY_SOLVED * bend, GRADIENT_GOAL)


def predictors(scores: Sequence[PeriodScores], chains: Sequence[ChainFit]) -> Iterator[Fitted]:
    """Yield the fits of all models, each after those whose predictions are its response."""
    for each in scores:
        yield from each.treatment
        yield from (modified for modified in each.modified if modified is not None)
        if each.censoring is not None:
            yield each.censoring
    for chain in chains:
        yield from (step.outcome for step in reversed(chain.steps))


@final
@dataclass(frozen=True, kw_only=True)
class ExactFit:
    """A GLM that is fitted by exact sums, from coefficients ``near`` those of the fit; None: from zero."""

    regression: Regression
    glm: GLM
    levels: Levels
    near: FittedGLM | None

    @classmethod
    def after(cls, chain: ChainFit, regression: Regression, glm: GLM, levels: Levels) -> Self:
        """Return the fit that starts from the coefficients of the next period, unless it has a ridge."""
        seed = chain.steps[0].outcome if chain.steps and not glm.ridge else None
        near = _warm_start(regression, glm, seed, levels)
        if near is not None:
            response = OffsetResponse(response=regression.response, offset_model=near)
            regression = replace(regression, response=response)
        return cls(regression=regression, glm=glm, levels=levels, near=near)

    def flow(self, n: int) -> Flow[FittedGLM]:
        has_offset = self.near is not None
        fit = yield from fit_exactly(self.regression, self.glm, self.levels, n, has_offset=has_offset)
        return self._moved(fit)

    def point(self, query: Query) -> FittedGLM:
        """Return the model at the coefficients at which the fit asks."""
        if not isinstance(query, SumsQuery):
            raise TypeError("a fit by exact sums asks for sums")
        return self._moved(fitted_model(self.regression, self.glm, self.levels, query.eps))

    def _moved(self, change: FittedGLM | FittedMultinomial) -> FittedGLM:
        if not isinstance(change, FittedGLM):
            raise TypeError("an outcome has one mean, not classes")
        if self.near is None:
            return change
        pairs = zip(self.near.coefficients, change.coefficients, strict=True)
        return replace(change, coefficients=tuple(a + b for a, b in pairs))


def _warm_start(
    regression: Regression, glm: GLM, following: Fitted | None, levels: Levels
) -> FittedGLM | None:
    """Return coefficients near those of the fit: those of the next period's model, column by column.

    Those of each silo's own are zero: each silo finds them given the others.
    """
    if not isinstance(following, FittedGLM) or following.family is not regression.family_of(glm):
        return None
    known = dict(zip(column_names(following.formula, levels), following.coefficients, strict=True))
    own = regression.own_formula(glm, levels)
    formula = glm.parsed if own is None else own.whole
    known |= dict.fromkeys(() if own is None else column_names(own.own, levels), 0.0)
    return FittedGLM(
        formula=formula,
        levels=levels,
        family=following.family,
        coefficients=tuple(known.get(name, 0.0) for name in column_names(formula, levels)),
    )


def _is_identity(rule: object) -> bool:
    return isinstance(rule, Shift) and rule.is_identity


def problem_ceiling(study: Study, ceiling: float) -> float:
    """Return the public bound of a cumulative weight times the observation's weight."""
    weight = study.weight_ceiling if study.weights else 1.0
    return weight * min(ceiling, UNBOUNDED_CEILING)


def fit_sequence(fits: SequentialFits) -> Flow[tuple[tuple[PeriodScores, ...], tuple[ChainFit, ...]]]:
    """Fit all models and fluctuate every step; return the scores of all periods and the finished chains."""
    scores = tuple((yield from together([fits.scores_of(t) for t in range(1, fits.last + 1)])))
    rules = fits.target.rules
    chains = [
        ChainFit(rule=rules.index(rule), horizon=horizon, population=population, share=share)
        for population, share in fits.populations
        for rule, horizon in fits.target.chains
    ]
    return scores, tuple((yield from together([_backwards(fits, chain, scores) for chain in chains])))


def _backwards(fits: SequentialFits, chain: ChainFit, scores: tuple[PeriodScores, ...]) -> Flow[ChainFit]:
    """Fit and fluctuate the regressions of one mean, from its last period to the first."""
    for period in range(chain.horizon, 0, -1):
        view = own_view(predictors(scores, [chain]))
        chain = yield from seen(fits.step_back(chain, scores, period), view)
    return chain


def regime_problem(
    fits: SequentialFits, scores: tuple[PeriodScores, ...], chains: tuple[ChainFit, ...]
) -> RegimeProblem:
    """Return the problem that is targeted, once every step is fluctuated."""
    study, smallest = fits.study, min(share for _, share in fits.populations)
    return RegimeProblem(
        labels=tuple(component.name for component in fits.target.components(fits.columns.strata_levels)),
        sequence=fits.sequence(scores),
        chains=chains,
        outcome_bounds=study.outcome_bounds,
        ceiling=problem_ceiling(study, fits.ceiling) / smallest,
        population_ceiling=(study.weight_ceiling if study.weights else 1.0) / smallest,
        largest_cluster=study.largest_cluster if study.cluster else 1,
        spanning=len(fits.columns.spanning),
    )


def named_fits(
    fits: SequentialFits, scores: tuple[PeriodScores, ...], problem: RegimeProblem
) -> tuple[dict[str, tuple[Fitted, ...]], dict[str, tuple[str, ...]]]:
    """Return the fitted models and their labels, by role."""
    named: dict[str, list[tuple[str, Fitted]]] = {"treatment": [], "censoring": [], "outcome": []}
    arms, rules = fits.target.arms, fits.target.rules
    for t, each in enumerate(scores, start=1):
        for k, fit in enumerate(each.treatment):
            arm = f", arm {arms[k]}" if len(each.treatment) > 1 else ""
            named["treatment"].append((f"period {t}{arm}", fit))
        for rule, modified in zip(rules, each.modified, strict=bool(each.modified)):
            if modified is not None:
                named["treatment"].append((f"period {t}, {rule.label}", modified))
        if each.censoring is not None:
            named["censoring"].append((f"period {t}", each.censoring))
    for label, chain in zip(problem.labels, problem.chains, strict=True):
        for t in range(1, chain.horizon + 1):
            named["outcome"].append((f"{label}, period {t}", chain.step(t).outcome))
    roles = {role: pairs for role, pairs in named.items() if pairs}
    return (
        {role: tuple(fit for _, fit in pairs) for role, pairs in roles.items()},
        {role: tuple(name for name, _ in pairs) for role, pairs in roles.items()},
    )


def find_regime_overlap(problem: RegimeProblem, target: AbstractRegimeEffect, n: int) -> Flow[RegimeOverlap]:
    """Ask for the effective sample sizes and for truncated weights in one round."""
    columns = RegimeWeights(problem)
    pooled, bins = yield JointQuery(
        (
            TallyQuery(columns=columns, n=n),
            BinsQuery(
                bins=RegimeTruncationBins(problem, problem.longest),
                n=n,
                phase=Phase.NUISANCE,
                floors=("min_cell", "min_truncated"),
            ),
        )
    )
    sums = columns.layout.split(pooled.values())
    truncated = tuple(above.count for _, above in bins)
    for chain, mass in zip(problem.chains, sums["squares"], strict=True):
        if not mass > 0:
            name = f"{target.rules[chain.rule].label} {chain.population.label}".strip()
            raise FitError("arm", f"rules: nobody follows '{name}' uncensored to the end")
    for rule, people in zip(target.rules, truncated, strict=True):
        if people > n / 2:
            raise InputError(
                f"g_bounds: the weights under '{rule.label}' are above their bound {problem.ceiling:.3g} for "
                f"{people} of {n} people; there is no overlap to learn from. Compare rules that people "
                "follow, over fewer periods, or simplify the models"
            )
    return RegimeOverlap(
        truncated=truncated,
        disclosing=tuple(above.silos for _, above in bins),
        effective_sizes=tuple(
            float(a * a / b) if b > 0 else 0.0 for a, b in zip(sums["omega"], sums["squares"], strict=True)
        ),
    )


def find_adherence(problem: RegimeProblem, n: int) -> Flow[Adherence]:
    """Ask, after the closing round, who follows each rule when; counts below the floor are hidden."""
    longest = problem.longest
    followers, weights = yield JointQuery(
        (
            BinsQuery(bins=AdherenceBins(problem, longest), n=n),
            BinsQuery(bins=WeightBins(problem, longest), n=n),
        )
    )
    ends = np.cumsum([problem.chains[r].horizon for r in longest]).tolist()
    places = [slice(end - problem.chains[r].horizon, end) for r, end in zip(longest, ends, strict=True)]
    return Adherence(
        followers=tuple(tuple(bins[1] for bins in followers[place]) for place in places),
        weights=tuple(tuple(tuple(bins) for bins in weights[place]) for place in places),
    )
