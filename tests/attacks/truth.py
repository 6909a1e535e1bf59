"""Whether honest studies really violate the rule of a masked study, by the rows of all silos.

Under masks a silo refuses if it cannot prove that its owner's rule holds, and it sees its own rows and
rounded totals only. This module sees everybody's rows, and evaluates the rule itself: what is behind the sums
of models over all silos keeps `min_pooled`, what remains of any sums after one silo has subtracted its own
rows keeps `min_people`, and a column that anyone has is that of `min_support` people.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear
from fedtmle.model.submodels import GroupedLinear, LongRows, by_person
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.looks import Looks
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import Evaluation, Local, Query
from fedtmle.protocol.subjects import Subject, subjects_of
from fedtmle_core.types import Family, matrix
from tests.attacks.honest import run_advised

Pieces = list[PersonRows]
SLACK = 1.0 + 1e-9


class Truth(NamedTuple):
    """What the rows of all silos say of one study.

    ``pooled`` is the largest leverage in the sums of models over all silos, ``rest`` that in any sums after
    one silo has subtracted its own, ``people`` the number of people in the rarest column or level, and
    ``other`` the largest leverage over all silos in sums that are not of models. ``signed`` has, for each of
    the rules of `SignedRows`, the largest leverage by a silo's own rows, over all silos, and in what remains.
    """

    pooled: float
    rest: float
    people: int
    other: float
    signed: Mapping[str, tuple[float, float, float]]

    def violates(self, policy: Policy) -> bool:
        """Whether the rule of a policy with one colluder is violated."""
        return (
            self.pooled > SLACK / policy.min_pooled
            or self.rest > SLACK / policy.min_people
            or self.people < policy.min_support
        )


@dataclass
class SignedRows:
    """The rows behind gradients of binary responses at zero, (1/2 - y) x, whose signs an attacker may guess.

    The rules that are tried: *events* judges the rows with y = 1 by themselves, *others* those with y = 0,
    *people* adds up the rows of each person with their signs, and *responses* does so for the columns of
    all models together.
    """

    rows: dict[tuple[str, Hashable], dict[int, Pieces]] = field(default_factory=dict)
    known: set[Hashable] = field(default_factory=set)
    by_silo: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def see(self, point: Evaluation, submodel: AbstractSubmodel, silo: int) -> None:
        names, response = point.model.design_names, getattr(point.model, "response", None)
        key = names, repr(response)
        if names is None or point.eps.any() or (silo, key) in self.known:
            return
        if isinstance(submodel, GeneralisedLinear):
            pieces = [LongRows(submodel, np.ones(submodel.n_rows, dtype=np.int64))]
        elif isinstance(submodel, GroupedLinear):
            pieces = list(submodel.over(lambda piece: piece))
        else:
            return
        X = np.concatenate([matrix(piece.design.X) for piece in pieces], axis=1)
        y = np.concatenate([piece.design.y for piece in pieces])
        if pieces[0].design.family is not Family.LOGISTIC or not np.isin(y, (0.0, 1.0)).all():
            return
        self.known.add((silo, key))
        w = np.concatenate([np.ones(p.design.n_rows) if p.design.w is None else p.design.w for p in pieces])
        counts = np.concatenate([piece.counts for piece in pieces])
        whole = by_person(X * w * (0.5 - y), counts)
        for rule, part in (("events", (X * w)[:, y == 1]), ("others", (X * w)[:, y == 0]), ("people", whole)):
            self.rows.setdefault((rule, key), {})[silo] = [PersonRows(part)]
        self.by_silo.setdefault(silo, []).append(whole)

    def largest(self) -> dict[str, tuple[float, float, float]]:
        found: dict[str, tuple[float, float, float]] = {}
        stacked = {}
        for silo, models in self.by_silo.items():
            size = max(whole.shape[1] for whole in models)
            together = [whole for whole in models if whole.shape[1] == size]
            stacked[silo] = [PersonRows(np.concatenate(together))]
        if len({own[0].rows.shape[0] for own in stacked.values()}) == 1:
            self.rows["responses", ()] = stacked
        for (rule, _), own in self.rows.items():
            before = found.get(rule, (0.0, 0.0, 0.0))
            found[rule] = (
                max(before[0], *(largest([pieces]) for pieces in own.values())),
                max(before[1], largest(own.values())),
                max(before[2], *rests(own)),
            )
        return found


@dataclass
class Witness:
    """Sees the rows behind every answer of a masked run; if it does not ``stop``, refusals are ignored."""

    examine: Callable[..., None]
    stops: bool
    rounds: dict[int, int] = field(default_factory=dict)
    together: dict[Hashable, dict[int, Pieces]] = field(default_factory=dict)
    other: dict[Hashable, dict[int, Pieces]] = field(default_factory=dict)
    people: dict[Hashable, dict[int, np.ndarray]] = field(default_factory=dict)
    signed: SignedRows = field(default_factory=SignedRows)

    def __call__(self, guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        silo = id(guard)
        self.rounds[silo] = self.rounds.get(silo, 0) + 1
        for k, member in enumerate(query.members):
            self._see(member, local, looks, (self.rounds[silo], k), silo)
        try:
            self.examine(guard, query, local, looks)
        except RefusalError:
            if self.stops:
                raise
            guard._left_out = frozenset()  # nothing is left out of an answer that was not examined

    def _see(self, member: Query, local: Local, looks: Looks | None, at: tuple[int, int], silo: int) -> None:
        rows = member.rows_of(local)
        for point in member.evaluations():
            self.signed.see(point, rows.submodel(point.model, point.law), silo)
        subjects = list(subjects_of(member)) if looks is not None and looks.groups.groups else []
        for subject in subjects:
            self._see_subject(subject, rows, looks, at, silo)
        for j, point in enumerate(() if subjects else member.evaluations()):
            submodel = rows.submodel(point.model, point.law)
            self.people.setdefault((*at, j), {})[silo] = submodel.column_people()
            for part in point.parts:
                self._keep(self.other, (*at, j, part), silo, submodel.disclosed_rows(point.eps, part))
        disclosed = None if member.is_optional else member.disclosed_columns(local)
        if disclosed is not None:
            whole = np.concatenate(list(disclosed.pieces()), axis=1)
            size = (len(whole) - disclosed.alone) // disclosed.groups
            starts = [
                *range(0, disclosed.groups * size, size or 1),
                *range(disclosed.groups * size, len(whole)),
            ]
            for start, stop in zip(starts, [*starts[1:], len(whole)], strict=True):
                self._keep(self.other, (*at, "columns", start), silo, [PersonRows(whole[start:stop])])

    def _see_subject(
        self, subject: Subject, rows: Local, looks: Looks | None, at: tuple[int, int], silo: int
    ) -> None:
        self._keep(self.together, (*at, subject.part), silo, subject.rows(rows))
        self.people.setdefault((*at, "subject"), {})[silo] = subject.people(rows)
        for union in () if looks is None else looks.unions(subject.point):
            key = type(union).__name__, union.names, repr(union.facts.response)
            self._keep(self.together, key, silo, union.rows(rows))

    def _keep(
        self,
        where: dict[Hashable, dict[int, Pieces]],
        key: Hashable,
        silo: int,
        pieces: Iterable[PersonRows],
    ) -> None:
        where.setdefault(key, {})[silo] = list(pieces)

    def truth(self) -> Truth:
        """What the rows say, after the run."""
        counts = np.concatenate([np.empty(0), *(sum(own.values()) for own in self.people.values())])
        everything = [*self.together.values(), *self.other.values()]
        return Truth(
            pooled=max((largest(own.values()) for own in self.together.values()), default=0.0),
            rest=max((rest for own in everything for rest in rests(own)), default=0.0),
            people=int(counts[counts > 0].min(initial=sys.maxsize)),
            other=max((largest(own.values()) for own in self.other.values()), default=0.0),
            signed=self.signed.largest(),
        )


def largest(silos: Iterable[Pieces]) -> float:
    """The largest leverage of a person in the rows of some silos together."""
    pieces = [piece for own in silos for piece in own]
    return largest_leverage(lambda: pieces)


def rests(by_silo: dict[int, Pieces]) -> Iterator[float]:
    """The largest leverage after each silo in turn has subtracted its rows."""
    for absent in by_silo:
        yield largest(own for silo, own in by_silo.items() if silo != absent)


def truth_of(plan: Plan, rows: Mapping[str, Any]) -> tuple[Truth, tuple[str, str, tuple[str, ...]]]:
    """What the rows of a masked study say, all its answers included, and how it ended (`run_advised`)."""
    for stops in (True, False):
        witness = Witness(Guard.examine, stops)
        with mock.patch.object(Guard, "examine", lambda *given, to=witness: to(*given)):
            ended = run_advised(plan, rows)
        if stops:
            first = ended
        if ended[0] != "refused":
            break
    return witness.truth(), first
