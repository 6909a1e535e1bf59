"""Simulated parallel time of a synchronous federation whose silos run one after another in this process.

A round lasts as long as its slowest silo computes, plus the server's work until the next request, plus one
link latency. `TimedFederation` takes its clock as an argument. The clock here is the CPU time of this thread,
so that other programs on the machine do not count.

In a real federation each party rebuilds the law and integrates its normaliser itself. In this process each
such result is computed once. `WorkLedger` stores it with the CPU time that it took, and charges that time
to every party that needs the result again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from fedtmle.model.problem import AbstractProblem, Estimate, PoolableRows
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel
from fedtmle.runtime.silo import Silo
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, RowBound
from fedtmle_paper.density.law import DensityLaw
from fedtmle_paper.optimal_transport import OptimalTransport


@dataclass(frozen=True, kw_only=True)
class RoundTime:
    """Seconds of one round: the slowest silo, all silos together, and the server after them."""

    slowest: float
    silos: float
    server: float

    @property
    def compute(self) -> float:
        """What the round adds to the parallel time, before latency."""
        return self.slowest + self.server


class TimedFederation:
    """All silos in this process, one at a time, each step timed."""

    def __init__(self, silos: Sequence[Silo], *, clock: Callable[[], float]) -> None:
        self._silos = {silo.name: silo for silo in silos}
        self._clock = clock
        self._steps: list[list[float]] = []
        self._entered: list[float] = []
        self._left: list[float] = []

    @property
    def silos(self) -> Sequence[str]:
        return tuple(self._silos)

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        self._entered.append(self._clock())
        replies, steps = {}, []
        for silo, request in requests.items():
            before = self._clock()
            replies[silo] = self._silos[silo].step(request)
            steps.append(self._clock() - before)
        self._steps.append(steps)
        self._left.append(self._clock())
        return replies

    def rounds(self) -> tuple[RoundTime, ...]:
        """Every round of a finished session, in order, without the opening and closing greetings."""
        server = (after - left for left, after in zip(self._left[1:], self._entered[2:], strict=False))
        return tuple(
            RoundTime(slowest=max(steps), silos=sum(steps), server=spent)
            for steps, spent in zip(self._steps[1:-1], server, strict=True)
        )


REMEMBERED = 512
Value = TypeVar("Value")


@final
class WorkLedger:
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
    ledger: WorkLedger

    def value(self, eps: Array) -> float:
        return self.ledger.get(("value", self.history, eps.tobytes()), lambda: self.inner.value(eps))

    def gradient(self, eps: Array) -> Array:
        return self.ledger.get(("gradient", self.history, eps.tobytes()), lambda: self.inner.gradient(eps))

    def hessian(self, eps: Array) -> Array:
        return self.ledger.get(("hessian", self.history, eps.tobytes()), lambda: self.inner.hessian(eps))

    def curvature_ceiling(self, C: Array) -> float:
        return self.inner.curvature_ceiling(C)

    def segment_curvature(self, start: Array, step: Array) -> float:
        key = "segment", self.history, start.tobytes(), step.tobytes()
        return self.ledger.get(key, lambda: self.inner.segment_curvature(start, step))


@final
@dataclass(frozen=True, kw_only=True)
class LedgerProblem(AbstractProblem[DensityLaw, Array], PoolableRows[Array]):
    """The transport problem, its public work kept in one run's ledger; rows are each silo's own work."""

    inner: OptimalTransport
    ledger: WorkLedger = field(compare=False, repr=False)

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

    def path(self, law: DensityLaw) -> tuple[tuple[float, ...], ...]:
        return self.inner.path(law)

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
