"""How far a sum over rows rests on a few of them.

A gradient of which one row makes up half discloses that row. For contributions c_i of the rows to one
coordinate, the largest share is max |c_i| / sum |c_i| and the effective number of rows is
(sum |c_i|)^2 / sum c_i^2, which is never below one over the largest share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedtmle.model.types import Array


class RowSpread(NamedTuple):
    """Sums and maxima over rows by coordinate, each of shape (d,), at one eps.

    ``total``, ``squares`` and ``largest`` are the sum of |c|, the sum of c^2 and the largest |c|;
    ``reach_total`` and ``reach_largest`` are the sum and the largest of w |X|; ``columns`` is the largest
    |X|, and ``rows`` the number of rows with a w X other than 0.
    """

    total: Array
    squares: Array
    largest: Array
    reach_total: Array
    reach_largest: Array
    columns: Array
    rows: Array

    def set_maxima(
        self, largest: ArrayLike, reach_largest: ArrayLike, columns: ArrayLike | None = None
    ) -> None:
        """Write bounds that hold for every row over the maxima of those that were read."""
        self.largest[:], self.reach_largest[:] = largest, reach_largest
        if columns is not None:
            self.columns[:] = columns


class Concentration(NamedTuple):
    """How far the gradient at one eps rests on single rows.

    w |X| in the ``spread`` bounds how fast |c| can change as the predictor moves, per unit of ``lipschitz``
    (sup rho'', infinite if there is none). Unless ``is_whole``, the sums are over some of the rows, which
    the others can only add to, and the maxima are bounds for every row: `share` and `radius` err on the
    safe side.
    """

    spread: RowSpread
    lipschitz: float
    is_whole: bool = True

    @property
    def support(self) -> float:
        """The fewest rows that enter a coordinate at all; infinite if none enters any."""
        return min(filter(None, self.spread.rows.tolist()), default=math.inf)

    def join(self, other: Concentration) -> Concentration:
        """Return the concentration over the rows of both, at the same eps."""
        a, b = self.spread, other.spread
        spread = RowSpread(
            total=a.total + b.total,
            squares=a.squares + b.squares,
            largest=np.maximum(a.largest, b.largest),
            reach_total=a.reach_total + b.reach_total,
            reach_largest=np.maximum(a.reach_largest, b.reach_largest),
            columns=np.maximum(a.columns, b.columns),
            rows=a.rows + b.rows,
        )
        return self._replace(spread=spread, is_whole=self.is_whole and other.is_whole)

    def of_all(self, largest: float) -> Concentration:
        """Return what these rows show of all rows, if none has a larger |c| than ``largest`` at any eps."""
        spread = RowSpread(*(column.copy() for column in self.spread))
        spread.set_maxima(largest, 0.0)
        return self._replace(spread=spread, is_whole=False)

    def shows(self, share: float, least: int) -> bool:
        """Whether no row has more than ``share`` of a coordinate, and each coordinate has ``least`` rows."""
        return self.radius(share) >= 0 and self.support >= least

    @property
    def share(self) -> float:
        """The largest share of one row in one coordinate; 0 if nothing is summed."""
        return _largest_ratio(self.spread.largest, self.spread.total)

    @property
    def effective(self) -> float:
        """The smallest effective number of rows over the coordinates; infinite if nothing is summed."""
        total = self.spread.total
        ratio = _largest_ratio(self.spread.squares, total * total)
        return 1.0 / ratio if ratio else np.inf

    def radius(self, share: float) -> float:
        """Return how far eps may move, as `distance` measures it, before a row's share can exceed ``share``.

        |rho'(eta) - rho'(eta')| <= L |eta - eta'| <= L distance =: s, so that |c| changes by at most
        s w |X|: no row has more than largest + s reach_largest, all have at least total - s reach_total.
        Negative if a row's share may be above it already.
        """
        s = math.inf
        spread = self.spread
        columns = (spread.total, spread.largest, spread.reach_total, spread.reach_largest)
        coordinates = zip(*(column.tolist() for column in columns), strict=True)
        for total, largest, reach_total, reach_largest in coordinates:
            slack, per_s = share * total - largest, reach_largest + share * reach_total
            if not slack >= 0:  # also if it is not a number
                return -1.0
            if per_s > 0:
                s = min(s, slack / per_s)
        return s / self.lipschitz if self.lipschitz and s < math.inf else math.inf

    def distance(self, move: Iterable[float]) -> float:
        """Return sum_j |move_j| max |X_j|: no row's predictor moves further when eps moves by this."""
        return float(sum(map(mul, map(abs, move), self.spread.columns.tolist())))


def _largest_ratio(part: Array, whole: Array) -> float:
    summed = whole > 0
    return float((part[summed] / whole[summed]).max(initial=0.0))
