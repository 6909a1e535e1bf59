"""How far a sum over rows rests on a few of them.

A gradient of which one row makes up half tells that row. For contributions c_i of the rows to one
coordinate, the largest share is max |c_i| / sum |c_i| and the effective number of rows is
(sum |c_i|)^2 / sum c_i^2, which is never below one over the largest share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.types import Array, IntArray


@final
@dataclass(frozen=True, kw_only=True)
class Concentration:
    """Sums of |c|, of c^2 and the largest |c| by coordinate, shape (d,), at one eps.

    ``reach_total`` and ``reach_largest`` are the same of w |X|: how fast |c| can change as the
    predictor moves, per unit of ``lipschitz`` (sup rho'', infinite where there is none);
    ``columns`` is the largest |X|. ``is_whole`` says whether all rows were looked at.
    """

    eps: Array
    total: Array
    squares: Array
    largest: Array
    reach_total: Array
    reach_largest: Array
    columns: Array
    lipschitz: float
    rows: IntArray  # how many have w X other than 0, by coordinate
    is_whole: bool = True

    @property
    def support(self) -> float:
        """The fewest rows that enter a coordinate at all; infinite where none enters any."""
        return min((int(count) for count in self.rows if count), default=math.inf)

    def join(self, other: Concentration) -> Concentration:
        """Of the rows of both, at the same eps."""
        return Concentration(
            eps=self.eps,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            largest=np.maximum(self.largest, other.largest),
            reach_total=self.reach_total + other.reach_total,
            reach_largest=np.maximum(self.reach_largest, other.reach_largest),
            columns=np.maximum(self.columns, other.columns),
            lipschitz=self.lipschitz,
            rows=self.rows + other.rows,
            is_whole=self.is_whole and other.is_whole,
        )

    @property
    def share(self) -> float:
        """The largest share of one row in one coordinate; 0 where nothing is summed."""
        return _largest_ratio(self.largest, self.total)

    @property
    def effective(self) -> float:
        """The smallest effective number of rows over the coordinates; infinite where nothing is summed."""
        ratio = _largest_ratio(self.squares, self.total * self.total)
        return 1.0 / ratio if ratio else np.inf

    def share_within(self, eps: Array) -> float:
        """A bound of `share` at another eps, without reading a row."""
        low, s = self.total_within(eps), self._change(eps)
        if not np.isfinite(s) or (low[self.reach_total > 0] <= 0).any():
            return 1.0
        return _largest_ratio(self.largest + s * self.reach_largest, low)

    def total_within(self, eps: Array) -> Array:
        """A lower bound of `total` at another eps."""
        s = self._change(eps)
        return self.total - s * self.reach_total if np.isfinite(s) else np.zeros_like(self.total)

    def _change(self, eps: Array) -> float:
        """|rho'(eta) - rho'(eta')| <= L |eta - eta'| <= L sum_j |eps_j - eps'_j| max |X_j| =: s, so that
        |c| changes by at most s w |X|."""
        distance = float(np.abs(eps - self.eps) @ self.columns)
        return self.lipschitz * distance if distance else 0.0


def _largest_ratio(part: Array, whole: Array) -> float:
    summed = whole > 0
    return float((part[summed] / whole[summed]).max(initial=0.0))
