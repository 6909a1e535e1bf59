"""Targeting: the algorithms of the package, driven over questions whose totals alone are known.

An algorithm yields queries for a problem, and here the problem's submodel is made of layers. Every query that
is a function of totals becomes blocks of a question: gradients, Hessians and losses are exact sums, a rounded
gradient is one over its lattice, closing sums are moments. What algorithms derive from the answers, and the
certificates, are as they were. Fits of a silo's own rows are no such function, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Never, TypeVar, final

import numpy as np

from fedtmle.errors import InputError, NumericalError
from fedtmle.estimation.eif import Closing, estimate, exact
from fedtmle.estimation.flow import Asked, Flow, blocks_of
from fedtmle.estimation.fluctuated import AbstractFluctuated, Law
from fedtmle.model.problem import Calibration, ConvergenceBounds, Estimate
from fedtmle.model.submodel import NoNormaliser
from fedtmle.protocol.coded import CalibrationQuery, Curvature, RoundedGradientQuery
from fedtmle.protocol.query import Flow as Queries
from fedtmle.protocol.query import JointQuery, MomentsQuery, Phase, Query
from fedtmle.protocol.sums import SumsQuery
from fedtmle.targets.effects.problem import AbstractMeans
from fedtmle_core import graph
from fedtmle_core.blocks import Block, Intervals, Lattice, Score
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Family, Part, RowBound

Result = TypeVar("Result")
Rider = TypeVar("Rider")

UNIT_CURVATURE = {Family.LOGISTIC: 0.25, Family.GAUSSIAN: 1.0}  # the largest rho'' of a family


@final
@dataclass(frozen=True, kw_only=True)
class TermProblem(AbstractMeans[Law, object]):
    """The problem that a regression poses to an algorithm; nothing of it reads a row.

    ``known`` are the scales at the start, if they were asked before.
    """

    q: AbstractFluctuated
    dictionary: Dictionary
    known: Calibration | None = None

    @property
    def curvature_is_fixed(self) -> bool:
        return self.q.is_common

    @property
    def names(self) -> tuple[str, ...]:
        return self.q.labels

    @property
    def dim(self) -> int:
        return self.q.dim

    @property
    def combination(self) -> tuple[tuple[float, ...], ...]:  # type: ignore[override]  # it is only read
        return self.q.combination

    def start(self) -> Law:
        """Return the law before targeting."""
        return Law()

    def score(self, law: Law, eps: Array, part: Part, lattice: Lattice | None = None) -> Score:
        """Return the block of one part of the loss at eps in the submodel of a law."""
        return Score(
            family=self.q.family,
            layers=self._layers(law),
            at=tuple(map(float, eps)),
            part=part,
            lattice=lattice,
        )

    def _layers(self, law: Law) -> tuple[Any, ...]:
        if law not in self._made:
            self._made[law] = self.q.layers(law)
        return self._made[law]

    @cached_property
    def _made(self) -> dict[Law, tuple[Any, ...]]:
        return {}

    def closing(self, law: Law) -> Closing:
        """Return the closing sums at a law."""
        return self.q.eif(law).closing

    def intervals(self, law: Law) -> Intervals:
        """Return the public interval of each term of the submodel at a law."""
        return graph.intervals_of(self.score(law, np.zeros(self.dim), Part.GRADIENT).terms, self.dictionary)

    # What every hospital derives from a law.

    def move(self, law: Law, eps: Array) -> Law:
        if not self.admits(law, eps):
            raise NumericalError(
                "eps: the fluctuation would move a prediction too far on the link scale; an arm may be "
                "perfectly predicted"
            )
        return law.moved(eps)

    def admits(self, law: Law, eps: Array) -> bool:  # noqa: ARG002 - the same set at every law
        return self.q.admits(eps)

    def path(self, law: Law) -> tuple[tuple[float, ...], ...]:
        return law.history

    def displacement(self, law: Law) -> Array | None:
        return law.total(self.dim) if self.q.is_common else None

    def normaliser(self, law: Law) -> NoNormaliser:  # noqa: ARG002 - a regression's loss has none
        return NoNormaliser(self.dim)

    def row_bound(self, law: Law) -> RowBound:
        return self.score(law, np.zeros(self.dim), Part.GRADIENT).bound(self.intervals(law))

    def curvature(self, law: Law) -> None:  # noqa: ARG002 - it is a sum over people
        return None

    def accuracy(self, law: Law) -> float:  # noqa: ARG002 - no quadrature
        return 0.0

    def calibration(self, law: Law) -> Calibration | None:
        return None if law.history else self.known

    def convergence_bounds(self, law: Law) -> ConvergenceBounds | None:
        if self.known is None or not self.q.is_common:
            return None
        return self.q.bounds(law, self.known, self.intervals(law))

    def envelope(self, law: Law) -> float:
        eif = self.q.eif(law)
        largest = eif.envelope(graph.intervals_of((*eif.u, *eif.m), self.dictionary))
        return largest * max(sum(map(abs, row)) for row in self.combination)

    def moment_shifts(self, law: Law) -> tuple[int, ...]:
        block = self.closing(law).block
        return block.shifts(graph.intervals_of(block.terms, self.dictionary))

    def finish(self, law: Law, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        return self._estimate(pooled)

    def finish_one_step(self, law: Law, pooled: Sums, n: int) -> Estimate:  # noqa: ARG002 - all is pooled
        return self._estimate(pooled, one_step=True)

    def _estimate(self, pooled: Sums, *, one_step: bool = False) -> Estimate:
        q = self.q
        return estimate(pooled, q.L, q.outcome_bounds[0], one_step=one_step, divides_by_n=q.divides_by_n)

    def _of_rows(self, *_: object, **__: object) -> Never:
        raise TypeError("a program over questions sees totals, never rows")

    read = count = submodel = losses = eif = moments = _of_rows


@final
@dataclass(frozen=True)
class AskedFor:
    """The blocks of one query, and what its algorithm expects of their totals."""

    blocks: tuple[Block, ...]
    read: Callable[[Sequence[Array]], object]


def asked(query: Query) -> AskedFor:
    """Return a query as blocks; `InputError` if it is no function of totals."""
    match query:
        case JointQuery():
            return _joined([asked(each) for each in query.queries])
        case SumsQuery(batch=None, problem=TermProblem() as problem, law=Law() as law):
            listed = [part for part in (Part.LOSS, Part.GRADIENT, Part.HESSIAN) if part in query.parts]
            blocks = tuple(problem.score(law, query.eps, part) for part in listed)
            return AskedFor(blocks, lambda totals: exact(np.concatenate(totals)))
        case RoundedGradientQuery(problem=TermProblem() as problem, law=Law() as law):
            # z = round(C g / h): the matrix is C / h, and the lattice that of the integers.
            C = tuple(tuple(float(entry / query.lattice.h) for entry in row) for row in query.lattice.C)
            block = problem.score(law, query.eps, Part.GRADIENT, Lattice(places=0, C=C))
            return AskedFor((block,), lambda totals: query.pool_totals(tuple(map(round, totals[0].tolist()))))
        case CalibrationQuery(problem=TermProblem() as problem, law=Law() as law) if query.lanes is not None:
            return _calibrated(query, problem, law)
        case MomentsQuery(problem=TermProblem() as problem, law=Law() as law):
            closing = problem.closing(law)
            return AskedFor((closing.block,), lambda totals: closing.read(totals[0]))
    raise InputError(
        f"algorithm: it asks for what is no sum over all hospitals ({query.explanation}); choose Coded, "
        "Gradient without batches, or OneStep"
    )


def _joined(parts: Sequence[AskedFor]) -> AskedFor:
    def read(totals: Sequence[Array]) -> tuple[object, ...]:
        rest = iter(totals)
        return tuple(part.read([next(rest) for _ in part.blocks]) for part in parts)

    return AskedFor(tuple(block for part in parts for block in part.blocks), read)


def _calibrated(query: CalibrationQuery, problem: TermProblem, law: Law) -> AskedFor:
    """Return the curvature at the start, or its bound: the Gram matrix times the largest rho''."""
    block, factor = problem.score(law, np.zeros(problem.dim), Part.HESSIAN), 1.0
    if query.curvature is Curvature.CEILING:
        factor = UNIT_CURVATURE[block.family]
        block = Score(family=Family.GAUSSIAN, layers=block.layers, at=block.at, part=Part.HESSIAN)

    def read(totals: Sequence[Array]) -> object:
        # The query's grid: entries, and what rounding a silo's entry could have changed; here nothing.
        units = [round(np.ldexp(factor * entry, -query.finest)) for entry in totals[0]]
        return query.pool_totals((*units, query.n))

    return AskedFor((block,), read)


def over_questions(
    queries: Queries[Result], rider: Callable[[Any], Flow[Rider] | None] | None = None
) -> Flow[tuple[Result, Rider | None]]:
    """Return the result of a flow of queries, and that of another flow that rides along with the closing.

    ``rider`` gives the other flow at the law of the closing sums, or none.
    """
    pooled: object = None
    riding: Flow[Rider] | None = None
    reply: list[Array] = []
    own: Rider | None = None
    while True:
        try:
            query = queries.send(pooled)
        except StopIteration as stop:
            result: Result = stop.value
            break
        own_blocks = asked(query)
        beside: Asked = ()
        law = _closes_at(query)
        if law is not None and rider is not None:
            riding = rider(law)
            try:
                beside = () if riding is None else next(riding)
            except StopIteration as stop:
                riding, own = None, stop.value
        blocks: Asked = tuple(dict.fromkeys((*own_blocks.blocks, *beside)))
        totals = dict(zip(blocks_of(blocks), (yield blocks), strict=True))
        pooled = own_blocks.read([totals[block] for block in own_blocks.blocks])
        reply = [totals[block] for block in blocks_of(beside)]
    while riding is not None:
        try:
            blocks = riding.send(reply)
        except StopIteration as stop:
            riding, own = None, stop.value
        else:
            reply = yield blocks
    return result, own


def _closes_at(query: Query) -> object | None:
    """Return the law of the closing sums in a query, None if it has none."""
    for member in query.members:
        if isinstance(member, MomentsQuery) and member.phase is Phase.CLOSING:
            return member.law
    return None
