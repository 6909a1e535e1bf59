"""How few people a combination of disclosed sums can rest on.

An answer discloses sums of rows t_i, and hence every linear combination sum_i a . t_i. The share of person i
in the sum of squares behind a combination, at its largest over all a, is the leverage

    h_i = max_a (a . t_i)^2 / sum_k (a . t_k)^2 = t_i^T S^-1 t_i,     S = sum_k t_k t_k^T.

For the indicator of a group it is one over the group's size, so that 1 / h_i counts people: a combination is
made, in effect, of 1 / max h_i. Leverages do not depend on the coordinates in which the numbers are sent, and
they find what checks of single numbers do not: complements, differences of nearly equal columns, spikes.

**Rounding.** A number that is sent on a grid of spacing g is off by up to g/2. Taken as uniform, the error
has the variance g^2/12, which enters the sum of squares of every combination:
h_i = t_i^T (S + diag(g^2/12))^-1 t_i. This errs on the safe side for an attacker who takes the error for a
worst case too: the errors that the grids allow contain the ellipsoid with half-axes g/2 > g/sqrt(12).

**Matrices.** A disclosed matrix sum_i t_i t_i^T, such as a curvature or a second moment, is judged by its
root rows t_i: person i has at most the share h_i of each of its quadratic forms a^T M a. Other combinations
of its entries may rest on fewer people (`docs/threats.md`).

S is that of the silo's own rows where sums are open. Where sums are masked, nobody learns more than totals
over all silos, and S is a lower bound of the pooled one that all parties know (`protocol.looks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import mul
from typing import NamedTuple, final

import numpy as np

from fedtmle_core.types import Array, Family, IntArray, Part

RESOLUTION = 1e-13  # relative size below which a direction of unit columns is only rounding error
AMBIGUOUS = 1e-10  # eigenvalues of unit columns' S below which the rows are read once more
FIRST_LOOK = 1 << 11  # rows after which a bound of all leverages is tried for the first time
OWN_SHARES = (0.0, 0.25, 0.5, 0.75)  # shares of the silo's own S in a lower bound of the pooled S
CERTAIN = 700.0  # size of a linear predictor beyond which a probability is 0 or 1
LEAST_RESIDUAL = 1.0 / 16  # least residual of a continuous response on the unit scale
WITHIN_ONE_SD = 0.6827  # share of a normal distribution within one standard deviation of its mean


class PersonRows(NamedTuple):
    """Rows t_i, shape (p, R), and how many each person has: None for one each."""

    rows: Array
    counts: IntArray | None = None


Pieces = Callable[[], Iterable[PersonRows]]


@final
@dataclass(frozen=True)
class RowSpace:
    """The metric of a space of disclosed numbers: S^-1 = W W^T on the span of S, W of shape (p, rank).

    The rows that are judged lie in the span.
    """

    W: Array

    @classmethod
    def own(cls, pieces: Pieces, gram: Array | None = None, rounding: Array | None = None) -> RowSpace:
        """Return the space of rows, given their S if it is known; ``rounding`` are the grids' spacings.

        The eigenvectors of S tell directions apart down to 1e-5 of unit columns. Along smaller ones the rows
        themselves are read once more: a direction counts if it is above `RESOLUTION`.
        """
        if gram is None:
            gram = _sum(piece.rows @ piece.rows.T for piece in pieces())
        noise = np.zeros(len(gram)) if rounding is None else rounding * rounding / 12.0
        size = np.sqrt(np.diag(gram) + noise)
        scale = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)
        values, vectors = np.linalg.eigh((gram + np.diag(noise)) * scale[:, None] * scale)
        doubtful = values <= AMBIGUOUS
        whole = scale[:, None] * vectors[:, ~doubtful] / np.sqrt(values[~doubtful])
        if not doubtful.any() or not size.any():
            return cls(whole)
        small = scale[:, None] * vectors[:, doubtful]
        left = _sum((along := small.T @ piece.rows) @ along.T for piece in pieces())
        values, vectors = np.linalg.eigh(left + small.T @ (noise[:, None] * small))
        kept = values > RESOLUTION**2
        return cls(np.concatenate([whole, small @ (vectors[:, kept] / np.sqrt(values[kept]))], axis=1))

    @classmethod
    def pooled(cls, C: Array, matrix: Array, error: float, pieces: Pieces) -> RowSpace:
        """Return the space of a lower bound of the pooled S, of which the rows of ``pieces`` are a part.

        C S C^T is within ``error`` of ``matrix`` in operator norm; C is invertible on the span of S. If the
        matrix does not exceed its error, the silo's own S is mixed in, since S is at least any mean of its
        two lower bounds. If that does not suffice, the own S alone is used.
        """
        bound = matrix - error * np.eye(len(matrix))
        own: Array | float = 0.0
        for share in OWN_SHARES:
            values, vectors = np.linalg.eigh((1.0 - share) * bound + share * own)
            if values[0] > AMBIGUOUS * values[-1]:
                return cls(C.T @ (vectors / np.sqrt(values)))
            if not share:
                own = _sum((image := C @ piece.rows) @ image.T for piece in pieces())
        return cls.own(pieces)

    def leverages(self, piece: PersonRows) -> Array:
        """Return the leverage of each person."""
        inside = self.W.T @ piece.rows
        each = np.einsum("kn,kn->n", inside, inside)
        if piece.counts is None:
            return np.asarray(each)
        ends = np.concatenate([[0.0], np.cumsum(each)])
        stops = np.cumsum(piece.counts)
        return np.asarray(ends[stops] - ends[stops - piece.counts])

    def largest_within(self, bounds: Array) -> float:
        """Return a bound of the leverage of any row in the span with |t_j| <= bounds[j].

        With r_j = |t_j| |W_j| and U the rows of W at unit length, h = |U^T (r, signed)|^2 is at most
        (sum_j r_j)^2, and at most |U|^2 sum_j r_j^2, which is smaller if columns are nearly uncorrelated.
        """
        lengths = np.sqrt((self.W * self.W).sum(axis=1))
        reach = bounds * lengths
        unit = self.W / np.where(lengths > 0, lengths, 1.0)[:, None]
        stretch = float(np.linalg.eigvalsh(unit.T @ unit).max(initial=0.0)) * (1.0 + 1e-9)
        return min(float(reach.sum()) ** 2, stretch * float(reach @ reach))


def largest_leverage(
    pieces: Pieces,
    *,
    rounding: Array | None = None,
    space: RowSpace | None = None,
    bounds: Array | None = None,
    enough: float = 0.0,
) -> float:
    """Return the largest leverage of a person in the rows; each call of ``pieces`` yields them in order.

    ``space`` is a pooled one; by default it is that of the rows themselves. With public ``bounds`` of |t_j|,
    an upper bound that is at most ``enough`` is returned as soon as the rows read so far prove it, because
    further rows can only add to S. Without them, an upper bound by the largest |t_j| may be returned.
    """
    if space is None:
        gram: Array | None = None
        most: Array | None = None
        read, next_look = 0, FIRST_LOOK
        has_groups = False
        for piece in pieces():
            size = _largest(piece.rows)
            own = piece.rows @ piece.rows.T
            gram, most = (own, size) if gram is None or most is None else (gram + own, np.maximum(most, size))
            read, has_groups = read + piece.rows.shape[1], has_groups or piece.counts is not None
            if bounds is not None and enough > 0 and read >= next_look and not has_groups:
                bound = _bound_of_all(gram, bounds, enough)
                if bound <= enough:
                    return bound
                next_look = 4 * read
        if gram is None or most is None:
            return 0.0
        space = RowSpace.own(pieces, gram, rounding)
        if enough > 0 and not has_groups and (bound := space.largest_within(most)) <= enough:
            return bound
    return max((float(space.leverages(piece).max(initial=0.0)) for piece in pieces()), default=0.0)


def heaviest_combination(pieces: Pieces, space: RowSpace | None = None) -> tuple[Array, IntArray]:
    """Return the parts of the columns in the combination in which one person's share is largest, and people.

    The combination is a = S^-1 t_i of the row with the largest leverage. The part of column j is |a_j| times
    the root of its sum of squares, relative to the largest part; the last array counts the rows in which the
    column is not zero. Both have shape (p,).
    """
    space = RowSpace.own(pieces) if space is None else space
    found, most = np.zeros(len(space.W)), -1.0
    squares, people = np.zeros(len(space.W)), np.zeros(len(space.W), dtype=np.int64)
    for piece in pieces():
        squares += (piece.rows * piece.rows).sum(axis=1)
        people += np.count_nonzero(piece.rows, axis=1)
        inside = space.W.T @ piece.rows
        each = np.einsum("kn,kn->n", inside, inside)
        if len(each) and each.max() > most:
            most, found = float(each.max()), space.W @ inside[:, int(each.argmax())]
    parts = np.abs(found) * np.sqrt(squares)
    return parts / (parts.max(initial=0.0) or 1.0), people


def _largest(rows: Array) -> Array:
    """Return the largest magnitude in each row of an array, 0 without columns."""
    return np.asarray(np.maximum(rows.max(axis=1, initial=0.0), -rows.min(axis=1, initial=0.0)))


def _bound_of_all(gram: Array, bounds: Array, enough: float) -> float:
    """Return a bound of all leverages from the S of some rows, to which others only add; or infinity.

    With R the S of unit columns, h = r^T R^-1 r <= |r|^2 / lambda_min(R) for rows r in units of the columns'
    lengths. If that is not ``enough``, `RowSpace.largest_within` may be less.
    """
    used = bounds > 0  # the other columns are zero for everyone
    if not used.any():
        return 0.0
    gram, bounds = gram[used][:, used], bounds[used]
    size = np.sqrt(np.diag(gram))
    if not size.all():
        return math.inf
    values, vectors = np.linalg.eigh(gram / size[:, None] / size)
    if (values <= AMBIGUOUS).any():
        return math.inf
    reach = bounds / size
    bound = float(reach @ reach) / (float(values[0]) - RESOLUTION)
    if bound <= enough:
        return bound
    return RowSpace(vectors / (size[:, None] * np.sqrt(values))).largest_within(bounds)


def _sum(parts: Iterable[Array]) -> Array:
    return np.asarray(reduce(np.add, parts))


def deviations(
    family: Family, eta: Array, y: Array | None, part: Part = Part.GRADIENT, w: Array | None = None
) -> Array:
    """Return the size s of each row's slope rho'(eta, y), shape (N,): max(sd(y), |mu - y|).

    A gradient is the sum of (mu_i - y_i) x_i. An attacker does not know how far the outcomes of the others
    are from their predictions: what hides one record is their standard deviation, by the model itself. The
    residual counts where it is larger, so that whoever stands out by the outcome is seen, wherever eps was
    steered to. A gaussian model has one standard deviation for all rows, `spread`; rows with ``w`` = 0 do
    not count. An exponential tilt has no response: s = 1. Of a Hessian, which has no residuals, s is the root
    of rho''.
    """
    if family is Family.LINEAR:
        return np.ones_like(eta)
    y = np.zeros_like(eta) if y is None else y
    if family is Family.LOGISTIC:
        size = np.minimum(np.abs(eta), CERTAIN)
        shrunk = np.exp(-size)
        deviation = np.asarray(np.exp(-0.5 * size) / (1.0 + shrunk))
        if part is Part.HESSIAN:
            return deviation
        return np.maximum(np.abs(np.where(eta > 0, 1.0, shrunk) / (1.0 + shrunk) - y), deviation)
    mean = eta if family is Family.GAUSSIAN else np.exp(np.minimum(eta, CERTAIN))
    if part is Part.HESSIAN:
        return np.ones_like(eta) if family is Family.GAUSSIAN else np.sqrt(mean)
    residuals = np.abs(mean - y)
    least = LEAST_RESIDUAL
    if family is Family.GAUSSIAN:
        least = max(least, spread(residuals if w is None else residuals[w != 0]))
    return np.maximum(residuals, least)


def spread(residuals: Array) -> float:
    """Return the standard deviation of a gaussian response from |mu - y|: 68 % of them are within it.

    It is never more than the root of their mean square, and a third of the rows, however far they stand out,
    do not raise it. If no residual moves by more than delta, neither does the spread.
    """
    if not len(residuals):
        return 0.0
    place = math.floor(WITHIN_ONE_SD * (len(residuals) - 1))
    within = float(np.partition(residuals, place)[place])
    return min(within, math.sqrt(float(residuals @ residuals) / len(residuals)))


@final
@dataclass(frozen=True, kw_only=True)
class Look:
    """The largest leverage of a gradient's rows at one eps, and how far eps may move until the next look.

    ``columns`` are the largest |x| by coordinate. For the logistic family |ds/d eta| <= s/2, so that no
    leverage grows by more than e^(2 delta) when no predictor moves by more than delta. For the squared loss s
    (a residual or their `spread`) changes by at most delta and is at least `LEAST_RESIDUAL`: the factor is
    ((1 + q)/(1 - q))^2 with q = delta / `LEAST_RESIDUAL`.
    """

    largest: float
    columns: Array
    family: Family | None  # None: unknown, no move is covered

    def radius(self, allowed: float) -> float:
        """Return how far eps may move, by `distance`, before a leverage can exceed ``allowed``."""
        if not self.largest <= allowed:
            return -1.0
        ratio = allowed / self.largest if self.largest > 0 else math.inf
        match self.family:
            case Family.LINEAR:
                return math.inf
            case Family.LOGISTIC:
                return 0.5 * math.log(ratio) if ratio < math.inf else math.inf
            case Family.GAUSSIAN:
                root = math.sqrt(ratio)
                return LEAST_RESIDUAL * ((root - 1.0) / (root + 1.0) if root < math.inf else 1.0)
            case _:
                return 0.0

    def distance(self, move: Iterable[float]) -> float:
        """Return sum_j |move_j| max |x_j|: no row's predictor moves further when eps moves by this."""
        return float(sum(map(mul, map(abs, move), self.columns.tolist())))
