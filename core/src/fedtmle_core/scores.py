"""The sums of scores: derivatives of a loss over people and the records that each has in it.

A column that is a number of the table is read where it is. Where the records of a person differ in a column,
as in a fluctuation whose covariates are those of the period, they are summed one after another; coordinates
whose column is 0 for everybody in a record are left out of it, because their sums are 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, final

import numpy as np

from fedtmle_core import kernels
from fedtmle_core.blocks import Layer, Score
from fedtmle_core.exact import Sums
from fedtmle_core.leaves import Number
from fedtmle_core.records import PersonSums, Records
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ZERO, Constant, Term
from fedtmle_core.types import Array, Family, Part, Scaled

Shifts: TypeAlias = tuple[int, ...]
Column: TypeAlias = tuple[Array, float]  # and the factor that it is to be multiplied with


@final
@dataclass(frozen=True)
class Columns:
    """Terms of a sheet: those that are at hand, and those that are ``asked`` to be computed."""

    sheet: Sheet
    terms: tuple[Term, ...]

    @cached_property
    def asked(self) -> tuple[Term, ...]:
        return tuple(dict.fromkeys(term for term in self.terms if in_place(term, self.sheet) is None))

    def found(self, values: Sequence[Array], rows: slice) -> Found:
        """Return the columns of some people, given those of the terms that are asked."""
        return Found(self.sheet, rows, dict(zip(self.asked, values, strict=True)))


@final
@dataclass(frozen=True)
class Found:
    """Columns of some people."""

    sheet: Sheet
    rows: slice
    computed: dict[Term, Array]

    def column(self, term: Term) -> Column:
        """Return a term's column, and the factor that it is to be multiplied with."""
        there = in_place(term, self.sheet)
        return (self.computed[term], 1.0) if there is None else (there[0][self.rows], there[1])

    def whole(self, term: Term | None) -> Array | None:
        """Return a term's values; None stands for zeros, or ones."""
        if term is None:
            return None
        values, factor = self.column(term)
        return values if factor == 1.0 else values * factor


def in_place(term: Term, sheet: Sheet) -> Column | None:
    """Return a column that needs no computation, and its factor; None if there is none."""
    if type(term) is Number and sheet.is_complete(term.name):
        return sheet.number(term.name), 2.0**-term.exponent
    if type(term) is Constant:
        return np.broadcast_to(np.float64(term.value), (sheet.n,)), 1.0
    return None


class AbstractScore(ABC):
    """Scores of the same layers at the same point: which terms they ask for in turn, and their sums."""

    @property
    @abstractmethod
    def asked(self) -> tuple[tuple[Term, ...], ...]:
        """The terms to be computed, group by group."""

    @abstractmethod
    def sums(self, values: Iterator[list[Array]], rows: slice) -> list[Sums]:
        """Return the sums of each score over some people, given the columns of each group."""


def read_scores(blocks: Sequence[Score], shifts: Sequence[Shifts], sheet: Sheet) -> AbstractScore:
    """Return how the scores of the same layers at the same point are summed."""
    records = Records.of(blocks[0])
    if records is None:
        return LayeredScores(tuple(blocks), tuple(shifts), sheet)
    return SharedScores(tuple(blocks), tuple(shifts), sheet, records)


