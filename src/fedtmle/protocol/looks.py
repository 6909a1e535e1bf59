"""Looks: under masks, silos judge what they are about to send against the rows of all of them.

An answer discloses sums of rows t_i, and the share of one person in a combination of them is the leverage
t_i^T S^-1 t_i (`model.leverage`). If sums are masked, only totals are disclosed, so that S is the pooled
sum of t t^T, which no silo knows. Before the gradient of a nuisance model is asked, separate rounds count the
people who have each column, and then pool S, coarsely. Each silo then compares its own rows with a lower
bound of S:

    C S C^T / n = M + E,   |E| <= p 2^(grid - 1),   S >= n C^-1 (M - |E|) C^-T,

p the number of columns. The coordinates C are public and whiten what is known of S so far: a matrix of some
nine bits then resolves all directions alike. Where it does not, another look follows in better coordinates.

The sums over the periods of all hazard models are looked at by themselves, at zero, after the silos have
judged the models: there the rows of one person in two periods, or two models, cancel, and whoever leaves is
left (`subjects.Hazards`). Models that each leave out a fold disclose the sums over every fold, so that the
rows of each fold are looked at as well (`subjects.FoldRows`).

A look holds at nearby points. The columns have declared ranges, so that no linear predictor moves by more
than some delta when eps moves, and S shrinks at most by a factor of exp(delta) for the logistic loss
(`model.leverage.Look`). When delta exceeds `subjects.NEAR`, the next look is due, and sooner if few people
have a column (`PooledGram.holds_at`): what the factor adds to a leverage might be too much there. All of this
is public, hence the same at every party.

**Silos that lie.** A silo may add to S people whom it does not have, and with the server it may subtract the
people whom it has. So S is pooled in several groups of silos, G_1 to G_g, each of which has at least two
silos more than may lie. If a silos lie, they are in at most a groups, and whatever they say,

    S without the liars >= S_own + the sum of G_k over the groups without them.

Only the silos of a group share the masks of its matrix, so that a silo of another group cannot add to it.
A silo judges its rows by every choice of a groups that are left out, so that what it finds holds after the
liars have subtracted what they know.

**Fewer silos** than (a + 1)(a + 2) are one group, and each counts the rows of the others by what these say.
That protects against silos that are curious, not against silos that lie. A curious silo j subtracts its own
part S_j. If S_j <= (1 - r) S, which silo j itself can see, then S - S_j >= r S, and no leverage grows by more
than 1/r. So one round more counts, for each of some r, the silos that leave so much to the others. At a
nearby point S - S_j shrinks by no more than the factor by which S is taken to have shrunk, so that r still
holds there. If few people to a column remain, r proves too little, because it is the share in the worst
combination: four or five silos then also add up by how much each makes shares grow, in all directions
(`masked.PooledGram.spaces_without_one`).

**Parts that silos may leave out**, such as a bin of few people, are asked for where no silo alone would
disclose or leave them out (`masked.ShownQuery`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, islice
from operator import is_not
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.model.leverage import Pieces, RowSpace
from fedtmle.model.problem import JudgedTogether, LeftOut
from fedtmle.protocol.masked import (
    LEVELS,
    Asked,
    GainsQuery,
    Groups,
    LookQuery,
    People,
    PeopleQuery,
    PooledGram,
    PooledLevels,
    SharesQuery,
    ShownQuery,
)
from fedtmle.protocol.query import VOID, Evaluation, Flow, Local, Model, Phase, Query
from fedtmle.protocol.subjects import (
    AbstractSubject,
    ClosingRows,
    FoldRows,
    Hazards,
    Subject,
    Union,
    all_periods,
    subjects_of,
)
from fedtmle_core.types import Array, Part

Result = TypeVar("Result")
Due = tuple[AbstractSubject, Array]  # what to look at, and the coordinates

GRIDS = (-10, -11, -12)  # exponents of the grid of M, in the looks that follow each other at a first point
MOST_GROUPS = 3  # groups of silos in a look: with more groups, less is left out, but more is disclosed


class Rule(NamedTuple):
    """How a silo judges its rows: groups to leave out, the floor, and how many silos may subtract theirs."""

    left_out: tuple[int, ...]
    floor: str
    colluders: int = 0  # silos of the same group


ALL = Rule((), "min_pooled")  # the rows of all silos


@final
@dataclass(frozen=True)
class LookGroups:
    """The groups of silos whose rows are pooled in looks, () without looks, and how many may lie by plan."""

    groups: Groups = ()
    liars: int = 0

    @classmethod
    def of(cls, silos: Iterable[str], liars: int) -> LookGroups:
        """Return the groups for these silos: all together if there are too few for more groups than liars.

        Each group has at least two silos more than may lie. They follow from the silos' names, whatever their
        order: all studies of the same silos have the same groups.
        """
        ordered = sorted(silos)
        count = min(len(ordered) // (liars + 2), max(MOST_GROUPS, liars + 1) if liars else 1)
        if not count:
            return cls()
        count = count if count > liars else 1
        return cls(tuple(tuple(ordered[k::count]) for k in range(count)), liars)

    @property
    def discloses_shares(self) -> bool:
        """Whether silos must be trusted, and so disclose how large a share of the sums they have."""
        return len(self.groups) == 1 and self.liars > 0

    def rules(
        self, colluders: int, doubted: Collection[str] = (), *, trusts: bool = True
    ) -> list[Rule] | None:
        """Return the rules that all hold for a silo's rows, None if it judges by its own rows alone.

        The rows of all silos keep `min_pooled`; those that remain when some cheat keep `min_people`. Silos
        that are ``doubted`` may all lie, and so may as many ``colluders`` of the others. If there is but one
        group, the silo must believe what the others say; ``trusts`` says whether its owner allows that.
        """
        choices = groups_left_out(self.groups, colluders, doubted)
        if choices is not None:
            return [ALL, *(Rule(choice, "min_people") for choice in choices if choice)]
        if trusts and self.discloses_shares and set(doubted).isdisjoint(self.groups[0]):
            return [ALL, Rule((), "min_people", colluders)]
        return None


def closings_of(query: Query) -> dict[int, tuple[ClosingRows, ...]]:
    """Return the rows behind closing sums that silos can judge together, by the number of the member.

    If noise is added, a query is asked once: a second draw would tell more.
    """
    if any(member.noise is not None for member in query.members) or query.retired_answer() is not None:
        return {}
    found = {
        number: tuple(ClosingRows.of(member, block) for block in member.closing_blocks)
        for number, member in enumerate(query.members)
        if member.lanes is not None
    }
    return {number: rows for number, rows in found.items() if rows}


def groups_left_out(
    groups: Groups, liars: int, doubted: Collection[str] = ()
) -> list[tuple[int, ...]] | None:
    """Return the choices of groups that may hold liars; None if every group may hold one.

    Silos that are ``doubted`` may all lie, and so may as many ``liars`` of the others.
    """
    always = [k for k, group in enumerate(groups) if not set(doubted).isdisjoint(group)]
    others = [k for k in range(len(groups)) if k not in always]
    if len(others) <= liars:
        return None
    return [(*always, *chosen) for chosen in combinations(others, liars)]


class Looks:
    """The looks of one masked session: what is public about the rows of all silos."""

    def __init__(self, n: int, groups: LookGroups) -> None:
        self._n = n
        self.groups = groups
        self._known: list[PooledGram] = []
        self._counted: list[tuple[AbstractSubject, People]] = []
        self._unions: list[Union] = []  # one for each response
        self._periods: dict[LeftOut | None, Union | Hazards] = {}  # the sums over periods of all of these
        self._folds: dict[int, FoldRows] = {}  # by number of a response
        self._has_been_void = False
        self.may_be_void = False  # whether silos may leave this round's query without an answer
        self.closing: Mapping[int, tuple[PooledLevels, ...]] = {}  # by member of this round's query
        self.shown_by_all: frozenset[int] = frozenset()  # parts of this round's query, as the silos say

    def before(self, flow: Flow[Result]) -> Flow[Result]:
        """Return the flow with a look before each query whose rows are not known well enough.

        Closing sums are asked at once. If some silo may not disclose its part, the round is void: nothing is
        disclosed. Only then, and before all later closing sums, there is a look at the rows behind them.
        """
        pooled: object = None
        while True:
            try:
                query = flow.send(pooled)
            except StopIteration as stop:
                result: Result = stop.value
                return result
            yield from self._look(query)
            self.shown_by_all = frozenset()
            if query.hideable:
                groups, liars = self.groups.groups, self.groups.liars
                shown = ShownQuery(query=query, groups=groups, liars=liars, phase=query.phase)
                query, self.shown_by_all = shown.kept((yield shown))
            closings = closings_of(query)
            if closings and not self._has_been_void:
                self.may_be_void = True
                pooled = yield query
                self.may_be_void, self._has_been_void = False, pooled is VOID
                if pooled is not VOID:
                    continue
            if closings:
                self.closing = yield from self._look_at_closings(closings, query.phase)
            pooled = yield query
            self.closing = {}

    def _look_at_closings(
        self, closings: Mapping[int, tuple[ClosingRows, ...]], phase: Phase
    ) -> Flow[dict[int, tuple[PooledLevels, ...]]]:
        """Ask once for the rounded matrices of the rows behind closing sums, at all levels.

        Rounding is to about a person's part: the totals over all silos are off by at most 1.
        """
        groups, grid = self.groups.groups, 1 - (self._n - 1).bit_length()
        subjects = tuple(subject for each in closings.values() for subject in each)
        count = PeopleQuery(subjects=subjects, n=self._n, groups=groups, phase=phase)
        counted = count.by_group((yield count))
        chosen = [subject.distinct(people) for subject, people in zip(subjects, counted, strict=True)]
        asked = [
            Asked(replace(subject, level=level), np.eye(len(subject.kept)), grid, people)
            for subject, people in chosen
            for level in range(LEVELS)
        ]
        look = LookQuery(asked=tuple(asked), n=self._n, groups=groups, phase=phase)
        grams = look.grams((yield look))
        found = [PooledLevels(levels=tuple(grams[k : k + LEVELS])) for k in range(0, len(grams), LEVELS)]
        if self.groups.discloses_shares:
            shares = SharesQuery(grams=tuple(found), silos=len(groups[0]), phase=phase)
            rests = shares.by_gram((yield shares))
            found = [replace(each, by_rest=rest) for each, rest in zip(found, rests, strict=True)]
        rest = iter(found)
        return {number: tuple(islice(rest, len(own))) for number, own in closings.items()}

    def _look(self, query: Query) -> Flow[None]:
        """Ask for the matrices that are due; for sums over periods only after the silos judged the models."""
        due, sums = self._due(query)
        yield from self._ask(due, query.phase)
        if sums:
            yield from self._ask(self._fresh(sums), query.phase, tuple(s.point for s in subjects_of(query)))

    def _ask(self, due: list[Due], phase: Phase, points: tuple[Evaluation, ...] = ()) -> Flow[None]:
        """Ask for the matrices that are due, and in better coordinates for those that are not resolved.

        If some ``points`` are to be asked next, a silo answers only if it would send the gradients there.
        """
        if not due:
            return
        groups = self.groups.groups
        subjects = [subject for subject, _ in due]
        new: list[AbstractSubject] = []
        for subject in subjects:
            if self._people(subject) is None and not any(map(subject.has_columns_of, new)):
                new.append(subject)
        if new:
            people = PeopleQuery(subjects=tuple(new), n=self._n, groups=groups, phase=phase)
            self._counted += zip(new, people.by_group((yield people)), strict=True)
        for grid in GRIDS:
            asked = tuple(Asked(subject, C, grid, self._people(subject) or ()) for subject, C in due)
            look = LookQuery(asked=asked, n=self._n, groups=groups, phase=phase, points=points)
            grams, points = look.grams((yield look)), ()
            for gram in grams:
                self._keep(gram)
            due = [(gram.subject, gram.whitened()) for gram in grams if not gram.is_resolved]
            if not due:
                break
        if self.groups.discloses_shares:
            looked = [gram for gram in self._known if any(gram.subject is each for each in subjects)]
            shares = SharesQuery(grams=tuple(looked), silos=len(groups[0]), phase=phase)
            looked = [
                replace(gram, by_rest=by_rest)
                for gram, by_rest in zip(looked, shares.by_gram((yield shares)), strict=True)
            ]
            crowded = [k for k, gram in enumerate(looked) if self._may_ask_gains(gram)]
            if crowded:
                chosen = tuple(looked[k] for k in crowded)
                gains = GainsQuery(grams=chosen, silos=len(groups[0]), phase=phase)
                for k, total in zip(crowded, gains.by_gram((yield gains)), strict=True):
                    looked[k] = replace(looked[k], gains=total)
            for gram in looked:
                self._keep(gram)

    def _may_ask_gains(self, gram: PooledGram) -> bool:
        """Return whether gains are asked: not of so few silos that two silos' matrices would follow."""
        are_enough = len(self.groups.groups[0]) >= self.groups.liars + 3
        return are_enough and gram.is_crowded and gram.public_metric is not None

    def _due(self, query: Query) -> tuple[list[Due], list[AbstractSubject]]:
        """Return the subjects to look at, and the sums over periods to look at after these.

        The coordinates of a subject whiten what is known of it.
        """
        due: list[Subject] = []
        numbers: dict[int, None] = {}
        for subject in subjects_of(query):
            model = subject.point.model
            numbers[self._join(model, subject.facts)] = None
            repeats = any(other.part is subject.part and other.is_of(model) for other in due)
            if not repeats and not self.knows(subject.point, subject.part):
                due.append(subject)
        judged = [number for number in numbers if self._unions[number].is_judged]
        folds = (rows for rows in map(self._fold_rows, numbers) if rows is not None)
        unions: list[Union | Hazards | FoldRows] = []
        for union in (*map(self._combined, judged), *folds):
            if self._gram(union) is None and not any(union is each for each in unions):
                unions.append(union)
        fresh = self._fresh(union for union in unions if not union.is_summed)
        sums: list[AbstractSubject] = [union for union in unions if union.is_summed]
        return [*((subject, self._coordinates(subject)) for subject in due), *fresh], sums

    def _fold_rows(self, number: int) -> FoldRows | None:
        """Return the rows of the fold that the models of a response disclose with those of others, if any."""
        union, known = self._unions[number], self._folds.get(number)
        left_out = union.facts.left_out
        if left_out is None or left_out.folds.count < 3:
            return None
        if known is None or known.union is not union:
            self._folds[number] = known = FoldRows(union, left_out)
        return known

    def _gram(self, subject: AbstractSubject) -> PooledGram | None:
        return next((gram for gram in self._known if gram.subject is subject), None)

    def _fresh(self, unions: Iterable[AbstractSubject]) -> list[Due]:
        return [(union, np.eye(len(union.names))) for union in unions]

    def _combined(self, number: int) -> Union | Hazards:
        """Return what is judged of a response's models: the sums over periods of all responses are one.

        Those without a fold are by themselves: together they would be too many columns to resolve.
        """
        left_out = self._unions[number].facts.left_out
        if not self._unions[number].is_summed:
            return self._unions[number]
        summed = [union for union in self._unions if union.is_summed and union.facts.left_out == left_out]
        known = self._periods.get(left_out)
        before = known.unions if isinstance(known, Hazards) else (known,)
        if known is None or len(before) != len(summed) or any(map(is_not, before, summed)):
            self._periods[left_out] = known = all_periods(summed)
        return known

    def _join(self, model: Model, facts: JudgedTogether) -> int:
        """Add a model to those of its response; return their number."""
        for number, union in enumerate(self._unions):
            if union.facts.response == facts.response:
                self._unions[number] = union.joined(model, facts)
                return number
        self._unions.append(Union.of(model, facts))
        return len(self._unions) - 1

    def _union_gram(self, number: int) -> PooledGram | None:
        return self._gram(self._combined(number))

    def _keep(self, new: PooledGram) -> None:
        """Replace earlier results for the same rows by these."""
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

    def _people(self, subject: AbstractSubject) -> People | None:
        """Return how many people have a subject's columns: the same at every point."""
        for counted, people in self._counted:
            if subject.has_columns_of(counted):
                return people
        parts = [self._people(union) for union in subject.unions] if isinstance(subject, Hazards) else []
        known = [part for part in parts if part is not None]
        if not isinstance(subject, Hazards) or len(known) < len(parts):
            return None
        return tuple(subject.counts(by_union) for by_union in zip(*known, strict=True))

    def _coordinates(self, subject: Subject) -> Array:
        model = subject.point.model
        known = self._find(model, subject.part) or self._find(model, None)
        return np.eye(model.dim) if known is None else known.whitened()

    def knows(self, point: Evaluation, part: Part) -> bool:
        """Return whether a look holds at a point; else a silo judges by its own rows."""
        known = self._find(point.model, part)
        return known is not None and known.holds_at(point)

    def _own(self, local: Local) -> int:
        return next(k for k, group in enumerate(self.groups.groups) if local.name in group)

    def _held(self, point: Evaluation, part: Part) -> PooledGram:
        known = self._find(point.model, part)
        if known is None:
            raise AssertionError("a space is known only at points where a look holds")
        return known

    def spaces(
        self, point: Evaluation, part: Part, local: Local, rule: Rule = ALL
    ) -> Iterator[tuple[RowSpace, float]]:
        """Yield metrics for a silo's rows at a point where a look holds, and factors of what a rule allows.

        If a person's leverage is within the limit times the factor in any of them, the rule holds.
        """
        known = self._held(point, part)
        subject = Subject(point, part, known.subject.facts)
        return self._spaces(known, partial(subject.rows, local), local, rule, known.subject.shrunk(point))

    def _spaces(
        self, known: PooledGram, pieces: Pieces, local: Local, rule: Rule, shrunk: float = 1.0
    ) -> Iterator[tuple[RowSpace, float]]:
        rest = known.rest(local, rule.colluders)
        if rest:  # else perhaps nothing remains of a combination, and no bound is small enough
            yield known.space(pieces, shrunk, left_out=rule.left_out, own=self._own(local)), rest
        if rule.colluders == 1:
            yield from ((space, 1.0) for space in known.spaces_without_one(local, shrunk))

    def has_joined(self, model: Model) -> bool:
        """Return whether a model is one of a response whose models are looked at together."""
        facts = model.judged_together
        return facts is not None and any(each.facts.response == facts.response for each in self._unions)

    def unions(self, point: Evaluation) -> Iterator[Union | Hazards | FoldRows]:
        """Yield the columns of all models of the response, if there are several; and those of a fold."""
        facts = point.model.judged_together
        for number, union in enumerate(self._unions):
            if facts is None or union.facts.response != facts.response:
                continue
            if self._union_gram(number) is not None:
                yield self._combined(number)
            fold = self._fold_rows(number)
            if fold is not None and self._gram(fold) is not None:
                yield fold

    def _union(self, union: AbstractSubject) -> PooledGram:
        return next(gram for gram in self._known if gram.subject is union)

    def union_spaces(
        self, union: AbstractSubject, local: Local, rule: Rule = ALL
    ) -> Iterator[tuple[RowSpace, float]]:
        """Yield metrics for a silo's rows of a union or a fold, and factors of what a rule allows."""
        return self._spaces(self._union(union), partial(union.rows, local), local, rule)

    def closing_leverage(
        self, levels: PooledLevels, local: Local, left_out: Collection[int], enough: float
    ) -> float:
        """Return a bound of the largest leverage of a silo's people in rows behind closing sums."""
        return levels.largest(local, self._own(local), left_out, enough=enough)

    def sizes(self, point: Evaluation) -> Array:
        """Return the largest magnitude that the columns of a model may have at any silo."""
        facts = point.model.judged_together
        return np.array(() if facts is None else facts.sizes)
