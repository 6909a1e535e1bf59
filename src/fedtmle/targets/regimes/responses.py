"""The responses of the regressions of one period; tables are the rows of the period (`PeriodView`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.table import Table
from fedtmle.model.types import Array, IntArray
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.regimes.chains import ChainFit, SequentialRules
from fedtmle.targets.regimes.rules import Shift
from fedtmle.targets.regimes.timeline import Timeline

MODIFIED = "\0modified"  # the column that distinguishes modified rows from observed ones


@final
@dataclass(frozen=True, kw_only=True)
class AmongAtRisk(AbstractResponse):
    """Another response, among those at risk in a period."""

    response: AbstractResponse
    timeline: Timeline
    period: int

    def of(self, table: Table) -> tuple[Array, Array]:
        y, w = self.response.of(table)
        return y, w * self.timeline.follow(table).at_risk[self.period - 1]


@final
@dataclass(frozen=True, kw_only=True)
class CensoredInPeriod(AbstractResponse):
    """Whether a person is censored in a period, among those at risk."""

    columns: EffectColumns
    timeline: Timeline
    period: int
    weight_mean: float

    def of(self, table: Table) -> tuple[Array, Array]:
        followed, t = self.timeline.follow(table), self.period - 1
        censored = followed.at_risk[t] & ~followed.uncensored[t]
        weight = self.columns.relative_weight(table, self.weight_mean)
        return censored.astype(np.float64), weight * followed.at_risk[t]


@final
@dataclass(frozen=True, kw_only=True)
class ModifiedRows(AbstractResponse):
    """1 for a row with the modified treatment, 0 for the same person's row as it was observed."""

    columns: EffectColumns
    timeline: Timeline
    period: int
    weight_mean: float
    rule: Shift

    @property
    def periods(self) -> int:
        return 2

    @property
    def is_public(self) -> bool:
        return True

    @property
    def shared_residuals(self) -> Hashable:
        return "modified rows", self.period  # at zero, 1/2 in the observed row and -1/2 in the modified one

    def expand(self, table: Table) -> tuple[Table, IntArray]:
        counts = 2 * self.timeline.follow(table).at_risk[self.period - 1].astype(np.int64)
        rows = np.repeat(np.arange(table.n_rows), counts)
        is_modified = np.tile([0.0, 1.0], len(rows) // 2)
        long, name = table.take(rows), self.timeline.treatment
        observed = long.numeric[name]
        treatment = np.where(is_modified == 1.0, self.rule.moved(observed), observed)
        numeric = {**long.numeric, name: treatment, MODIFIED: is_modified}
        return replace(long, numeric=numeric), counts

    def of(self, table: Table) -> tuple[Array, Array]:
        return table.numeric[MODIFIED], self.columns.relative_weight(table, self.weight_mean)


@final
@dataclass(frozen=True, kw_only=True)
class NextOutcome(AbstractResponse):
    """Z_{t+1} of one chain, among those not censored in period t."""

    sequence: SequentialRules
    chain: ChainFit
    period: int

    def of(self, table: Table) -> tuple[Array, Array]:
        here = self.sequence.timeline.follow(table).uncensored[self.period - 1]
        y = self.sequence.next_outcome(self.chain, table, self.period)
        return np.where(here, y, 0.0), self.sequence.weight(table) * here


@final
@dataclass(frozen=True, kw_only=True)
class Fluctuated(AbstractResponse):
    """The outcome of a step, weighted by W_t, for its fluctuation; the step's prediction is the offset."""

    sequence: SequentialRules
    chain: ChainFit
    period: int

    @property
    def shared_residuals(self) -> Hashable:
        # Rules and strata differ by their weights. Imputed data sets differ by their predictions, too.
        return "fluctuations", self.period, self.chain.horizon, self.sequence.completion

    def of(self, table: Table) -> tuple[Array, Array]:
        followed = self.sequence.timeline.follow(table)
        here = followed.uncensored[self.period - 1]
        y = np.where(here, self.sequence.next_outcome(self.chain, table, self.period), 0.0)
        weights, _ = self.sequence.weights(table, followed, self.chain.rule, self.period)
        return y, self.sequence.weight(table) * weights[-1] * self.sequence.inside(self.chain, table)

    def offset(self, table: Table) -> Array:
        return self.sequence.natural(self.chain, table, self.period)
