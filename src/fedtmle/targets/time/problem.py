"""The problem of time to an event: functionals of cumulative incidences, targeted by fluctuating hazards.

Component r is a functional f under a regime in a population. In the world of arm a, with q_l(t) the hazards,

    logit q_l(t; eps) = logit q_l(t) - sum_r eps_r omega_r(t) c_{f,l}(t),
    omega_r(t) = d_r(a | W) E[v_r | W] / (g_a(W) G_a(t- | W) P(v_r)),

with the logistic loss over person-periods at risk. Its score at eps = 0 is the first part of the EIF; the
second, v/P(v) (functional given W - psi), has pooled mean zero because psi is the pooled mean. The covariates
c depend on q, so that the law is the sequence of the accepted fluctuations and is replayed: the paper's outer
loop. A silo keeps the hazards of many of its rows at the last law and moves them on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.initial.crossfit import Fitted, Folds
from fedtmle.model.problem import Estimate
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear
from fedtmle.model.submodels import GroupedLinear, LongRows
from fedtmle.model.table import AnyTable, PerTable, Table, people_blocks, people_slices
from fedtmle.targets.effects.components import AbstractPopulation, AbstractRegime
from fedtmle.targets.effects.moments import (
    ClosingLayout,
    MomentColumns,
    estimate_components,
)
from fedtmle.targets.effects.prepare import EffectColumns, arm_probabilities
from fedtmle.targets.long import AbstractLongProblem, History
from fedtmle.targets.time.followup import FollowUp, Functional, Seen, covariates, payments, plug_in, reach
from fedtmle_core import kernels
from fedtmle_core.exact import Sums
from fedtmle_core.parallel import done, mapped
from fedtmle_core.types import Array, Bools, Codes, Family, RowBound, exponent

# From a table and fitted hazards to the worlds of a time-to-event problem, at one silo.

MARGIN = 2.0**-60  # hazards are truncated this far inside (0, 1)


@final
@dataclass(frozen=True)
class RegimeGroup:
    """A regime in a population, and the population's share P(v) of the pooled weight."""

    regime: AbstractRegime
    population: AbstractPopulation
    share: float


@final
@dataclass(frozen=True, kw_only=True)
class TimePreparation:
    """Evaluate hazards, propensity scores and censoring on people, and compute their weights omega.

    ``events`` has one fitted hazard per cause, in the order of the causes; ``censoring`` is the hazard of
    censoring, None if nobody is censored before the last period. ``horizon`` is the last period of any
    functional. ``used`` are the columns that the models over person-periods need.
    """

    columns: EffectColumns
    follow_up: FollowUp
    groups: tuple[RegimeGroup, ...]
    events: tuple[Fitted, ...]
    censoring: Fitted | None
    treatment: tuple[Fitted, ...]
    horizon: int
    g_floor: float
    weight_mean: float
    used: frozenset[str]
    folds: Folds | None = None

    @property
    def periods(self) -> int:
        return self.horizon

    @property
    def causes(self) -> int:
        return len(self.follow_up.causes)

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """The number of each group's population: populations are fluctuated apart from each other."""
        populations = list(dict.fromkeys(group.population for group in self.groups))
        return tuple(populations.index(group.population) for group in self.groups)

    @cached_property
    def arms_needed(self) -> tuple[int, ...]:
        return tuple(range(len(self.columns.arms)))

    def mark(self, table: Table) -> Table:
        """Return the whole table with the folds of its rows, if the models are cross-fitted."""
        return table if self.folds is None else self.folds.mark(table)

    def people(self, table: Table) -> People:
        return People(self, table)

    def hazards(self, model: Fitted, table: Table, periods: int) -> Array:
        """Return the hazard of each person in each period, shape (periods, N)."""
        counts = np.full(table.n_rows, periods)
        long, _ = self.follow_up.long(self._thin(table), counts)
        predicted = model.predict(long)
        if not np.isfinite(predicted).all():
            raise DataError("a hazard model's prediction is not finite in some person-periods")
        return np.ascontiguousarray(predicted.reshape(table.n_rows, periods).T)

    def _thin(self, table: Table) -> Table:
        """Return the table with the columns that the models over person-periods need."""
        return replace(
            table,
            numeric={name: column for name, column in table.numeric.items() if name in self.used},
            factors={
                name: factor
                for name, factor in table.factors.items()
                if name in self.used or name.startswith("\0")
            },
            known_reach=table.reach,
        )

    def propensities(self, table: Table) -> Array:
        """Return g_a, shape (arms, N)."""
        fits = [model.predict(table) for model in self.treatment]
        return arm_probabilities(fits, len(self.columns.arms), slice(0, table.n_rows))


