"""Whose rows a table has: keyed digests of people and of records, read together with the study's columns.

The silo file names the column of the person (`person` in [data]). Where it names none, a record is known by
all of its cells, so that every corrected cell and every new column makes another person of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedtmle.data.convert import Cells, Numbers, UnreadableError, number
from fedtmle.model.table import Factor
from fedtmle_core.people import PERSON, Basis, Census, Digester, Digests
from fedtmle_core.types import Array

_INEXACT = 2.0**53  # from here on, different identifiers may be the same number
_FIX = "correct person in [data] of the silo file, or complete the column"


@dataclass(kw_only=True)
class Watcher:
    """Make digests of a table's rows, batch by batch, over the bases of this study and of earlier ones.

    ``person`` is the hospital's column of identifiers, empty if it has none; ``bases`` are those of earlier
    studies; ``theirs`` are the hospital's columns that the study reads.
    """

    digester: Digester
    person: str
    bases: Sequence[Basis]
    theirs: tuple[str, ...] = ()
    own: tuple[Basis, ...] = ()
    _parts: dict[Basis, list[Digests]] = field(default_factory=dict)

    def settle(self, names: Sequence[str], theirs: Sequence[str]) -> list[str]:
        """Decide on the bases, of a source with these columns; return all columns that have to be read."""
        known = {name for name in names if names.count(name) == 1}
        if self.person and self.person not in known:
            raise UnreadableError(f"the table has no column '{self.person}' of the person", _FIX)
        self.theirs = tuple(sorted(theirs))
        if self.person:
            self.own = (PERSON, (self.person, *(name for name in self.theirs if name != self.person)))
        else:
            self.own = tuple(dict.fromkeys((tuple(sorted(known)), self.theirs)))
        computable = [basis for basis in self.bases if known.issuperset(basis) and (basis or self.person)]
        self._parts = {basis: [] for basis in dict.fromkeys((*self.own, *computable))}
        wanted = (
            *theirs,
            *([self.person] if self.person else []),
            *(n for basis in self._parts for n in basis),
        )
        return list(dict.fromkeys(wanted))

    def add(self, n_rows: int, cells: Mapping[str, Cells]) -> None:
        """Note the rows of a batch."""
        hashed = {name: _hashed(cells[name], n_rows) for basis in self._parts for name in basis}
        for basis, parts in self._parts.items():
            if basis == PERSON:
                parts.append(self.digester.of_people(_identifiers(cells[self.person], self.person)))
            else:
                parts.append(self.digester.of_records(basis, np.stack([hashed[n] for n in basis], axis=1)))

    def census(self) -> Census:
        """Return the digests of all rows that were noted, in their order."""
        empty = np.empty(0, dtype=np.uint64)
        views = {basis: np.concatenate([empty, *parts]) for basis, parts in self._parts.items()}
        return Census(views=views, own=self.own, reads=frozenset(self.theirs))


def _identifiers(cells: Cells, name: str) -> Iterator[bytes]:
    """Return the identifier in each row as text: 17 is one person, as a number, as "17" and as "017"."""
    if isinstance(cells, Numbers):
        return (b"%d" % int(value) for value in _whole(cells.values, name))
    if not isinstance(cells, Factor):
        raise UnreadableError(f"column '{name}' does not hold identifiers of people", _FIX)
    _refuse(int(np.count_nonzero(cells.codes < 0)), f"column '{name}' of the person is missing", _FIX)
    written = [label.strip() for label in cells.levels]
    known = [str(int(label)) if re.fullmatch(r"[0-9]{1,18}", label) else label for label in written]
    texts = [label.encode() for label in known]
    return (texts[code] for code in cells.codes.tolist())


def _whole(values: Array, name: str) -> list[float]:
    _refuse(int(np.count_nonzero(np.isnan(values))), f"column '{name}' of the person is missing", _FIX)
    fix = "let the source give it as text, such as CAST(... AS VARCHAR) in a query"
    inexact = (np.abs(values) >= _INEXACT) | (values != np.floor(values))
    _refuse(int(np.count_nonzero(inexact)), f"column '{name}' of the person is no exact whole number", fix)
    return list(values.tolist())


def _refuse(count: int, message: str, fix: str) -> None:
    if count:
        raise UnreadableError(f"{message} in {count} row{'s'[: count != 1]}", fix)


def _hashed(cells: Cells, n_rows: int) -> NDArray[np.uint64]:
    """Return an integer for each cell: equal for equal values, whether a source has numbers or text.

    Cells that are neither numbers, text nor dates are not told apart.
    """
    if isinstance(cells, Factor):
        levels = [_bits(label) for label in cells.levels]
        return np.array([*levels, _NO_VALUE], dtype=np.uint64)[cells.codes]
    values = cells.values if isinstance(cells, Numbers) else cells.days
    if values is None:
        return np.zeros(n_rows, dtype=np.uint64)
    return np.where(np.isnan(values), np.nan, values + 0.0).view(np.uint64)  # no negative zero


_NO_VALUE = int(np.array(np.nan).view(np.uint64))


def _bits(label: str) -> int:
    value = number(label)
    if value is not None:
        return int(np.array(value + 0.0).view(np.uint64))
    return int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "big")
