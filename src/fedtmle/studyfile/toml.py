"""Reading the sections of a TOML document by their declared keys, and collecting all defects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fedtmle.defects import Defect, Lines, Place, Toml, near
from fedtmle.errors import InputError
from fedtmle.studyfile.values import Key, SectionKind

Arguments = dict[str, Any]  # each value is read by its key and checked by the constructor
T = TypeVar("T")
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
