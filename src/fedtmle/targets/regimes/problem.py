"""The problem of treatment over time: means under rules, from regressions that were fluctuated one by one.

With Z, Q, m and W of the sequential regression below, the EIF of a mean is

    D = sum_t W_t (Z_{t+1} - Q_t(A_t, H_t)) + m_1(H_1) - psi.

The sequential fluctuations have solved its equation, each to the accuracy of exact sums. The problem is their
joint form, by which every algorithm certifies that and closes the run: all Q_t of mean r move by eps_r,

    logit Q_t(eps) = logit Q_t - width eps_r,   weights W_t, outcomes Z_{t+1} at the law,

so that the score at eps = 0 is the first part of D; the second has pooled mean zero because psi is the pooled
mean of m_1. Outcomes move with the law, which is the sequence of the accepted fluctuations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.initial.crossfit import CrossFitted, Fitted
from fedtmle.model.problem import Estimate
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear
from fedtmle.model.submodels import GroupedLinear, LongRows
from fedtmle.model.table import AnyTable, Table, people_blocks
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime, Everyone
from fedtmle.targets.effects.moments import (
    MomentColumns,
    estimate_components,
)
from fedtmle.targets.effects.prepare import Q_MARGIN, EffectColumns, arm_probabilities
from fedtmle.targets.long import AbstractLongProblem, History
from fedtmle.targets.regimes.estimands import Shift
from fedtmle.targets.regimes.timeline import Followed, PeriodView, Timeline
from fedtmle_core import kernels
from fedtmle_core.exact import Sums
from fedtmle_core.parallel import mapped
from fedtmle_core.types import Array, Bools, Family, RowBound, exponent

# Sequential regression: weights from models of treatment and censoring, predictions period by period.
#
# For a rule d and the outcome at horizon h, with A_t the treatment and H_t the history of period t,
#
#     W_t = prod_{s<=t} r_s(A_s, H_s) 1(C_s = 0) / pi_s(A_s, H_s),   r_s = d_s / g_s,
#     Q_t(a, H_t) = E[Z_{t+1} | A_t = a, H_t, C_t = 0],   Z_{h+1} = Y,
#     Z_t = m_t(H_t), the mean of Q_t under the rule; 1 after an event before t.
#
# r_s is the ratio of the density of treatment under the rule to that observed. For a modified policy it is
# p/(1 - p), with p the probability that a row is one of the modified rows, among observed and modified rows
# in equal number. W_t is at most ``ceiling``: the bound is on the cumulative product. Each Q_t is fluctuated,
#
#     logit Q*_t = logit Q_t + eps_t,   P_n W_t (Z_{t+1} - Q*_t) = 0,
#
# before it is used for Z_t. Z_t is the fluctuated prediction for everyone at risk in period t, those who are
# censored *in* the period included.
#
# With cross-fitting each fold v has regressions of its own, from the last period to the first: that of period
# t without fold v has as outcomes the Z_{t+1} of the regressions without fold v (`ChainFit.without`). So
# nothing of a person's own fold is in the regressions that predict for this person. W and eps are common to
# all folds.

EVERYONE = Everyone()


@final
@dataclass(frozen=True, kw_only=True)
class PeriodScores:
    """The models of one period: of each arm's probability, of censoring, and of modified rows.

    ``treatment`` holds the fits of g as `arm_probabilities` reads them; a modified policy has none.
    ``censoring`` is None if nobody is censored in the period. ``modified`` has one classifier for each rule,
    None where the rule leaves treatment as it is.
    """

    treatment: tuple[Fitted, ...] = ()
    censoring: Fitted | None = None
    modified: tuple[Fitted | None, ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class SequentialStep:
    """The regression of one period, and its fluctuation eps_t."""

    outcome: Fitted
    eps: float


@final
@dataclass(frozen=True, kw_only=True)
class ChainFit:
    """The steps of one mean that are done: those of the last periods up to ``horizon``, in order of time.

    The mean is that of ``population``, whose share of the pooled weight is ``share``. Its regressions are
    fitted to everyone, and fluctuated in the population: strata leave the estimates of everyone as they are.
    """

    rule: int
    horizon: int
    population: AbstractPopulation = EVERYONE
    share: float = 1.0
    steps: tuple[SequentialStep, ...] = ()

    def step(self, period: int) -> SequentialStep:
        return self.steps[period - 1 - (self.horizon - len(self.steps))]

    def without(self, fold: int) -> ChainFit:
        """Return, with folds, the chain whose predictions for everyone are those fitted without one fold."""
        steps = []
        for step in self.steps:
            if not isinstance(step.outcome, CrossFitted):
                raise TypeError("a step without folds has one regression")
            steps.append(replace(step, outcome=step.outcome.models[fold]))
        return replace(self, steps=tuple(steps))

    def before(self, step: SequentialStep) -> ChainFit:
        """Return the chain with the step of one earlier period put in front."""
        return replace(self, steps=(step, *self.steps))


@final
@dataclass(frozen=True, kw_only=True)
class SequentialRules:
    """Evaluate weights and predictions of all rules on a table."""

    timeline: Timeline
    columns: EffectColumns
    rules: tuple[AbstractRegime, ...]
    scores: tuple[PeriodScores, ...]  # scores of each period
    ceiling: float  # bound of a cumulative weight
    weight_mean: float
    completion: int = 0  # the number of the imputed data set, 0 if there is but one

    @cached_property
    def views(self) -> tuple[PeriodView, ...]:
        return tuple(PeriodView(timeline=self.timeline, period=t + 1) for t in range(self.timeline.periods))

    def show(self, table: Table, period: int) -> Table:
        """Return the rows of one period."""
        return self.views[period - 1].show(table)

    def weight(self, table: Table) -> Array:
        """Return the observation weights over their pooled mean."""
        return self.columns.relative_weight(table, self.weight_mean)

    def inside(self, chain: ChainFit, table: Table) -> Array:
        """Return v/P(v), the indicator of the mean's population over its share."""
        nobody, stratum = np.zeros(0, dtype=np.int16), self.columns.stratum(table)
        return chain.population.indicator(table, nobody, stratum, lambda: np.zeros(0)) / chain.share

    # Weights.

    def ratio(self, shown: Table, rule: int, period: int) -> Array:
        """Return r_t at the observed treatment, from the rows of the period."""
        regime, scores = self.rules[rule].at(period), self.scores[period - 1]
        if isinstance(regime, Shift):
            model = scores.modified[rule]
            if model is None:
                return np.ones(shown.n_rows)
            p = model.predict(shown)
            return np.asarray(p / np.maximum(1.0 - p, np.finfo(np.float64).tiny))
        arms = self.columns.arms
        d = regime.probabilities(shown, arms)
        fits = [model.predict(shown) for model in scores.treatment]
        g = arm_probabilities(fits, len(arms), slice(0, shown.n_rows))
        taken = self.columns.arm(shown).astype(np.int64)[None, :]
        given, chance = (np.take_along_axis(values, taken, axis=0)[0] for values in (d, g))
        return np.where(given > 0, given / np.maximum(chance, np.finfo(np.float64).tiny), 0.0)

    def products(self, table: Table, followed: Followed, rule: int, horizon: int) -> Array:
        """Return the cumulative weights before truncation, shape (horizon, N); 0 once censored."""
        products = np.zeros((horizon, table.n_rows))
        so_far = np.ones(table.n_rows)
        for t in range(1, horizon + 1):
            shown = self.show(table, t)
            here = followed.uncensored[t - 1]
            so_far = np.where(here, so_far * self.ratio(shown, rule, t), 0.0)
            censoring = self.scores[t - 1].censoring
            if censoring is not None:
                stays = np.maximum(1.0 - censoring.predict(shown), np.finfo(np.float64).tiny)
                so_far = np.where(here, so_far / stays, 0.0)
            products[t - 1] = so_far
        return products

    def weights(self, table: Table, followed: Followed, rule: int, horizon: int) -> tuple[Array, Bools]:
        """Return W_t, shape (horizon, N), and whose weight was truncated in some period."""
        products = self.products(table, followed, rule, horizon)
        return np.minimum(products, self.ceiling), np.asarray((products > self.ceiling).any(axis=0))

    # Predictions.

    def logits(self, model: Fitted, shown: Table) -> Array:
        """Return the logits of predictions, truncated as those of every outcome model are."""
        predicted = model.predict(shown)
        bounded, logits = np.empty(shown.n_rows), np.empty(shown.n_rows)
        if not kernels.bound(predicted, Q_MARGIN, 1.0 - Q_MARGIN, bounded, logits):
            raise DataError("the outcome model's prediction is not finite in some rows")
        return logits

    def mean(self, chain: ChainFit, table: Table, period: int, moved: float = 0.0) -> Array:
        """Return m_t, the mean of the fluctuated Q_t under the rule; ``moved`` moves its logits further."""
        shown, step = self.show(table, period), chain.step(period)
        regime, shift = self.rules[chain.rule].at(period), step.eps + moved
        if isinstance(regime, Shift):
            treatment = self.timeline.treatment
            world = shown.with_numeric(treatment, regime.moved(shown.numeric[treatment]))
            return kernels.expit(self.logits(step.outcome, world) + shift)
        d = regime.probabilities(shown, self.columns.arms)
        total = np.zeros(table.n_rows)
        for code, share in enumerate(d):
            if share.any():
                world = self.columns.in_arm(shown, code)
                total += share * kernels.expit(self.logits(step.outcome, world) + shift)
        return total

    def natural(self, chain: ChainFit, shown: Table, period: int) -> Array:
        """Return logit Q*_t at the observed treatment, from the rows of the period."""
        step = chain.step(period)
        return self.logits(step.outcome, shown) + step.eps

    def next_outcome(self, chain: ChainFit, table: Table, period: int, moved: float = 0.0) -> Array:
        """Return Z_{t+1}, shape (N,): for those not censored in the period; other entries are arbitrary."""
        is_last = period == chain.horizon
        if self.timeline.event is None:
            return self.columns.y(table) if is_last else self.mean(chain, table, period + 1, moved)
        event = self.timeline.event_in(table, period)
        rest = np.zeros(table.n_rows) if is_last else self.mean(chain, table, period + 1, moved)
        return np.where(event, 1.0, rest)


