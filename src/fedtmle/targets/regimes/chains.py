"""Sequential regression: weights from models of treatment and censoring, predictions period by period.

For a rule d and the outcome at horizon h, with A_t the treatment and H_t the history of period t,

    W_t = prod_{s<=t} r_s(A_s, H_s) 1(C_s = 0) / pi_s(A_s, H_s),   r_s = d_s / g_s,
    Q_t(a, H_t) = E[Z_{t+1} | A_t = a, H_t, C_t = 0],   Z_{h+1} = Y,
    Z_t = m_t(H_t), the mean of Q_t under the rule; 1 after an event before t.

r_s is the ratio of the density of treatment under the rule to that observed. For a modified policy it is
p/(1 - p), with p the probability that a row is one of the modified rows, among observed and modified rows in
equal number. W_t is at most ``ceiling``: the bound is on the cumulative product. Each Q_t is fluctuated,

    logit Q*_t = logit Q_t + eps_t,   P_n W_t (Z_{t+1} - Q*_t) = 0,

before it is used for Z_t. Z_t is the fluctuated prediction for everyone at risk in period t, those who are
censored *in* the period included.

With cross-fitting each fold v has regressions of its own, from the last period to the first: that of period t
without fold v has as outcomes the Z_{t+1} of the regressions without fold v (`ChainFit.without`). So nothing
of a person's own fold is in the regressions that predict for this person. W and eps are common to all folds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.initial.crossfit import CrossFitted, Fitted
from fedtmle.model import kernels
from fedtmle.model.table import Table
from fedtmle.model.types import Array, Bools
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime, Everyone
from fedtmle.targets.effects.prepare import Q_MARGIN, EffectColumns, arm_probabilities
from fedtmle.targets.regimes.rules import Shift
from fedtmle.targets.regimes.timeline import Followed, PeriodView, Timeline

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
