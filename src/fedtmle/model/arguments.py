"""Arguments of the wrong type, told at once: which one it is, what was expected and what came instead."""

from __future__ import annotations

from numbers import Integral, Real
from types import UnionType
from typing import Any

from fedtmle.errors import InputError


def expect(name: str, value: object, kind: type | UnionType, what: str) -> None:
    """Raises unless ``value`` is of ``kind``."""
    if not isinstance(value, kind):
        raise InputError(f"{name}: expected {what}, not {called(value)}")


def expect_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name}: expected an integer, not {called(value)}")


def expect_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name}: expected a number, not {called(value)}")


def expect_column(name: str, value: object) -> None:
    expect(name, value, str, "the name of a column, in quotes")


def label(name: str, value: Any) -> str:
    """A level as text: it is text at every silo, and the level 1 may be written as a number."""
    if isinstance(value, str):
        return value
    expect_integer(name, value)
    return str(int(value))


def called(value: object) -> str:
    """What a value is, in words that carry none of it."""
    if isinstance(value, type):
        return f"the class {value.__name__}: call it, as in {value.__name__}()"
    return f"something of type {type(value).__name__}"
