"""Problems whose loss is a logistic regression over long rows: people times periods.

Component r has columns u_r, t_r and m_r, whose pooled sums give psi_r = sum m_r / sum t_r and the EIF
D_r = u_r - t_r psi_r. Laws are sequences of accepted fluctuations, each in units of the logit after a reach.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np

from fedtmle.errors import NumericalError
from fedtmle.model.problem import AbstractProblem, ClosingBlock
from fedtmle.model.submodel import NoNormaliser
from fedtmle.model.table import AnyTable, StreamedTable, Table
from fedtmle.targets.effects.balance import AbstractArmWeights, ArmRows
from fedtmle.targets.effects.moments import (
    ClosingLayout,
    MomentColumns,
    closing_blocks,
    closing_sums,
    judged_columns,
    spanning_sums,
)
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle_core.exact import Sums, column_shifts, zero_sums
from fedtmle_core.types import Array, IntArray

LINK_REACH = 64.0  # a logit moved further than this is a runaway fluctuation, not a fit

History = tuple[tuple[float, ...], ...]


class ReplayedLaw(Protocol):
    """A law that is the sequence of the accepted fluctuations."""

    @property
    def history(self) -> History: ...


Law = TypeVar("Law", bound=ReplayedLaw)
Piece = TypeVar("Piece")
Result = TypeVar("Result")


@final
@dataclass(frozen=True)
class ClusterCodes:
    """Clusters of rows, as `closing_sums` reads them."""

    cluster: IntArray | None
    spanned: IntArray | None


class AbstractLongProblem(AbstractProblem[Law, AnyTable], Generic[Law, Piece]):
    """Components in the order of their labels, each fluctuated by a coordinate of its own.

    ``ceiling`` bounds a long row's weight, and ``population_ceiling`` that of a person in a component's mean.
    """

    curvature_is_fixed = False  # covariates or outcomes of a period move with the predictions of others

    labels: tuple[str, ...]
    ceiling: float
    population_ceiling: float
    largest_cluster: int
    spanning: int

    @property
    @abstractmethod
    def reach(self) -> float:
        """A bound of every covariate of the fluctuation, and of every component's range."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """The most long rows of one person in one coordinate."""

    @property
    @abstractmethod
    def effect_columns(self) -> EffectColumns:
        """The columns of the table."""

    @property
    @abstractmethod
    def runaway(self) -> tuple[str, str]:
        """What moves if eps is too large, and the likely reason."""

    @abstractmethod
    def over(self, rows: AnyTable, work: Callable[[Piece], Result]) -> Iterator[Result]:
        """Return ``work`` of consecutive people, in order; the blocks run in parallel."""

    @abstractmethod
    def columns(self, law: Law, piece: Piece) -> MomentColumns:
        """Return u, t and m of each component: the EIF's parts, times the weight."""

    @abstractmethod
    def law(self, history: History) -> Law:
        """Return the law after these accepted fluctuations."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.labels

    @property
    def R(self) -> Array:
        """The combinations of components that are reported: each by itself."""
        return np.eye(len(self.labels))

    @property
    def L(self) -> Array:
        """The combinations of components that are fluctuated: each by itself."""
        return self.R

    def start(self) -> Law:
        return self.law(())

    def read(self, rows: object) -> AnyTable:
        if not isinstance(rows, Table | StreamedTable):
            raise TypeError("this problem reads tables that the data layer made")
        return rows

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    # The rows' contributions to the closing sums.

    def whole(self, law: Law, rows: AnyTable) -> MomentColumns:
        parts = [columns.stacked for columns in self.over(rows, lambda piece: self.columns(law, piece))]
        return MomentColumns(np.concatenate(parts, axis=2))

    def clusters(self, rows: AnyTable) -> ClusterCodes:
        """Return the clusters of a whole table in memory."""
        if isinstance(rows, StreamedTable):
            raise TypeError("a streamed table has no clusters")
        return ClusterCodes(self.effect_columns.clusters(rows), self.effect_columns.spanned(rows))

    def eif(self, law: Law, rows: AnyTable, psi: Array) -> Array:  # noqa: ARG002 - plug-ins on these rows
        columns = self.whole(law, rows)
        components = columns.m.sum(axis=1) / columns.t.sum(axis=1)
        return np.asarray((columns.u - columns.t * components[:, None]).T)

    def moments(self, law: Law, rows: AnyTable) -> Sums:
        exponents, zero = self._moment_exponents(), zero_sums(self.moment_shifts(law))
        if self.effect_columns.cluster is None:
            alone = ClusterCodes(None, None)
            parts = self.over(rows, lambda piece: closing_sums(alone, self.columns(law, piece), exponents))
            return reduce(add, parts, zero)
        columns, clusters = self.whole(law, rows), self.clusters(rows)
        total = closing_sums(clusters, columns, exponents)
        if self.spanning:
            total = total.joined(spanning_sums(clusters, columns, exponents, self.spanning))
        return total

    def disclosed_columns(self, law: Law, rows: AnyTable) -> Iterable[Array]:
        if self.effect_columns.cluster is None:
            return self.over(rows, lambda piece: self.columns(law, piece).flat)
        return (judged_columns(self.clusters(rows), self.whole(law, rows)),)

    @property
    def disclosed_predictions(self) -> int:
        return len(self.labels)

    @property
    def disclosed_groups(self) -> int:
        return 1 if self.effect_columns.cluster is None else 2

    @property
    def closing_blocks(self) -> tuple[ClosingBlock, ...]:
        if self.spanning:
            return ()
        u = self.reach * (self.ceiling * self.terms + self.population_ceiling)
        size = 1 if self.effect_columns.cluster is None else max(self.largest_cluster, 2)
        return closing_blocks(len(self.labels), u, self.population_ceiling, size)

    def moment_shifts(self, law: Law) -> tuple[int, ...]:  # noqa: ARG002 - declared, for every law
        return column_shifts(self._moment_exponents())

    def envelope(self, law: Law) -> float:  # noqa: ARG002 - declared, for every law
        return self.reach * (self.ceiling * self.terms + self.population_ceiling)

    def _moment_exponents(self) -> list[int]:
        u = self.largest_cluster * self.reach * (self.ceiling * self.terms + self.population_ceiling)
        t = self.largest_cluster * self.population_ceiling
        return ClosingLayout(len(self.labels)).exponents(u, t, self.spanning)

    # The law.

    def move(self, law: Law, eps: Array) -> Law:
        if not self.admits(law, eps):
            moved, reason = self.runaway
            raise NumericalError(
                f"eps: the fluctuation would move a {moved} by more than {LINK_REACH:g} on the logit scale; "
                f"{reason}"
            )
        return self.law((*law.history, tuple(map(float, eps))))

    def admits(self, law: Law, eps: Array) -> bool:  # noqa: ARG002 - the same set at every law
        return bool((np.abs(eps) * self.reach <= LINK_REACH).all())

    def path(self, law: Law) -> History:
        return law.history

    def normaliser(self, law: Law) -> NoNormaliser:  # noqa: ARG002 - a regression loss
        return NoNormaliser(self.dim)

    def curvature(self, law: Law) -> None:  # noqa: ARG002 - it is a sum over rows
        return None

    def accuracy(self, law: Law) -> float:  # noqa: ARG002 - no quadrature
        return 0.0


class OverProblem(Generic[Piece]):
    """Reads consecutive people as the problem's pieces; a base of the statistics of such problems."""

    problem: AbstractLongProblem[Any, Piece]

    def over(self, rows: AnyTable, work: Callable[[Piece], Result]) -> Iterable[Result]:
        return self.problem.over(rows, work)


class AbstractLongArmWeights(AbstractArmWeights, Generic[Piece]):
    """Weighs the people of such a problem, whose ceilings it takes."""

    problem: AbstractLongProblem[Any, Piece]

    @property
    def ceiling(self) -> float:
        return self.problem.ceiling

    @property
    def population_ceiling(self) -> float:
        return self.problem.population_ceiling

    def over(self, rows: AnyTable, work: Callable[[ArmRows], Result]) -> Iterable[Result]:
        return self.problem.over(rows, lambda piece: work(self.weighed(piece)))

    @abstractmethod
    def weighed(self, piece: Piece) -> ArmRows:
        """Return the people of a piece with their weights."""
