"""How much of any combination of judged columns is one person's: shares that rounding cannot hide.

Person i has a row v_i of D numbers in [-1, 1], one for each judged column. Whoever reads the totals of the
columns can form the total of any combination c, sum_i c.v_i. Person i's share of it is

    h_i = max_c (c.v_i)^2 / sum_j (c.v_j)^2 = v_i^T S^+ v_i,     S = sum_j v_j v_j^T  (the Gram).

**Why squares.** A reader who does not know the others' parts c.v_j, up to their signs say, finds person i's
part hidden in noise of variance sum_{j != i} (c.v_j)^2. A share of 1/2 is where the part equals one standard
deviation of it. Statistical offices compare absolute values: a cell is refused if one contributor makes up
more than half of sum_j |c.v_j|. Squares imply that rule for every c at once, since sum_{j != i} |a_j| >=
(sum_{j != i} a_j^2)^(1/2): a share of s in squares is at most 1 / (1 + ((1 - s) / s)^(1/2)) in absolute
values, and 1/2 stays 1/2. The largest absolute share over all c needs everybody's rows; the largest square
share needs S, which is a sum over people, and the own row. It depends on the span alone, not on how columns
are coded or scaled, and counts people where columns are indicators: 1/m in a group of m.

It judges linear combinations by their sizes. A reader who knows that parts lie on a lattice (0 or 1, times
numbers that the reader knows) may solve for people who are small in every combination: no Gram prevents that.

**Rounding.** Each hospital sends its part of W = C S C, C = diag(1 / root of the number of people behind a
column), so that every entry is in [-1, 1], in multiples of g = 2^-bits. With M hospitals an entry of the
pooled matrix W' is off by at most e = M g / 2. For any positive weights u, by Cauchy and Schwarz,

    |c^T (W' - W) c| <= e (sum_j |c_j|)^2 <= c^T Delta c,     Delta = e (sum_k u_k) diag(1 / u_j),

so that (W' + Delta)^-1 <= W^-1 <= (W' - Delta)^-1, which bounds every share w_i^T W^-1 w_i, w_i = C v_i, on
both sides. The trace of Delta W^-1, the loss, is least if u_j^2 is the diagonal of W^-1: columns that are
nearly combinations of others get less of the error. (With u = 1 it is D times the identity, which costs two
bits more.)

If the bounds leave the verdict open, the same matrix is asked for once more with small g. There, what is left
below the error are exact collinearities, such as a total and its parts: directions in which *nobody* has more
than `INVISIBLE` of a person. If every hospital finds that of its own people, all rows lie in the span of the
other directions, and shares are theirs. If somebody has more, nobody can show that others are in it: it is
refused. So rows are judged to 2^-30 of their bounds, and sums over people must not be told finer than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

POINT = 30  # rows are read in multiples of 2^-30 of their bounds, a billionth
HALF = 15  # and split into halves of 15 bits, so that products of integers add up exactly in float64
BLOCK = 1 << 13  # people at a time: sums of products of halves stay below 2^(15 + 15 + 13) < 2^53
COARSE = 22  # bits: `tests/honest.py` has what fewer leave open
FINE = 52  # bits: a float64 holds an entry of [-1, 1] in multiples of 2^-52
FLOATS = 2.0**-47  # error of an entry that stands for float arithmetic, and
ERROR = 1.125  # the error of an eigenvalue, in coordinates where that of entries is 1: `Span.of` has why
INVISIBLE = 2.0**-26  # part of a person: 32 columns, each rounded to 2^-30, add up to an error of 2^-26
SLACK = 2.0**-20  # a share above the limit by less than this part of it is rounding: two people have 1/2 each


def fixed(piece: Array) -> Iterator[Array]:
    """Yield rows (D, people), at most `BLOCK` people at a time, as whole multiples of 2^-30."""
    if not (np.abs(piece) <= 1.0).all():  # NaN included
        raise ValueError("judged columns must lie in [-1, 1]")
    for first in range(0, piece.shape[1], BLOCK):
        yield np.rint(np.ldexp(piece[:, first : first + BLOCK], POINT))


def exact_gram(pieces: Iterable[Array], dim: int) -> list[list[int]]:
    """Return S of the rows in multiples of 2^-60, exactly, by splitting v = high 2^15 + low.

    Products of halves add up without rounding, in whatever order, so that every processor finds the same
    integers.
    """
    high, cross, low = (np.zeros((dim, dim), dtype=np.int64) for _ in range(3))
    for piece in pieces:
        for v in fixed(piece):
            top = np.rint(np.ldexp(v, -HALF))
            rest = v - np.ldexp(top, HALF)
            high += (top @ top.T).astype(np.int64)
            if rest.any():  # indicators have no lower half
                cross += (top @ rest.T).astype(np.int64)
                low += (rest @ rest.T).astype(np.int64)
    both = (cross + cross.T).tolist()
    parts = zip(high.tolist(), both, low.tolist(), strict=True)
    return [[(h << 2 * HALF) + (c << HALF) + s for h, c, s in zip(*rows, strict=True)] for rows in parts]


@final
@dataclass(frozen=True)
class Layout:
    """Which entries of the upper triangle are sent: row by row, the number of each one's lane, None if it is
    0.

    Entries share a lane if they are one product: with y an indicator, (y x_1) (y x_2) and (y x_1) x_2.
    """

    dim: int
    lanes: tuple[int | None, ...]

    @classmethod
    def full(cls, dim: int) -> Layout:
        """Return the layout in which every entry has a lane."""
        return cls(dim, tuple(range(dim * (dim + 1) // 2)))

    @property
    def numbers(self) -> int:
        """How many lanes there are."""
        return max((lane + 1 for lane in self.lanes if lane is not None), default=0)

    @property
    def is_full(self) -> bool:
        return self.numbers == self.dim * (self.dim + 1) // 2

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Yield (j, k, lane) of the entries that are sent, j <= k."""
        pairs = ((j, k) for j in range(self.dim) for k in range(j, self.dim))
        yield from ((*pair, lane) for pair, lane in zip(pairs, self.lanes, strict=True) if lane is not None)

    def scales(self, counts: Sequence[int]) -> list[float]:
        """Return by lane the least root of c_j c_k of its entries, which bounds them all; 0 if nobody has
        one."""
        least = [math.inf] * self.numbers
        for j, k, lane in self.entries():
            least[lane] = min(least[lane], math.sqrt(counts[j] * counts[k]))
        return least


