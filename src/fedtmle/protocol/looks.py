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
(`model.leverage.Look`). When delta exceeds `NEAR`, the next look is due. All of this is public, hence the
same at every party.

**Silos that lie.** A silo may add to S people whom it does not have, and with the server it may subtract the
people whom it has. So S is pooled in several groups of silos, G_1 to G_g, each of which has at least two
silos more than may lie. If a silos lie, they are in at most a groups, and whatever they say,

    S without the liars >= S_own + the sum of G_k over the groups without them.

Only the silos of a group share the masks of its matrix, so that a silo of another group cannot add to it.

A silo judges its rows by every choice of a groups that are left out, so that what it finds holds after the
liars have subtracted what they know. If there are not more than a groups, only its own rows remain, and no
look is asked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
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
from fedtmle.protocol.masked import Groups
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import AbstractTotals, Evaluation, Flow, Local, Model, Phase, Query
from fedtmle.protocol.views import ViewedQuery

Result = TypeVar("Result")

GRIDS = (-10, -11, -12)  # exponents of the grid of M, in the looks that follow each other at a first point
CLEAR = 4.0  # times the error that each eigenvalue of M exceeds where it is resolved
# The farthest that a linear predictor may have moved since a look: S shrinks by at most a third.
NEAR = {Family.LOGISTIC: 0.28125, Family.GAUSSIAN: LEAST_RESIDUAL * 0.125}
MOST_GROUPS = 3  # of silos in a look: with more, less is left out, and more is told

Present = tuple[tuple[int, ...], ...]  # by group and combination of columns