Result = TypeVar("Result")


@final
@dataclass(frozen=True, kw_only=True)
class RegimeLaw:
    """The fluctuations that were accepted after the sequential regressions' own."""

    history: History = ()


@final
@dataclass(frozen=True, kw_only=True)
class ChainRows:
    """One mean evaluated for some people, shape (periods, N): weights, outcomes and predicted logits."""

    weights: Array
    outcomes: Array
    logits: Array
    first: Array  # m_1, shape (N,)


@final
@dataclass(frozen=True, kw_only=True)
class RegimeProblem(AbstractLongProblem[RegimeLaw, Table]):
    """Means under rules.

    ``population_ceiling`` bounds an observation's weight over a population's share, ``ceiling`` W_t times it.
    """

    runaway = "prediction", "a rule may be followed by too few people"

    labels: tuple[str, ...]
    sequence: SequentialRules = field(compare=False)
    chains: tuple[ChainFit, ...] = field(compare=False)
    outcome_bounds: tuple[float, float]
    ceiling: float
    population_ceiling: float
    largest_cluster: int = 1
    spanning: int = 0

    @property
    def reach(self) -> float:
        return self.outcome_bounds[1] - self.outcome_bounds[0]

    @property
    def terms(self) -> int:
        """The most long rows of one person in one coordinate."""
        return max(chain.horizon for chain in self.chains)

    @property
    def longest(self) -> tuple[int, ...]:
        """For each rule, the number of the mean of everyone with its last horizon."""
        everyone = [(r, chain) for r, chain in enumerate(self.chains) if chain.population == EVERYONE]
        rules = dict.fromkeys(chain.rule for _, chain in everyone)
        return tuple(
            max((chain.horizon, r) for r, chain in everyone if chain.rule == rule)[1] for rule in rules
        )

    @property
    def effect_columns(self) -> EffectColumns:
        return self.sequence.columns

    def law(self, history: History) -> RegimeLaw:
        return RegimeLaw(history=history)

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
        """Return ``work`` of consecutive people, in order; the blocks run in parallel."""
        return mapped(work, people_blocks(rows, self.terms * len(self.chains)))

    def moved(self, law: RegimeLaw, r: int) -> float:
        """Return by how much the law moves the logits of a mean."""
        return -self.reach * math.fsum(eps[r] for eps in law.history)

    def weights(self, table: Table) -> list[tuple[Array, Bools]]:
        """Return W_t of every mean, shape (periods, N), and whose weight was truncated."""
        followed = self.sequence.timeline.follow(table)
        return [self.sequence.weights(table, followed, each.rule, each.horizon) for each in self.chains]

    def evaluate(self, law: RegimeLaw, table: Table) -> list[ChainRows]:
        """Return every mean evaluated for some people at the law."""
        sequence, followed = self.sequence, self.sequence.timeline.follow(table)
        evaluated = []
        for r, chain in enumerate(self.chains):
            moved, periods = self.moved(law, r), range(1, chain.horizon + 1)
            weights, _ = sequence.weights(table, followed, chain.rule, chain.horizon)
            logits = np.stack([sequence.natural(chain, sequence.show(table, t), t) + moved for t in periods])
            means = [sequence.mean(chain, table, t, moved) for t in periods]
            outcomes = np.stack([self._outcome(chain, table, t, means) for t in periods])
            evaluated.append(
                ChainRows(
                    weights=weights,
                    outcomes=np.where(weights > 0, outcomes, 0.0),
                    logits=logits,
                    first=means[0],
                )
            )
        return evaluated

    def _outcome(self, chain: ChainFit, table: Table, period: int, means: Sequence[Array]) -> Array:
        """Return Z_{t+1}, given m_1, m_2, ..."""
        sequence = self.sequence
        if period == chain.horizon:
            return sequence.next_outcome(chain, table, period)
        event = sequence.timeline.event_in(table, period)
        return np.where(event, 1.0, means[period])

    def submodel(self, law: RegimeLaw, rows: AnyTable) -> AbstractSubmodel:
        def over(work: Callable[[LongRows], Result]) -> Iterator[Result]:
            return self.over(rows, lambda table: work(self._long(law, table)))

        return GroupedLinear(
            people=rows.n_rows,
            dim=self.dim,
            family=Family.LOGISTIC,
            bound=self.row_bound(law),
            over=over,
            has_groups=True,
        )

    def _long(self, law: RegimeLaw, table: Table) -> LongRows:
        """Return a row for each person, period and mean with a weight; the means of a period are a group."""
        evaluated = self.evaluate(law, table)
        weight = self.sequence.weight(table)
        shape = (len(evaluated), self.terms, table.n_rows)
        weights, outcomes, logits = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for r, rows in enumerate(evaluated):
            periods = len(rows.weights)
            weights[r, :periods] = rows.weights * (weight * self.sequence.inside(self.chains[r], table))
            outcomes[r, :periods], logits[r, :periods] = rows.outcomes, rows.logits
        person, period, chain = np.nonzero((weights > 0).transpose(2, 1, 0))
        X = np.zeros((self.dim, len(person)))
        X[chain, np.arange(len(person))] = -self.reach
        design = GeneralisedLinear(
            family=Family.LOGISTIC,
            X=X,
            offset=np.ascontiguousarray(logits[chain, period, person]),
            y=np.ascontiguousarray(outcomes[chain, period, person]),
            w=np.ascontiguousarray(weights[chain, period, person]),
            bound=self.row_bound(law),
            y_largest=1.0,
        )
        counts = np.bincount(person, minlength=table.n_rows)
        return LongRows(design, counts, groups=person * self.terms + period)

    # The rows' contributions to the closing sums.

    def columns(self, law: RegimeLaw, table: Table) -> MomentColumns:
        """Return u, t and m of each mean: the EIF's parts, times the weight."""
        weight = self.sequence.weight(table)
        stacked = np.zeros((3, len(self.labels), table.n_rows))
        u, t, m = stacked
        for r, rows in enumerate(self.evaluate(law, table)):
            residual = rows.weights * (rows.outcomes - kernels.expit(rows.logits))
            t[r] = self.sequence.inside(self.chains[r], table)
            m[r] = t[r] * (self.reach * rows.first)
            u[r] = t[r] * (self.reach * residual.sum(axis=0))
        u += m
        stacked *= weight
        return MomentColumns(stacked)

    def losses(self, law: RegimeLaw, rows: AnyTable) -> Array:
        def of(table: Table) -> Array:
            loss = np.zeros(table.n_rows)
            for each, chain in zip(self.evaluate(law, table), self.chains, strict=True):
                terms = kernels.softplus(each.logits) - each.outcomes * each.logits
                loss += (each.weights * terms).sum(axis=0) * self.sequence.inside(chain, table)
            return np.asarray(loss * self.sequence.weight(table))

        return np.asarray(np.concatenate(list(self.over(rows, of))))

    def finish(self, law: RegimeLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        psi, covariance = estimate_components(pooled, len(self.labels))
        return Estimate(psi=self.outcome_bounds[0] + psi, covariance=covariance)

    def finish_one_step(self, law: RegimeLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - see above
        psi, covariance = estimate_components(pooled, len(self.labels), one_step=True)
        return Estimate(psi=self.outcome_bounds[0] + psi, covariance=covariance)

    def row_bound(self, law: RegimeLaw) -> RowBound:  # noqa: ARG002 - declared, for every law
        x = self.reach * self.ceiling * self.terms
        return RowBound(gradient=exponent(x), curvature=exponent(0.25 * x * self.reach))
