"""What is wrong with a silo's data, told without a value: a name, a count, and what to do."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedtmle.errors import DataError, InputError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing to mend: where it is, what is wrong, in how many rows, what to do."""

    what: str
    fix: str
    silo: str | None = None
    file: str | None = None
    line: int | None = None
    column: str | None = None  # the study's name for it
    rows: int | None = None

    def __str__(self) -> str:
        places = (
            self.silo and f"silo '{self.silo}'",
            self.file and f"file '{self.file}'",
            self.line and f"line {self.line}",
            self.column and f"column '{self.column}'",
        )
        where = ", ".join(place for place in places if place)
        rows = "" if self.rows is None else f" in {self.rows} {'row' if self.rows == 1 else 'rows'}"
        return f"{where}: {self.what}{rows}; {self.fix}"


class DataErrors(DataError):  # noqa: N818 (several errors in one)
    """Everything that is wrong with the data of one or more silos, each problem once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        heading = "1 problem" if count == 1 else f"{count} problems"
        super().__init__("\n".join([f"{heading} with the data:", *(f"  - {p}" for p in self.problems)]))

    def at(self, silo: str) -> DataErrors:
        """The same problems, all of the given silo."""
        return DataErrors(replace(problem, silo=silo) for problem in self.problems)

    def __reduce__(self) -> tuple[type[DataErrors], tuple[tuple[Problem, ...]]]:
        # The default would rebuild from the message, and fail in the parent of a worker process.
        return (DataErrors, (self.problems,))


class Findings:
    """Collects problems that share a place, so that all can be reported together."""

    def __init__(self, *, silo: str | None = None, file: str | None = None) -> None:
        self.problems: list[Problem] = []
        self._place = Problem(what="", fix="", silo=silo, file=file)

    def add(
        self,
        what: str,
        fix: str,
        *,
        column: str | None = None,
        rows: int | None = None,
        line: int | None = None,
    ) -> None:
        """Note a problem."""
        self.problems.append(replace(self._place, what=what, fix=fix, column=column, rows=rows, line=line))

    def merge(self, other: Findings) -> None:
        """Take over what another part of the same table has wrong, adding up rows."""
        for problem in other.problems:
            for at, known in enumerate(self.problems):
                if replace(known, rows=None) == replace(problem, rows=None):
                    if known.rows is not None and problem.rows is not None:
                        self.problems[at] = replace(known, rows=known.rows + problem.rows)
                    break
            else:
                self.problems.append(problem)

    def settle(self) -> None:
        """Raise `DataErrors` if anything was found."""
        if self.problems:
            raise DataErrors(self.problems)


# What a study asks of a silo's table: names, kinds, bounds, levels, and where values may be missing.


class Kind(enum.Enum):
    """How the study reads a column."""

    NUMERIC = "numeric"
    COUNT = "count"  # 0, 1, 2, ...; numeric in the table
    BINARY = "binary"  # 0 and 1; numeric in the table
    FACTOR = "factor"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column a study needs; bounds are for numbers and counts, levels for factors and binary ones.

    The levels of a binary column are (the name of 0, the name of 1).
    """

    name: str
    kind: Kind
    may_be_missing: bool = False
    bounds: tuple[float, float] | None = None
    levels: tuple[str, ...] | None = None
    most: int | None = None  # levels of a factor: refused beyond
    outside: tuple[str, str] = (
        "is outside the declared bounds",
        "check the unit (scale and shift in the silo file), the records or the study's bounds",
    )  # what to say of values beyond the bounds, and what to do

    def __post_init__(self) -> None:
        if self.bounds is not None:
            if self.kind not in (Kind.NUMERIC, Kind.COUNT):
                raise InputError(f"column '{self.name}': bounds are for numeric columns")
            low, high = self.bounds
            if math.isnan(low) or math.isnan(high) or low >= high:
                raise InputError(f"column '{self.name}': bounds are (low, high) with low < high")
        if self.levels is not None:
            if self.kind in (Kind.NUMERIC, Kind.COUNT):
                raise InputError(f"column '{self.name}': levels are for factors and binary columns")
            if not self.levels or len(set(self.levels)) != len(self.levels):
                raise InputError(f"column '{self.name}': levels are distinct and at least one")
            if self.kind is Kind.BINARY and len(self.levels) != 2:
                raise InputError(f"column '{self.name}': a binary column has two levels, that of 0 first")


@dataclass(frozen=True)
class Schema:
    """The columns a study needs; a name may be asked both as numbers and as a factor."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise InputError("a schema has at least one column")
        object.__setattr__(self, "columns", tuple(dict.fromkeys(self.columns)))
        asked: dict[tuple[str, bool], Column] = {}
        for column in self.columns:
            as_factor = column.kind is Kind.FACTOR
            if asked.setdefault((column.name, as_factor), column) != column:
                raise InputError(
                    f"column '{column.name}' is asked twice {'as a factor' if as_factor else 'as numbers'}, "
                    "and differently: declare it once"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Each name once, in the order first asked."""
        return tuple(dict.fromkeys(column.name for column in self.columns))

    def __getitem__(self, name: str) -> tuple[Column, ...]:
        """What is asked of one name: one column, or its numeric and its factor reading."""
        return tuple(column for column in self.columns if column.name == name)
