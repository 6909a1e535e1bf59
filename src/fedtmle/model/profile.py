"""A generalised linear loss with an intercept of each silo's own, profiled out at the silo.

With beta common to all silos and alpha_m the intercept of silo m, each silo minimises its own loss over its
intercept, alpha_m(beta), and what all silos minimise together is the profile of the loss,

    l(beta) = sum_m min_a l_m(a, beta),     grad l(beta) = sum_m sum_i w_i s_i x_i   at a = alpha_m(beta),
    Hess l(beta) = sum_m (H_bb - H_ba H_ab / H_aa),

s_i the slope of row i's loss in its linear predictor; the gradient follows from the envelope theorem. Both
add up over silos. No column belongs to one silo alone, and no party but the silo learns alpha_m.

**What a sum discloses.** At alpha_m the slopes of a silo's rows add up to zero, so that x_i counts up to a
constant of the silo: sum_i x_i s_i = sum_i (x_i - c_m) s_i. The guard judges rows that are centred within
the silo, t_i = s_i (x_i - c_m), c_m the mean with weights s_i^2, of which the sum of t t^T is the smallest.
With q_i = s_i^2 / sum_k s_k^2, the share of person i in what is known of the slopes is

    q_i + t_i^T S^-1 t_i   if the silo's sum of slopes is known as well, as with open sums,
    t_i^T S^-1 t_i / (1 - q_i)   if it is not, as under masks.

The first is the leverage in the rows with a column of ones. The second is the share in what the other rows
leave unknown: the squared correlation of slope and answer, given that the slopes add up to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from operator import add
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.exact import Sums, query_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.grouped import GroupedLinear, by_person
from fedtmle.model.leverage import Look, PersonRows, RowSpace
from fedtmle.model.submodel import AbstractSubmodel, GeneralisedLinear, StreamedLinear
from fedtmle.model.types import Array, IntArray, Part, RowBound, packed_size, upper_pairs

KEPT = 4  # points whose intercepts are kept: guard, gradient and curvature ask for the same ones


@final
@dataclass(frozen=True, kw_only=True)
class SiloRows:
    """The rows of one silo.

    ``whole`` has the intercept as its first coordinate. ``intercept`` returns alpha_m(beta).
    """

    whole: AbstractSubmodel
    intercept: Callable[[Array], float]
    _kept: dict[bytes, float] = field(default_factory=dict, init=False, repr=False)

    def point(self, eps: Array) -> Array:
        """Return (alpha_m(eps), eps)."""
        key = eps.tobytes()
        if key not in self._kept:
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self.intercept(eps)
        return np.concatenate([[self._kept[key]], eps])

    def sums(self, eps: Array, parts: Part, shifts: tuple[int, ...]) -> Sums:
        units = self.whole.sums(self.point(eps), parts).units
        size, own = len(eps), 0
        profiled: tuple[int, ...] = ()
        if Part.GRADIENT in parts:
            profiled, own = units[1 : size + 1], size + 1
        if Part.HESSIAN in parts:
            profiled += _profiled(units[own:], size)
        return Sums(profiled, shifts)

    def rows(self, eps: Array, part: Part) -> Iterator[PersonRows]:
        """Yield the rows with the intercept's, s_i (1, x_i)."""
        return self.whole.disclosed_rows(self.point(eps), part)

    def centre(self, eps: Array, part: Part) -> tuple[Array, float]:
        """Return c_m and the sum of s_i^2."""
        first = np.zeros(len(eps) + 1)
        for piece in self.rows(eps, part):
            first = first + piece.rows @ piece.rows[0]
        mass = float(first[0])
        return (first[1:] / mass if mass > 0 else np.zeros(len(eps))), mass

    def centred(self, eps: Array, part: Part) -> Iterator[tuple[PersonRows, Array]]:
        """Yield the rows t_i, and q_i of each person."""
        centre, mass = self.centre(eps, part)
        for piece in self.rows(eps, part):
            own = piece.rows[:1] ** 2 / (mass or 1.0)
            share = own[0] if piece.counts is None else by_person(own, piece.counts)[0]
            yield PersonRows(piece.rows[1:] - np.outer(centre, piece.rows[0]), piece.counts), share

    def largest_leverage(self, eps: Array, part: Part, space: RowSpace) -> float:
        """Return the largest t_i^T S^-1 t_i / (1 - q_i) of a person, S pooled."""
        most = 0.0
        for piece, share in self.centred(eps, part):
            found, left = space.leverages(piece), 1.0 - share
            alone = np.where(found > 0, np.inf, 0.0)
            ratio = np.divide(found, left, out=alone, where=left > 0)
            most = max(most, float(ratio.max(initial=0.0)))
        return most


