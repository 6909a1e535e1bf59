"""The effect problem: components (or a combination of them), targeted by fluctuations of Q.

Components are in blocks, and each block fluctuates a Q of its own. With y on the unit scale of the outcome's
bounds (low, high), width = high - low, and k over the coordinates of the block,

    link Q_a(eps) = link Q_a + sum_k eps_k X_k(a),   X_k(a) = -width sum_r L_kr H_r(a, W),

logistic (or linear, by choice) loss in y on the rows whose outcome was observed, added over the blocks. The
score at eps = 0 is L times the first part of D; the second has pooled mean exactly zero because Psi is the
pooled mean of m_r. X does not depend on Q, so the law is the sum of what was accepted. The clever covariates
of one block's components are never both other than zero, so that the estimate of a component is the same
whichever others are asked for: an overall effect with or without effects by stratum.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model.linear import congruence, multiply
from fedtmle.model.problem import (
    AbstractProblem,
    Calibration,
    ClosingBlock,
    ConvergenceBounds,
    Estimate,
    Law,
    Rows,
)
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear, NoNormaliser, StreamedLinear
from fedtmle.model.submodels import Blocks
from fedtmle.model.table import AnyTable, PerTable, StreamedTable, Table, over_blocks
from fedtmle.targets.effects.moments import (
    ClosingLayout,
    EffectRows,
    Fluctuation,
    MomentColumns,
    closing_blocks,
    closing_sums,
    estimate_components,
    judged_columns,
    moment_columns,
    spanning_sums,
)
from fedtmle.targets.effects.prepare import LINEAR_REACH
from fedtmle_core import kernels
from fedtmle_core.exact import FINE_BITS, GRID_BITS, Sums, column_shifts, zero_sums
from fedtmle_core.parallel import done, mapped, pieces
from fedtmle_core.types import Array, Family, RowBound, Scaled, exponent

Result = TypeVar("Result")

LINK_REACH = 64.0  # a predicted logit moved further than this is a runaway fluctuation, not a fit


@final
@dataclass(frozen=True, kw_only=True)
class EffectLaw:
    """The accepted fluctuations; the initial Q, g and pi are functions that each silo evaluates."""

    history: tuple[tuple[float, ...], ...] = ()


class FluctuatedPart(NamedTuple):
    """A block: the components whose means are those of one fluctuated Q, and the coordinates that move it."""

    components: tuple[int, ...]
    coordinates: tuple[int, ...]


@dataclass
class _Prepared:
    """One table's rows, and its submodel, each made once."""

    rows: EffectRows
    fluctuation: Fluctuation | None = None


class AbstractMeans(AbstractProblem[Law, Rows]):
    """A problem whose psi combines means of the outcome."""

    combination: tuple[tuple[float, ...], ...]  # L, (d, means)

    @abstractmethod
    def start(self) -> Law:
        """Return the law before targeting."""


