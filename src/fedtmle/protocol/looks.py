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
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.model.exact import column_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.kernels import column_sums
from fedtmle.model.leverage import LEAST_RESIDUAL, PersonRows, Pieces, RowSpace
from fedtmle.model.linear import cholesky, congruence, invert_lower, multiply
from fedtmle.model.problem import JudgedTogether
from fedtmle.model.types import Array, Part, packed_size, unpack, upper_pairs
from fedtmle.protocol.codes import Golomb, Integers
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import AbstractTotals, Evaluation, Flow, Local, Model, Phase, Query
from fedtmle.protocol.views import ViewedQuery

Result = TypeVar("Result")

GRIDS = (-10, -11, -12)  # exponents of the grid of M, in the looks that follow each other at a first point
CLEAR = 4.0  # times the error that each eigenvalue of M exceeds where it is resolved
FARTHEST = 1.35  # the factor by which S may have shrunk since a look
NEAR = {Family.LOGISTIC: math.log(FARTHEST), Family.GAUSSIAN: LEAST_RESIDUAL * (1.0 - FARTHEST**-0.5)}


class AbstractSubject(ABC):
    """Rows that silos judge together."""

    facts: JudgedTogether

    @property
    def largest(self) -> Array:
        """A bound of |t_j| by column; larger rows are shortened for the look, which makes S smaller."""
        return self.weight * np.array(self.facts.sizes)

    @property
    def weight(self) -> float:
        return self.facts.weight

    @abstractmethod
    def shrunk(self, point: Evaluation) -> float:
        """Return the largest factor by which S may be smaller at another point; infinite if that is far."""

    @abstractmethod
    def rows(self, local: Local) -> Iterator[PersonRows]:
        """Yield a silo's rows."""


@final
@dataclass(frozen=True, eq=False)
class Subject(AbstractSubject):
    """The rows of a model's gradient at a point, or the roots of its Hessian."""

    point: Evaluation
    part: Part
    facts: JudgedTogether

    @property
    def weight(self) -> float:
        return self.facts.weight if self.part is Part.GRADIENT else math.sqrt(self.facts.weight)

    def is_of(self, model: Model) -> bool:
        return self.point.model is model or bool(self.point.model == model)

    def shrunk(self, point: Evaluation) -> float:
        pairs, family = zip(point.eps.tolist(), self.point.eps.tolist(), strict=True), self.facts.family
        delta = self.facts.largest_move([a - b for a, b in pairs])
        if self.part is Part.HESSIAN and family is Family.GAUSSIAN:
            return 1.0
        if not delta <= NEAR[family]:
            return math.inf
        return math.exp(delta) if family is Family.LOGISTIC else (1.0 - delta / LEAST_RESIDUAL) ** -2

    def rows(self, local: Local) -> Iterator[PersonRows]:
        return local.submodel(self.point.model, self.point.law).told_rows(self.point.eps, self.part)


@final
@dataclass(frozen=True, eq=False)
class Union(AbstractSubject):
    """The columns of all models of one response, with the residuals at zero.

    There two models tell sums of the same residuals over different columns, and with them the differences
    of columns between the models. ``columns`` says of each column by its name in which model it is, and
    where.
    """

    models: tuple[Model, ...]
    columns: Mapping[str, tuple[int, int]]
    facts: JudgedTogether

    @classmethod
    def of(cls, model: Model, facts: JudgedTogether) -> Union:
        return cls((model,), {name: (0, j) for j, name in enumerate(model.design_names or ())}, facts)

    def joined(self, model: Model, facts: JudgedTogether) -> Union:
        """Return the union with another model, or this one if it has no new column."""
        new = {name: (len(self.models), j) for j, name in enumerate(model.design_names or ())}
        new = {name: place for name, place in new.items() if name not in self.columns}
        if not new:
            return self
        ranges = (*self.facts.ranges, *(facts.ranges[j] for _, j in new.values()))
        return Union((*self.models, model), {**self.columns, **new}, self.facts._replace(ranges=ranges))

    def shrunk(self, point: Evaluation) -> float:
        return 1.0

    def rows(self, local: Local) -> Iterator[PersonRows]:
        told = (
            local.submodel(model, None).told_rows(np.zeros(model.dim), Part.GRADIENT) for model in self.models
        )
        for pieces in zip(*told, strict=True):
            rows = np.stack([pieces[k].rows[j] for k, j in self.columns.values()])
            yield PersonRows(rows, pieces[0].counts)


@final
@dataclass(frozen=True, kw_only=True)
class PooledGram:
    """A lower bound of S at one point: M and the coordinates and the error above."""

    subject: AbstractSubject
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

    def space(self, pieces: Pieces, shrunk: float = 1.0) -> RowSpace:
        """Return the metric by which a silo judges its rows where S may have shrunk by a factor."""
        total = self.n / shrunk
        return RowSpace.pooled(self.C / self.subject.largest, total * self.matrix, total * self.error, pieces)


