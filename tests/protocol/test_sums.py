"""A tally: exact sums of a silo's columns, within their declared bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedtmle.errors import ContributionError
from fedtmle.model.table import AbstractBoundedColumns, Factor, Table
from fedtmle.protocol.codes import decode, encode
from fedtmle.protocol.sums import TallyQuery


class Rows:
    """A silo that has nothing but a table."""

    def __init__(self, table: Table) -> None:
        self.n_rows = table.n_rows
        self.table = table

    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        return function(self.table)


def rows(numeric: dict[str, list[float]] | None = None, **factors: Factor) -> Any:
    columns = {name: np.array(column, dtype=float) for name, column in (numeric or {}).items()}
    n = len(next(iter([*columns.values(), *(f.codes for f in factors.values())])))
    return Rows(Table(n_rows=n, numeric=columns, factors=factors))


def there_and_back(query: Any, answer: Any) -> Any:
    return decode(query.answer_code, encode(query.answer_code, answer))


class Both(AbstractBoundedColumns[Table]):
    """The columns x, below 2, and y, below 16."""

    label = "weight"
    names = ("x", "y")
    exponents = (1, 4)

    def evaluate(self, piece: Table) -> np.ndarray:
        return np.stack([piece.numeric["x"], piece.numeric["y"]])


def test_a_tally_is_exact_and_refuses_what_is_beyond_its_bound() -> None:
    query = TallyQuery(columns=Both(), n=3)
    first = query.answer(rows({"x": [1.0, 0.0], "y": [0.1, 9.5]}))
    second = query.answer(rows({"x": [1.0], "y": [-3.0]}))
    pooled = query.pool({"a": first, "b": second}, {"a": 2, "b": 1})
    assert pooled == query.answer(rows({"x": [1.0, 1.0, 0.0], "y": [9.5, -3.0, 0.1]}))
    np.testing.assert_allclose(pooled.values(), [2.0, 6.6], rtol=1e-15)
    assert there_and_back(query, pooled) == pooled
    with pytest.raises(ContributionError, match=r"1 row\(s\).*weight") as caught:
        query.answer(rows({"x": [1.0, 1.0], "y": [0.0, 17.25]}))
    assert "17.25" not in str(caught.value)
    with pytest.raises(ContributionError):
        query.answer(rows({"x": [np.nan], "y": [0.0]}))