@final
@dataclass(frozen=True)
class LayeredScores(AbstractScore):
    """Scores whose records differ in some column."""

    blocks: tuple[Score, ...]
    shifts: tuple[Shifts, ...]
    sheet: Sheet

    @cached_property
    def _layers(self) -> tuple[tuple[Layer, list[int], Columns], ...]:
        """Each layer with the coordinates that it has, and the terms that it reads."""
        listed = []
        for layer in self.blocks[0].layers:
            factors = layer.factors or (1.0,) * len(layer.X)
            there = [j for j, (x, f) in enumerate(zip(layer.X, factors, strict=True)) if f and x != ZERO]
            others = (term for term in (layer.offset, layer.y, layer.w) if term is not None)
            listed.append((layer, there, Columns(self.sheet, (*(layer.X[j] for j in there), *others))))
        return tuple(listed)

    @property
    def asked(self) -> tuple[tuple[Term, ...], ...]:
        return tuple(columns.asked for _, _, columns in self._layers)

    def sums(self, values: Iterator[list[Array]], rows: slice) -> list[Sums]:
        totals = [Sums((0,) * len(shifts), shifts) for shifts in self.shifts]
        for (layer, there, columns), computed in zip(self._layers, values, strict=True):
            if there:
                more = self._of_layer(layer, there, columns.found(computed, rows))
                totals = [total + each for total, each in zip(totals, more, strict=True)]
        return totals

    def _of_layer(self, layer: Layer, there: list[int], found: Found) -> list[Sums]:
        columns = [found.column(layer.X[j]) for j in there]
        factors = np.array([factor for _, factor in columns])
        if layer.factors:
            factors = factors * np.array(layer.factors)[there]
        X = Scaled(tuple(values for values, _ in columns), factors)
        family, at = self.blocks[0].family, np.array(self.blocks[0].at)[there]
        records = kernels.glm_rows(
            family, X, found.whole(layer.offset), found.whole(layer.y), found.whole(layer.w)
        )
        sums = []
        for block, shifts in zip(self.blocks, self.shifts, strict=True):
            places = _places(len(block.at), there, block.part)
            units = [0] * len(shifts)
            of_layer = kernels.glm_sums(records, at, block.part, tuple(shifts[s] for s in places))
            for s, unit in zip(places, of_layer, strict=True):
                units[s] = unit
            sums.append(Sums(tuple(units), shifts))
        return sums


def _places(dim: int, there: Sequence[int], part: Part) -> list[int]:
    """Return where the sums of some coordinates are among those of all."""
    match part:
        case Part.GRADIENT:
            return list(there)
        case Part.HESSIAN:
            starts = np.cumsum([0, *range(dim, 0, -1)]).tolist()  # rows of the upper triangle
            return [starts[j] + k - j for a, j in enumerate(there) for k in there[a:]]
    return [0]  # the loss is one number


@final
@dataclass(frozen=True)
class SharedScores(AbstractScore):
    """Scores whose records share their columns (`records`)."""

    blocks: tuple[Score, ...]
    shifts: tuple[Shifts, ...]
    sheet: Sheet
    records: Records

    @cached_property
    def _columns(self) -> Columns:
        return Columns(self.sheet, self.records.columns)

    @cached_property
    def _others(self) -> tuple[Columns, ...]:
        """The offset, response and weight of each record."""
        return tuple(
            Columns(self.sheet, tuple(term for term in (layer.offset, layer.y, layer.w) if term is not None))
            for layer in self.blocks[0].layers
        )

    @property
    def asked(self) -> tuple[tuple[Term, ...], ...]:
        return (self._columns.asked, *(others.asked for others in self._others))

    def sums(self, values: Iterator[list[Array]], rows: slice) -> list[Sums]:
        found = self._columns.found(next(values), rows)
        X = [found.column(term) for term in self.records.columns]
        at = self.blocks[0].at
        z = [_weighted([X[j] for j in each], [at[j] for j in each]) for each in self.records.classes]

        def read() -> Iterator[tuple[Array | None, Array | None, Array | None]]:
            for layer, others, computed in zip(self.blocks[0].layers, self._others, values, strict=True):
                own = others.found(computed, rows)
                yield own.whole(layer.offset), own.whole(layer.y), own.whole(layer.w)

        parts = [block.part for block in self.blocks]
        sums = PersonSums.over(self.records, z, read(), rows.stop - rows.start, parts)
        return [
            sums.gradient(X, shifts) if part is Part.GRADIENT else sums.hessian(X, shifts)
            for part, shifts in zip(parts, self.shifts, strict=True)
        ]


def _weighted(columns: Sequence[Column], factors: Sequence[float]) -> Array:
    """Return the sum of columns times factors."""
    design = Scaled(tuple(values for values, _ in columns), np.array([factor for _, factor in columns]))
    return kernels.glm_means(kernels.glm_rows(Family.GAUSSIAN, design), np.array(factors))
