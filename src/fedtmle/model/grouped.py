"""A generalised linear submodel over the long rows of people: several rows of a sum belong to one person.

Sums are exact sums over the long rows. Whatever the silo's guard asks is answered per person: the share of a
person in a gradient is that of all the rows of that person together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model import kernels
from fedtmle.model.concentration import Concentration, RowSpread
from fedtmle.model.exact import Sums, query_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.submodel import AbstractRowsSubmodel, GeneralisedLinear
from fedtmle.model.types import Array, IntArray, Part, RowBound, matrix, unpack, upper_pairs

Result = TypeVar("Result")


class LongRows(NamedTuple):
    """The long rows of consecutive people, one person after the other, and how many each of them has."""

    design: GeneralisedLinear
    counts: IntArray

    @property
    def starts(self) -> IntArray:
        """Where the rows of each person begin who has any."""
        return starts_of(self.counts)

    def by_person(self, values: Array) -> Array:
        """Return sums over each person's rows, shape (p, people), of values of shape (p, rows)."""
        people = np.zeros((len(values), len(self.counts)))
        if values.shape[1]:
            people[:, self.counts > 0] = np.add.reduceat(values, self.starts, axis=1)
        return people


def starts_of(counts: IntArray) -> IntArray:
    """Return where the rows of each person begin who has any, given how many each has."""
    return np.asarray((np.cumsum(counts) - counts)[counts > 0])


class OverPieces(Protocol):
    """Applies work to consecutive pieces of the long rows, in order; the pieces run in parallel."""

    def __call__(self, work: Callable[[LongRows], Any], /) -> Iterator[Any]: ...


@final
@dataclass(frozen=True, kw_only=True)
class GroupedLinear(AbstractRowsSubmodel):
    """The submodel whose long rows ``over`` makes piece by piece, at every query.

    ``people`` is the number of people, with or without a long row; ``bound`` bounds the sum of one person's
    rows.
    """

    people: int
    dim: int
    family: Family
    bound: RowBound
    over: OverPieces

    @property
    def n_rows(self) -> int:
        return self.people

    def take(self, rows: IntArray) -> GroupedLinear:  # noqa: ARG002 - no batch of them
        raise InputError(
            "optimizer: person-periods are made in one pass over all people; choose one that draws no rows"
        )

    def sums(self, eps: Array, parts: Part) -> Sums:
        zero = zero_sums(query_shifts(self.bound, eps, parts))
        return reduce(add, self.over(lambda piece: piece.design.sums(eps, parts)), zero)

    def concentration(self, eps: Array, *, share: float = 0.0, least: int = 0) -> Concentration:
        public = 2.0**self.bound.gradient
        empty = Concentration(_no_spread(self.dim), self._lipschitz)
        pieces = self.over(lambda piece: Concentration(_spread(piece, eps), self._lipschitz))
        so_far = empty
        for so_far in accumulate(pieces, Concentration.join, initial=empty):
            if share > 0 and (of_all := so_far.of_all(public)).shows(share, least):
                return of_all
        return so_far

    @property
    def _lipschitz(self) -> float:
        ceiling = self.family.curvature_ceiling
        return math.inf if ceiling is None else ceiling

    def fewest_joint(self) -> float:
        joint = self.joint()
        return float(joint[joint > 0].min(initial=math.inf))

    def joint(self) -> Array:
        """In how many people's long rows two coordinates both have a covariate, shape (d, d)."""
        return np.asarray(reduce(np.add, self.over(_joint), np.zeros((self.dim, self.dim))))

    def gram(self) -> Sums:
        total: Sums = reduce(add, self.over(lambda piece: piece.design.gram()))
        return total

    def curvature_ceiling(self) -> Array:
        ceiling = self.family.curvature_ceiling
        if ceiling is None:
            raise InputError(
                "smoothness: this loss has no curvature bound on the whole line; "
                "give a number, or use smoothness=Estimated()"
            )
        return ceiling * unpack(self.gram().values(max(self.people, 1)), self.dim)


def _no_spread(dim: int) -> RowSpread:
    return RowSpread(*(np.zeros(dim) for _ in RowSpread._fields))


def _spread(piece: LongRows, eps: Array) -> RowSpread:
    """Return the spread over people: a person contributes the sum of the long rows of that person."""
    design, starts = piece.design, piece.starts
    if not len(starts):
        return _no_spread(len(eps))
    X = matrix(design.X)
    mean = kernels.glm_means(kernels.glm_rows(design.family, *_with_offset(design, X)), np.append(eps, 1.0))
    slope = mean - (0.0 if design.y is None else design.y)
    reach = np.abs(X)
    columns = reach.max(axis=1)
    if design.w is not None:
        slope, reach = slope * design.w, reach * design.w
    people = np.abs(np.add.reduceat(slope * X, starts, axis=1))
    reached = np.add.reduceat(reach, starts, axis=1)
    return RowSpread(
        total=people.sum(axis=1),
        squares=(people * people).sum(axis=1),
        largest=people.max(axis=1),
        reach_total=reached.sum(axis=1),
        reach_largest=reached.max(axis=1),
        columns=columns,
        rows=np.count_nonzero(reached, axis=1).astype(np.float64),
    )


def _with_offset(design: GeneralisedLinear, X: Array) -> tuple[Array]:
    """Return the design with its offset as one more column, whose coefficient is 1."""
    offset = np.zeros(X.shape[1]) if design.offset is None else design.offset
    return (np.concatenate([X, offset[None, :]]),)


def _joint(piece: LongRows) -> Array:
    """Return how many people have a long row in which two coordinates both have a covariate, (d, d)."""
    inside = matrix(piece.design.X) != 0
    if piece.design.w is not None:
        inside &= piece.design.w != 0
    joint = np.zeros((len(inside), len(inside)))
    for j, k in upper_pairs(len(inside)):
        both = inside[j] & inside[k]
        if len(piece.starts):
            joint[j, k] = joint[k, j] = np.count_nonzero(np.logical_or.reduceat(both, piece.starts))
    return joint
