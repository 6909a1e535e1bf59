"""Exact sums: the grid, the totals, and the closing sums that keep every digit of a double."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.premise import Premise

from fedtmle_core.errors import ContributionError
from fedtmle_core.exact import (
    CHUNK,
    GRID_BITS,
    Sums,
    beyond_bound,
    column_shifts,
    query_shifts,
    total,
    zero_sums,
)
from fedtmle_core.kernels import column_sums
from fedtmle_core.types import Part, RowBound

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_sums_add_slice_and_become_numbers() -> None:
    a, b = Sums((3, -5), (1, 70)), Sums((4, 2**80), (1, 70))
    assert a + b == Sums((7, 2**80 - 5), (1, 70))
    assert a + zero_sums((1, 70)) == a
    assert (a + b)[1:] == Sums((2**80 - 5,), (70,))
    assert a.fractions(2) == [Fraction(3, 4), Fraction(-5, 2**71)]
    assert (a + b).values().tolist() == [3.5, float(Fraction(2**80 - 5, 2**70))]
    with pytest.raises(ValueError, match="different grids"):
        a + zero_sums((1, 71))


def test_negative_shifts_are_a_coarse_grid() -> None:
    assert Sums((3,), (-4,)).fractions() == [Fraction(48)]


@given(st.lists(st.tuples(INT64, INT64), min_size=1, max_size=50))
def test_total_does_not_overflow(rows: list[tuple[int, int]]) -> None:
    assert total(np.array(rows, dtype=np.int64)) == tuple(sum(column) for column in zip(*rows, strict=True))


def test_query_shifts_follow_the_parts() -> None:
    bound, eps = RowBound(gradient=3, curvature=5), np.array([0.5, -1.0])
    everything = Part.LOSS | Part.GRADIENT | Part.HESSIAN
    # |eps|_1 = 1.5 < 2^1, so that the loss is below 2^4.
    assert query_shifts(bound, eps, everything) == (46, 47, 47, 45, 45, 45)
    assert query_shifts(bound, eps, Part.HESSIAN) == (45, 45, 45)
    assert query_shifts(bound, np.zeros(2), Part.LOSS) == (47,)


@pytest.mark.parametrize("n", [1, CHUNK, CHUNK + 1, 3 * CHUNK - 7])
def test_column_sums_keep_every_digit(n: int) -> None:
    rng = np.random.default_rng(n)
    exponents = (4, 12)  # a generous bound: the values use a small part of it
    columns = np.stack([rng.standard_normal(n), rng.uniform(0.01, 1, n)])
    columns[0, np.abs(columns[0]) < 2.0**-30] = 1.0  # their last bits would lie below the fine grid
    sums = column_sums(columns, exponents, what="column")
    assert sums.shifts == column_shifts(exponents) == (86, 78)
    assert sums.fractions() == [sum(map(Fraction, column.tolist()), Fraction(0)) for column in columns]


is_rounded = Premise("the sum is rounded", at_least=0.3)


@is_rounded
@given(st.lists(st.floats(-8, 8), min_size=1, max_size=30))
def test_column_sums_round_only_below_the_fine_grid(values: list[float]) -> None:
    sums = column_sums(np.array([values]), (3,), what="column")
    error = sums.fractions()[0] - sum(map(Fraction, values), Fraction(0))
    is_rounded.holds(error != 0)
    assert abs(error) <= len(values) * Fraction(1, 2) / 2**87


def test_column_sums_are_a_function_of_the_multiset() -> None:
    rng = np.random.default_rng(0)
    columns = rng.uniform(-1, 1, (3, 10_000))
    whole = column_sums(columns, (0, 1, 2), what="column")
    assert column_sums(columns[:, rng.permutation(10_000)], (0, 1, 2), what="column") == whole
    left, right = (column_sums(part, (0, 1, 2), what="column") for part in np.split(columns, [4097], axis=1))
    assert left + right == whole


def test_column_sums_of_no_rows() -> None:
    assert column_sums(np.zeros((2, 0)), (0, 5), what="column") == zero_sums(column_shifts((0, 5)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 123.4567])
def test_a_row_beyond_the_bound_is_counted_and_not_quoted(bad: float) -> None:
    columns = np.ones((2, 10))
    columns[:, 3] = columns[1, 7] = bad
    with pytest.raises(ContributionError) as error:
        column_sums(columns, (1, 6), what="outcome")
    assert str(error.value) == beyond_bound(2, "outcome")
    assert "123" not in str(error.value)
    assert str(error.value).startswith("2 row(s)")


def test_the_bound_itself_is_allowed() -> None:
    assert column_sums(np.array([[8.0, -8.0, 8.0]]), (3,), what="column").fractions() == [8]
    with pytest.raises(ContributionError):
        column_sums(np.array([[np.nextafter(8.0, 9.0)]]), (3,), what="column")
    assert GRID_BITS == 50
