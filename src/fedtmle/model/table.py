"""A silo's table: typed columns, read once; what formulas and effect targets see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedtmle.model.types import Array, IntArray


@dataclass(frozen=True)
class Factor:
    """A categorical column: ``levels[codes[i]]`` is the level of row i, code -1 is missing."""

    codes: IntArray
    levels: tuple[str, ...]

    def recode(self, levels: tuple[str, ...]) -> IntArray:
        """Codes into the study's levels, which must hold all of this silo's."""
        position = {level: code for code, level in enumerate(levels)}
        lookup = np.array([position[level] for level in self.levels] + [-1], dtype=np.int64)
        return np.asarray(lookup[self.codes])


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of equal length by the study's names; a name may be both numeric and a factor.

    Numeric columns are float64 with NaN for missing.
    """

    n_rows: int
    numeric: Mapping[str, Array]
    factors: Mapping[str, Factor]

    def with_numeric(self, name: str, column: Array) -> Table:
        """The same table with one numeric column replaced, as for a counterfactual."""
        return replace(self, numeric={**self.numeric, name: column})

    def with_factor(self, name: str, factor: Factor) -> Table:
        """The same table with one factor replaced."""
        return replace(self, factors={**self.factors, name: factor})

    def take(self, rows: IntArray) -> Table:
        """The given rows, in the given order."""
        return Table(
            n_rows=len(rows),
            numeric={name: column[rows] for name, column in self.numeric.items()},
            factors={name: Factor(f.codes[rows], f.levels) for name, f in self.factors.items()},
        )