@final
class People:
    """Consecutive people of one table: what was seen of them, and their worlds."""

    def __init__(self, preparation: TimePreparation, table: Table) -> None:
        self.preparation, self.table = preparation, table

    @property
    def n_rows(self) -> int:
        return self.table.n_rows

    @cached_property
    def seen(self) -> Seen:
        return self.preparation.follow_up.read(self.table)

    @cached_property
    def arm(self) -> Codes:
        return self.preparation.columns.arm(self.table)

    @cached_property
    def at_risk(self) -> Bools:
        """Who is at risk of each cause in each period, (causes, periods, N)."""
        prepare, seen = self.preparation, self.seen
        period = np.arange(1, prepare.periods + 1)[:, None]
        cause = np.arange(1, prepare.causes + 1)[:, None, None]
        earlier = (seen.last == period) & (seen.cause > 0) & (seen.cause < cause)
        return np.asarray((seen.last >= period) & ~earlier)

    @cached_property
    def events(self) -> Array:
        """1 where an event of a cause happens in a period, (causes, periods, N)."""
        prepare, seen = self.preparation, self.seen
        period = np.arange(1, prepare.periods + 1)[:, None]
        cause = np.arange(1, prepare.causes + 1)[:, None, None]
        return np.asarray((seen.last == period) & (seen.cause == cause), dtype=np.float64)

    @cached_property
    def weight(self) -> Array | None:
        """The observation weights over their pooled mean; None without any."""
        columns = self.preparation.columns
        if columns.weights is None:
            return None
        return columns.relative_weight(self.table, self.preparation.weight_mean)

    @cached_property
    def indicators(self) -> list[Array]:
        """v/P(v) of each group."""
        stratum = self.preparation.columns.stratum(self.table)
        return [
            group.population.indicator(self.table, self.arm, stratum, lambda: self.g) / group.share
            for group in self.preparation.groups
        ]

    @cached_property
    def g(self) -> Array:
        return self.preparation.propensities(self.table)

    def in_arm(self, arm: int | None) -> Table:
        """Return the table with everyone in one arm, or as it is."""
        return self.table if arm is None else self.preparation.columns.in_arm(self.table, arm)

    def logits(self, arm: int | None) -> Array:
        """Return the initial logits of the hazards in the world of one arm, or of each person's own arm."""
        prepare, world = self.preparation, self.in_arm(arm)
        hazards = np.stack([prepare.hazards(model, world, prepare.periods) for model in prepare.events])
        bounded, logits = np.empty(hazards.size), np.empty(hazards.size)
        kernels.bound(hazards.reshape(-1), MARGIN, 1.0 - MARGIN, bounded, logits)
        return logits.reshape(hazards.shape)

    def uncensored(self, arm: int | None) -> Array:
        """Return G(t-), the probability of not being censored before each period, (periods, N)."""
        prepare = self.preparation
        G = np.ones((prepare.periods, self.n_rows))
        if prepare.censoring is not None and prepare.periods > 1:
            hazard = prepare.hazards(prepare.censoring, self.in_arm(arm), prepare.periods - 1)
            np.cumprod(1.0 - hazard, axis=0, out=G[1:])
        return G

    def world(self, arm: int | None, logits: Array | None = None) -> World:
        """Return the world of one arm, or of each person's own, at the start or with the given logits."""
        omega, truncated = self._omega(arm)
        if logits is None:
            start = self.logits(arm)
            logits = np.broadcast_to(start, (max(self.preparation.blocks) + 1, *start.shape))
        return World(self, omega, truncated, logits)

    def _omega(self, arm: int | None) -> tuple[Array, Bools]:
        prepare, G = self.preparation, self.uncensored(arm)
        omega = np.zeros((len(prepare.groups), *G.shape))
        truncated = np.zeros(self.n_rows, dtype=bool)
        for a in prepare.arms_needed if arm is None else (arm,):
            here = (self.arm == a) if arm is None else np.ones(self.n_rows, dtype=bool)
            g, pi = self.g[:, None, :], np.broadcast_to(G, (len(prepare.columns.arms), *G.shape))
            for s, group in enumerate(prepare.groups):
                d = group.regime.probabilities(self.table, prepare.columns.arms)[a]
                if not d.any():
                    continue
                v = self.indicators[s] * group.share
                expected, probability = group.population.ratio(v[None, :], a, g, pi, prepare.g_floor)
                probability = np.broadcast_to(probability, G.shape)
                weight = (d * here) * expected / group.share / np.maximum(probability, prepare.g_floor)
                omega[s] += weight
                below = (probability < prepare.g_floor).any(axis=0)
                truncated |= below & here & (d > 0)
        return omega, truncated


