"""What a study asks of a silo's table: columns with their kinds, bounds and levels."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from fedtmle.errors import InputError


class Kind(enum.Enum):
    """How the study reads a column."""

    NUMERIC = "numeric"
    COUNT = "count"  # 0, 1, 2, ...; numeric in the table
    BINARY = "binary"  # 0 and 1; numeric in the table
    FACTOR = "factor"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column that a study needs.

    ``bounds`` are for numbers and counts. ``levels`` are for factors and binary columns; those of a binary
    column are (the name of 0, the name of 1).
    ``outside`` is the message for values beyond the bounds, and what to do about them. ``unit`` is the
    unit in the study's dictionary.
    """

    name: str
    kind: Kind
    may_be_missing: bool = False
    bounds: tuple[float, float] | None = None
    levels: tuple[str, ...] | None = None
    outside: tuple[str, str] = (
        "is outside the declared bounds",
        "check the unit (scale and shift in the silo file), the records or the study's bounds",
    )
    unit: str = ""

    def __post_init__(self) -> None:
        if self.bounds is not None:
            if self.kind not in (Kind.NUMERIC, Kind.COUNT):
                raise InputError(f"column '{self.name}': bounds are for numeric columns")
            low, high = self.bounds
            if math.isnan(low) or math.isnan(high) or low >= high:
                raise InputError(f"column '{self.name}': bounds must be (low, high) with low < high")
        if self.levels is not None:
            if self.kind in (Kind.NUMERIC, Kind.COUNT):
                raise InputError(f"column '{self.name}': levels are for factors and binary columns")
            if not self.levels or len(set(self.levels)) != len(self.levels):
                raise InputError(
                    f"column '{self.name}': levels must be distinct, and there must be at least one"
                )
            if self.kind is Kind.BINARY and len(self.levels) != 2:
                raise InputError(f"column '{self.name}': a binary column needs two levels, that of 0 first")


@dataclass(frozen=True)
class Schema:
    """The columns that a study needs; one name may be asked both as numbers and as a factor."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise InputError("a schema must have at least one column")
        object.__setattr__(self, "columns", tuple(dict.fromkeys(self.columns)))
        declared: dict[tuple[str, bool], Column] = {}
        for column in self.columns:
            as_factor = column.kind is Kind.FACTOR
            if declared.setdefault((column.name, as_factor), column) != column:
                reading = "as a factor" if as_factor else "as numbers"
                raise InputError(
                    f"column '{column.name}' is declared twice {reading}, and differently: declare it once"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names, in the order in which they are first declared."""
        return tuple(dict.fromkeys(column.name for column in self.columns))

    def __getitem__(self, name: str) -> tuple[Column, ...]:
        """Return the declarations of one name: one column, or its numeric and its factor reading."""
        return tuple(column for column in self.columns if column.name == name)
