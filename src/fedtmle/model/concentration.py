"""How far a sum over rows rests on a few of them.

A gradient of which one row makes up half tells that row. For contributions c_i of the rows to one
coordinate, the largest share is max |c_i| / sum |c_i| and the effective number of rows is
(sum |c_i|)^2 / sum c_i^2, which is never below one over the largest share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

import numpy as np

from fedtmle.model.types import Array, IntArray

_LARGEST = (2, 4, 5)  # of the numbers found, those that are no sums


class Concentration(NamedTuple):
    """Sums of |c|, of c^2 and the largest |c| by coordinate, shape (d,), at one eps.

    ``reach_total`` and ``reach_largest`` are the same of w |X|: how fast |c| can change as the
    predictor moves, per unit of ``lipschitz`` (sup rho'', infinite where there is none);
    ``columns`` is the largest |X|, ``rows`` how many have a w X other than 0. Unless ``is_whole``, the
    sums are over some of the rows, which the others can only add to, and what is largest is a bound for
    every row: `share` and `radius` err on the safe side.
    """

    found: Array  # what is named below, shape (7, d), in this order
    lipschitz: float
    is_whole: bool = True

    @property
    def total(self) -> Array:
        return np.asarray(self.found[0])

    @property
    def squares(self) -> Array:
        return np.asarray(self.found[1])

    @property
    def largest(self) -> Array:
        return np.asarray(self.found[2])

    @property
    def reach_total(self) -> Array:
        return np.asarray(self.found[3])

    @property
    def reach_largest(self) -> Array:
        return np.asarray(self.found[4])

    @property
    def columns(self) -> Array:
        return np.asarray(self.found[5])

    @property
    def rows(self) -> IntArray:
        return np.asarray(self.found[6], dtype=np.int64)

    @property
    def support(self) -> float:
        """The fewest rows that enter a coordinate at all; infinite where none enters any."""
        return min(filter(None, self.found[6].tolist()), default=math.inf)

    def join(self, other: Concentration) -> Concentration:
        """Of the rows of both, at the same eps."""
        found = self.found + other.found
        for at in _LARGEST:
            found[at] = np.maximum(self.found[at], other.found[at])
        return self._replace(found=found, is_whole=self.is_whole and other.is_whole)

    def of_all(self, largest: float) -> Concentration:
        """What these rows show of all rows, of which none has a larger |c| than this, at any eps."""
        found = self.found.copy()
        found[2], found[4] = largest, 0.0
        return self._replace(found=found, is_whole=False)

    def shows(self, share: float, least: int) -> bool:
        """Whether no row has more than ``share`` of a coordinate, and each has at least ``least`` rows."""
        return self.radius(share) >= 0 and self.support >= least

    @property
    def share(self) -> float:
        """The largest share of one row in one coordinate; 0 where nothing is summed."""
        return _largest_ratio(self.largest, self.total)

    @property
    def effective(self) -> float:
        """The smallest effective number of rows over the coordinates; infinite where nothing is summed."""
        ratio = _largest_ratio(self.squares, self.total * self.total)
        return 1.0 / ratio if ratio else np.inf

    def radius(self, share: float) -> float:
        """How far eps may move, as `distance` measures it, before a row's share can come above ``share``.

        |rho'(eta) - rho'(eta')| <= L |eta - eta'| <= L distance =: s, so that |c| changes by at most
        s w |X|: no row has more than largest + s reach_largest, all have at least total - s reach_total.
        Negative where a row's share may be above it already.
        """
        s = math.inf
        for total, _, largest, reach_total, reach_largest, *_ in self.found.T.tolist():
            slack, per_s = share * total - largest, reach_largest + share * reach_total
            if not slack >= 0:  # nor where it is not a number
                return -1.0
            if per_s > 0:
                s = min(s, slack / per_s)
        return s / self.lipschitz if self.lipschitz and s < math.inf else math.inf

    def distance(self, move: Iterable[float]) -> float:
        """sum_j |move_j| max |X_j|: no row's predictor moves further when eps moves by this."""
        return float(sum(map(mul, map(abs, move), self.columns.tolist())))


def _largest_ratio(part: Array, whole: Array) -> float:
    summed = whole > 0
    return float((part[summed] / whole[summed]).max(initial=0.0))
