"""Where the keys of a TOML text stand: `tomllib` gives values without their lines."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedtmle.errors import InputError
from fedtmle.studyfile.values import Key, Kind

Place = tuple[str | int, ...]

_BARE = r"[A-Za-z0-9_-]+"
_PART = rf'(?:{_BARE}|"[^"]*"|\'[^\']*\')'
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*(\[\[?)\s*({_DOTTED})\s*\]")
_KEY = re.compile(rf"\s*({_DOTTED})\s*=")
_TRIPLE = re.compile(r'"""|\'\'\'')


class Lines:
    """The line of every key and section that starts a line; a key inside braces has its owner's line."""

    def __init__(self, text: str) -> None:
        self._first: dict[Place, int] = {}
        for place, number in _places(text):
            for end in range(1, len(place) + 1):
                self._first.setdefault(place[:end], number)

    def of(self, place: Sequence[str | int]) -> int | None:
        """The line of a place, or of the nearest thing around it."""
        for end in range(len(place), 0, -1):
            if tuple(place[:end]) in self._first:
                return self._first[tuple(place[:end])]
        return None


def _places(text: str) -> Iterator[tuple[Place, int]]:
    """Headers and keys in the order of their lines; the n-th [[table]] is numbered n from zero."""
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


# Reading the sections of a TOML document by their declared keys, noting every mistake with its line.


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One thing to mend in a file."""

    file: str
    line: int | None
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{'' if self.line is None else f'{self.line}:'} {self.what}"


class Sections:
    """A document, and the mistakes found in it so far; ``homes`` are the keys of each section."""

    def __init__(
        self, file: str, lines: Lines, document: dict[str, Any], homes: Mapping[str, Iterable[str]]
    ) -> None:
        self._file, self._lines, self._document, self._homes = file, lines, document, homes
        self.mistakes: list[Mistake] = []

    def add(self, section: Place, key: str | None, what: str) -> None:
        """Notes a mistake in a section, or at one key of it."""
        written = f"[{'.'.join(part for part in section if isinstance(part, str))}]" if section else ""
        place = section if key is None else (*section, key)
        where = " ".join(part for part in (written, key) if part)
        self.mistakes.append(Mistake(file=self._file, line=self._lines.of(place), what=f"{where}: {what}"))

    def table(self, section: Place) -> dict[str, Any] | None:
        """The table of a section; None if it is not there, empty (and noted) if it is no table."""
        found: Any = self._document
        for part in section:
            found = found[part] if isinstance(part, int) else found.get(part)
            if found is None:
                return None
            if not isinstance(found, dict | list):
                self.add(section, None, "this is not a section; write its keys below the heading")
                return {}
        return found if isinstance(found, dict) else {}

    def values(
        self, section: Place, known: Mapping[str, Key], *, kind: str | None = None, demand: bool = True
    ) -> dict[str, Any]:
        """The values of a section that can be read; ``demand`` notes the required ones that are missing."""
        table = self.table(section) or {}
        self.refuse_unknown(section, table, ("kind", *known) if kind else known, whose=kind)
        values: dict[str, Any] = {}
        for name, key in known.items():
            if name in table:
                try:
                    value = self._value(section, name, key, table[name])
                    # A table inside that could not be made has its mistakes noted already.
                    failed = key.kinds and (value is None or (key.several and None in value))
                    values |= {} if failed else {name: value}
                except ValueError:
                    words = re.findall(r'"([^"]+)"', key.expected)
                    self.add(section, name, f"expected {key.expected}{near(table[name], words)}")
            elif key.required and demand:
                self.add(section, name, f"is missing; expected {key.expected}")
        return values

    def _value(self, section: Place, name: str, key: Key, value: Any) -> Any:
        """What is written at a key; a table of one of its kinds is a section of its own."""
        place = (*section, name)
        if key.kinds is None:
            return key.read(value)
        if key.several:
            if not (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
                raise ValueError(name)
            return tuple(self.make((*place, i), key.kinds, default=key.default) for i in range(len(value)))
        return (
            self.make(place, key.kinds, default=key.default) if isinstance(value, dict) else key.read(value)
        )

    def make(self, section: Place, kinds: Mapping[str, Kind], *, default: str | None = None) -> Any:
        """What a section with a ``kind`` makes, None if it cannot."""
        table = self.table(section)
        if table is None:
            return None
        kind = table.get("kind", default)
        if not isinstance(kind, str) or kind not in kinds:
            wrong = "is missing" if kind is None else "is not known"
            hint = near(kind, kinds) or f"; expected one of {', '.join(kinds)}"
            self.add(section, "kind", f"{wrong}{hint}")
            every = {name: key for other in kinds.values() for name, key in other.keys.items()}
            self.values(section, every, kind="any kind", demand=False)
            return None
        before, keys = len(self.mistakes), kinds[kind].keys
        values = self.values(section, keys, kind=kind)
        sound = before == len(self.mistakes)
        expected = {name for name, key in keys.items() if key.required or name in table}
        # With an unknown key beside what can be read, the rest may be wrong by itself: say so as well.
        made = self.construct(section, kinds[kind].make, values) if expected <= values.keys() else None
        return made if sound else None

    def construct(self, section: Place, make: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """The object of a section; None, and noted at the key that the error names, if it is refused."""
        try:
            return make(**values)
        except InputError as error:
            named, _, rest = str(error).partition(": ")
            self.add(section, named, rest) if named in values else self.add(section, None, str(error))
            return None

    def refuse_unknown(
        self, section: Place, table: Mapping[str, Any], known: Iterable[str], *, whose: str | None = None
    ) -> None:
        """Notes keys that are not known, with the name or the section that may be meant."""
        known = tuple(known)
        for name in (name for name in table if name not in known):
            home = next(
                (home for home, own in self._homes.items() if name in own and home not in section), None
            )
            hint = near(name, known) or (
                f"; it belongs in [{home}]" if home else f"; known: {', '.join(known)}"
            )
            what = "unknown section" if not section else f"unknown key{f' of {whose}' if whose else ''}"
            self.add(section, name, f"{what}{hint}")


def near(name: object, known: Iterable[str]) -> str:
    """A question after the known name that may be meant, if one is near."""
    by_fold = {other.casefold(): other for other in known}
    found = difflib.get_close_matches(str(name).casefold(), by_fold, n=1)
    return f"; did you mean '{by_fold[found[0]]}'?" if found else ""
