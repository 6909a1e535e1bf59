"""Where the keys of a TOML text stand: `tomllib` gives values without their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
