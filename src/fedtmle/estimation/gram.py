"""Coordinates in which a regression is easy to fit: columns that are nearly uncorrelated, of unit variance.

One coarse matrix of products of columns, rounded to several people an entry, serves all regressions over the
same records. Columns are moved and scaled by their declared ranges, z = A x, and with the Cholesky factor L
of the rounded mean of z z' the coordinates are C x, C = L^-1 A. C need not be accurate: the gradients are.
Where rounding hides what a column adds to those before it, the matrix is asked again in the coordinates found
so far: a column that was hidden is now of a size that can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np

from fedtmle.estimation.algebra import congruence, invert_lower, multiply, on_grid, solve_lower
from fedtmle.estimation.flow import Flow, ask, both
from fedtmle.estimation.regression import Regression
from fedtmle.model.refusals import refuse_redundant
from fedtmle_core.blocks import Lattice, Layer, Moments, Score
from fedtmle_core.terms import Term, product, total
from fedtmle_core.types import Array, Family, Part, unpack

SEVERAL = 4  # people to which an entry of a matrix is rounded
COARSEST = 8  # binary places of a mean at the least: 2 people of 500
ENOUGH = 2.0**-9  # of an entry of order 1, where the columns may stay in place
RESOLVED = 0.25  # share of what a column adds to those before it that rounding may be
COUNTED = 10  # binary places of sums of weights and responses
WITHIN = 4.0  # declared half ranges are some four standard deviations wide
MOST_STAGES = 5  # 1,000 people resolve a share of 2^-8 of a column at a time: 2^-40 in all, as exact sums do


def places_of(n: int) -> int:
    """Return the binary places to which means over ``n`` people are rounded to several people."""
    return max(math.floor(math.log2(max(n, 1) / SEVERAL)), COARSEST)


def centred(regression: Regression) -> Array:
    """Return A, lower triangular: z = A x are the unit columns, moved and scaled by their declared ranges.

    With an intercept a column is centred whose range is away from 0. A range that holds 0 stays where it is:
    many columns, such as rare levels, are mostly 0.
    """
    design = regression.design
    size = len(design.columns)
    A = np.zeros((size, size))
    for j, ((least, most), centre) in enumerate(zip(design.unit_ranges, design.centres, strict=True)):
        low, high = least - centre, most - centre
        moves = design.has_intercept and j > 0 and not low <= 0.0 <= high
        middle = 0.5 * (low + high) if moves else 0.0
        reach = max(high - middle, middle - low) or 1.0
        # The intercept and indicators are as large as they can be; a number is mostly well inside its range.
        typical = reach if design.of_levels[j] or low == high else reach / WITHIN
        A[j, j] = 1.0 / typical
        if moves:
            A[j, 0] = -middle / (typical * math.ldexp(1.0, -design.exponents[0]))
    return A


Column: TypeAlias = tuple[tuple[Term, float], ...]  # a column's term and factor in each layer


@final
@dataclass(frozen=True, kw_only=True)
class Gram:
    """What is known of the mean of x x' over people and records, x the unit columns.

    The columns ``whitener`` x are nearly uncorrelated and of unit variance. ``hidden`` are the columns that
    those before determine, as far as rounding shows, and ``unused`` those of a level that nobody has.
    """

    columns: tuple[Column, ...]
    weights: tuple[Term | None, ...]
    whitener: Array
    hidden: tuple[bool, ...]
    unused: tuple[bool, ...]

    def covers(self, regression: Regression) -> bool:
        """Return whether the columns of a regression are some of these, over the same records."""
        layers = regression.layers()
        is_same = tuple(layer.w for layer in layers) == self.weights
        return is_same and set(columns_of(layers)) <= set(self.columns)

    def raw(self) -> Array:
        """Return the mean of x x' of the unit columns."""
        root = invert_lower(self.whitener)
        return multiply(root, root.T)

    def of(self, regression: Regression) -> Gram:
        """Return the same for a regression whose columns are some of these.

        A part of the matrix has no larger relative error than the whole.
        """
        columns = columns_of(regression.layers())
        if columns == self.columns:
            return self
        places, A = [self.columns.index(column) for column in columns], centred(regression)
        factor, _ = factored(congruence(A, self.raw()[np.ix_(places, places)]), 2.0**-50)
        return replace(
            self,
            columns=columns,
            whitener=on_grid(solve_lower(factor, A)),
            hidden=tuple(self.hidden[j] for j in places),
            unused=tuple(self.unused[j] for j in places),
        )


