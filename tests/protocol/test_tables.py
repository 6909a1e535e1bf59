"""Queries that set up a study: what a silo says, what is pooled, and both as bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import ContributionError, DataError, DecodeError
from fedtmle.model.statistics import AbstractBoundedColumns
from fedtmle.model.table import Factor, Table
from fedtmle.protocol.codes import decode, encode
from fedtmle.protocol.query import Phase
from fedtmle.protocol.sums import TallyQuery
from fedtmle.protocol.tables import LevelsQuery, ScalesQuery, sort_levels
from tests.damage import damaged_bits
from tests.premise import Premise


class Rows:
    """A silo that has nothing but a table."""

    def __init__(self, table: Table) -> None:
        self.n_rows = table.n_rows
        self.table = table

    def evaluate(self, function: Callable[[Any], Any]) -> Any:
        return function(self.table)


def factor(*labels: str) -> Factor:
    levels = tuple(dict.fromkeys(labels))
    return Factor(np.array([levels.index(label) for label in labels]), levels)


def rows(numeric: dict[str, list[float]] | None = None, **factors: Factor) -> Any:
    columns = {name: np.array(column, dtype=float) for name, column in (numeric or {}).items()}
    n = len(next(iter([*columns.values(), *(f.codes for f in factors.values())])))
    return Rows(Table(n_rows=n, numeric=columns, factors=factors))


def there_and_back(query: Any, answer: Any) -> Any:
    return decode(query.answer_code, encode(query.answer_code, answer))


labels = (
    st.text(max_size=6) | st.integers(-20, 20).map(str) | st.sampled_from(["nan", "inf", "1.0", "1", "-0"])
)


@given(st.sets(labels, max_size=6))
def test_levels_have_one_order_whatever_the_order_of_the_set(levels: set[str]) -> None:
    expected = sort_levels(levels)
    assert set(expected) == levels
    for order in itertools.islice(itertools.permutations(levels), 24):
        ordered: Any = dict.fromkeys(order)  # a dict is iterated in this order, a set in its own
        assert sort_levels(set(order)) == sort_levels(ordered) == expected


def test_numbers_are_in_the_order_of_numbers() -> None:
    assert sort_levels({"10", "9", "-1", "2.5"}) == ("-1", "2.5", "9", "10")
    assert sort_levels({"10", "9", "b"}) == ("10", "9", "b")
    assert sort_levels({"nan", "10", "9"}) == ("10", "9", "nan")  # not a number, so all are text


def test_the_studys_levels_are_the_union() -> None:
    query = LevelsQuery(factors=("site", "school"))
    one = query.answer(rows(site=factor("b", "a"), school=factor("10", "2")))
    two = query.answer(rows(site=factor("c", "c"), school=factor("9", "2")))
    assert one == (("a", "b"), ("2", "10"))
    pooled = query.pool({"one": one, "two": two}, {"one": 2, "two": 2})
    assert pooled == (("a", "b", "c"), ("2", "9", "10"))
    assert query.phase is Phase.NUISANCE
    assert query.retirement(one) is None


@given(st.lists(st.sets(labels, max_size=4), min_size=2, max_size=2))
def test_levels_travel_as_they_are(levels: list[set[str]]) -> None:
    query = LevelsQuery(factors=("a", "b"))
    answer = tuple(map(sort_levels, levels))
    assert there_and_back(query, answer) == answer


def test_a_factor_with_too_many_or_too_long_levels_is_named_at_the_silo() -> None:
    query = LevelsQuery(factors=("site",))
    with pytest.raises(DataError, match="'site' has 5000 levels"):
        query.answer(rows(site=Factor(np.zeros(3, dtype=np.int64), tuple(map(str, range(5000))))))
    with pytest.raises(DataError, match=r"'site' has 1 level\(s\) of more than 256 bytes"):
        query.answer(rows(site=factor("a", "b" * 300)))


decodes = Premise("the bits are levels", at_least=0.08)


@decodes
@given(st.lists(st.sets(labels, max_size=4), min_size=2, max_size=2), st.data())
def test_levels_from_garbage_are_refused(levels: list[set[str]], data: st.DataObject) -> None:
    code = LevelsQuery(factors=("a", "b")).pooled_code
    bits = data.draw(damaged_bits(encode(code, tuple(map(sort_levels, levels)))))
    try:
        pooled = decode(code, bits)
    except DecodeError:
        decodes.holds(False)
        return
    decodes.holds(True)
    assert encode(code, pooled) == bits


@pytest.mark.parametrize("levels", [("b", "a"), ("a", "a"), ("10", "9")])
def test_levels_out_of_order_are_refused(levels: tuple[str, ...]) -> None:
    code = LevelsQuery(factors=("a",)).pooled_code
    with pytest.raises(DecodeError, match="sorted"):
        decode(code, encode(code, (levels,)))


class Both(AbstractBoundedColumns[Table]):
    """The columns x, below 2, and y, below 16."""

    label = "weight"
    names = ("x", "y")
    exponents = (1, 4)

    def evaluate(self, piece: Table) -> np.ndarray:
        return np.stack([piece.numeric["x"], piece.numeric["y"]])


SCALES = ScalesQuery(columns=Both())


def test_scales_bound_each_column_by_the_least_power_of_two() -> None:
    answer = SCALES.answer(rows({"x": [0.3, -5.0], "y": [1.0, 0.999]}))
    assert answer == (3, 1)  # 5 < 8 and 1 < 2
    assert SCALES.answer(rows({"x": [0.01, 0.0], "y": [-0.25, 0.2]})) == (-6, -1)
    assert there_and_back(SCALES, answer) == answer
    assert SCALES.retirement(answer) is None


has_zeros = Premise("a silo's column is all zero", at_least=0.4)
number = st.one_of(st.just(0.0), st.floats(-1e300, 1e300))


@has_zeros
@given(st.lists(st.tuples(number, number | st.floats(-1, 1)), min_size=2, max_size=8), st.integers(1, 7))
def test_scales_do_not_depend_on_the_partition(values: list[tuple[float, float]], at: int) -> None:
    """A silo whose column is all zero has no say, so neither has how the zeros are spread."""
    x, y = (list(column) for column in zip(*values, strict=True))
    at = min(at, len(x) - 1)
    parts = [rows({"x": x[:at], "y": y[:at]}), rows({"x": x[at:], "y": y[at:]})]
    answers = {str(m): SCALES.answer(part) for m, part in enumerate(parts)}
    has_zeros.holds(any(not any(column[part]) for column in (x, y) for part in (slice(at), slice(at, None))))
    pooled = SCALES.pool(answers, {"0": at, "1": len(x) - at})
    assert pooled == SCALES.answer(rows({"x": x, "y": y}))
    assert there_and_back(SCALES, pooled) == pooled


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