def rounded_gram(
    pieces: Iterable[Array], counts: Sequence[int], bits: int, layout: Layout
) -> tuple[int, ...]:
    """Return the hospital's own products by lane, over the lane's scale, in multiples of 2^-bits."""
    gram, scales, found = exact_gram(pieces, layout.dim), layout.scales(counts), [0] * layout.numbers
    for j, k, lane in layout.entries():
        if scales[lane] > 0.0:
            found[lane] = round(gram[j][k] / (1 << 2 * POINT) / scales[lane] * 2.0**bits)
    return tuple(found)


def entry_reach(bits: int, hospitals: int) -> int:
    """Return a bound of each pooled number: 2^bits by Cauchy and Schwarz, and half a unit of each
    hospital."""
    return (1 << bits) + hospitals


@final
@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Products of columns, added up over hospitals: the numbers by lane, in multiples of 2^-bits."""

    numbers: Sequence[int]
    bits: int
    hospitals: int
    layout: Layout

    @property
    def error(self) -> float:
        """A bound of the error of an entry of the matrix.

        Each hospital rounds by half a unit, and errs by at most 2^-51 in a division, a root and a product
        before. Entries that share a lane differ by the fixed point of their columns: by 2^-28 at most, four
        times 2^-30 for each of min(c_j, c_k) people, over the root of c_j c_k.
        """
        shared = 0.0 if self.layout.is_full else 2.0**-28
        return self.hospitals * (0.5 * 2.0**-self.bits + 2.0**-51) + shared + FLOATS

    def matrix(self, counts: Sequence[int]) -> tuple[NDArray[np.int64], Array]:
        """Return the places of the columns that somebody has, and W' of these."""
        found, scales = np.zeros((self.layout.dim, self.layout.dim)), self.layout.scales(counts)
        for j, k, lane in self.layout.entries():
            if counts[j] and counts[k]:
                number = math.ldexp(self.numbers[lane], -self.bits)
                found[j, k] = found[k, j] = number * scales[lane] / math.sqrt(counts[j] * counts[k])
        live = np.flatnonzero(np.asarray(counts) > 0)
        return live, found[np.ix_(live, live)]

    def is_possible(self, counts: Sequence[int]) -> bool:
        """Return whether these may be products of any records: no eigenvalue is below minus the error."""
        live, matrix = self.matrix(counts)
        return float(np.linalg.eigvalsh(matrix).min(initial=0.0)) >= -len(live) * self.error