class Asked(NamedTuple):
    """One matrix of a look: whose, in which coordinates, on which grid."""

    subject: AbstractSubject
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

    def addends(self, answer: Integers, n_rows: int) -> Integers:
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
        self._unions: list[Union] = []  # one for each response

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
        """Ask for the matrices that are due, and in better coordinates for those that are not resolved."""
        due = self._due(query)
        for grid in GRIDS:
            if not due:
                return
            asked = tuple(Asked(subject, coordinates, grid) for subject, coordinates in due)
            look = LookQuery(asked=asked, n=self._n, silos=self._silos, phase=query.phase)
            grams = look.grams((yield look))
            for gram in grams:
                self._keep(gram)
            due = [(gram.subject, gram.whitened()) for gram in grams if not gram.is_resolved]

    def _due(self, query: Query) -> list[tuple[AbstractSubject, Array]]:
        """Return the subjects to look at, and the coordinates: those that whiten what is known of them."""
        due: list[Subject] = []
        unions: dict[int, Union] = {}
        for subject in _subjects(query):
            model = subject.point.model
            number = self._join(model, subject.facts)
            if len(self._unions[number].models) > 1 and self._union_gram(number) is None:
                unions[number] = self._unions[number]
            repeats = any(other.part is subject.part and other.is_of(model) for other in due)
            if not repeats and not self.knows(subject.point, subject.part):
                due.append(subject)
        return [*((subject, self._coordinates(subject)) for subject in due), *self._fresh(unions)]

    def _fresh(self, unions: Mapping[int, Union]) -> Iterator[tuple[AbstractSubject, Array]]:
        return ((union, np.eye(len(union.columns))) for union in unions.values())

    def _join(self, model: Model, facts: JudgedTogether) -> int:
        """Add a model to those of its response; return their number."""
        for number, union in enumerate(self._unions):
            if union.facts.response == facts.response:
                self._unions[number] = union.joined(model, facts)
                return number
        self._unions.append(Union.of(model, facts))
        return len(self._unions) - 1

    def _union_gram(self, number: int) -> PooledGram | None:
        return next((gram for gram in self._known if gram.subject is self._unions[number]), None)

    def _keep(self, new: PooledGram) -> None:
        """Keep what is known now in the place of what was known of the same rows."""
        subject = new.subject

        def is_old(gram: PooledGram) -> bool:
            old = gram.subject
            if isinstance(subject, Subject) and isinstance(old, Subject):
                return old.part is subject.part and old.is_of(subject.point.model)
            return old is subject

        self._known = [*(gram for gram in self._known if not is_old(gram)), new]

    def _find(self, model: Model, part: Part | None) -> PooledGram | None:
        for gram in self._known:
            subject = gram.subject
            if isinstance(subject, Subject) and part in (None, subject.part) and subject.is_of(model):
                return gram
        return None

    def _coordinates(self, subject: Subject) -> Array:
        model = subject.point.model
        known = self._find(model, subject.part) or self._find(model, None)
        return np.eye(model.dim) if known is None else known.whitened()

    def knows(self, point: Evaluation, part: Part) -> bool:
        """Return whether a look holds at a point; else a silo judges by its own rows."""
        known = self._find(point.model, part)
        return known is not None and known.subject.shrunk(point) < math.inf

    def space(self, point: Evaluation, part: Part, local: Local) -> RowSpace:
        """Return the metric for a silo's rows at a point where a look holds."""
        known = self._find(point.model, part)
        if known is None:
            raise AssertionError("a space is asked where a look holds")
        subject = Subject(point, part, known.subject.facts)
        return known.space(lambda: subject.rows(local), known.subject.shrunk(point))

    def union(self, point: Evaluation, local: Local) -> tuple[Union, RowSpace] | None:
        """Return the columns of all models of the response and their metric; None if there is one model."""
        facts = point.model.judged_together
        for number, union in enumerate(self._unions):
            known = self._union_gram(number)
            if facts is not None and known is not None and union.facts.response == facts.response:
                return union, known.space(lambda union=union: union.rows(local))  # type: ignore[misc]
        return None

    def sizes(self, point: Evaluation) -> Array:
        """Return the largest magnitude that the columns of a model may have at any silo."""
        facts = point.model.judged_together
        return np.array(() if facts is None else facts.sizes)


def _subjects(query: Query) -> Iterator[Subject]:
    """Yield the rows behind a query that silos can judge together."""
    for member in query.members:
        if member.noise is not None or isinstance(member, ViewedQuery) or member.lanes is None:
            continue
        for point in member.evaluations():
            facts = point.model.judged_together
            if facts is not None and point.batch is None:
                yield from (Subject(point, part, facts) for part in point.parts)
