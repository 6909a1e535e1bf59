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
from functools import reduce
from operator import add
from typing import TypeVar, final

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model import kernels
from fedtmle.model.exact import Sums, column_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.grouped import GroupedLinear, LongRows
from fedtmle.model.parallel import mapped
from fedtmle.model.problem import AbstractProblem, Estimate
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear, NoNormaliser
from fedtmle.model.table import AnyTable, StreamedTable, Table, people_blocks
from fedtmle.model.types import Array, Bools, RowBound, exponent
from fedtmle.targets.effects.moments import (
    ClosingLayout,
    MomentColumns,
    closing_sums,
    estimate_components,
    spanning_sums,
)
from fedtmle.targets.regimes.chains import ChainFit, SequentialRules
from fedtmle.targets.time.prepare import ClusterCodes

Result = TypeVar("Result")

LINK_REACH = 64.0  # a predicted logit moved further than this is a runaway fluctuation, not a fit


@final
@dataclass(frozen=True, kw_only=True)
class RegimeLaw:
    """The accepted fluctuations, after the sequential ones."""

    history: tuple[tuple[float, ...], ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class ChainRows:
    """One mean as some people see it, shape (periods, N): weights, outcomes and logits of predictions."""

    weights: Array
    outcomes: Array
    logits: Array
    first: Array  # m_1, shape (N,)


@final
@dataclass(frozen=True, kw_only=True)
class RegimeProblem(AbstractProblem[RegimeLaw, AnyTable]):
    """Means under rules.

    ``ceiling`` bounds W_t times the observation's weight, ``weight_ceiling`` the latter alone.
    """

    labels: tuple[str, ...]
    sequence: SequentialRules = field(compare=False)
    chains: tuple[ChainFit, ...] = field(compare=False)
    outcome_bounds: tuple[float, float]
    ceiling: float
    weight_ceiling: float
    largest_cluster: int = 1
    spanning: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return self.labels

    @property
    def width(self) -> float:
        return self.outcome_bounds[1] - self.outcome_bounds[0]

    @property
    def R(self) -> Array:
        """The combinations of components that are reported: each by itself."""
        return np.eye(len(self.labels))

    @property
    def L(self) -> Array:
        """The combinations of components that are fluctuated: each by itself."""
        return self.R

    @property
    def terms(self) -> int:
        """The most long rows of one person in one coordinate."""
        return max(chain.horizon for chain in self.chains)

    @property
    def longest(self) -> tuple[int, ...]:
        """For each rule, the number of the mean with its last horizon."""
        rules = dict.fromkeys(chain.rule for chain in self.chains)
        return tuple(
            max((chain.horizon, r) for r, chain in enumerate(self.chains) if chain.rule == rule)[1]
            for rule in rules
        )

    def start(self) -> RegimeLaw:
        return RegimeLaw()

    def read(self, rows: object) -> AnyTable:
        if not isinstance(rows, Table | StreamedTable):
            raise TypeError("a problem of treatment over time reads tables that the data layer made")
        return rows

    def concatenate(self, parts: Sequence[AnyTable]) -> AnyTable:
        raise NotImplementedError("tables are pooled by the data layer, before nuisances are fitted")

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterator[Result]:
        """Return ``work`` of consecutive people, in order; the blocks run in parallel."""
        return mapped(work, people_blocks(rows, self.terms * len(self.chains)))

    def moved(self, law: RegimeLaw, r: int) -> float:
        """Return by how much the law moves the logits of a mean."""
        return -self.width * math.fsum(eps[r] for eps in law.history)

    def weights(self, table: Table) -> list[tuple[Array, Bools]]:
        """Return W_t of every mean, shape (periods, N), and whose weight was truncated."""
        followed = self.sequence.timeline.follow(table)
        return [self.sequence.weights(table, followed, each.rule, each.horizon) for each in self.chains]

    def evaluate(self, law: RegimeLaw, table: Table) -> list[ChainRows]:
        """Return every mean as some people see it at the law."""
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
            people=rows.n_rows, dim=self.dim, family=Family.LOGISTIC, bound=self.row_bound(law), over=over
        )

    def _long(self, law: RegimeLaw, table: Table) -> LongRows:
        """Return a row for each person, mean and period with a weight."""
        evaluated = self.evaluate(law, table)
        weight = self.sequence.weight(table)
        shape = (len(evaluated), self.terms, table.n_rows)
        weights, outcomes, logits = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for r, rows in enumerate(evaluated):
            periods = len(rows.weights)
            weights[r, :periods] = rows.weights * weight
            outcomes[r, :periods], logits[r, :periods] = rows.outcomes, rows.logits
        person, chain, period = np.nonzero((weights > 0).transpose(2, 0, 1))
        X = np.zeros((self.dim, len(person)))
        X[chain, np.arange(len(person))] = -self.width
        design = GeneralisedLinear(
            family=Family.LOGISTIC,
            X=X,
            offset=np.ascontiguousarray(logits[chain, period, person]),
            y=np.ascontiguousarray(outcomes[chain, period, person]),
            w=np.ascontiguousarray(weights[chain, period, person]),
            bound=self.row_bound(law),
            y_largest=1.0,
        )
        return LongRows(design, np.bincount(person, minlength=table.n_rows))

    # What the rows add to the closing sums.

    def columns(self, law: RegimeLaw, table: Table) -> MomentColumns:
        """Return u, t and m of each mean: the EIF's parts, times the weight."""
        weight = self.sequence.weight(table)
        stacked = np.zeros((3, len(self.labels), table.n_rows))
        u, t, m = stacked
        for r, rows in enumerate(self.evaluate(law, table)):
            residual = rows.weights * (rows.outcomes - kernels.expit(rows.logits))
            m[r] = self.width * rows.first
            t[r] = 1.0
            u[r] = self.width * residual.sum(axis=0)
        u += m
        stacked *= weight
        return MomentColumns(stacked)

    def whole(self, law: RegimeLaw, rows: AnyTable) -> MomentColumns:
        parts = [columns.stacked for columns in self.over(rows, lambda table: self.columns(law, table))]
        return MomentColumns(np.concatenate(parts, axis=2))

    def clusters(self, rows: AnyTable) -> ClusterCodes:
        """Return the clusters of a whole table in memory."""
        if isinstance(rows, StreamedTable):
            raise TypeError("a streamed table has no clusters")
        columns = self.sequence.columns
        return ClusterCodes(columns.clusters(rows), columns.spanned(rows))

    def losses(self, law: RegimeLaw, rows: AnyTable) -> Array:
        def of(table: Table) -> Array:
            loss = np.zeros(table.n_rows)
            for each in self.evaluate(law, table):
                terms = kernels.softplus(each.logits) - each.outcomes * each.logits
                loss += (each.weights * terms).sum(axis=0)
            return np.asarray(loss * self.sequence.weight(table))

        return np.asarray(np.concatenate(list(self.over(rows, of))))

    def eif(self, law: RegimeLaw, rows: AnyTable, psi: Array) -> Array:  # noqa: ARG002 - plug-ins on these rows
        columns = self.whole(law, rows)
        components = columns.m.sum(axis=1) / columns.t.sum(axis=1)
        return np.asarray((columns.u - columns.t * components[:, None]).T)

    def moments(self, law: RegimeLaw, rows: AnyTable) -> Sums:
        exponents, zero = self._moment_exponents(), zero_sums(self.moment_shifts(law))
        if self.sequence.columns.cluster is None:
            alone = ClusterCodes(None, None)
            parts = self.over(rows, lambda table: closing_sums(alone, self.columns(law, table), exponents))
            return reduce(add, parts, zero)
        columns, clusters = self.whole(law, rows), self.clusters(rows)
        total = closing_sums(clusters, columns, exponents)
        if self.spanning:
            total = total.joined(spanning_sums(clusters, columns, exponents, self.spanning))
        return total

    def moment_shifts(self, law: RegimeLaw) -> tuple[int, ...]:  # noqa: ARG002 - declared, for every law
        return column_shifts(self._moment_exponents())

    def _moment_exponents(self) -> list[int]:
        u = self.largest_cluster * self.width * (self.ceiling * self.terms + self.weight_ceiling)
        t = self.largest_cluster * self.weight_ceiling
        return ClosingLayout(len(self.labels)).exponents(u, t, self.spanning)

    def finish(self, law: RegimeLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        psi, covariance = estimate_components(pooled, len(self.labels))
        return Estimate(psi=self.outcome_bounds[0] + psi, covariance=covariance)

    def finish_one_step(self, law: RegimeLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - see above
        psi, covariance = estimate_components(pooled, len(self.labels), one_step=True)
        return Estimate(psi=self.outcome_bounds[0] + psi, covariance=covariance)

    # The law.

    def move(self, law: RegimeLaw, eps: Array) -> RegimeLaw:
        if not self.admits(law, eps):
            raise NumericalError(
                f"eps: the fluctuation would move a prediction by more than {LINK_REACH:g} on the logit "
                "scale; a rule may be followed by too few people"
            )
        return RegimeLaw(history=(*law.history, tuple(map(float, eps))))

    def admits(self, law: RegimeLaw, eps: Array) -> bool:  # noqa: ARG002 - the same set at every law
        return bool((np.abs(eps) * self.width <= LINK_REACH).all())

    def path(self, law: RegimeLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    def normaliser(self, law: RegimeLaw) -> NoNormaliser:  # noqa: ARG002 - a regression loss
        return NoNormaliser(self.dim)

    def row_bound(self, law: RegimeLaw) -> RowBound:  # noqa: ARG002 - declared, for every law
        x = self.width * self.ceiling * self.terms
        return RowBound(gradient=exponent(x), curvature=exponent(0.25 * x * self.width))

    def curvature(self, law: RegimeLaw) -> None:  # noqa: ARG002 - it is a sum over rows
        return None

    def accuracy(self, law: RegimeLaw) -> float:  # noqa: ARG002 - no quadrature
        return 0.0

    @property
    def curvature_is_fixed(self) -> bool:
        return False  # the outcomes of a period move with the predictions of the next
