"""A table's blocks, and the largest magnitudes that they have from it."""

import math

import numpy as np
import pytest

from fedtmle.model.table import Factor, Table, over_blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle_core.parallel.BLOCK", 10)


def table(n: int = 25) -> Table:
    x = np.arange(n, dtype=np.float64)
    factor = Factor(np.zeros(n, dtype=np.int64), ("a",))
    gone = np.where(x == 3, np.nan, x)
    return Table(n_rows=n, numeric={"x": x, "minus": -2 * x, "gone": gone}, factors={"f": factor})


def test_blocks_are_consecutive_rows() -> None:
    assert [block.n_rows for block in table().blocks()] == [10, 10, 5]
    assert list(over_blocks(table(), lambda block: float(block.numeric["x"][0]))) == [0.0, 10.0, 20.0]
    for rows, block in table().placed_blocks():
        assert block.numeric["x"].tolist() == table().numeric["x"][rows].tolist()
    assert list(table(0).blocks()) == []


def test_a_block_has_the_reach_of_its_table() -> None:
    whole = table()
    for own in (whole, *whole.blocks()):
        assert own.reach["x"] == 24
        assert own.reach["minus"] == 48
        assert math.isnan(own.reach["gone"])


def test_a_column_that_was_replaced_has_a_reach_of_its_own() -> None:
    block = next(table().blocks())
    moved = block.with_numeric("x", np.full(10, -3.0)).with_factor("f", block.factors["f"])
    assert moved.reach["x"] == 3
    assert moved.reach["minus"] == 48
    assert table().take(np.array([2, 1])).reach["x"] == 2


def test_it_is_no_part_of_what_a_table_is() -> None:
    one, other = table(), table()
    assert one.reach == pytest.approx(other.reach, nan_ok=True)
    assert "reach" not in repr(one)


def test_a_factor_counts_the_rows_of_each_level() -> None:
    factor = Factor(np.array([2, -1, 0, 2, 2]), ("a", "b", "c"))
    assert factor.counts == (1, 0, 3)
    own = Table(n_rows=5, numeric={}, factors={"f": factor})
    assert own.counts("f") == (1, 0, 3)
    assert own.take(np.array([0, 0, 1])).counts("f") == (0, 0, 2)
