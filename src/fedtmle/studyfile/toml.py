"""Reading the sections of a TOML document by their declared keys, and collecting all defects."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

from fedtmle.defects import Defect, Lines, Place, Toml, near
from fedtmle.errors import InputError

# The keys of a study file: how the value of each is read, or refused.

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a section: ``read`` converts its TOML value, or raises ValueError.

    ``expected`` describes the values that can be read. If there are ``kinds``, a table at this key makes an
    object of one of them; ``default`` is the kind of a table that does not name one. With ``several``, the
    value is a list of such tables.
    """

    read: Callable[[Toml], object]
    expected: str
    required: bool = False
    kinds: Mapping[str, SectionKind[object]] | None = None
    default: str | None = None
    several: bool = False


@dataclass(frozen=True, kw_only=True)
class SectionKind(Generic[T_co]):
    """One kind of section: what makes its object, and the keys that are the arguments."""

    make: Callable[..., T_co]
    keys: Mapping[str, Key]


def refuse(value: object) -> NoReturn:
    raise ValueError(value)


def text(value: Toml) -> str:
    return value if isinstance(value, str) and value.strip() else refuse(value)


def number(value: Toml) -> float:
    """Return a finite number; TOML also has inf and nan."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        refuse(value)
    return float(value)


def positive(value: Toml) -> float:
    return number(value) if number(value) > 0 else refuse(value)


def integer(value: Toml) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else refuse(value)


def count(value: Toml) -> int:
    return integer(value) if integer(value) >= 0 else refuse(value)


def truth(value: Toml) -> bool:
    return value if isinstance(value, bool) else refuse(value)


def level(value: Toml) -> str:
    """Return a level as text, as every silo stores it; a study file may write level 1 as a number."""
    return text(value) if isinstance(value, str) else str(integer(value))


def date(value: Toml) -> datetime.date:
    """Return a day without a time."""
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    raise ValueError(value)


def public_key(value: Toml) -> bytes:
    """Return a silo's public keys from their hexadecimal digits: 64 for signatures, 64 more for masks."""
    key = bytes.fromhex(text(value))
    return key if len(key) in (32, 64) else refuse(value)


def server_key(value: Toml) -> bytes:
    """Return the server's public key from its 64 hexadecimal digits."""
    key = bytes.fromhex(text(value))
    return key if len(key) == 32 else refuse(value)


def several(read: Callable[[Toml], T]) -> Callable[[Toml], tuple[T, ...]]:
    """Return a reader of lists with at least one item."""
    return lambda value: tuple(map(read, value)) if isinstance(value, list) and value else refuse(value)


def pair(value: Toml) -> tuple[float, ...]:
    numbers = several(number)(value)
    return numbers if len(numbers) == 2 else refuse(value)


def table_of(read: Callable[[Toml], T]) -> Callable[[Toml], dict[str, T]]:
    """Return a reader of tables with at least one key, all of whose values ``read`` can read."""
    return lambda value: (
        {name: read(item) for name, item in value.items()}
        if isinstance(value, dict) and value
        else refuse(value)
    )


def named(
    names: Mapping[str, object], otherwise: Callable[[Toml], object] = refuse
) -> Callable[[Toml], object]:
    """Return a reader of the names in a mapping; other values go to ``otherwise``."""
    return lambda value: names[value] if isinstance(value, str) and value in names else otherwise(value)