def look_groups(silos: Iterable[str], liars: int) -> Groups:
    """Return the groups of silos in which looks are pooled, () if no look is worth asking.

    Each group has at least two silos more than may lie, and there are more groups than those. They follow
    from the silos' names, whatever their order: all studies of the same silos have the same groups.
    """
    ordered = sorted(silos)
    count = min(len(ordered) // (liars + 2), max(MOST_GROUPS, liars + 1) if liars else 1)
    return tuple(tuple(ordered[k::count]) for k in range(count)) if count > liars else ()


def _vectors(facts: JudgedTogether) -> Array:
    """Return the combinations of columns that may be zero for everyone, one in each row."""
    combined = facts.combinations
    vectors = np.zeros((len(combined), len(facts.ranges)))
    for vector, combination in zip(vectors, combined, strict=True):
        for j, factor in combination:
            vector[j] = factor
    return vectors


def groups_left_out(
    groups: Groups, liars: int, doubted: Collection[str] = ()
) -> list[tuple[int, ...]] | None:
    """Return the choices of groups that may hold liars, None if no group surely holds none.

    Silos that are ``doubted`` may all lie, and so may as many ``liars`` of the others.
    """
    always = [k for k, group in enumerate(groups) if not set(doubted).isdisjoint(group)]
    others = [k for k in range(len(groups)) if k not in always]
    if len(others) <= liars:
        return None
    return [(*always, *chosen) for chosen in combinations(others, liars)]


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
        columns, names = {**self.columns, **new}, model.design_names or ()
        places = {name: place for place, name in enumerate(columns)}
        moved = (tuple((places[names[j]], factor) for j, factor in each) for each in facts.references)
        references = tuple(dict.fromkeys((*self.facts.references, *moved)))
        ranges = (*self.facts.ranges, *(facts.ranges[j] for _, j in new.values()))
        joined = self.facts._replace(ranges=ranges, references=references)
        return Union((*self.models, model), columns, joined)

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
    """A lower bound of S at one point: M by group, the coordinates, and the error above of the whole."""

    subject: AbstractSubject
    C: Array
    groups: Sequence[Array]
    sizes: Sequence[int]  # silos in each group
    present: Present
    error: float
    n: int

    @property
    def matrix(self) -> Array:
        """M over all silos."""
        return np.asarray(sum(self.groups))

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

    def space(
        self, pieces: Pieces, shrunk: float = 1.0, *, left_out: Collection[int] = (), own: int = 0
    ) -> RowSpace:
        """Return the metric by which a silo of group ``own`` judges its rows, with some groups left out.

        S may have shrunk by a factor since the look. The own rows count in any case. Combinations of columns
        that are zero for everyone whose rows count are no directions of S: for a basis P of the others and
        C P = U R with orthonormal U, U^T M U is R P^T S P R^T / n within the same error.
        """
        total, C = self.n / shrunk, self.C / self.subject.largest
        kept = [k for k in range(len(self.groups)) if k not in left_out]
        matrix = total * np.asarray(sum(self.groups[k] for k in kept))
        error = total * self.error * sum(self.sizes[k] for k in kept) / sum(self.sizes)
        is_absent = ~np.array([self.present[k] for k in kept], dtype=bool).any(axis=0)
        absent = _vectors(self.subject.facts)[is_absent]
        if own in left_out:
            for piece in pieces():
                absent = absent[~(absent @ piece.rows).any(axis=1)]
        if len(absent):
            rank = int(np.linalg.matrix_rank(absent))
            P = np.linalg.qr(absent.T, mode="complete")[0][:, rank:]
            U, R = np.linalg.qr(C @ P)
            C, matrix = R @ P.T, U.T @ matrix @ U
        if own in left_out:
            images = (C @ piece.rows for piece in pieces())
            matrix = matrix + sum(image @ image.T for image in images)
        return RowSpace.pooled(C, matrix, error, pieces)


class Asked(NamedTuple):
    """One matrix of a look: whose, in which coordinates, on which grid.

    ``present`` is what is known of the columns, None if that is asked too: by group, and for each of the
    combinations of columns that may be zero for everyone, how many silos have anybody for whom it is not.
    """

    subject: AbstractSubject
    C: Array
    grid: int
    present: Present | None

    @property
    def dim(self) -> int:
        return len(self.C)

    @property
    def counts(self) -> int:
        """How many counts of silos are asked."""
        return len(self.subject.facts.combinations) if self.present is None else 0

    @property
    def error(self) -> float:
        """A bound of the operator norm of what rounding does to M."""
        return self.dim * 2.0 ** (self.grid - 1)


@final
@dataclass(frozen=True, kw_only=True)
class LookQuery(AbstractTotals[Integers, Integers]):
    """The pooled sums of t t^T of some subjects in public coordinates, rounded; masked, and never open.

    They are told by group of silos. Each silo rounds to multiples of 2^e <= n 2^grid / silos, so that the
    total over all groups is off by n 2^(grid - 1).
    """

    asked: tuple[Asked, ...]
    n: int
    groups: Groups
    phase: Phase = Phase.NUISANCE

    @property
    def explanation(self) -> str:
        return "sums of products of a model's rows, rounded coarsely, to judge the sums that are asked next"

    @property
    def needs_masks(self) -> bool:
        return True

    @property
    def told_groups(self) -> Groups:
        return self.groups

    @property
    def answer_code(self) -> Golomb:
        sizes = (size for each in self.asked for size in (packed_size(each.dim), each.counts))
        return Golomb(blocks=tuple(filter(None, sizes)))

    @property
    def pooled_code(self) -> Golomb:
        return Golomb(blocks=self.answer_code.blocks * len(self.groups))

    @property
    def _silos(self) -> int:
        return sum(map(len, self.groups))

    def _unit(self, each: Asked) -> int:
        """Return e."""
        return math.frexp(self.n / self._silos)[1] - 1 + each.grid

    def answer(self, local: Local) -> Integers:
        answer: list[int] = []
        for each in self.asked:
            answer += (*self._rounded(each, local), *self._present(each, local))
        return tuple(answer)

    def _present(self, each: Asked, local: Local) -> Iterator[int]:
        """Yield 1 for each combination of columns that is not zero for everyone, else 0."""
        vectors = _vectors(each.subject.facts)[: each.counts]
        found = np.zeros(len(vectors), dtype=bool)
        for piece in each.subject.rows(local):
            found |= (vectors @ piece.rows).any(axis=1)
        return map(int, found)

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
        lanes: list[Lane] = []
        for each in self.asked:
            lanes += (*self._lanes(each), *[Lane(self._silos)] * each.counts)
        return tuple(lanes)

    def _lanes(self, each: Asked) -> Iterator[Lane]:
        reach = [math.fsum(map(abs, row)) for row in each.C.tolist()]
        most = math.ldexp(self.n * each.subject.facts.periods * (1.0 + 2.0**-20), -self._unit(each))
        for j, k in upper_pairs(each.dim):
            yield Lane(math.ceil(most * reach[j] * reach[k]) + self._silos)

    def addends(self, answer: Integers, n_rows: int) -> Integers:
        return answer

    def pool_totals(self, totals: Integers) -> Integers:
        return totals

    def pool(self, answers: Mapping[str, Integers], sizes: Mapping[str, int]) -> Integers:
        members = ([answers[silo] for silo in group] for group in self.groups)
        return tuple(sum(column) for group in members for column in zip(*group, strict=True))

    def grams(self, pooled: Integers) -> list[PooledGram]:
        """Return what the totals tell."""
        rest = iter(pooled)
        told: list[list[tuple[Array, tuple[int, ...]]]] = [[] for _ in self.asked]  # by subject and group
        for _ in self.groups:
            for each, groups in zip(self.asked, told, strict=True):
                entries = np.array(list(islice(rest, packed_size(each.dim))), dtype=np.float64)
                matrix = unpack(np.ldexp(entries, self._unit(each)) / self.n, each.dim)
                groups.append((matrix, tuple(islice(rest, each.counts))))
        return [
            PooledGram(
                subject=each.subject,
                C=each.C,
                groups=[matrix for matrix, _ in groups],
                sizes=tuple(map(len, self.groups)),
                present=tuple(present for _, present in groups) if each.present is None else each.present,
                error=each.error,
                n=self.n,
            )
            for each, groups in zip(self.asked, told, strict=True)
        ]


class Looks:
    """The looks of one masked session: what is public about the rows of all silos."""

    def __init__(self, n: int, groups: Groups) -> None:
        self._n = n
        self.groups = groups
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
            asked = tuple(
                Asked(subject, coordinates, grid, self._present(subject)) for subject, coordinates in due
            )
            look = LookQuery(asked=asked, n=self._n, groups=self.groups, phase=query.phase)
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

    def _present(self, subject: AbstractSubject) -> Present | None:
        """Return what is known of a subject's columns: they are the same at every point."""
        if isinstance(subject, Subject):
            known = self._find(subject.point.model, None)
        else:
            known = next((gram for gram in self._known if gram.subject is subject), None)
        return None if known is None else known.present

    def _coordinates(self, subject: Subject) -> Array:
        model = subject.point.model
        known = self._find(model, subject.part) or self._find(model, None)
        return np.eye(model.dim) if known is None else known.whitened()

    def knows(self, point: Evaluation, part: Part) -> bool:
        """Return whether a look holds at a point; else a silo judges by its own rows."""
        known = self._find(point.model, part)
        return known is not None and known.subject.shrunk(point) < math.inf

    def _own(self, local: Local) -> int:
        return next(k for k, group in enumerate(self.groups) if local.name in group)

    def space(self, point: Evaluation, part: Part, local: Local, left_out: Collection[int] = ()) -> RowSpace:
        """Return the metric for a silo's rows at a point where a look holds, with some groups left out."""
        known = self._find(point.model, part)
        if known is None:
            raise AssertionError("a space is asked where a look holds")
        subject = Subject(point, part, known.subject.facts)
        return known.space(
            lambda: subject.rows(local),
            known.subject.shrunk(point),
            left_out=left_out,
            own=self._own(local),
        )

    def union(self, point: Evaluation) -> Union | None:
        """Return the columns of all models of the response; None if there is one model."""
        facts = point.model.judged_together
        for number, union in enumerate(self._unions):
            known = self._union_gram(number)
            if facts is not None and known is not None and union.facts.response == facts.response:
                return union
        return None

    def union_space(self, union: Union, local: Local, left_out: Collection[int] = ()) -> RowSpace:
        """Return the metric for a silo's rows of a union."""
        known = next(gram for gram in self._known if gram.subject is union)
        return known.space(lambda: union.rows(local), left_out=left_out, own=self._own(local))

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
