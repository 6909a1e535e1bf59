"""Looks: under masks, silos judge what they are about to tell against the rows of all of them.

An answer tells sums of rows t_i, and the share of one person in a combination of them is the leverage
t_i^T S^-1 t_i (`model.leverage`). Where sums are masked, only totals are told, so that S is the pooled
sum of t t^T. No silo knows it. Before the gradient of a nuisance model is asked, a round of its own pools S,
coarsely, and each silo then holds its own rows against what is surely in S:

    C S C^T / n = M + E,   |E| <= p 2^(grid - 1),   S >= n C^-1 (M - |E|) C^-T,

p the number of columns. The coordinates C are public and whiten what is known of S so far: a matrix of some
nine bits then resolves all directions alike. Where it does not, another look follows in better coordinates.

A look holds at nearby points. The columns have declared ranges, so that no linear predictor moves by more
than some delta when eps moves, and S shrinks at most by a factor of exp(delta) for the logistic loss
(`model.leverage.Look`). When the factor exceeds `FARTHEST`, the next look is due. All of this is public,
hence the same at every party.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import add
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.model.exact import column_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.kernels import column_sums
from fedtmle.model.leverage import LEAST_RESIDUAL, PersonRows, RowSpace
from fedtmle.model.linear import cholesky, congruence, invert_lower, multiply
from fedtmle.model.problem import JudgedTogether
from fedtmle.model.types import Array, Part, packed_size, unpack, upper_pairs
from fedtmle.protocol.codes import Golomb, Integers
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import AbstractTotals, Evaluation, Flow, Local, Phase, Query
from fedtmle.protocol.views import ViewedQuery

Result = TypeVar("Result")

GRIDS = (-10, -11, -12)  # exponents of the grid of M, in the looks that follow each other at a first point
CLEAR = 4.0  # times the error that each eigenvalue of M exceeds where it is resolved
FARTHEST = 1.35  # the factor by which S may have shrunk since a look
NEAR = {Family.LOGISTIC: math.log(FARTHEST), Family.GAUSSIAN: LEAST_RESIDUAL * (1.0 - FARTHEST**-0.5)}


class Subject(NamedTuple):
    """Rows that silos judge together: those of a model's gradient at a point, or the roots of its Hessian."""

    point: Evaluation
    part: Part
    facts: JudgedTogether

    @property
    def largest(self) -> Array:
        """A bound of |t_j| by column; larger rows are shortened for the look, which makes S smaller."""
        weight = self.facts.weight if self.part is Part.GRADIENT else math.sqrt(self.facts.weight)
        return weight * np.array(self.facts.sizes)

    def is_like(self, other: Subject) -> bool:
        """Return whether the other is of the same model."""
        own, others = self.point.model, other.point.model
        return own is others or bool(own == others)

    def rows(self, local: Local) -> Iterator[PersonRows]:
        point = self.point
        return local.submodel(point.model, point.law).told_rows(point.eps, self.part)


@final
@dataclass(frozen=True, kw_only=True)
class PooledGram:
    """A lower bound of S at one point: M and the coordinates and the error above."""

    subject: Subject
    C: Array
    matrix: Array
    error: float
    n: int

    @property
    def is_resolved(self) -> bool:
        return cholesky(self.matrix, shift=-CLEAR * self.error) is not None

    def whitened(self) -> Array:
        """Return coordinates in which M is nearly the identity, lifted by its error where it must be."""
        lift = 0.0
        while True:
            factor = cholesky(self.matrix, shift=lift, floor=self.error)
            if factor is not None:
                return multiply(invert_lower(factor), self.C)
            lift = 4.0 * lift if lift else 2.0 * self.error

    def shrunk(self, point: Evaluation) -> float:
        """Return the largest factor by which S may be smaller at another point; infinite if that is far."""
        pairs = zip(point.eps.tolist(), self.subject.point.eps.tolist(), strict=True)
        family = self.subject.facts.family
        delta = self.subject.facts.largest_move([a - b for a, b in pairs])
        if self.subject.part is Part.HESSIAN and family is Family.GAUSSIAN:
            return 1.0
        if not delta <= NEAR[family]:
            return math.inf
        return math.exp(delta) if family is Family.LOGISTIC else (1.0 - delta / LEAST_RESIDUAL) ** -2

    def space(self, subject: Subject, local: Local) -> RowSpace:
        """Return the metric by which a silo judges its rows at a point nearby."""
        total = self.n / self.shrunk(subject.point)
        C = self.C / self.subject.largest
        return RowSpace.pooled(C, total * self.matrix, total * self.error, lambda: subject.rows(local))


class Asked(NamedTuple):
    """One matrix of a look: whose, in which coordinates, on which grid."""

    subject: Subject
    C: Array
    grid: int

    @property
    def dim(self) -> int:
        return len(self.C)

    @property
    def error(self) -> float:
        """A bound of the operator norm of what rounding does to M."""
        return self.dim * 2.0 ** (self.grid - 1)


