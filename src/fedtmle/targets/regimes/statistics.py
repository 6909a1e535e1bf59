"""What a study of treatment over time asks of its silos: responses of regressions, and statistics."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.table import AbstractBins, AnyTable, Group, Table, over_blocks
from fedtmle.targets.diagnostics import WEIGHT_EDGES
from fedtmle.targets.effects.balance import ArmRows
from fedtmle.targets.effects.prepare import EffectColumns, arm_probabilities
from fedtmle.targets.effects.statistics import AbstractLaidOutColumns, Block, TallyLayout
from fedtmle.targets.long import AbstractLongArmWeights, OverProblem
from fedtmle.targets.regimes.estimands import Shift
from fedtmle.targets.regimes.problem import ChainFit, RegimeProblem, SequentialRules
from fedtmle.targets.regimes.timeline import PeriodView, Timeline
from fedtmle_core import kernels
from fedtmle_core.types import Array, IntArray, exponent

# The responses of the regressions of one period; tables are the rows of the period (`PeriodView`).

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

    periods = 2
    is_public = True

    columns: EffectColumns
    timeline: Timeline
    period: int
    weight_mean: float
    rule: Shift

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


# The statistics that a study of treatment over time asks of its silos, as values.

Result = TypeVar("Result")


@final
@dataclass(frozen=True, kw_only=True)
class RegimeCounts(AbstractLaidOutColumns[Table]):
    """People by arm in period 1 and stratum; in each period those at risk, censored and with an event."""

    label = "count"

    columns: EffectColumns
    timeline: Timeline
    weight_exponent: int

    @cached_property
    def layout(self) -> TallyLayout:
        periods, strata = range(1, self.timeline.periods + 1), self.columns.strata_levels
        return TallyLayout(
            {
                "arm": Block(tuple(f"in arm {arm} in period 1" for arm in self.columns.arms), 1),
                "at risk": Block(tuple(f"at risk in period {t}" for t in periods), 1),
                "censored": Block(tuple(f"censored in period {t}" for t in periods), 1),
                "events": Block(tuple(f"with the event in period {t}" for t in periods), 1),
                "weight": Block(("weight",), self.weight_exponent),
                "stratum": Block(tuple(f"in stratum {level}" for level in strata), 1),
                "stratum weight": Block(
                    tuple(f"weight in stratum {level}" for level in strata), self.weight_exponent
                ),
            }
        )

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        followed, shown = (
            self.timeline.follow(piece),
            PeriodView(timeline=self.timeline, period=1).show(piece),
        )
        values = np.zeros((len(self.exponents), piece.n_rows))
        part = self.layout.split(values)
        for code in range(len(self.columns.arms)):
            part["arm"][code] = self.columns.taken(shown, code)
        part["at risk"][:] = followed.at_risk
        part["censored"][:] = followed.at_risk & ~followed.uncensored
        for t in range(self.timeline.periods):
            part["events"][t] = followed.uncensored[t] & self.timeline.event_in(piece, t + 1)
        weight, stratum = self.columns.weight(piece), self.columns.stratum(piece)
        part["weight"][:] = weight
        if stratum is not None:
            part["stratum"][:] = stratum == np.arange(len(self.columns.strata_levels))[:, None]
            part["stratum weight"][:] = part["stratum"] * weight
        return values


@final
@dataclass(frozen=True)
class RegimeWeights(OverProblem[Table], AbstractLaidOutColumns[Table]):
    """Each mean's weight W in a person's last period at risk up to the horizon, and its square."""

    label = "inverse probability"

    problem: RegimeProblem

    @cached_property
    def layout(self) -> TallyLayout:
        means, h = range(len(self.problem.chains)), self.problem.ceiling
        return TallyLayout(
            {
                "omega": Block(tuple(f"weight of mean {r}" for r in means), exponent(h)),
                "squares": Block(tuple(f"weight of mean {r}, squared" for r in means), exponent(h * h)),
            }
        )

    @property
    def judged(self) -> Sequence[int]:
        return self.layout.places["omega"]

    def evaluate(self, piece: Table) -> Array:
        at_risk = self.problem.sequence.timeline.follow(piece).at_risk
        weight, people = self.problem.sequence.weight(piece), np.arange(piece.n_rows)
        chains = self.problem.chains
        omega = np.empty((len(self.problem.chains), piece.n_rows))
        for r, (weights, _) in enumerate(self.problem.weights(piece)):
            last = at_risk[: len(weights)].sum(axis=0) - 1
            omega[r] = weights[last, people] * weight * self.problem.sequence.inside(chains[r], piece)
        return np.concatenate([omega, omega * omega])


@final
@dataclass(frozen=True)
class RegimeTruncationBins(OverProblem[Table], AbstractBins[Table]):
    """Per rule, how many people have a truncated weight in some period (bin 1)."""

    label = "weights above their bound"

    problem: RegimeProblem
    longest: tuple[int, ...]  # for each rule, the mean with its last horizon

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2,) * len(self.longest)

    def groups(self, piece: Table) -> list[Group]:
        truncated = [each for _, each in self.problem.weights(piece)]
        return [Group(bins=truncated[r].astype(np.uint8)) for r in self.longest]


@final
@dataclass(frozen=True)
class FirstArmWeights(AbstractLongArmWeights[Table]):
    """Weighs people by the inverse propensity score of their arm in period 1; by 1 without arms."""

    problem: RegimeProblem

    def weighed(self, table: Table) -> ArmRows:
        sequence, n = self.problem.sequence, table.n_rows
        shown, weight, columns = sequence.show(table, 1), sequence.weight(table), sequence.columns
        if not columns.arms:
            return ArmRows(table=shown, arm=np.zeros(n, dtype=np.int64), weight=weight, inverse=np.ones(n))
        arm = columns.arm(shown)
        fits = [model.predict(shown) for model in sequence.scores[0].treatment]
        g = kernels.chosen(arm_probabilities(fits, len(columns.arms), slice(0, n)), arm)
        bounded = np.maximum(g, 1.0 / min(sequence.ceiling, self.ceiling))
        return ArmRows(table=shown, arm=arm, weight=weight, inverse=1.0 / bounded)


@final
@dataclass(frozen=True)
class AdherenceBins(OverProblem[Table], AbstractBins[Table]):
    """Per rule and period, of those at risk: how many have followed the rule so far, uncensored (bin 1)."""

    label = "people who follow a rule"

    problem: RegimeProblem
    longest: tuple[int, ...]  # for each rule, the mean with its last horizon

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2,) * sum(self.problem.chains[r].horizon for r in self.longest)

    def groups(self, piece: Table) -> list[Group]:
        at_risk = self.problem.sequence.timeline.follow(piece).at_risk
        weights = [each for each, _ in self.problem.weights(piece)]
        return [
            Group(bins=(row > 0)[at_risk[t]].astype(np.uint8))
            for r in self.longest
            for t, row in enumerate(weights[r])
        ]


@final
@dataclass(frozen=True)
class WeightBins(OverProblem[Table], AbstractBins[Table]):
    """Per rule and period, a histogram of the weights of those who have followed the rule so far."""

    label = "inverse probability weights over time"
    on_a_scale = True

    problem: RegimeProblem
    longest: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        periods = sum(self.problem.chains[r].horizon for r in self.longest)
        return (len(WEIGHT_EDGES) + 1,) * periods

    def groups(self, piece: Table) -> list[Group]:
        weights = [each for each, _ in self.problem.weights(piece)]
        return [
            Group(bins=kernels.bins_between(WEIGHT_EDGES, row[row > 0]))
            for r in self.longest
            for row in weights[r]
        ]
