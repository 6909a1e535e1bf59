"""A generalised linear submodel over the long rows of people: several rows of a sum belong to one person.

Sums are exact sums over the long rows. Whatever the silo's guard asks is answered per person: the share of a
person in a gradient is that of all the rows of that person together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Protocol, TypeVar, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.exact import Sums, query_shifts, zero_sums
from fedtmle.model.families import Family
from fedtmle.model.leverage import Look, PersonRows, RowSpace, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel, GeneralisedLinear
from fedtmle.model.types import Array, IntArray, Part, RowBound, matrix, unpack

Result = TypeVar("Result")


class LongRows(NamedTuple):
    """The long rows of consecutive people, one person after the other, and how many each of them has.

    ``groups`` numbers the rows so that consecutive ones of one person with a common residual, such as those
    of several means in one period, have the same number. The guard judges such a group as one row of all
    coordinates. None if there are no such rows.
    """

    design: GeneralisedLinear
    counts: IntArray
    groups: IntArray | None = None

    @property
    def starts(self) -> IntArray:
        """The first long row of each person who has long rows."""
        return starts_of(self.counts)

    def by_person(self, values: Array) -> Array:
        """Return sums over each person's rows, shape (p, people), of values of shape (p, rows)."""
        return by_person(values, self.counts)


def by_person(values: Array, counts: IntArray) -> Array:
    """Return sums over each person's rows, shape (p, people), given how many rows each has."""
    people = np.zeros((len(values), len(counts)))
    if values.shape[1]:
        people[:, counts > 0] = np.add.reduceat(values, starts_of(counts), axis=1)
    return people


def starts_of(counts: IntArray) -> IntArray:
    """Return the first long row of each person who has long rows, given how many each has."""
    return np.asarray((np.cumsum(counts) - counts)[counts > 0])


class OverPieces(Protocol):
    """Applies work to consecutive pieces of the long rows, in order; the pieces run in parallel."""

    def __call__(self, work: Callable[[LongRows], Any], /) -> Iterator[Any]: ...


@final
@dataclass(frozen=True, kw_only=True)
class GroupedLinear(AbstractRowsSubmodel):
    """The submodel whose long rows ``over`` makes piece by piece, at every query.

    ``people`` is the number of people, with or without a long row; ``bound`` bounds the sum of one person's
    rows. If responses ``are_public``, a person's row in a gradient is the sum of the long ones with their
    signs, because those of others may cancel. ``has_groups`` states whether the pieces have groups.
    """

    people: int
    dim: int
    family: Family
    bound: RowBound
    over: OverPieces
    are_public: bool = False
    has_groups: bool = False

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

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        largest = largest_leverage(lambda: self.disclosed_rows(eps, part), space=space, enough=enough)
        # Elsewhere a move of eps scales the rows of one person by one factor, within known bounds.
        is_scaled = part is Part.HESSIAN or not (self.are_public or self.has_groups)
        return Look(largest=largest, columns=self.column_sizes, family=self.family if is_scaled else None)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        """Yield the long rows; the leverages of one person's rows are added up."""
        if self.are_public and part is Part.GRADIENT:
            return self.summed_rows(eps)

        def disclosed(piece: LongRows) -> PersonRows:
            design, counts = piece.design, piece.counts
            pieces = [part.rows for part in design.disclosed_rows(eps, part)]
            rows = np.concatenate(pieces, axis=1) if pieces else np.zeros((self.dim, 0))
            if piece.groups is None or part is not Part.GRADIENT or not rows.size:
                return PersonRows(rows, counts)
            is_first = np.diff(piece.groups, prepend=-1) != 0
            joined = np.add.reduceat(rows, np.flatnonzero(is_first), axis=1)
            return PersonRows(joined, by_person(is_first[None], counts)[0].astype(np.int64))

        return self.over(disclosed)

    def summed_rows(self, eps: Array) -> Iterator[PersonRows]:
        """Yield what each person adds to the gradient: the sum of the long rows with their signs."""
        return self.over(lambda piece: PersonRows(by_person(piece.design.slopes(eps), piece.counts)))

    @property
    def column_sizes(self) -> Array:
        sizes = self.over(lambda piece: piece.design.column_sizes if piece.design.n_rows else 0.0)
        return np.asarray(reduce(np.maximum, sizes, np.zeros(self.dim)))

    def column_people(self, enough: int | None = None) -> IntArray:  # noqa: ARG002 - counted at once
        return np.asarray(reduce(np.add, self.over(_people), np.zeros(self.dim, dtype=np.int64)))

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


def _people(piece: LongRows) -> IntArray:
    """Return how many people have a long row in which each coordinate has a covariate, shape (d,)."""
    inside = matrix(piece.design.X) != 0
    if piece.design.w is not None:
        inside &= piece.design.w != 0
    if not len(piece.starts):
        return np.zeros(len(inside), dtype=np.int64)
    return np.asarray(np.logical_or.reduceat(inside, piece.starts, axis=1).sum(axis=1))
