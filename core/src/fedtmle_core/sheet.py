"""The checked columns of one hospital: what the loader hands to the core, and what leaves read.

A sheet holds exactly the variables of the plan's dictionary. The core checks every value against it again, so
that no public bound rests on the loader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

import numpy as np

from fedtmle_core.dictionary import Categorical, Dictionary, Identifier, Numeric
from fedtmle_core.draws import stream_key, uniforms
from fedtmle_core.errors import DataError
from fedtmle_core.types import Array, Codes, IntArray


@final
@dataclass(frozen=True, kw_only=True)
class Sheet:
    """The records of one hospital, one a person, by column.

    ``numbers`` are float64 with NaN for missing, ``levels`` places in the dictionary's list of levels with -1
    for missing, and ``clusters`` numbers from 0 that the records of one cluster share. ``first`` is the place
    of the first record in the hospital's table.
    """

    n: int
    numbers: Mapping[str, Array]
    levels: Mapping[str, Codes]
    clusters: Mapping[str, IntArray] = field(default_factory=dict)
    first: int = 0
    whole: Sheet | None = field(default=None, repr=False, compare=False)  # the table this is a part of

    @classmethod
    def read(
        cls,
        dictionary: Dictionary,
        numbers: Mapping[str, Array],
        levels: Mapping[str, Codes],
        clusters: Mapping[str, IntArray] | None = None,
    ) -> Sheet:
        """Return the sheet of these columns, checked; `DataError` names the column and how many records."""
        clusters, kept = clusters or {}, Sheet(n=0, numbers={}, levels={})
        for variable in dictionary.variables:
            match variable:
                case Numeric(name=name):
                    x = np.ascontiguousarray(_of(numbers, name), dtype=np.float64)
                    outside = ~(np.isnan(x) | ((x >= variable.low) & (x <= variable.high)))
                    _refuse(outside, name, "is outside the range that the plan declares")
                    kept = replace(kept, n=len(x), numbers={**kept.numbers, name: x})
                case Categorical(name=name):
                    codes = np.ascontiguousarray(_of(levels, name), dtype=np.int16)
                    _refuse((codes < -1) | (codes >= len(variable.levels)), name, "has an undeclared level")
                    _refuse((codes < 0) & variable.required, name, "is missing")
                    kept = replace(kept, n=len(codes), levels={**kept.levels, name: codes})
                case Identifier(name=name):
                    marks = np.unique(_of(clusters, name), return_inverse=True)[1].astype(np.int64)
                    large = np.bincount(marks) > variable.largest if len(marks) else np.zeros(0, dtype=bool)
                    _refuse(large[marks], name, f"has clusters of more than {variable.largest}")
                    kept = replace(kept, n=len(marks), clusters={**kept.clusters, name: marks})
        lengths = {
            len(column) for held in (kept.numbers, kept.levels, kept.clusters) for column in held.values()
        }
        if len(lengths) > 1:
            raise DataError("the columns of a table have different lengths")
        return kept

    @cached_property
    def digest(self) -> bytes:
        """A digest of all columns; it never leaves the hospital."""
        digest = hashlib.blake2b(digest_size=32)
        for held in (self.numbers, self.levels, self.clusters):
            for name in sorted(held):
                column = np.ascontiguousarray(held[name])
                digest.update(f"{name}\0{column.dtype.str}{len(column)}\0".encode())
                digest.update(column.data)
        return digest.digest()

    def part(self, rows: slice) -> Sheet:
        """Return consecutive people without copying."""
        return Sheet(
            n=rows.stop - rows.start,
            numbers={name: column[rows] for name, column in self.numbers.items()},
            levels={name: column[rows] for name, column in self.levels.items()},
            clusters={name: column[rows] for name, column in self.clusters.items()},
            first=self.first + rows.start,
            whole=self.whole or self,
        )

    # What leaves read (`terms.Rows`).

    def number(self, name: str) -> Array:
        return self.numbers[name]

    def codes(self, name: str) -> Codes:
        return self.levels[name]

    def is_complete(self, name: str) -> bool:
        return name in (self.whole or self)._complete

    @cached_property
    def _complete(self) -> frozenset[str]:
        numbers = {name for name, column in self.numbers.items() if not np.isnan(column).any()}
        return frozenset(numbers | {name for name, codes in self.levels.items() if not (codes < 0).any()})

    @cached_property
    def _folds(self) -> dict[tuple[int, int, str], IntArray]:
        return {}

    def fold(self, folds: int, seed: int, cluster: str) -> IntArray:
        whole = self.whole or self
        key = folds, seed, cluster
        if key not in whole._folds:
            units = whole.clusters[cluster] if cluster else np.arange(whole.n)
            size = int(units.max(initial=-1)) + 1
            rng = np.random.Generator(np.random.Philox(key=[seed, size]))
            whole._folds[key] = np.asarray((rng.permutation(size) % folds)[units])
        start = self.first - whole.first
        return whole._folds[key][start : start + self.n]

    def uniform(self, seed: int, stream: int) -> Array:
        return uniforms(stream_key(f"{seed} {stream}"), self.first + np.arange(self.n, dtype=np.float64))

    def by_cluster(self, name: str, values: Array) -> Array:
        marks = self.clusters[name]
        sums = np.bincount(marks, weights=values)
        result = np.zeros(self.n)
        _, places = np.unique(marks, return_index=True)
        result[places] = sums[marks[places]]
        return result


def _of(columns: Mapping[str, Array] | Mapping[str, Codes] | Mapping[str, IntArray], name: str) -> np.ndarray:
    if name not in columns:
        raise DataError(f"the table has no column '{name}', which the plan's dictionary has")
    return np.asarray(columns[name])


def _refuse(bad: np.ndarray, name: str, what: str) -> None:
    count = int(np.count_nonzero(bad))
    if count:
        raise DataError(f"column '{name}' {what} in {count} record(s)")
