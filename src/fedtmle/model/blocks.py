"""Several submodels of the same rows, each with coordinates of its own: their losses are added.

The loss of row i is sum_b w_i rho(offset_bi + eps_b . X_bi, y_i), where eps_b are the coordinates of block b.
The gradient consists of the blocks' gradients, and the Hessian is zero between blocks: the minimiser in the
coordinates of one block does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.exact import Sums, layout, query_shifts
from fedtmle.model.leverage import FIRST_LOOK, Look, PersonRows, RowSpace, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel, GeneralisedLinear
from fedtmle.model.types import Array, IntArray, Part, RowBound, packed_size, upper_pairs


@final
@dataclass(frozen=True, kw_only=True)
class Blocks(AbstractRowsSubmodel):
    """Generalised linear submodels side by side; ``places`` holds the coordinates of each among all."""

    blocks: tuple[GeneralisedLinear, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def dim(self) -> int:
        return sum(map(len, self.places))

    @property
    def bound(self) -> RowBound:
        return self.blocks[0].bound

    @property
    def n_rows(self) -> int:
        return self.blocks[0].n_rows

    def take(self, rows: IntArray) -> Blocks:
        return Blocks(blocks=tuple(block.take(rows) for block in self.blocks), places=self.places)

    def sums(self, eps: Array, parts: Part) -> Sums:
        shifts = query_shifts(self.bound, eps, parts)
        units = [0] * len(shifts)
        for block, place in zip(self.blocks, self.places, strict=True):
            at = self._at(place, parts)
            own = block.units(eps[list(place)], parts, tuple(shifts[k] for k in at))
            for k, unit in zip(at, own, strict=True):
                units[k] += unit
        return Sums(tuple(units), shifts)

    def _at(self, place: tuple[int, ...], parts: Part) -> list[int]:
        """Return where the sums of one block stand among those of all."""
        whole = layout(self.dim, parts)
        at = list(range(whole.loss.start, whole.loss.stop))
        if Part.GRADIENT in parts:
            at += [whole.gradient.start + k for k in place]
        if Part.HESSIAN in parts:
            order = {pair: k for k, pair in enumerate(upper_pairs(self.dim))}
            pairs = [(place[j], place[k]) for j, k in upper_pairs(len(place))]
            at += [whole.hessian.start + order[min(pair), max(pair)] for pair in pairs]
        return at

    def joined(self, parts: Part, of_blocks: Sequence[Array]) -> Array:
        """Return the terms of all blocks, shape (p, N), from those of each, in the order of the sums."""
        whole = np.zeros((layout(self.dim, parts).width, self.n_rows))
        for place, terms in zip(self.places, of_blocks, strict=True):
            whole[self._at(place, parts)] += terms
        return whole

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        may_end_early = self.n_rows >= FIRST_LOOK and space is None and enough > 0
        largest = largest_leverage(
            lambda: self.disclosed_rows(eps, part),
            space=space,
            bounds=self.row_bounds(eps, part) if may_end_early else None,
            enough=enough,
        )
        return Look(largest=largest, columns=self.column_sizes, family=self.blocks[0].family)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        parts = [
            block.disclosed_rows(eps[list(place)], part)
            for block, place in zip(self.blocks, self.places, strict=True)
        ]
        for pieces in zip(*parts, strict=True):
            rows = np.zeros((self.dim, pieces[0].rows.shape[1]))
            for place, piece in zip(self.places, pieces, strict=True):
                rows[list(place)] = piece.rows
            yield PersonRows(rows)

    @property
    def column_sizes(self) -> Array:
        sizes = np.zeros(self.dim)
        for block, place in zip(self.blocks, self.places, strict=True):
            sizes[list(place)] = block.column_sizes
        return sizes

    def row_bounds(self, eps: Array, part: Part = Part.GRADIENT) -> Array | None:
        """Return bounds of the rows' entries by coordinate; None if a block knows none."""
        bounds = np.zeros(self.dim)
        for block, place in zip(self.blocks, self.places, strict=True):
            own = block.row_bounds(eps[list(place)], part)
            if own is None:
                return None
            bounds[list(place)] = own
        return bounds

    def column_people(self, enough: int | None = None) -> IntArray:
        people = np.zeros(self.dim, dtype=np.int64)
        for block, place in zip(self.blocks, self.places, strict=True):
            people[list(place)] = block.column_people(enough)
        return people

    def curvature_ceiling(self) -> Array:
        return self._diagonal(GeneralisedLinear.curvature_ceiling)

    def gram(self) -> Sums:
        units, shifts = [0] * packed_size(self.dim), (0,) * packed_size(self.dim)
        for block, place in zip(self.blocks, self.places, strict=True):
            own = block.gram()
            shifts = (own.shifts[0],) * len(units)  # the same for all blocks, which share one bound
            for k, unit in zip(self._at(place, Part.HESSIAN), own.units, strict=True):
                units[k] = unit
        return Sums(tuple(units), shifts)

    def _diagonal(self, of: Callable[[GeneralisedLinear], Array]) -> Array:
        whole = np.zeros((self.dim, self.dim))
        for block, place in zip(self.blocks, self.places, strict=True):
            whole[np.ix_(place, place)] = of(block)
        return whole