def listed(names: Mapping[str, object]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def one_of(values: Mapping[str, object]) -> Key:
    return Key(read=named(values), expected=listed(values))


def choice(*names: str) -> Key:
    return one_of({name: name for name in names})


def either(names: Mapping[str, object], read: Callable[[Toml], object], otherwise: str) -> Key:
    return Key(read=named(names, read), expected=f"{listed(names)} or {otherwise}")


def required(key: Key) -> Key:
    return replace(key, required=True)


def table(
    kinds: Mapping[str, SectionKind[object]], *, default: str | None = None, expected: str = "a table"
) -> Key:
    """Return the key of a table that makes an object of one of these kinds."""
    return Key(read=refuse, expected=expected, kinds=kinds, default=default)


def tables(kinds: Mapping[str, SectionKind[object]], *, default: str | None = None, expected: str) -> Key:
    """Return the key of a list of such tables."""
    return Key(read=refuse, expected=expected, required=True, kinds=kinds, default=default, several=True)


TEXT = Key(read=text, expected="text in quotes")
TEXTS = Key(read=several(text), expected='a list of texts, such as ["a", "b"]')
NUMBER = Key(read=number, expected="a number")
NUMBERS = Key(read=several(number), expected="a list of numbers")
POSITIVE = Key(read=positive, expected="a number above 0")
INTEGER = Key(read=integer, expected="a whole number")
INTEGERS = Key(read=several(integer), expected="a list of whole numbers")
COUNT = Key(read=count, expected="a whole number of at least 0")
TRUTH = Key(read=truth, expected="true or false")
LEVEL = Key(read=level, expected="a level, text in quotes")
LEVELS = Key(read=several(level), expected='a list of levels, such as ["0", "1"]')
BOUNDS = Key(read=pair, expected="[low, high], two numbers")


Arguments = dict[str, Any]  # each value is read by its key and checked by the constructor
DEEPEST = 16  # parts of a dotted key, or nested brackets


class Sections:
    """A TOML document and its defects so far; ``homes`` has the keys of each section."""

    def __init__(
        self, file: str, lines: Lines, document: dict[str, Toml], homes: Mapping[str, Iterable[str]]
    ) -> None:
        self._file, self._lines, self._document, self._homes = file, lines, document, homes
        self.defects: list[Defect] = []

    def add(self, section: Place, key: str | None, message: str) -> None:
        """Add a defect of a section, or of one key of it."""
        written = f"[{'.'.join(part for part in section if isinstance(part, str))}]" if section else ""
        line = self._lines.of(section if key is None else (*section, key))
        where = " ".join(part for part in (written, key) if part)
        self.defects.append(Defect(message=f"{where}: {message}", file=self._file, line=line))

    def table(self, section: Place) -> dict[str, Toml] | None:
        """Return a section's table, None if it is absent; add a defect and return {} if it is no table."""
        value: Toml | None = self._document
        for part in section:
            if isinstance(value, list) and isinstance(part, int):
                value = value[part]
            else:
                value = value.get(str(part)) if isinstance(value, dict) else None
            if value is None:
                return None
            if not isinstance(value, dict | list):
                self.add(section, None, "this is not a section; write its keys below the heading")
                return {}
        return value if isinstance(value, dict) else {}

    def values(
        self,
        section: Place,
        known: Mapping[str, Key],
        *,
        kind: str | None = None,
        demand: bool = True,
        sections: Iterable[str] = (),
    ) -> Arguments:
        """Return the values that can be read; with ``demand``, a missing required key is a defect.

        ``sections`` are names that may occur in addition to the ``known`` keys. They are not read here.
        """
        table = self.table(section) or {}
        self.refuse_unknown(section, table, (*(["kind"] if kind else []), *known, *sections), kind=kind)
        values: Arguments = {}
        for name, key in known.items():
            if name in table:
                try:
                    value = self._value(section, name, key, table[name])
                except ValueError:
                    words = re.findall(r'"([^"]+)"', key.expected)
                    self.add(section, name, f"expected {key.expected}{near(table[name], words)}")
                    continue
                # None means that an inner table has defects, which were added when it was read.
                parts = value if isinstance(value, tuple) and key.several else (value,)
                if not (key.kinds and None in parts):
                    values[name] = value
            elif key.required and demand:
                self.add(section, name, f"is missing; expected {key.expected}")
        return values

    def _value(self, section: Place, name: str, key: Key, value: Toml) -> object:
        """Return the value of a key; a table of one of its kinds is read as a section."""
        place = (*section, name)
        if key.kinds is None:
            return key.read(value)
        if key.several:
            if not (isinstance(value, list) and value and all(isinstance(item, dict) for item in value)):
                raise ValueError(name)
            return tuple(self.make((*place, i), key.kinds, default=key.default) for i in range(len(value)))
        if isinstance(value, dict):
            return self.make(place, key.kinds, default=key.default)
        return key.read(value)

    def make(
        self, section: Place, kinds: Mapping[str, SectionKind[T]], *, default: str | None = None
    ) -> T | None:
        """Return the object that a section with a ``kind`` describes, or None if it has a defect."""
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
        before, keys = len(self.defects), kinds[kind].keys
        values = self.values(section, keys, kind=kind)
        sound = before == len(self.defects)
        expected = {name for name, key in keys.items() if key.required or name in table}
        # Construct the object even if a key is unknown, to report the values that it refuses as well.
        made = self.construct(section, kinds[kind].make, values) if expected <= values.keys() else None
        return made if sound else None

    def construct(self, section: Place, make: Callable[..., T], values: Arguments) -> T | None:
        """Return the object of a section; if it is refused, add a defect at the key that the error names."""
        try:
            return make(**values)
        except InputError as error:
            key, _, rest = str(error).partition(": ")
            self.add(section, key, rest) if key in values else self.add(section, None, str(error))
            return None

    def refuse_unknown(
        self, section: Place, table: Iterable[str], known: Iterable[str], *, kind: str | None = None
    ) -> None:
        """Add a defect for every unknown key, and suggest the name or section that was probably meant."""
        known = tuple(known)
        for name in (name for name in table if name not in known):
            home = next(
                (home for home, keys in self._homes.items() if name in keys and home not in section), None
            )
            belongs = f"; it belongs in [{home}]" if home else f"; known: {', '.join(known)}"
            unknown = "unknown section" if not section else f"unknown key{f' of {kind}' if kind else ''}"
            self.add(section, name, f"{unknown}{near(name, known) or belongs}")


_QUOTED = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' + r"'''.*?'''|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'|#[^\n]*", re.DOTALL
)


def too_deep(text: str) -> int | None:
    """Return the first line of a TOML text that is nested more than `DEEPEST` levels, None if none is.

    The levels of a line are the parts of its dotted key and the brackets that are open in it.
    """
    bare = _QUOTED.sub(lambda quoted: '""' + "\n" * quoted[0].count("\n"), text)
    depth = 0
    for number, line in enumerate(bare.split("\n"), start=1):
        if any(part.count(".") > DEEPEST for part in re.split(r"[=,\[\]{}]", line)):
            return number
        for character in line:
            depth += (character in "[{") - (character in "]}")
            if depth > DEEPEST:
                return number
    return None
