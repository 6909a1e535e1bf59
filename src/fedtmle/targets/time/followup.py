"""Follow-up on the study's public grid, and the curves of one person on it.

Period k is the time after edge k-1 and up to edge k; the first begins at 0. Within a period events come
before censoring: a person who is censored in period k was at risk of an event in all of it. A person who is
followed beyond the last edge is observed, without an event, through the last period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.model.table import Factor, Table
from fedtmle_core.types import Array, IntArray

PERIOD = "period"  # the name of the period in formulas: a number and, as C(period), a factor


@final
@dataclass(frozen=True)
class Seen:
    """Each person's last period, counted from 1, and the cause of the event in it: 0 none, else from 1."""

    last: IntArray
    cause: IntArray

    def part(self, rows: slice) -> Seen:
        return Seen(self.last[rows], self.cause[rows])


@final
@dataclass(frozen=True, kw_only=True)
class FollowUp:
    """Which columns hold the follow-up, and the public grid.

    ``time`` is the time of the event or of the end of follow-up, ``event`` the column that says which: one
    of ``causes``, or ``censored``. ``entry`` is the time of entry on the same scale, None if time is counted
    from entry. With ``truncate``, follow-up after the last edge is cut off there; without, it is an error.
    ``subperiods`` consecutive periods of the grid are one period in formulas.
    """

    time: str
    event: str
    edges: tuple[float, ...]
    causes: tuple[str, ...]
    censored: str
    entry: str | None = None
    truncate: bool = False
    subperiods: int = 1

    @property
    def periods(self) -> int:
        return len(self.edges)

    def name(self, period: int) -> str:
        """Return the name of a period of the grid, counted from 1."""
        whole, part = divmod(period - 1, self.subperiods)
        of = "" if self.subperiods == 1 else f"part {part + 1} of "
        return f"{of}period {whole + 1}"

    def read(self, table: Table) -> Seen:
        """Return the follow-up of each row; `DataError` names the column and the number of rows, no value."""
        factor = table.factors[self.event]
        cause = factor.recode((self.censored, *self.causes))
        time = table.numeric[self.time]
        _refuse(np.isnan(time) & (cause > 0), f"column '{self.time}' is missing where '{self.event}' has one")
        _refuse(np.isnan(time), f"column '{self.time}' is missing")
        if self.entry is not None:
            entry = table.numeric[self.entry]
            _refuse(np.isnan(entry), f"column '{self.entry}' is missing")
            time = time - entry
            _refuse(time < 0, f"column '{self.time}' is before '{self.entry}', the time of entry,")
        _refuse(~((time >= 0) & (time < math.inf)), f"column '{self.time}' is negative or not finite")
        _refuse(cause < 0, f"column '{self.event}' is missing")
        beyond = time > self.edges[-1]
        if not self.truncate:
            _refuse(
                beyond,
                f"column '{self.time}' is beyond the end of the grid, {self.edges[-1]:g},",
                '; lengthen the grid, or set beyond = "truncate" to end follow-up there',
            )
        last = np.searchsorted(np.array(self.edges), time, side="left") + 1
        return Seen(np.minimum(last, self.periods), np.where(beyond, 0, cause))

    def is_censored(self, seen: Seen) -> IntArray:
        """Return who is censored before the last period, 0 or 1."""
        return np.where((seen.cause == 0) & (seen.last < self.periods), 1, 0)

    def long(self, table: Table, counts: IntArray) -> tuple[Table, IntArray]:
        """Return the person-periods 1..counts[i] of each row i, and the row of each.

        Formulas see the period in which a part of a period is, as a factor, and its end in periods.
        """
        starts = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(table.n_rows), counts)
        period = np.arange(len(rows)) - starts[rows]
        taken, whole = table.take(rows), self.periods // self.subperiods
        long = Table(
            n_rows=len(rows),
            numeric={**taken.numeric, PERIOD: (period + 1.0) / self.subperiods},
            factors={**taken.factors, PERIOD: Factor(period // self.subperiods, period_levels(whole))},
            known_reach={**table.reach, PERIOD: float(whole)},
        )
        return long, rows


def grid_periods(long: Table, subperiods: int) -> IntArray:
    """Return the period of the grid of each person-period, counted from 1."""
    return np.rint(long.numeric[PERIOD] * subperiods).astype(np.int64)


def period_levels(periods: int) -> tuple[str, ...]:
    """Return the levels of C(period)."""
    return tuple(str(k + 1) for k in range(periods))


def _refuse(rows: np.ndarray, what: str, advice: str = "") -> None:
    count = int(np.count_nonzero(rows))
    if count:
        raise DataError(f"{what} in {count} row(s){advice}")


# Curves of one person: cumulative incidences from hazards, and the clever covariates of their functionals.
#
# Causes are ordered within a period: q_l(t) is the hazard of cause l among those at risk in t who have no
# event of a cause before l in it. So lambda_l = q_l prod_{m<l} (1 - q_m), hazards add up to at most 1, and
#
#     F_j(t) = sum_{s<=t} S(s-1) lambda_j(s),   S(t) = prod_{s<=t} prod_l (1 - q_l(s)),   S + sum_j F_j = 1.
#
# A functional sum_{j,t} L_j(t) F_j(t) pays A_l(t) = sum_{s>=t} L_l(s) for an event of cause l in period t.
# Its expected payment to someone who has none of the causes up to l in t, nor any event before, is
#
#     v_l(t) = v_0(t+1) for the last cause,   v_{l-1}(t) = q_l(t) A_l(t) + (1 - q_l(t)) v_l(t),
#
# so that v_0(1) is the functional itself, and its EIF given the covariates is
#
#    sum_t 1(at risk in t) / (g G(t-)) sum_l c_l(t) 1(no cause before l) [dN_l(t) - q_l(t)],  c_l = A_l - v_l.
#
# This is the usual h_l = 1(l = j) - [F_j(tau) - F_j(t)]/S(t), written for q instead of lambda; there is no
# division by a survival that may be nearly 0.


@final
@dataclass(frozen=True, kw_only=True)
class Functional:
    """A linear functional of the cumulative incidences: ``weights[j][t]`` is that of F_{j+1}(t+1)."""

    name: str
    weights: tuple[tuple[float, ...], ...]

    @property
    def horizon(self) -> int:
        """The last period that matters."""
        return max(t + 1 for row in self.weights for t, weight in enumerate(row) if weight)


def payments(functionals: tuple[Functional, ...], periods: int) -> Array:
    """Return A_l(t) of each functional, shape (functionals, causes, periods)."""
    weights = np.array([[row[:periods] for row in each.weights] for each in functionals])
    return np.ascontiguousarray(np.cumsum(weights[:, :, ::-1], axis=2)[:, :, ::-1])


def reach(functionals: tuple[Functional, ...], periods: int) -> float:
    """Return a bound of every |c_l(t)| and of every |v_l(t)|: payments and 0 enclose them."""
    paid = payments(functionals, periods)
    return float(max(paid.max(), 0.0) - min(paid.min(), 0.0))


def covariates(paid: Array, q: Array) -> tuple[Array, Array]:
    """Return c_l(t), shape (functionals, causes, periods, N), and v_0(1), shape (functionals, N).

    ``q`` has shape (causes, periods, N).
    """
    causes, periods, n = q.shape
    value = np.zeros((len(paid), n))
    c = np.empty((len(paid), causes, periods, n))
    for t in reversed(range(periods)):
        for cause in reversed(range(causes)):
            here = c[:, cause, t]
            np.subtract(paid[:, cause, t, None], value, out=here)
            value += q[cause, t] * here
    return c, value


def plug_in(paid: Array, q: Array) -> Array:
    """Return v_0(1), shape (functionals, N), without the covariates."""
    value = np.zeros((len(paid), q.shape[2]))
    for t in reversed(range(q.shape[1])):
        for cause in reversed(range(len(q))):
            value += q[cause, t] * (paid[:, cause, t, None] - value)
    return value