def _profiled(units: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return H_bb - H_ba H_ab / H_aa, each entry rounded once to the grid of the sums, half to even."""
    places = {pair: k for k, pair in enumerate(upper_pairs(size + 1))}
    own = units[places[0, 0]]
    if own <= 0:  # no row has a weight
        return (0,) * packed_size(size)
    return tuple(
        units[places[j + 1, k + 1]] - round(Fraction(units[places[0, j + 1]] * units[places[0, k + 1]], own))
        for j, k in upper_pairs(size)
    )


@final
@dataclass(frozen=True, kw_only=True)
class Profiled(AbstractSubmodel):
    """The profile of the loss over one silo's rows or, where all rows are in one place, over several's."""

    silos: tuple[SiloRows, ...]
    dim: int
    family: Family
    bound: RowBound

    @property
    def is_streamed(self) -> bool:
        """Whether the rows are read at every query."""
        return any(isinstance(silo.whole, StreamedLinear) for silo in self.silos)

    @property
    def in_memory(self) -> GeneralisedLinear | None:
        """One silo's rows with the intercept's column first, if they are in memory."""
        whole = self.silos[0].whole
        return whole if len(self.silos) == 1 and isinstance(whole, GeneralisedLinear) else None

    @property
    def n_rows(self) -> int:
        return sum(silo.whole.n_rows for silo in self.silos)

    def take(self, rows: IntArray) -> AbstractSubmodel:  # noqa: ARG002 - no batch of them
        raise InputError(
            "optimizer: an intercept of a silo's own is fitted to all rows; choose one that draws no rows"
        )

    def sums(self, eps: Array, parts: Part) -> Sums:
        if Part.LOSS in parts:
            raise InputError("the profile of a loss has no sum of its own; ask for its derivatives")
        shifts = query_shifts(self.bound, eps, parts)
        return reduce(add, (silo.sums(eps, parts, shifts) for silo in self.silos), zero_sums(shifts))

    def column_people(self, enough: int | None = None) -> IntArray:
        counts = (silo.whole.column_people(enough)[1:] for silo in self.silos)
        return np.asarray(reduce(np.add, counts, np.zeros(self.dim, dtype=np.int64)))

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield the rows t_i, centred within the silo."""
        return (piece for silo in self.silos for piece, _ in silo.centred(eps, part))

    def summed_rows(self, eps: Array) -> Iterator[PersonRows]:
        """Yield what each person adds to the gradient, of people with several rows."""
        for silo in self.silos:
            if isinstance(silo.whole, GroupedLinear):
                for piece in silo.whole.summed_rows(silo.point(eps)):
                    yield PersonRows(piece.rows[1:])

    def counted_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        for silo in self.silos:
            for piece in silo.rows(eps, part):
                yield PersonRows(piece.rows[1:], piece.counts)

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        if space is not None:
            # The shares may grow faster than the rows do when eps moves: no move is covered.
            largest = max(silo.largest_leverage(eps, part, space) for silo in self.silos)
            return Look(largest=largest, columns=np.zeros(self.dim), family=None)
        looks = [silo.whole.look(silo.point(eps), part, enough=enough) for silo in self.silos]
        # When beta moves a predictor by at most delta, the intercept moves it back by no more than that.
        columns = 2.0 * reduce(np.maximum, (look.columns[1:] for look in looks))
        return Look(largest=max(look.largest for look in looks), columns=columns, family=looks[0].family)

    def curvature_ceiling(self) -> Array:
        # The profile's Hessian is at most that of the columns: centring only takes away.
        ceilings = (silo.whole.n_rows * silo.whole.curvature_ceiling()[1:, 1:] for silo in self.silos)
        return np.asarray(reduce(np.add, ceilings) / max(self.n_rows, 1))
