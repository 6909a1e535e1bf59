"""Checks of argument types: an error names the argument, the type that was expected and the type it got."""

from __future__ import annotations

from numbers import Integral, Real
from types import UnionType
from typing import SupportsInt, cast

from fedtmle.errors import InputError


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