@final
@dataclass(frozen=True, kw_only=True)
class LookQuery(AbstractTotals[Integers, Integers]):
    """The pooled sums of t t^T of some subjects in public coordinates, rounded; masked, and never open.

    Each silo rounds to multiples of 2^e <= n 2^grid / silos, so that the total is off by n 2^(grid - 1).
    """

    asked: tuple[Asked, ...]
    n: int
    silos: int
    phase: Phase = Phase.NUISANCE

    @property
    def explanation(self) -> str:
        return "sums of products of a model's rows, rounded coarsely, to judge the sums that are asked next"

    @property
    def needs_masks(self) -> bool:
        return True

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=tuple(packed_size(each.dim) for each in self.asked))

    @property
    def pooled_code(self) -> Golomb:
        return self.answer_code

    def _unit(self, each: Asked) -> int:
        """Return e."""
        return math.frexp(self.n / self.silos)[1] - 1 + each.grid

    def answer(self, local: Local) -> Integers:
        return tuple(z for each in self.asked for z in self._rounded(each, local))

    def _rounded(self, each: Asked, local: Local) -> Iterator[int]:
        upper, exponents = upper_pairs(each.dim), (0,) * packed_size(each.dim)
        total = zero_sums(column_shifts(exponents))
        for piece in each.subject.rows(local):
            rows = piece.rows / each.subject.largest[:, None]
            rows /= np.maximum(np.abs(rows).max(axis=0, initial=0.0), 1.0)
            total += column_sums(rows, exponents, what="row of a look", terms=upper)
        image = congruence(each.C, unpack(total.values(), each.dim))
        return (round(math.ldexp(float(image[j, k]), -self._unit(each))) for j, k in upper)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return tuple(lane for each in self.asked for lane in self._lanes(each))

    def _lanes(self, each: Asked) -> Iterator[Lane]:
        reach = [math.fsum(map(abs, row)) for row in each.C.tolist()]
        most = math.ldexp(self.n * each.subject.facts.periods * (1.0 + 2.0**-20), -self._unit(each))
        for j, k in upper_pairs(each.dim):
            yield Lane(math.ceil(most * reach[j] * reach[k]) + self.silos)

    def addends(self, answer: Integers, n_rows: int) -> Integers:  # noqa: ARG002 - sums, not means
        return answer

    def pool_totals(self, totals: Integers) -> Integers:
        return totals

    def grams(self, pooled: Integers) -> list[PooledGram]:
        """Return what the totals tell."""
        rest, found = iter(pooled), []
        for each in self.asked:
            entries = np.array(list(islice(rest, packed_size(each.dim))), dtype=np.float64)
            matrix = unpack(np.ldexp(entries, self._unit(each)) / self.n, each.dim)
            found.append(
                PooledGram(subject=each.subject, C=each.C, matrix=matrix, error=each.error, n=self.n)
            )
        return found


class Looks:
    """The looks of one masked session: what is public about the rows of all silos."""

    def __init__(self, n: int, silos: int) -> None:
        self._n = n
        self._silos = silos
        self._known: list[PooledGram] = []

    def before(self, flow: Flow[Result]) -> Flow[Result]:
        """Return the flow with a look before each query whose rows are not known well enough."""
        pooled: object = None
        while True:
            try:
                query = flow.send(pooled)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            yield from self._look(query)
            pooled = yield query

    def _look(self, query: Query) -> Flow[None]:
        due: list[Subject] = []
        for subject in _subjects(query):
            repeats = any(other.part is subject.part and other.is_like(subject) for other in due)
            if not repeats and not self._covers(self._find(subject), subject.point):
                due.append(subject)
        for number, grid in enumerate(GRIDS):
            due = [s for s in due if number == 0 or not self._is_done(s)]
            if not due:
                return
            asked = tuple(Asked(subject, self._coordinates(subject), grid) for subject in due)
            look = LookQuery(asked=asked, n=self._n, silos=self._silos, phase=query.phase)
            grams = look.grams((yield look))
            found = [self._find(gram.subject) for gram in grams]
            self._known = [gram for gram in self._known if all(gram is not old for old in found)] + grams

    def _find(self, subject: Subject) -> PooledGram | None:
        like = (gram for gram in self._known if gram.subject.part is subject.part)
        return next((gram for gram in like if gram.subject.is_like(subject)), None)

    def _covers(self, known: PooledGram | None, point: Evaluation) -> bool:
        return known is not None and known.shrunk(point) < math.inf

    def _is_done(self, subject: Subject) -> bool:
        known = self._find(subject)
        return known is not None and known.is_resolved

    def _coordinates(self, subject: Subject) -> Array:
        """Return the coordinates of the next look: those that whiten what is known, also of the other part."""
        known = self._find(subject)
        if known is None:
            known = next((gram for gram in self._known if gram.subject.is_like(subject)), None)
        return np.eye(subject.point.model.dim) if known is None else known.whitened()

    def knows(self, point: Evaluation, part: Part) -> bool:
        """Return whether a look holds at a point; else a silo judges by its own rows."""
        facts = point.model.judged_together
        return facts is not None and self._covers(self._find(Subject(point, part, facts)), point)

    def space(self, point: Evaluation, part: Part, local: Local) -> RowSpace:
        """Return the metric for a silo's rows at a point where a look holds."""
        subject = Subject(point, part, _facts(point))
        known = self._find(subject)
        if known is None:
            raise AssertionError("a space is asked where a look holds")
        return known.space(subject, local)

    def sizes(self, point: Evaluation) -> Array:
        """Return the largest magnitude that the columns of a model may have at any silo."""
        return np.array(_facts(point).sizes)


def _facts(point: Evaluation) -> JudgedTogether:
    facts = point.model.judged_together
    if facts is None:
        raise AssertionError("each silo judges this model by its own rows")
    return facts


def _subjects(query: Query) -> Iterator[Subject]:
    """Yield the rows behind a query that silos can judge together."""
    for member in query.members:
        if member.noise is not None or isinstance(member, ViewedQuery) or member.lanes is None:
            continue
        for point in member.evaluations():
            facts = point.model.judged_together
            if facts is not None and point.batch is None:
                yield from (Subject(point, part, facts) for part in point.parts)
