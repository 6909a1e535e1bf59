"""The keys of a study file: how the value of each is read, or refused."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, TypeVar

from fedtmle.defects import Toml

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
