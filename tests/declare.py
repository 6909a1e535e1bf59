"""Dictionaries in shorthand, for studies of tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import fedtmle as ft


def declare(base: Mapping[str, Any] | None = None, /, **variables: Any) -> ft.Variables:
    """Return a dictionary, on top of ``base`` if given.

    A pair of numbers is the range of a number, ("count", most) a count, a list the levels of a category;
    "binary" and "identifier" are kinds.
    """
    return ft.Variables({**(base or {}), **{name: _entry(short) for name, short in variables.items()}})


def _entry(short: Any) -> Any:
    match short:
        case "binary" | "identifier":
            return {"kind": short}
        case list():
            return {"kind": "category", "levels": short}
        case ("count", most):
            return {"kind": "count", "range": (0, most)}
        case (low, high):
            return {"kind": "number", "range": (low, high)}
    raise AssertionError(f"no shorthand: {short!r}")
