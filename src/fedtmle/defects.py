"""Checks of what people give: the types of arguments, and the defects of files and tables.

All defects of a file or table are collected and reported together. A defect has names and counts of rows,
never a record's value.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import UnionType
from typing import SupportsInt, cast

from fedtmle.errors import DataError, InputError

# Checks of argument types: an error names the argument, the type that was expected and the type it got.


def expect(name: str, value: object, kind: type | UnionType, description: str) -> None:
    """Raise `InputError` unless ``value`` is of ``kind``, which the message calls ``description``."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: expected {description}, not {called(value)}")


def expect_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name}: expected an integer, not {called(value)}")


def expect_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name}: expected a number, not {called(value)}")


def expect_column(name: str, value: object) -> None:
    expect(name, value, str, "the name of a column, in quotes")


def label(name: str, value: object) -> str:
    """Return a level as text; an integer such as 1 may stand for the level "1"."""
    if isinstance(value, str):
        return value
    expect_integer(name, value)
    return str(int(cast(SupportsInt, value)))


def called(value: object) -> str:
    """Return the type of a value in words, without the value itself."""
    if isinstance(value, type):
        return f"the class {value.__name__}: call it, as in {value.__name__}()"
    return f"something of type {type(value).__name__}"


Toml = str | int | float | bool | datetime.date | datetime.time | list["Toml"] | dict[str, "Toml"]
Place = tuple[str | int, ...]  # keys and positions that lead to a value of a TOML document


@dataclass(frozen=True, kw_only=True)
class Defect:
    """Something to correct in a study file, a silo file or a table: what is wrong, where, and what to do.

    ``column`` is the study's name of the column, ``rows`` the number of rows that are affected.
    """

    message: str
    fix: str = ""
    silo: str | None = None
    file: str | None = None
    line: int | None = None
    column: str | None = None
    rows: int | None = None

    @property
    def text(self) -> str:
        """The defect without its file and line."""
        places = (self.silo and f"silo '{self.silo}'", self.column and f"column '{self.column}'")
        where = ", ".join(place for place in places if place)
        rows = "" if self.rows is None else f" in {self.rows} {'row' if self.rows == 1 else 'rows'}"
        fix = f"; {self.fix}" if self.fix else ""
        return f"{f'{where}: ' if where else ''}{self.message}{rows}{fix}"

    def __str__(self) -> str:
        if self.file is None:
            return self.text
        return f"{self.file}:{'' if self.line is None else f'{self.line}:'} {self.text}"

    def to_dict(self) -> dict[str, str | int | None]:
        """Return the text and its place as plain data, for JSON."""
        return {"message": self.text, "file": self.file, "line": self.line, "silo": self.silo}


class DataErrors(DataError):  # noqa: N818 (several errors in one)
    """All defects of the data of one or more silos, or of their silo files."""

    def __init__(self, defects: Iterable[Defect]) -> None:
        self.defects = tuple(dict.fromkeys(defects))
        count = len(self.defects)
        heading = f"{count} {'defect' if count == 1 else 'defects'} in the data:"
        super().__init__("\n".join([heading, *(f"  - {defect}" for defect in self.defects)]))

    def at(self, silo: str) -> DataErrors:
        """Return the same defects, all of the given silo."""
        return DataErrors(replace(defect, silo=silo) for defect in self.defects)

    def __reduce__(self) -> tuple[type[DataErrors], tuple[tuple[Defect, ...]]]:
        # The default would rebuild from the message, and fail in the parent of a worker process.
        return (DataErrors, (self.defects,))


class Defects:
    """Collects the defects of one silo or file, so that all can be reported together."""

    def __init__(self, *, silo: str | None = None, file: str | None = None) -> None:
        self._silo, self._file = silo, file
        self._defects: list[Defect] = []

    def __iter__(self) -> Iterator[Defect]:
        return iter(self._defects)

    def __len__(self) -> int:
        return len(self._defects)

    def add(
        self,
        message: str,
        fix: str,
        *,
        column: str | None = None,
        rows: int | None = None,
        line: int | None = None,
    ) -> None:
        """Add a defect of this silo or file."""
        self._defects.append(
            Defect(
                message=message,
                fix=fix,
                silo=self._silo,
                file=self._file,
                line=line,
                column=column,
                rows=rows,
            )
        )

    def merge(self, other: Defects) -> None:
        """Add the defects of another part of the same table; rows of equal defects are added up."""
        for defect in other:
            for index, known in enumerate(self._defects):
                if replace(known, rows=None) == replace(defect, rows=None):
                    if known.rows is not None and defect.rows is not None:
                        self._defects[index] = replace(known, rows=known.rows + defect.rows)
                    break
            else:
                self._defects.append(defect)

    def raise_if_any(self) -> None:
        """Raise `DataErrors` if there is any defect."""
        if self._defects:
            raise DataErrors(self._defects)


def near(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean '...'?" with the known name closest to ``name``, or "" if none is close."""
    by_fold = {other.casefold(): other for other in known}
    close = difflib.get_close_matches(str(name).casefold(), by_fold, n=1)
    return f"; did you mean '{by_fold[close[0]]}'?" if close else ""


_PART = r'(?:[A-Za-z0-9_-]+|"[^"]*"|\'[^\']*\')'
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")
_TRIPLE = re.compile(r'"""|\'\'\'')


class Lines:
    """The line numbers of the sections and keys of a TOML text, which `tomllib` does not give.

    Only a key that starts a line has a line of its own; a key inside braces has that of the key around it.
    """

    def __init__(self, text: str) -> None:
        self._first: dict[Place, int] = {}
        for place, number in _places(text):
            for end in range(1, len(place) + 1):
                self._first.setdefault(place[:end], number)

    def of(self, place: Sequence[str | int]) -> int | None:
        """Return the line of a place, or of the nearest place around it that has one."""
        for end in range(len(place), 0, -1):
            if tuple(place[:end]) in self._first:
                return self._first[tuple(place[:end])]
        return None


def _places(text: str) -> Iterator[tuple[Place, int]]:
    """Yield sections and keys with their lines; the n-th [[table]] of a name has the position n - 1."""
    section: Place = ()
    repeats: dict[Place, int] = {}
    inside_text = False
    for number, line in enumerate(text.splitlines(), start=1):
        if not inside_text:
            header, key = _HEADER.match(line), _KEY.match(line)
            if header:
                section = _parts(header[2])
                if header[1] == "[[":
                    repeats[section] = repeats.get(section, -1) + 1
                    section = (*section, repeats[section])
                yield section, number
            elif key:
                yield (*section, *_parts(key[1])), number
        inside_text ^= len(_TRIPLE.findall(line)) % 2 == 1


def _parts(dotted: str) -> Place:
    return tuple(part.strip("\"'") for part in re.findall(_PART, dotted))
