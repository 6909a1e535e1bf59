"""A hospital's side of the study: its columns behind the study's names, and its database."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedtmle.errors import InputError

SHORTEST_SECRET = 16  # a shorter one is soon guessed


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """The hospital's column behind a study's: unit conversion value * scale + shift, or level codes.

    ``missing`` are codes that stand for no value, such as 999 or "unknown", in the hospital's own units;
    they are taken out first. ``secret`` replaces identifiers of clusters by keyed digests, the same in
    every silo that was given the same secret.
    """

    column: str
    scale: float = 1.0
    shift: float = 0.0
    levels: Mapping[str, str] | None = None  # the hospital's code -> the study's level
    missing: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)) or self.scale == 0.0:
            raise InputError("scale and shift are finite numbers, scale not zero")
        if self.levels is not None and self.converts:
            raise InputError("a column has scale and shift or has levels, not both")
        if self.levels is not None and set(self.missing) & set(self.levels):
            raise InputError("a code is both a level and missing")
        if self.secret is not None and len(self.secret) < SHORTEST_SECRET:
            raise InputError(f"a secret has at least {SHORTEST_SECRET} characters")

    @property
    def converts(self) -> bool:
        """Whether the hospital's unit is another than the study's."""
        return (self.scale, self.shift) != (1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Database:
    """A DuckDB file, opened read-only, and what to read in it: a table or a query."""

    path: Path
    table: str | None = None
    query: str | None = None

    def __post_init__(self) -> None:
        if (self.table is None) == (self.query is None):
            raise InputError("a database needs a table or a query, and not both")
