"""Public work is done once in this process, and every party is charged for it.

Each party of a federation rebuilds the law and integrates its normaliser itself. Here they all live in
one process, so a result is remembered with the CPU time it took; whoever needs it again gets it at
once, and the clock moves on as if it had been computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from fedtmle.model.density.law import DensityLaw
from fedtmle.model.exact import Sums
from fedtmle.model.problem import AbstractProblem, Estimate
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.model.types import Array, RowBound
from fedtmle.targets.optimal_transport import OptimalTransport

REMEMBERED = 512
Value = TypeVar("Value")


@final
class Ledger:
    """Results with their costs; `now` is CPU time plus all that was remembered instead of computed."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._known: OrderedDict[Hashable, tuple[Any, float]] = OrderedDict()
        self._owed = 0.0

    def now(self) -> float:
        return self._clock() + self._owed

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        value: Value
        if key in self._known:
            value, cost = self._known[key]
            self._owed += cost
        else:
            before = self.now()
            value = compute()
            self._known[key] = value, self.now() - before
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return value


@final
@dataclass(frozen=True, kw_only=True)
class LedgerNormaliser(AbstractNormaliser):
    """A normaliser whose values are remembered."""

    inner: AbstractNormaliser
    history: tuple[tuple[float, ...], ...]  # names the law, for one start
    ledger: Ledger

    def value(self, eps: Array) -> float:
        return self.ledger.get(("value", self.history, eps.tobytes()), lambda: self.inner.value(eps))

    def gradient(self, eps: Array) -> Array:
        return self.ledger.get(("gradient", self.history, eps.tobytes()), lambda: self.inner.gradient(eps))

    def hessian(self, eps: Array) -> Array:
        return self.ledger.get(("hessian", self.history, eps.tobytes()), lambda: self.inner.hessian(eps))

    def curvature_ceiling(self, C: Array) -> float:
        return self.inner.curvature_ceiling(C)


@final
@dataclass(frozen=True, kw_only=True)
class LedgerProblem(AbstractProblem[DensityLaw, Array]):
    """The transport problem, its public work kept in one run's ledger; rows are each silo's own work."""

    inner: OptimalTransport
    ledger: Ledger = field(compare=False, repr=False)

    @property
    def names(self) -> tuple[str, ...]:
        return self.inner.names

    @property
    def curvature_is_fixed(self) -> bool:
        return self.inner.curvature_is_fixed

    def move(self, law: DensityLaw, eps: Array) -> DensityLaw:
        key = "move", law.history, eps.tobytes()
        return self.ledger.get(key, lambda: self.inner.move(law, eps))

    def curvature(self, law: DensityLaw) -> Array:
        return self.ledger.get(("curvature", law.history), lambda: self.inner.curvature(law))

    def accuracy(self, law: DensityLaw) -> float:
        return self.ledger.get(("accuracy", law.history), lambda: self.inner.accuracy(law))

    def normaliser(self, law: DensityLaw) -> AbstractNormaliser:
        return LedgerNormaliser(inner=self.inner.normaliser(law), history=law.history, ledger=self.ledger)

    def row_bound(self, law: DensityLaw) -> RowBound:
        return self.inner.row_bound(law)

    def admits(self, law: DensityLaw, eps: Array) -> bool:
        return self.inner.admits(law, eps)

    def moment_shifts(self, law: DensityLaw) -> tuple[int, ...]:
        return self.inner.moment_shifts(law)

    def finish(self, law: DensityLaw, pooled: Sums, n: int) -> Estimate:
        return self.inner.finish(law, pooled, n)

    def read(self, rows: object) -> Array:
        return self.inner.read(rows)

    def concatenate(self, parts: Sequence[Array]) -> Array:
        return self.inner.concatenate(parts)

    def count(self, rows: Array) -> int:
        return self.inner.count(rows)

    def submodel(self, law: DensityLaw, rows: Array) -> AbstractSubmodel:
        return self.inner.submodel(law, rows)

    def losses(self, law: DensityLaw, rows: Array) -> Array:
        return self.inner.losses(law, rows)

    def eif(self, law: DensityLaw, rows: Array, psi: Array) -> Array:
        return self.inner.eif(law, rows, psi)

    def moments(self, law: DensityLaw, rows: Array) -> Sums:
        return self.inner.moments(law, rows)