def factored(matrix: Array, precision: float) -> tuple[Array, list[int]]:
    """Return a Cholesky factor L, and the columns whose pivots rounding may have made.

    Every entry is within ``precision``. With v the row of L^-1 of a column, v' K v = 1, and rounding moves it
    by some precision |v|^2. A pivot that is too small for that is lifted.
    """
    rest = np.array(matrix)
    L, V = np.zeros_like(rest), np.zeros_like(rest)
    hidden = []
    for k in range(len(rest)):
        v = -multiply(V[:k].T, L[k, :k]) if k else np.zeros(len(rest))
        v[k] += 1.0
        pivot, least = float(rest[k, k]), precision * math.fsum((v * v).tolist()) / RESOLVED
        if pivot < least:
            hidden.append(k)
            pivot = least
        L[k, k] = math.sqrt(pivot)
        V[k] = v / L[k, k]
        L[k + 1 :, k] = rest[k + 1 :, k] / L[k, k]
        rest[k + 1 :, k + 1 :] -= np.multiply.outer(L[k + 1 :, k], L[k + 1 :, k])
    return L, hidden


def columns_of(layers: Sequence[Layer]) -> tuple[Column, ...]:
    """Return each column's terms and factors, one for each layer."""
    return tuple(tuple((layer.X[j], layer.factors[j]) for layer in layers) for j in range(len(layers[0].X)))


def curvatures(
    family: Family,
    layers: Sequence[Sequence[Layer]],
    at: Sequence[float],
    C: Array,
    n: int,
    *,
    bend: float = 1.0,
    enough: float = ENOUGH,
) -> Flow[tuple[list[Array], float]]:
    """Return the mean curvatures of some losses in the coordinates C x, and by how much an entry may be off.

    They are rounded to several people an entry, of whom an average one adds ``bend`` to the diagonal. The
    columns stay in place if rounding them to two people leaves the coordinates precise ``enough``; otherwise
    the columns C x are computed.
    """
    places, size = places_of(n) - math.ceil(math.log2(bend)), len(C)
    stretch = max(*(math.fsum(row) for row in (C * C).tolist()), 1.0)  # errors of entries are not in step
    finer = min(places + math.ceil(math.log2(stretch)), places + 1)
    precision = stretch * 2.0 ** -(finer + 1)
    in_place = precision * math.sqrt(size) <= enough  # what a matrix of such errors does to a vector
    asked = [
        Score(
            family=family,
            layers=tuple(each) if in_place else tuple(_mixed(layer, C, at) for layer in each),
            at=tuple(at) if in_place else (0.0,) * size,
            part=Part.HESSIAN,
            lattice=Lattice(places=finer if in_place else places),
        )
        for each in layers
    ]
    found = [unpack(sums / n, size) for sums in (yield from ask(*asked))]
    if in_place:
        return [congruence(C, matrix) for matrix in found], precision
    return found, 2.0 ** -(places + 1)


def _mixed(layer: Layer, C: Array, at: Sequence[float]) -> Layer:
    """Return a layer of the columns C x; the point of the loss is an offset."""
    factors = np.array(layer.factors)
    offset = [] if layer.offset is None else [layer.offset]
    point = total(layer.X, (np.array(at) * factors).tolist()) if any(at) else None
    return Layer(
        X=tuple(total(layer.X, on_grid(row * factors).tolist()) for row in C),
        factors=(1.0,) * len(C),
        offset=total([*offset, point]) if point is not None else layer.offset,
        y=layer.y,
        w=layer.w,
    )


def ask_gram(regression: Regression, n: int) -> Flow[Gram]:
    """Return the matrix of a regression's columns, asked until no column in use is hidden by rounding."""
    layers, design = regression.layers(), regression.design
    records = [replace(layer, offset=None, y=None) for layer in layers]
    columns, size = columns_of(layers), len(design.columns)
    of_levels = [j for j in range(size) if design.of_levels[j]]
    sums = [total([_weighted(layer, layer.X[j]) for layer in layers]) for j in of_levels]
    counts = Moments.of(sums, places=COUNTED)
    basis, unused = on_grid(centred(regression)), [False] * size
    for stage in range(MOST_STAGES):
        of_matrix = curvatures(Family.GAUSSIAN, [records], (0.0,) * size, basis, n)
        if stage or not sums:
            (matrix,), precision = yield from of_matrix
        else:
            ((matrix,), precision), (counted,) = yield from both(of_matrix, ask(counts))
            nobody = [j for j, count in zip(of_levels, counted.tolist(), strict=True) if not count]
            unused = [j in nobody for j in range(size)]
        factor, hidden = factored(matrix, precision)
        basis = on_grid(solve_lower(factor, basis))
        if all(unused[j] for j in hidden):
            break
    return Gram(
        columns=columns,
        weights=tuple(layer.w for layer in layers),
        whitener=basis,
        hidden=tuple(j in hidden for j in range(size)),
        unused=tuple(unused),
    )


def _weighted(layer: Layer, term: Term) -> Term:
    return term if layer.w is None else product(layer.w, term)


def refuse_hidden(gram: Gram, regression: Regression) -> None:
    """Refuse columns that those before determine, unless a penalty makes up for them."""
    pairs = zip(gram.hidden, gram.unused, strict=True)
    is_redundant = [is_hidden and not is_unused for is_hidden, is_unused in pairs]
    names = [name for name, is_so in zip(regression.design.names, is_redundant, strict=True) if is_so]
    if names and not regression.ridge:
        refuse_redundant(names, regression.label)