@final
@dataclass(frozen=True)
class World:
    """Hazards and weights of people in the world of one arm, or of each person's own arm.

    ``omega`` has shape (groups, periods, N), ``logits`` (populations, causes, periods, N); ``truncated`` says
    whose probability of the arm and of not being censored was truncated in some period.
    """

    people: People
    omega: Array
    truncated: Bools
    logits: Array

    def with_logits(self, logits: Array) -> World:
        return World(self.people, self.omega, self.truncated, logits)


Result = TypeVar("Result")


@final
@dataclass(frozen=True, kw_only=True)
class TimeLaw:
    """The accepted fluctuations; the initial hazards are functions that each silo evaluates."""

    history: History = ()


@dataclass
class _Kept:
    """The logits of hazards of a table's first people, in the world of their own arm at a law.

    The shape is as in `World`. No more people are kept than take up the memory of the table; the hazards of
    the others are computed anew at every pass, so that memory does not grow with the number of periods.
    """

    marked: Table
    logits: Array
    history: tuple[tuple[float, ...], ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class TimeProblem(AbstractLongProblem[TimeLaw, People]):
    """Functionals under regimes in populations, in the order population, regime, functional.

    Each population has hazards and a fluctuation of its own, so that asking for strata leaves the estimates
    of everyone as they are. ``ceiling`` bounds omega times the observation's weight.
    """

    runaway = "hazard", "an event may be perfectly predicted"

    labels: tuple[str, ...]
    functionals: tuple[Functional, ...]
    prepare: TimePreparation = field(compare=False)
    ceiling: float
    population_ceiling: float
    largest_cluster: int = 1
    spanning: int = 0
    _kept: PerTable[_Kept] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    @cached_property
    def places(self) -> tuple[tuple[int, int, int], ...]:
        """The population, group and functional of each component."""
        groups = enumerate(self.prepare.blocks)
        return tuple((block, s, f) for s, block in groups for f in range(len(self.functionals)))

    @property
    def blocks(self) -> int:
        """The number of populations."""
        return max(self.prepare.blocks) + 1

    @property
    def outcome_bounds(self) -> tuple[float, float]:
        """The bounds of a component's value, 0 and its largest."""
        return 0.0, self.reach

    @cached_property
    def paid(self) -> Array:
        return payments(self.functionals, self.prepare.periods)

    @cached_property
    def reach(self) -> float:
        """A bound of every covariate c, and of every value of a functional."""
        return reach(self.functionals, self.prepare.periods)

    @property
    def terms(self) -> int:
        """The most long rows of one person."""
        return self.prepare.periods * self.prepare.causes * self.blocks

    @property
    def effect_columns(self) -> EffectColumns:
        return self.prepare.columns

    def law(self, history: History) -> TimeLaw:
        return TimeLaw(history=history)

    # The worlds of a block of people, and how a law moves them.

    def moved(self, world: World, history: Sequence[tuple[float, ...]]) -> World:
        """Return the world after further accepted fluctuations."""
        for eps in history:
            logits = np.empty(world.logits.shape)
            for block, before in enumerate(world.logits):
                c, _ = covariates(self.paid, kernels.expit(before))
                logits[block] = before
                for move, (of, s, f) in zip(eps, self.places, strict=True):
                    if of == block and move:
                        logits[block] -= (move * world.omega[s]) * c[f]
            world = world.with_logits(logits)
        return world

    def over(self, table: AnyTable, work: Callable[[People], Result]) -> Iterator[Result]:
        """Return ``work`` of consecutive people, in order; the blocks run in parallel."""
        marked = self.prepare.mark(table) if isinstance(table, Table) else table
        blocks = people_blocks(marked, self.terms)
        return mapped(lambda block: work(self.prepare.people(block)), blocks)

    def _own(self, law: TimeLaw, table: Table) -> _Kept:
        """Return the kept hazards of a table's own arms at the law; they move on from the last law."""
        kept = self._kept.of(table, self._initial)
        if law.history[: len(kept.history)] != kept.history:
            self._kept.forget(table)
            kept = self._kept.of(table, self._initial)
        further = law.history[len(kept.history) :]
        if further:

            def move(rows: slice) -> None:
                world = self._own_world(kept, rows)
                kept.logits[..., rows] = self.moved(world, further).logits

            done(move, people_slices(kept.logits.shape[-1], self.terms))
            kept.history = law.history
        return kept

    def _initial(self, table: Table) -> _Kept:
        """Return the hazards of a table's own arms before any move."""
        people = min(table.n_rows, table.nbytes // (8 * self.terms))
        logits = np.empty((self.blocks, self.prepare.causes, self.prepare.periods, people))
        kept = _Kept(self.prepare.mark(table), logits)

        def fill(rows: slice) -> None:
            logits[..., rows] = self.prepare.people(kept.marked.part(rows)).logits(None)

        done(fill, people_slices(people, self.terms))
        return kept

    def _own_world(self, kept: _Kept, rows: slice) -> World:
        """Return the world of some people's own arms at the law of ``kept``."""
        people = self.prepare.people(kept.marked.part(rows))
        if rows.stop > kept.logits.shape[-1]:
            return self.moved(people.world(None), kept.history)
        return people.world(None, logits=np.ascontiguousarray(kept.logits[..., rows]))

    def submodel(self, law: TimeLaw, rows: AnyTable) -> AbstractSubmodel:
        if isinstance(rows, Table):
            kept = self._own(law, rows)
            slices = list(people_slices(rows.n_rows, self.terms))

            def over(work: Callable[[LongRows], Result]) -> Iterator[Result]:
                return mapped(lambda part: work(self._long(law, self._own_world(kept, part))), slices)

        else:

            def over(work: Callable[[LongRows], Result]) -> Iterator[Result]:
                return self.over(
                    rows, lambda people: work(self._long(law, self.moved(people.world(None), law.history)))
                )

        return GroupedLinear(
            people=rows.n_rows,
            dim=self.dim,
            family=Family.LOGISTIC,
            bound=self.row_bound(law),
            over=over,
        )

    def _long(self, law: TimeLaw, world: World) -> LongRows:
        """Return the person-periods at risk of each cause, with the covariates at the world's law."""
        people, omega = world.people, world.omega
        used = np.zeros((self.blocks, people.n_rows), dtype=bool)  # who is in each population
        for s, of in enumerate(self.prepare.blocks):
            used[of] |= omega[s].any(axis=0)
        at_risk = used[:, None, None] & people.at_risk  # (populations, causes, periods, N)
        person, block, period, cause = np.nonzero(at_risk.transpose(3, 0, 2, 1))
        X = np.zeros((self.dim, len(person)))
        for b in range(self.blocks):
            here = np.flatnonzero(block == b)
            place = cause[here], period[here], person[here]
            c, _ = covariates(self.paid, kernels.expit(world.logits[b]))
            for row, (of, s, f) in zip(X, self.places, strict=True):
                if of == b:
                    row[here] = -omega[s][place[1:]] * c[f][place]
        weight = people.weight
        counts = np.bincount(person, minlength=people.n_rows)
        design = GeneralisedLinear(
            family=Family.LOGISTIC,
            X=X,
            offset=np.ascontiguousarray(world.logits[block, cause, period, person]),
            y=people.events[cause, period, person],
            w=None if weight is None else weight[person],
            bound=self.row_bound(law),
            y_largest=1.0,
        )
        return LongRows(design, counts)

    # The rows' contributions to the closing sums.

    def columns(self, law: TimeLaw, people: People) -> MomentColumns:
        """Return u, t and m of each component: the EIF's parts, times the weight."""
        prepare, per_group = self.prepare, len(self.functionals)
        stacked = np.zeros((3, len(self.labels), people.n_rows))
        u, t, m = stacked
        for arm in prepare.arms_needed:
            world = self.moved(people.world(arm), law.history)
            here = people.at_risk & (people.arm == arm)
            for s, group in enumerate(prepare.groups):
                d = group.regime.probabilities(people.table, prepare.columns.arms)[arm]
                if not d.any():
                    continue
                q = kernels.expit(world.logits[prepare.blocks[s]])
                c, value = covariates(self.paid, q)
                residual = np.where(here, people.events - q, 0.0)
                for f in range(per_group):
                    r = s * per_group + f
                    m[r] += d * value[f]
                    u[r] += (world.omega[s] * (c[f] * residual).sum(axis=0)).sum(axis=0)
        for s, v in enumerate(people.indicators):
            for r in range(s * per_group, (s + 1) * per_group):
                m[r] *= v
                t[r] = v
        u += m
        if people.weight is not None:
            stacked *= people.weight
        return MomentColumns(stacked)

    def losses(self, law: TimeLaw, rows: AnyTable) -> Array:
        def of(people: People) -> Array:
            world = self.moved(people.world(None), law.history)
            loss = np.zeros(people.n_rows)
            for block, eta in enumerate(world.logits):
                inside = np.zeros(people.n_rows, dtype=bool)
                for s in (s for s, of in enumerate(self.prepare.blocks) if of == block):
                    inside |= world.omega[s].any(axis=0)
                terms = np.where(people.at_risk & inside, kernels.softplus(eta) - people.events * eta, 0.0)
                loss += terms.sum(axis=(0, 1))
            return np.asarray(loss if people.weight is None else loss * people.weight)

        return np.asarray(np.concatenate(list(self.over(rows, of))))

    def finish(self, law: TimeLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        """Return psi and its covariance with divisor n: Greenwood's where there are no covariates."""
        psi, covariance = estimate_components(pooled, len(self.labels))
        layout = ClosingLayout(len(self.labels)).read(pooled)
        units = int(layout.clusters) + len(layout.spanning)
        return Estimate(psi=psi, covariance=covariance * ((units - 1) / units))

    def row_bound(self, law: TimeLaw) -> RowBound:  # noqa: ARG002 - declared, for every law
        x = self.ceiling * self.reach
        return RowBound(gradient=exponent(self.terms * x), curvature=exponent(0.25 * self.terms * x * x))

    def values(self, law: TimeLaw, rows: AnyTable, arm: int) -> Array:
        """Return every functional given the covariates in the world of an arm, shape (functionals, N)."""

        def of(people: People) -> Array:
            world = self.moved(people.world(arm), law.history)
            return plug_in(self.paid, kernels.expit(world.logits[0]))

        return np.concatenate(list(self.over(rows, of)), axis=1)