@final
@dataclass(frozen=True, kw_only=True)
class Span:
    """The pooled matrix in coordinates where Delta is the identity, by its eigenvectors.

    ``live`` numbers the columns that somebody has, and ``scale`` takes their rows to the coordinates. A
    direction is ``seen`` if its eigenvalue is above 2, twice the error; ``lost`` has the others, one in each
    column.
    """

    live: NDArray[np.int64]
    scale: Array
    values: Array
    seen: Array
    lost: Array

    @classmethod
    def of(cls, pooled: Pooled, counts: Sequence[int]) -> Span:
        """Return the span of the pooled products; ``counts`` bound how many people have each column.

        In the coordinates the matrix has a trace of at most 1/e, as every diagonal entry is at most 1: the
        eigenvalues' own error, some 2^-52 of it, is below 1/8 if e is at least 2^-47. `ERROR` adds it to the
        1 of Delta.
        """
        live, matrix = pooled.matrix(counts)
        error = pooled.error
        weights = _weights(matrix, error)
        to_unit = np.sqrt(weights / (error * weights.sum()))
        values, vectors = np.linalg.eigh(matrix * to_unit[:, None] * to_unit)
        seen = values > 2.0 * ERROR
        return cls(
            live=live,
            scale=to_unit / np.sqrt(np.asarray(counts, dtype=np.float64)[live]),
            values=values[seen],
            seen=vectors[:, seen],
            lost=vectors[:, ~seen],
        )

    def most(self, v: Array) -> Array:
        """Return an upper bound of each person's share, of rows in fixed point, in the directions that are
        seen."""
        return self._form(v, self.values - ERROR)

    def least(self, v: Array) -> Array:
        """Return a lower bound of each person's share."""
        return self._form(v, self.values + ERROR)

    def beyond(self, v: Array) -> Array:
        """Return the largest part that each person has in a lost direction, its coefficients in [-1, 1]."""
        combination = self.lost * self.scale[:, None]
        combination /= np.abs(combination).max(axis=0, initial=0.0)
        parts = combination.T @ np.ldexp(v[self.live], -POINT)
        return np.asarray(np.abs(parts).max(axis=0, initial=0.0))

    def remedy(self, v: Array) -> tuple[int, float]:
        """Return the column without which a person's share is smallest, and the share that is then left.

        Without column j it is h - c_j^2 / (W^-1)_jj, c = W^-1 w the combination in which the share is
        largest.
        """
        inverse = self.seen / (self.values - ERROR) @ self.seen.T
        w = self._row(v)
        c = inverse @ w
        size = np.diag(inverse)
        gain = np.divide(c * c, size, out=np.zeros_like(c), where=size > 0)
        column = int(gain.argmax())
        return int(self.live[column]), max(0.0, float(w @ c - gain[column]))

    def faintest(self, v: Array) -> int:
        """Return the column that is nearly a combination of others, where a person has most in a lost
        direction."""
        along = np.abs(self.lost.T @ self._row(v))
        return int(self.live[np.abs(self.lost[:, int(along.argmax())]).argmax()])

    def _row(self, v: Array) -> Array:
        return np.asarray(np.ldexp(v[self.live], -POINT) * self.scale)

    def _form(self, v: Array, values: Array) -> Array:
        metric = (self.seen / np.sqrt(values)) * np.ldexp(self.scale, -POINT)[:, None]
        inside = metric.T @ v[self.live]
        return np.asarray(np.einsum("an,an->n", inside, inside))


def _weights(matrix: Array, error: float) -> Array:
    """Return weights u, roots of the diagonal of W^-1; any positive weights give a bound."""
    if not len(matrix):
        return np.ones(0)
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, len(matrix) * error)
    return np.asarray(np.sqrt((vectors * vectors / values).sum(axis=1)))
