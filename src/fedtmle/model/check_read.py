"""Does `read` quote a record's value in an error? It is given broken rows that hold known values.

An error message ends in logs and in front of other people, so `read` must say what is wrong with a column
and never with which value. Every broken form is read twice, with two values: a number that a message
shows by chance is not close to both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from fedtmle.model.types import Array

FRACTIONS = (0.735193, 0.268351)  # shares of a column's range at which the two known values lie
CLOSE = 4e-3  # a printed number this close to a known value, relative to it, is a quotation
_NUMBER = re.compile(r"\d[\d,_]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+")

Form = tuple[str, object, float]  # a description, rows, and the value that they hold


def broken_rows(raw: object) -> Iterator[tuple[Form, Form]]:
    """Yield broken forms of the raw rows, each with two different values."""
    first, second = FRACTIONS
    yield from zip(_forms(raw, first), _forms(raw, second), strict=True)


def quotes(error: BaseException, value: float) -> bool:
    """Whether the text of an error, or of one that it shows as its cause, has the value in some format."""
    numbers = (float(token.replace(",", "").replace("_", "")) for token in _NUMBER.findall(_text(error)))
    return any(abs(number - abs(value)) <= CLOSE * abs(value) for number in numbers)


def _text(error: BaseException) -> str:
    shown = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    notes = getattr(error, "__notes__", ())
    return "\n".join([str(error), *map(repr, error.args), *notes, _text(shown) if shown else ""])


def _forms(raw: object, fraction: float) -> Iterator[Form]:
    """Yield each column of the rows broken in several ways, then values that are no rows at all."""
    columns = _columns(raw)
    for name, column in columns.items():
        for description, broken, value in _broken_columns(np.asarray(column, dtype=np.float64), fraction):
            yield description, _rebuilt(raw, {**columns, name: broken}), value
    for number in (fraction, 1e6 * fraction):
        yield "one number instead of rows", number, number
        yield "text instead of rows", f"id {number}", number
        yield "text instead of numbers", [f"id {number}"] * 3, number
        yield "too many dimensions", np.full((2, 2, 2), number), number
        yield "rows of different lengths", [[number], [number, number]], number
        yield "a column of another name", {"another": [number]}, number


def _broken_columns(column: Array, fraction: float) -> Iterator[tuple[str, object, float]]:
    low, high = float(column.min()), float(column.max())
    inside = low + fraction * ((high - low) or 1.0)
    outside = high + 1e6 * fraction * (1.0 + abs(high))
    for value in (inside, outside, -outside):
        yield "a column of one value that it does not hold", np.full_like(column, value), value
        for description, wrong in (("a missing value", np.nan), ("an infinite value", np.inf)):
            yield description, np.array([wrong, *np.full(len(column) - 1, value)]), value
        yield "text in a column", np.full(len(column), f"id {value}"), value
        yield "text among numbers", np.array([f"id {value}", *column[1:]], dtype=object), value
        yield "a column of two dimensions", np.full((len(column), 2), value), value
        yield "a column that is too short", np.full(len(column) - 1, value), value


def _columns(raw: object) -> dict[object, object]:
    """Return the columns of a mapping or of an array; none of another kind of rows."""
    if isinstance(raw, Mapping):
        return {name: column for name, column in raw.items() if _is_numeric(np.asarray(column))}
    if isinstance(raw, list | tuple | np.ndarray) and _is_numeric(array := np.asarray(raw)):
        return dict(enumerate(array.T if array.ndim == 2 else [array]))
    return {}


def _is_numeric(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuf" and array.ndim in (1, 2) and array.size > 0


def _rebuilt(raw: object, columns: Mapping[object, object]) -> object:
    if isinstance(raw, Mapping):
        return {**raw, **columns}
    if np.ndim(raw) == 1:  # type: ignore[arg-type]  # `_columns` has made an array of it
        return columns[0]
    return [list(row) for row in zip(*map(np.asarray, columns.values()), strict=False)]