@final
@dataclass(frozen=True, kw_only=True)
class EffectProblem(AbstractMeans[EffectLaw, AnyTable]):
    """Means of the outcome per component; the rows of ``combination`` (L) combine them into psi.

    ``blocks`` lists the components that share a fluctuated Q; empty: all of them do. A row of L combines
    components of one block. ``ceiling`` bounds H_r times the observation's weight over all rows; it follows
    from the bound on g, or is declared. ``as_weight`` puts H into the loss's weight instead of the covariate.
    """

    curvature_is_fixed = True

    labels: tuple[str, ...]
    combination: tuple[tuple[float, ...], ...]
    outcome_bounds: tuple[float, float]
    prepare: Callable[[Table], EffectRows] = field(compare=False)
    ceiling: float
    population_ceiling: float  # bound of weight * v / P(v)
    largest_cluster: int = 1
    spanning: int = 0  # clusters that are in more than one silo
    linear: bool = False
    as_weight: bool = False
    blocks: tuple[tuple[int, ...], ...] = ()
    has_floor: bool = False  # whether ``ceiling`` bounds H of every record and arm, not only disclosed values
    known: Calibration | None = None  # at the start, where sums are rounded and the overlap is known
    _prepared: PerTable[_Prepared] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return self.labels

    @property
    def dim(self) -> int:
        return len(self.combination)

    @cached_property
    def L(self) -> Array:
        return np.array(self.combination)

    @cached_property
    def parts(self) -> tuple[FluctuatedPart, ...]:
        """The blocks, each with its components and its coordinates."""
        blocks = self.blocks or (tuple(range(len(self.combination[0]))),)
        return tuple(
            FluctuatedPart(
                components=block,
                coordinates=tuple(k for k, row in enumerate(self.combination) if any(row[r] for r in block)),
            )
            for block in blocks
        )

    @property
    def width(self) -> float:
        return self.outcome_bounds[1] - self.outcome_bounds[0]

    @property
    def widths(self) -> Array:
        """The width of the response behind each coordinate."""
        return np.full(self.dim, self.width)

    def start(self) -> EffectLaw:
        return EffectLaw()

    def knowing(self, scales: Calibration | None) -> EffectProblem:
        """Return the problem with its calibration at the start; both share the rows prepared so far."""
        problem = replace(self, known=scales)
        object.__setattr__(problem, "_prepared", self._prepared)  # which does not depend on the calibration
        return problem

    def read(self, rows: object) -> AnyTable:
        if not isinstance(rows, Table | StreamedTable):
            raise TypeError("an effect problem reads tables that the data layer made")
        return rows

    def rows(self, table: AnyTable) -> EffectRows:
        """Return the prepared rows of a table in memory; nuisances are evaluated once for it."""
        if isinstance(table, StreamedTable):
            raise TypeError("the rows of a streamed table are never there all at once")
        return self._of(table).rows

    def _of(self, table: Table) -> _Prepared:
        return self._prepared.of(table, lambda table: _Prepared(self.prepare(table)))

    def over(self, table: AnyTable, work: Callable[[EffectRows], Result]) -> Iterator[Result]:
        """Return ``work`` of consecutive pieces of the rows, in order; the pieces run in parallel."""
        if isinstance(table, Table):
            return mapped(work, self.rows(table).blocks())
        return over_blocks(table, lambda block: work(self.prepare(block)))

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def submodel(self, law: EffectLaw, rows: AnyTable) -> AbstractSubmodel:
        if isinstance(rows, Table):
            prepared = self._of(rows)
            if prepared.fluctuation is None or prepared.fluctuation.combination != self.combination:
                prepared.fluctuation = None  # free the old one before the new one is built
                prepared.fluctuation = self._fluctuation(prepared.rows)
            return self._design(law, prepared.rows, prepared.fluctuation)
        return StreamedLinear(
            table=rows,
            family=self._family,
            dim=self.dim,
            bound=self.row_bound(law),
            design=lambda batch: self.design(law, self.prepare(batch)),
        )

    @property
    def _family(self) -> Family:
        return Family.GAUSSIAN if self.linear else Family.LOGISTIC

    def design(self, law: EffectLaw, prepared: EffectRows) -> GeneralisedLinear | Blocks:
        """Return the submodel of prepared rows at the law."""
        return self._design(law, prepared, self._fluctuation(prepared))

    def _fluctuation(self, prepared: EffectRows) -> Fluctuation:
        return Fluctuation.of(
            prepared, self.combination, self.width, linear=self.linear, as_weight=self.as_weight
        )

    def _design(self, law: EffectLaw, prepared: EffectRows, fixed: Fluctuation) -> GeneralisedLinear | Blocks:
        blocks = tuple(self._block(law, prepared, fixed, part) for part in self.parts)
        if len(blocks) == 1:
            return blocks[0]
        return Blocks(blocks=blocks, places=tuple(part.coordinates for part in self.parts))

    def _block(
        self, law: EffectLaw, prepared: EffectRows, fixed: Fluctuation, part: FluctuatedPart
    ) -> GeneralisedLinear:
        offset, shifts = np.empty_like(fixed.link), self.shifts(law, part)

        def fill(rows: slice) -> None:
            offset[rows] = fixed.link[rows]
            self._move_link(offset[rows], shifts, prepared.covariates[:, rows])

        done(fill, pieces(len(offset)))
        return GeneralisedLinear(
            family=self._family,
            X=fixed.X.chosen(part.coordinates),
            offset=offset,
            y=prepared.y,
            w=fixed.w,
            bound=self.row_bound(law),
            y_largest=1.0,  # on the unit scale
        )

    def losses(self, law: EffectLaw, rows: AnyTable) -> Array:
        prepared, loss = self.rows(rows), np.zeros(rows.n_rows)
        for part in self.parts:
            eta = prepared.factual(self._means(law, prepared, part, Family.GAUSSIAN))
            loss += 0.5 * (eta - prepared.y) ** 2 if self.linear else kernels.softplus(eta) - prepared.y * eta
        weight = prepared.covariates.sum(axis=0) if self.as_weight else 1.0
        return np.asarray(prepared.weight * prepared.observed * weight * loss)

    def eif(self, law: EffectLaw, rows: AnyTable, psi: Array) -> Array:  # noqa: ARG002 - see below
        """Return D_k = sum_r L_kr (u_r - t_r psi_r), psi_r the components' plug-ins on these rows."""
        columns = self.moment_columns(law, self.rows(rows))
        components = columns.m.sum(axis=1) / columns.t.sum(axis=1)
        return np.asarray((self.L @ (columns.u - columns.t * components[:, None])).T)

    def moments(self, law: EffectLaw, rows: AnyTable) -> Sums:
        if isinstance(rows, Table):
            return self._moments(law, self.rows(rows))
        parts = rows.map(lambda batch: self._moments(law, self.prepare(batch)))
        return reduce(add, parts, zero_sums(self.moment_shifts(law)))

    def disclosed_columns(self, law: EffectLaw, rows: AnyTable) -> Iterable[Array]:
        def disclosed(prepared: EffectRows) -> Array:
            return judged_columns(prepared, self.moment_columns(law, prepared))

        if isinstance(rows, Table):
            return map(disclosed, self.rows(rows).blocks())
        return rows.map(lambda batch: disclosed(self.prepare(batch)))

    @property
    def disclosed_predictions(self) -> int:
        return len(self.combination[0])

    @property
    def disclosed_groups(self) -> int:
        return 2 if self.largest_cluster > 1 else 1

    @property
    def closing_blocks(self) -> tuple[ClosingBlock, ...]:
        if self.spanning:
            return ()
        u = self.width * self._reach * (self.ceiling + self.population_ceiling)
        return closing_blocks(len(self.combination[0]), u, self.population_ceiling, self.largest_cluster)

    def _moments(self, law: EffectLaw, rows: EffectRows) -> Sums:
        exponents = self._moment_exponents()

        def closed(prepared: EffectRows) -> Sums:
            columns = self.moment_columns(law, prepared)
            total = closing_sums(prepared, columns, exponents)
            if not self.spanning:
                return total
            # All rows are one block here.
            return total.joined(spanning_sums(prepared, columns, exponents, self.spanning))

        return reduce(add, mapped(closed, rows.blocks()), zero_sums(self.moment_shifts(law)))

    def moment_shifts(self, law: EffectLaw) -> tuple[int, ...]:  # noqa: ARG002 - declared, for every law
        return column_shifts(self._moment_exponents())

    @property
    def moment_bits(self) -> int:
        # Rounded sums are to 2^-28 of the outcome's width; the bounds are larger by the inverse probabilities
        # and the clusters.
        if self.known is None:
            return GRID_BITS + FINE_BITS
        ceiling = exponent(self._reach * (self.ceiling + self.population_ceiling))
        return min(28 + ceiling + 2 * (self.largest_cluster - 1).bit_length(), GRID_BITS + FINE_BITS)

    @property
    def similar_moments(self) -> Sequence[int]:
        return ClosingLayout(len(self.combination[0])).similar(self.spanning)

    def calibration(self, law: EffectLaw) -> Calibration | None:
        return None if law.history else self.known

    def convergence_bounds(self, law: EffectLaw) -> ConvergenceBounds | None:
        # The logistic loss has |third derivative| <= second derivative, so that the Hessian at the law is at
        # least e^-s times that at the start, s the largest move of a record's link.
        if self.known is None or not (self.has_floor or self.as_weight):
            return None
        largest = 1.0 if self.as_weight else self.ceiling
        widths = self.width * np.abs(self.L).max(axis=1)
        x = np.zeros(self.dim) if self.linear else widths * largest
        farthest = float((x * np.abs(self.displacement(law))).max())
        start = np.array(self.known.curvature) - self.known.rounding * np.eye(self.dim)
        bend = 1.0 if self.linear else 0.25
        # m_r moves by rho'' H_r per unit of the link, and psi_r is a mean of m_r.
        slopes = bend * largest * self.width**2 * multiply(np.abs(self.L), np.abs(self.L).T)
        return ConvergenceBounds(
            curvature=tuple(map(tuple, (kernels.exp(-farthest) * start).tolist())),
            covariates=tuple(x.tolist()),
            slopes=tuple(map(tuple, slopes.tolist())),
        )

    def envelope(self, law: EffectLaw) -> float:  # noqa: ARG002 - declared, for every law
        largest = self.width * self._reach * (self.ceiling + self.population_ceiling)
        return largest * max(sum(map(abs, row)) for row in self.combination)

    def finish(self, law: EffectLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        return self._estimate(pooled, one_step=False)

    def finish_one_step(self, law: EffectLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - see above
        return self._estimate(pooled, one_step=True)

    def _estimate(self, pooled: Sums, *, one_step: bool) -> Estimate:
        components, covariance = estimate_components(pooled, len(self.combination[0]), one_step=one_step)
        low = self.outcome_bounds[0] * self.L.sum(axis=1)
        psi = low + multiply(self.L, components[:, None])[:, 0]
        return Estimate(psi=psi, covariance=congruence(self.L, covariance))

    def move(self, law: EffectLaw, eps: Array) -> EffectLaw:
        if not self.admits(law, eps):
            raise NumericalError(
                f"eps: the fluctuation would move a prediction by more than {LINK_REACH:g} on the link "
                "scale; an arm may be perfectly predicted"
            )
        return EffectLaw(history=(*law.history, tuple(map(float, eps))))

    def admits(self, law: EffectLaw, eps: Array) -> bool:  # noqa: ARG002 - the same set at every law
        return bool((np.abs(eps) * self.width <= LINK_REACH).all())

    def path(self, law: EffectLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    def displacement(self, law: EffectLaw) -> Array:
        return np.array([math.fsum(step) for step in zip(*law.history, strict=True)] or [0.0] * self.dim)

    def normaliser(self, law: EffectLaw) -> NoNormaliser:  # noqa: ARG002 - a regression loss
        return NoNormaliser(self.dim)

    def row_bound(self, law: EffectLaw) -> RowBound:  # noqa: ARG002 - declared, for every law
        # |rho'| <= 1 for the logistic loss; a linear prediction may leave [0, 1] by some widths.
        x = self.width * self.ceiling * max(sum(map(abs, row)) for row in self.combination)
        slope, bend = (LINEAR_REACH, 1.0) if self.linear else (1.0, 0.25)
        return RowBound(gradient=exponent(slope * x), curvature=exponent(bend * x * x))

    def curvature(self, law: EffectLaw) -> None:  # noqa: ARG002 - it is a sum over rows
        return None

    def accuracy(self, law: EffectLaw) -> float:  # noqa: ARG002 - no quadrature
        return 0.0

    def moment_columns(self, law: EffectLaw, prepared: EffectRows) -> MomentColumns:
        """Return the columns whose sums close a run at the law."""
        q = ((part.components, self.regression(law, prepared, part)) for part in self.parts)
        return moment_columns(prepared, q, self.width)

    def factual(self, law: EffectLaw, prepared: EffectRows) -> Array:
        """Return Q(A, W) at the law on the unit scale, shape (N,), of rows whose outcome was observed.

        With several blocks it is the Q of the first: that of the overall means.
        """
        if not law.history:
            return prepared.factual(prepared.q)
        link, shifts = prepared.factual_link(linear=self.linear), self.shifts(law, self.parts[0])
        moves = [(shift, prepared.covariates[r]) for r, shift in shifts.items()]
        return self._mean(link, moves, self._family)

    def _mean(self, link: Array, moves: Sequence[tuple[float, Array]], family: Family) -> Array:
        """Return the family's mean at a link, shape (N,), that is moved by multiples of H, added in order."""
        if not moves:
            return kernels.expit(link) if family is Family.LOGISTIC else link
        shifts, columns = zip(*moves, strict=True)
        X = Scaled(tuple(map(self._covariate, columns)), np.ones(len(columns)))
        return kernels.glm_means(kernels.glm_rows(family, X, link), np.array(shifts))

    def _covariate(self, H: Array) -> Array:
        """Return the covariate of a component: H or, if H is the weight, its sign."""
        return np.sign(H) if self.as_weight else H

    def _move_link(self, eta: Array, shifts: Mapping[int, float], covariates: Array) -> None:
        """Move link Q(A, W), shape (N,), by the shifts; a row whose outcome was not observed stays."""
        for r, shift in shifts.items():
            kernels.add_multiple(eta, shift, self._covariate(covariates[r]))

    def shifts(self, law: EffectLaw, part: FluctuatedPart) -> dict[int, float]:
        """Return the factors of the components' H on the link scale, unless zero, at the law."""
        total = self.displacement(law).tolist()
        factors = {
            r: -self.width * math.fsum(self.combination[k][r] * total[k] for k in part.coordinates)
            for r in part.components
        }
        return {r: factor for r, factor in factors.items() if factor}

    def regression(self, law: EffectLaw, prepared: EffectRows, part: FluctuatedPart) -> list[Array]:
        """Return Q_a of one block at the law on the unit scale, shape (N,) for each arm."""
        return self._means(law, prepared, part, self._family)

    def _means(
        self, law: EffectLaw, prepared: EffectRows, part: FluctuatedPart, family: Family
    ) -> list[Array]:
        """Return the family's mean at link Q_a of one block at the law, for each arm: Gaussian, the link."""
        moves: list[list[tuple[float, Array]]] = [[] for _ in prepared.q]
        for r, shift in self.shifts(law, part).items():
            for term in prepared.terms[r]:
                moves[term.arm].append((shift, term.H))
        links = prepared.q if self.linear else prepared.logit_q
        return [self._mean(link, moves[a], family) for a, link in enumerate(links)]

    @property
    def _reach(self) -> float:
        """A bound of |Q| and |y - Q| on the unit scale."""
        return LINEAR_REACH if self.linear else 1.0

    def _moment_exponents(self) -> list[int]:
        u = self.largest_cluster * self.width * self._reach * (self.ceiling + self.population_ceiling)
        t = self.largest_cluster * self.population_ceiling
        return ClosingLayout(len(self.combination[0])).exponents(u, t, self.spanning)
