"""The problem of treatment over time: means under rules, from regressions that were fluctuated one by one.

With Z, Q, m and W of `chains` the EIF of a mean is

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
from dataclasses import dataclass, field
from typing import TypeVar, final

import numpy as np

from fedtmle.model import kernels
from fedtmle.model.exact import Sums
from fedtmle.model.families import Family
from fedtmle.model.grouped import GroupedLinear, LongRows
from fedtmle.model.parallel import mapped
from fedtmle.model.problem import Estimate
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear
from fedtmle.model.table import AnyTable, Table, people_blocks
from fedtmle.model.types import Array, Bools, RowBound, exponent
from fedtmle.targets.effects.moments import (
    MomentColumns,
    estimate_components,
)
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.long import AbstractLongProblem, History
from fedtmle.targets.regimes.chains import EVERYONE, ChainFit, SequentialRules

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

    @property
    def runaway(self) -> tuple[str, str]:
        return "prediction", "a rule may be followed by too few people"

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
