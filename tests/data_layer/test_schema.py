from __future__ import annotations

import math

import pytest

from fedtmle.data import Column, Kind, Schema
from fedtmle.errors import InputError

from .asking import binary, factor, numeric, schema


def test_a_name_may_be_numbers_and_a_factor() -> None:
    asked = schema(numeric("age"), factor("age"), binary("treat"), numeric("age"))
    assert asked.names == ("age", "treat")
    assert [column.kind for column in asked["age"]] == [Kind.NUMERIC, Kind.FACTOR]
    assert len(asked.columns) == 3


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ((numeric("age"), numeric("age", bounds=(0, 9))), "'age' is declared twice as numbers"),
        ((numeric("age"), binary("age")), "'age' is declared twice as numbers"),
        ((factor("sex"), factor("sex", levels=("f", "m"))), "'sex' is declared twice as a factor"),
        ((), "at least one column"),
    ],
)
def test_contradictory_schemas_are_refused(columns: tuple[Column, ...], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Schema(columns)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": Kind.FACTOR, "bounds": (0.0, 1.0)},
        {"kind": Kind.NUMERIC, "bounds": (1.0, 1.0)},
        {"kind": Kind.NUMERIC, "bounds": (math.nan, 1.0)},
        {"kind": Kind.NUMERIC, "levels": ("a",)},
        {"kind": Kind.FACTOR, "levels": ()},
        {"kind": Kind.FACTOR, "levels": ("a", "a")},
        {"kind": Kind.BINARY, "levels": ("a", "b", "c")},
    ],
)
def test_contradictory_columns_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match="'x'"):
        Column(name="x", **options)  # type: ignore[arg-type]
