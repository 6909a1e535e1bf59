"""Targets that other packages bring: two problems that they can be made of, and how they are found.

`ResidualProblem` has means with several residuals per record, for a target such as a ratio of two effects.

Residual b is a response y_b on the unit scale of its bounds, width_b = high_b - low_b, and a regression Q_b.
Component r belongs to one residual, and has a weight H_r and a plug-in mean m_r, which is Q_b somewhere:

    psi_r = E[m_r],   D_r = H_r (Y_b - Q_b) + m_r - psi_r,
    logit Q_b(eps) = logit Q_b + sum_r eps_r X_r,   X_r = -width_b H_r.

The loss of a record is the sum of the residuals' logistic losses, whose gradient at eps = 0 is the first part
of D; the second has pooled mean exactly zero, because psi is the pooled mean of m. A function of psi, such as
a ratio, has the derivative of that function times D for its EIF: every part of it is targeted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from operator import add
from typing import Any, Generic, final

import numpy as np

from fedtmle.errors import InputError, NumericalError
from fedtmle.model.problem import (
    AbstractProblem,
    ConvergenceBounds,
    Estimate,
    Law,
    mean_and_covariance,
    second_moment_shifts,
    second_moments,
)
from fedtmle.model.submodel import (
    AbstractNormaliser,
    AbstractSubmodel,
    GeneralisedLinear,
    NoNormaliser,
    StreamedLinear,
)
from fedtmle.model.submodels import Blocks
from fedtmle.model.table import AnyTable, PerTable, StreamedTable, Table
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle_core import kernels
from fedtmle_core.exact import Sums, column_shifts, zero_sums
from fedtmle_core.kernels import column_sums
from fedtmle_core.types import Array, Family, RowBound, exponent

LINK_REACH = 64.0  # a predicted logit moved further than this is a runaway fluctuation, not a fit


@final
@dataclass(frozen=True, kw_only=True)
class Residual:
    """One residual of each record, and the k components that it targets; columns have shape (N,).

    ``q`` is the initial regression at the record, ``weights`` are H_r there, (k, N); ``plug_in`` has the
    initial m_r, (k, N), and ``plug_in_weights`` H_r where m_r is taken. All of q and m lie strictly between 0
    and 1. No record may have two weights other than zero.
    """

    y: Array
    q: Array
    weights: Array
    plug_in: Array
    plug_in_weights: Array


@final
@dataclass(frozen=True, kw_only=True)
class ResidualLaw:
    """The accepted fluctuations; the initial regressions are functions that each silo evaluates."""

    history: tuple[tuple[float, ...], ...] = ()


@final
@dataclass(frozen=True, kw_only=True)
class ResidualProblem(AbstractProblem[ResidualLaw, AnyTable]):
    """Means of several responses at once.

    ``components`` has the names of each residual's components, ``bounds`` each response's own scale.
    ``prepare`` returns the residuals of a table's records, in the same order; ``ceiling`` bounds every H.
    """

    curvature_is_fixed = True

    components: tuple[tuple[str, ...], ...]
    bounds: tuple[tuple[float, float], ...]
    ceiling: float
    prepare: Callable[[Table], tuple[Residual, ...]] = field(compare=False)
    _prepared: PerTable[tuple[Residual, ...]] = field(
        init=False, default_factory=PerTable, compare=False, repr=False
    )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.components for name in part)

    @property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The coordinates of each residual's components."""
        starts = np.cumsum([0, *map(len, self.components)])
        return tuple(
            tuple(range(start, start + len(part)))
            for start, part in zip(starts.tolist(), self.components, strict=False)
        )

    def start(self) -> ResidualLaw:
        return ResidualLaw()

    def read(self, rows: object) -> AnyTable:
        if not isinstance(rows, Table | StreamedTable):
            raise TypeError("this problem reads tables that the data layer made")
        return rows

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def residuals(self, table: Table) -> tuple[Residual, ...]:
        """Return the residuals of a table's records; nuisances are evaluated once for it."""
        return self._prepared.of(table, self.prepare)

    def submodel(self, law: ResidualLaw, rows: AnyTable) -> AbstractSubmodel:
        if isinstance(rows, Table):
            return self._design(law, self.residuals(rows))
        return StreamedLinear(
            table=rows,
            family=Family.LOGISTIC,
            dim=self.dim,
            bound=self.row_bound(law),
            design=lambda block: self._design(law, self.prepare(block)),
        )

    def _design(self, law: ResidualLaw, residuals: tuple[Residual, ...]) -> Blocks:
        blocks = tuple(
            GeneralisedLinear(
                family=Family.LOGISTIC,
                X=-width * each.weights,
                offset=self._link(law, each.q, each.weights, b),
                y=each.y,
                bound=self.row_bound(law),
                y_largest=1.0,
            )
            for b, (each, width) in enumerate(zip(residuals, self._widths, strict=True))
        )
        return Blocks(blocks=blocks, places=self.places)

    def _link(self, law: ResidualLaw, q: Array, weights: Array, b: int) -> Array:
        """Return logit Q_b at the law, where the components have these weights; shape (N,)."""
        moved = self.displacement(law)[list(self.places[b])]
        link = kernels.logit(q)
        for eps, weight in zip(moved.tolist(), weights, strict=True):
            kernels.add_multiple(link, -self._widths[b] * eps, weight)
        return link

    def losses(self, law: ResidualLaw, rows: AnyTable) -> Array:
        loss = np.zeros(rows.n_rows)
        for b, each in enumerate(self._in_memory(rows)):
            eta = self._link(law, each.q, each.weights, b)
            loss += kernels.softplus(eta) - each.y * eta
        return loss

    def eif(self, law: ResidualLaw, rows: AnyTable, psi: Array) -> Array:
        u, _ = self._columns(law, self._in_memory(rows))
        return np.asarray((u + (self._lows - psi)[:, None]).T)

    def moments(self, law: ResidualLaw, rows: AnyTable) -> Sums:
        if isinstance(rows, Table):
            return self._moments(law, self.residuals(rows))
        parts = rows.map(lambda block: self._moments(law, self.prepare(block)))
        return reduce(add, parts, zero_sums(self.moment_shifts(law)))

    def _moments(self, law: ResidualLaw, residuals: tuple[Residual, ...]) -> Sums:
        u, m = self._columns(law, residuals)
        first, second = self._exponents()
        return second_moments(u, first).joined(column_sums(m, second, what="plug-in mean"))

    def closing_columns(self, law: ResidualLaw, table: Table) -> Array:
        """Return the columns behind the closing message, u below m, shape (2 d, N)."""
        return np.concatenate(self._columns(law, self.residuals(table)))

    def _columns(self, law: ResidualLaw, residuals: tuple[Residual, ...]) -> tuple[Array, Array]:
        """Return u_r = H_r (Y - Q) + m_r and m_r, less the lower bound, shape (d, N) each."""
        u, m = [], []
        for b, (each, width) in enumerate(zip(residuals, self._widths, strict=True)):
            rest = width * (each.y - kernels.expit(self._link(law, each.q, each.weights, b)))
            for r, weight in enumerate(each.weights):
                only = np.zeros_like(each.plug_in_weights)
                only[r] = each.plug_in_weights[r]
                m.append(width * kernels.expit(self._link(law, each.plug_in[r], only, b)))
                u.append(weight * rest + m[-1])
        return np.stack(u), np.stack(m)

    def moment_shifts(self, law: ResidualLaw) -> tuple[int, ...]:  # noqa: ARG002 - declared, for every law
        first, second = self._exponents()
        return (*second_moment_shifts(first), *column_shifts(second))

    def finish(self, law: ResidualLaw, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        products = len(pooled.units) - self.dim
        _, covariance = mean_and_covariance(pooled[:products], self.dim, n)
        return Estimate(psi=self._lows + pooled[products:].values(n), covariance=covariance)

    def move(self, law: ResidualLaw, eps: Array) -> ResidualLaw:
        if not self.admits(law, eps):
            raise NumericalError(
                f"eps: the fluctuation would move a prediction by more than {LINK_REACH:g} on the link "
                "scale; a response may be perfectly predicted"
            )
        return ResidualLaw(history=(*law.history, tuple(map(float, eps))))

    def admits(self, law: ResidualLaw, eps: Array) -> bool:  # noqa: ARG002 - the same set at every law
        return bool((np.abs(eps) * self.widths <= LINK_REACH).all())

    def path(self, law: ResidualLaw) -> tuple[tuple[float, ...], ...]:
        return law.history

    def displacement(self, law: ResidualLaw) -> Array:
        return np.array([math.fsum(step) for step in zip(*law.history, strict=True)] or [0.0] * self.dim)

    def normaliser(self, law: ResidualLaw) -> NoNormaliser:  # noqa: ARG002 - regression losses
        return NoNormaliser(self.dim)

    def row_bound(self, law: ResidualLaw) -> RowBound:  # noqa: ARG002 - declared, for every law
        x = max(self._widths) * self.ceiling  # |rho'| <= 1 and rho'' <= 1/4 for the logistic loss
        return RowBound(gradient=exponent(x), curvature=exponent(0.25 * x * x))

    def envelope(self, law: ResidualLaw) -> float:  # noqa: ARG002 - declared, for every law
        return max(self._widths) * (self.ceiling + 1.0)

    def curvature(self, law: ResidualLaw) -> None:  # noqa: ARG002 - it is a sum over rows
        return None

    def accuracy(self, law: ResidualLaw) -> float:  # noqa: ARG002 - no integral
        return 0.0

    def _in_memory(self, rows: AnyTable) -> tuple[Residual, ...]:
        if isinstance(rows, StreamedTable):
            raise TypeError("the rows of a streamed table are never there all at once")
        return self.residuals(rows)

    @property
    def _widths(self) -> tuple[float, ...]:
        return tuple(high - low for low, high in self.bounds)

    @property
    def widths(self) -> Array:
        """The width of the response behind each coordinate."""
        return np.repeat(self._widths, [len(part) for part in self.components])

    @property
    def _lows(self) -> Array:
        return np.repeat([low for low, _ in self.bounds], [len(part) for part in self.components])

    def _exponents(self) -> tuple[list[int], list[int]]:
        """Return the exponents of the columns u and m."""
        widths = self.widths.tolist()
        return [exponent(w * (self.ceiling + 1.0)) for w in widths], [exponent(w) for w in widths]


# A problem of plain arrays, such as a mean or a density's functional, on columns of a study's table.


@final
@dataclass(frozen=True, kw_only=True)
class OnColumns(AbstractProblem[Law, AnyTable], Generic[Law]):
    """``problem``, which reads an array of shape (N,) or (N, q), on these numeric columns of a table."""

    problem: AbstractProblem[Law, Any]
    columns: tuple[str, ...]
    _rows: PerTable[Any] = field(init=False, default_factory=PerTable, compare=False, repr=False)

    def rows(self, table: AnyTable) -> Any:
        """Return the rows as the problem reads them; they are read once for a table."""
        if isinstance(table, StreamedTable):
            raise InputError("this target needs all rows at once; leave out stream in the silo file")
        return self._rows.of(table, self._read)

    def _read(self, table: Table) -> Any:
        values = np.stack([table.numeric[name] for name in self.columns], axis=1)
        return self.problem.read(values if len(self.columns) > 1 else values[:, 0])

    @property
    def names(self) -> tuple[str, ...]:
        return self.problem.names

    def read(self, rows: object) -> AnyTable:
        if not isinstance(rows, Table | StreamedTable):
            raise TypeError("this problem reads tables that the data layer made")
        self.rows(rows)
        return rows

    def count(self, rows: AnyTable) -> int:
        return rows.n_rows

    def submodel(self, law: Law, rows: AnyTable) -> AbstractSubmodel:
        return self.problem.submodel(law, self.rows(rows))

    def normaliser(self, law: Law) -> AbstractNormaliser:
        return self.problem.normaliser(law)

    def row_bound(self, law: Law) -> RowBound:
        return self.problem.row_bound(law)

    def losses(self, law: Law, rows: AnyTable) -> Array:
        return self.problem.losses(law, self.rows(rows))

    def eif(self, law: Law, rows: AnyTable, psi: Array) -> Array:
        return self.problem.eif(law, self.rows(rows), psi)

    def moments(self, law: Law, rows: AnyTable) -> Sums:
        return self.problem.moments(law, self.rows(rows))

    def moment_shifts(self, law: Law) -> tuple[int, ...]:
        return self.problem.moment_shifts(law)

    def finish(self, law: Law, pooled: Sums, n: int) -> Estimate:
        return self.problem.finish(law, pooled, n)

    def move(self, law: Law, eps: Array) -> Law:
        return self.problem.move(law, eps)

    def admits(self, law: Law, eps: Array) -> bool:
        return self.problem.admits(law, eps)

    def path(self, law: Law) -> tuple[tuple[float, ...], ...]:
        return self.problem.path(law)

    def convergence_bounds(self, law: Law) -> ConvergenceBounds | None:
        return self.problem.convergence_bounds(law)

    def envelope(self, law: Law) -> float | None:
        return self.problem.envelope(law)

    def displacement(self, law: Law) -> Array | None:
        return self.problem.displacement(law)

    def curvature(self, law: Law) -> Array | None:
        return self.problem.curvature(law)

    def accuracy(self, law: Law) -> float:
        return self.problem.accuracy(law)

    def accuracy_at(self, law: Law, eps: Array) -> float:
        return self.problem.accuracy_at(law, eps)

    @property
    def curvature_is_fixed(self) -> bool:
        return self.problem.curvature_is_fixed


# Targets that installed distributions bring, by the entry point group ``fedtmle.targets``.
#
#     [project.entry-points."fedtmle.targets"]
#     LATE = "fedtmle_late:LATE"
#
# The name is the kind of the study file's [target] and the name of the class. Entry points are read only when
# a study names a kind that this package does not have, because reading them takes about 30 ms.

GROUP = "fedtmle.targets"


def installed_target(name: str) -> type[AbstractEffect] | None:
    """Return the target that an installed distribution brings as ``name``, or None; import its module."""
    points = sorted(entry_points(group=GROUP, name=name), key=_distribution)
    if not points:
        return None
    if len({_distribution(point) for point in points}) > 1:
        both = " and ".join(map(_distribution, points))
        raise InputError(f"kind: {both} both bring a target '{name}'; uninstall one of them")
    source = _distribution(points[0])
    try:
        target = points[0].load()
    except Exception as error:  # whatever the module of another distribution raises
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"kind: '{name}' of {source} cannot be imported ({reason})") from None
    if not (isinstance(target, type) and issubclass(target, AbstractEffect) and target.__name__ == name):
        raise InputError(
            f"kind: {source} declares '{name}', and {points[0].value} is no target of that "
            "name; expected a subclass of AbstractEffect"
        )
    return target


def _distribution(point: EntryPoint) -> str:
    return "an unknown distribution" if point.dist is None else point.dist.name
