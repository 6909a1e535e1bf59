"""A dictionary as the section [variables] of a study file, and values as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedtmle.errors import InputError
from fedtmle.initial.variables import Variable, Variables


def variables_text(variables: Variables) -> str:
    """Return the section [variables] that declares these variables, one line for each."""
    lines = [f"{toml_key(name)} = {toml_text(entry(variable))}" for name, variable in variables.items()]
    return "\n".join(["[variables]", *lines, ""])


def entry(variable: Variable) -> dict[str, object]:
    """Return one variable as the plain values of its entry; keys without a value are left out."""
    levels: object = [code for code, _ in variable.levels]
    if any(words for _, words in variable.levels):
        levels = dict(variable.levels)
    given = {
        "kind": variable.kind,
        "range": None if variable.range is None else [_shortest(end) for end in variable.range],
        "levels": levels,
        "label": variable.label,
        "unit": variable.unit,
        "missing": "" if variable.missing == "refuse" else variable.missing,
    }
    return {key: value for key, value in given.items() if value not in (None, [], "")}


def _shortest(number: float) -> float | int:
    return int(number) if number.is_integer() and abs(number) < 2.0**53 else number


def toml_text(value: object) -> str:
    """Return a value as TOML; a table is inline."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml_text, value))}]"
        case Mapping():
            return (
                f"{{{', '.join(f'{toml_key(str(key))} = {toml_text(item)}' for key, item in value.items())}}}"
            )
        case _:
            raise InputError(f"a study file cannot hold a value of type {type(value).__name__}")


def toml_key(name: str) -> str:
    """Return a key, in quotes unless it is plain."""
    return name if name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name) else toml_text(name)
