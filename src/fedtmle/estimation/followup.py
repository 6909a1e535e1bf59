"""Follow-up on the study's public grid, as terms of one person: who is at risk of what in which period.

Period t is the time after edge t-1 and up to edge t; the first begins at 0. Within a period events come
before censoring, and events of a cause before those of the causes after it: a person who is censored in
period t was at risk of an event in all of it. Whoever is followed beyond the last edge is observed, without
an event, through the last period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.estimation.worlds import Both, World
from fedtmle.targets.time.followup import PERIOD
from fedtmle_core.leaves import Between
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Pick, Term, product, total

GRID = "\0grid"  # the period of the grid in models that are counted; in formulas it may be part of a period


@final
@dataclass(frozen=True, kw_only=True)
class Periods:
    """Follow-up as terms; periods are counted from 1, causes from 0.

    ``time`` is the number of the dictionary that counts from entry, and ``ends`` are the indicators, by
    cause, of whose follow-up ends with an event of it. ``subperiods`` consecutive periods of the grid are
    one period in formulas.
    """

    time: str
    edges: tuple[float, ...]
    ends: tuple[Term, ...]
    subperiods: int = 1

    @property
    def last(self) -> int:
        """The last period of the grid."""
        return len(self.edges)

    @property
    def happens(self) -> tuple[Term, ...]:
        """1 for who has an event of each cause on the grid."""
        return tuple(product(Between(self.time, None, self.edges[-1]), ends) for ends in self.ends)

    @property
    def is_censored(self) -> Term:
        """1 for who is censored before the last period."""
        if self.last == 1:
            return ZERO
        return product(Between(self.time, None, self.edges[-2]), 1.0 - _any(self.ends))

    def at_risk(self, t: int) -> Term:
        """Return 1 for who is followed, without an event, until period t."""
        return ONE if t == 1 else Between(self.time, self._begin(t), None)

    def at_risk_of(self, cause: int, t: int) -> Term:
        """Return 1 for who is at risk in period t without an event of an earlier cause in it."""
        return self._without(self.ends[:cause], t)

    def event(self, cause: int, t: int) -> Term:
        """Return 1 for who has an event of a cause in period t."""
        return product(self._ends_in(t), self.ends[cause])

    def at_risk_of_censoring(self, t: int) -> Term:
        """Return 1 for who is at risk in period t without an event in it; t is before the last period."""
        return self._without(self.ends, t)

    def censored(self, t: int) -> Term:
        """Return 1 for who is censored in period t, before the last."""
        return product(self._ends_in(t), 1.0 - _any(self.ends))

    def leaves_in(self, t: int, horizon: int) -> Term:
        """Return 1 for whom period t is the last at risk, of those up to a horizon."""
        return self.at_risk(t) if t == horizon else self._ends_in(t)

    def world(self, t: int) -> World:
        """Return the world in which it is period t, as formulas see it."""
        whole, end = (t - 1) // self.subperiods, Constant(t / self.subperiods)
        return World({PERIOD: Both(code=whole, number=end), GRID: t - 1})

    def _begin(self, t: int) -> float | None:
        return None if t == 1 else self.edges[t - 2]

    def _ends_in(self, t: int) -> Term:
        return Between(self.time, self._begin(t), self.edges[t - 1])

    def _without(self, ends: Sequence[Term], t: int) -> Term:
        """Return 1 for who is at risk in period t, unless the time ends in it with one of some events."""
        if not ends:
            return self.at_risk(t)
        over = Between(self.time, None, self.edges[t - 1])
        return product(self.at_risk(t), 1.0 - product(over, _any(ends)))


def by_period(per_period: Sequence[Term]) -> Term:
    """Return a term that is another in the world of each period of the grid."""
    return Pick(GRID, tuple(per_period))


def _any(ends: Sequence[Term]) -> Term:
    """Return 1 for whose follow-up ends with one of some events, of which a person has one at most."""
    return ends[0] if len(ends) == 1 else Apply("clip", total(ends), low=0.0, high=1.0)
