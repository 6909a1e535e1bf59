"""The exponential Golomb code: one form for every vector, short, and differences over changing grids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol.codes import (
    DECLINED,
    ELIAS_DELTA,
    BitWriter,
    Declinable,
    Golomb,
    Joined,
    Remembered,
    SimilarSums,
    Triangle,
    Uplink,
    decode,
    encode,
    gamma_length,
    golomb_length,
    golomb_order,
)
from fedtmle_core.exact import Sums

integers = st.integers(-(2**40), 2**40) | st.integers(-20, 20)


@given(st.lists(integers, max_size=12))
def test_what_is_written_is_read(values: list[int]) -> None:
    code = Golomb(blocks=(len(values),))
    assert decode(code, encode(code, tuple(values))) == tuple(values)


@given(st.lists(integers, min_size=1, max_size=12))
def test_its_length_is_that_of_its_order_and_order_zero_is_the_gamma_code(values: list[int]) -> None:
    order = golomb_order(values)
    assert encode(Golomb(blocks=(len(values),)), tuple(values)).length == 5 + golomb_length(values, order)
    assert golomb_length(values, 0) == sum(map(gamma_length, values))


def test_integers_of_very_different_sizes_are_in_the_delta_code() -> None:
    values = [0] * 9 + [10**12]
    assert golomb_order(values) == ELIAS_DELTA
    # 10^12 is 2e12 + 1 by iota, of 41 digits: gamma(41) has 11 bits, then 40 digits; a zero has one bit.
    assert golomb_length(values, ELIAS_DELTA) == 9 + 11 + 40
    assert all(golomb_length(values, ELIAS_DELTA) < golomb_length(values, order) for order in range(31))
    bits = encode(Golomb(blocks=(10,)), tuple(values))
    assert bits.length == 5 + 60
    assert decode(Golomb(blocks=(10,)), bits) == tuple(values)


def test_a_delta_codeword_without_end_is_refused() -> None:
    out = BitWriter()
    out.uint(ELIAS_DELTA, 5)
    out.uint(1 << 40, 81)  # a number of 2^40 digits
    with pytest.raises(DecodeError, match="longer"):
        decode(Golomb(blocks=(1,)), out.finish())


@given(st.lists(integers, min_size=4, max_size=4))
def test_similar_sums_come_back(units: list[int]) -> None:
    code = SimilarSums((12, 8, 12, 0), (2**41,) * 4, (0, 0, 1, 3))
    sums = Sums(tuple(units), code.shifts)
    assert decode(code, encode(code, sums)) == sums


def test_a_sum_like_another_costs_one_bit_whatever_its_grid() -> None:
    alone = golomb_length([1 << 30], ELIAS_DELTA)
    shifts, like = (12, 8, 16, 12), (0, 0, 1, 2)
    alike = Sums(tuple(1 << 18 + shift for shift in shifts), shifts)
    assert encode(SimilarSums(shifts, (2**41,) * 4, like), alike).length == 5 + alone + 3


def test_a_similar_sum_beyond_its_bound_is_refused() -> None:
    wide, narrow = (SimilarSums((0, 0), (most, most), (0, 0)) for most in (10, 6))
    bits = encode(wide, Sums((5, 7), (0, 0)))
    with pytest.raises(DecodeError, match="range"):
        decode(narrow, bits)


@given(st.integers(1, 4), st.data())
def test_triangles_come_back(dim: int, data: st.DataObject) -> None:
    code = Triangle(dim=dim)
    assert code.numbers == dim * (dim + 1) // 2
    entries = data.draw(st.lists(integers, min_size=code.numbers, max_size=code.numbers))
    assert decode(code, encode(code, tuple(entries))) == tuple(entries)


def test_products_of_uncorrelated_columns_are_foretold() -> None:
    """With means 1, 1/2, 1/4 of independent columns all entries but the first row are told by a zero."""
    independent = (512, 256, 128, 128, 64, 32)
    first = golomb_length(independent[:3], golomb_order(independent[:3]))
    assert encode(Triangle(dim=3), independent).length == 3 * 5 + first + 3
    assert encode(Triangle(dim=3), (512, 256, 128, 256, 64, 128)).length > 3 * 5 + first + 3


def test_another_order_is_another_form_and_is_refused() -> None:
    out = BitWriter()
    out.uint(3, 5)
    for _ in range(4):  # zero in the code of order 3, where order 0 is shorter
        out.uint(1, 1)
        out.uint(0, 3)
    with pytest.raises(DecodeError, match="shortest"):
        decode(Golomb(blocks=(4,)), out.finish())


@given(
    st.lists(
        st.tuples(st.integers(-6, 6), st.lists(integers, min_size=3, max_size=3)), min_size=1, max_size=5
    )
)
def test_both_ends_of_a_link_agree_whatever_the_grids(messages: list[tuple[int, list[int]]]) -> None:
    silo, server = Uplink(), Uplink()
    for exponent, values in messages:
        one = Golomb(blocks=(1, 2), stream="one", exponent=exponent)
        other = Golomb(blocks=(3,), stream="other", exponent=-exponent)
        code = Joined((one, other))
        answer = (tuple(values), tuple(reversed(values)))
        assert server.decode(code, silo.encode(code, answer)) == answer
    assert silo.memory == server.memory
    assert silo.memory["one"].values == tuple(messages[-1][1])


def test_the_memory_is_rescaled_half_to_even() -> None:
    last = Remembered((6, -6, 7, 10), 0)
    assert last.rescaled(-2) == (24, -24, 28, 40)
    assert last.rescaled(2) == (2, -2, 2, 2)  # 1.5, -1.5, 1.75, 2.5


def test_a_small_change_of_large_numbers_is_short() -> None:
    code = Golomb(blocks=(3,), stream="g")
    link = Uplink()
    first = link.encode(code, (10**6, -(10**6), 5 * 10**5))
    assert link.encode(code, (10**6 + 1, -(10**6), 5 * 10**5 - 2)).length < first.length / 4


@given(st.lists(st.integers(-(2**70), 2**70), max_size=8))
def test_no_integers_have_the_order_that_stands_for_a_declined_answer(values: list[int]) -> None:
    assert golomb_order(values) != DECLINED
    code = Declinable(Golomb(blocks=(len(values),)), may_decline=True)
    bits = encode(code, tuple(values))
    assert decode(code, bits) == tuple(values)
    assert bits == encode(Golomb(blocks=(len(values),)), tuple(values))  # not a bit more


def test_a_declined_answer_is_not_remembered_and_only_read_where_it_is_allowed() -> None:
    code = Declinable(Golomb(blocks=(2,), stream="s"), may_decline=True)
    silo, server = Uplink(), Uplink()
    for value in ((1000, -1000), None, (1001, -999)):
        bits = silo.encode(code, value)
        assert server.decode(code, bits) == value
    assert bits.length == 5 + golomb_length((1, 1), golomb_order((1, 1)))
    assert encode(code, None).length == 5
    never = Declinable(code.code, may_decline=False)
    with pytest.raises(DecodeError):
        decode(never, encode(code, None))
    matrix = Declinable(Triangle(dim=2), may_decline=True)
    assert decode(matrix, encode(matrix, None)) is None
    assert decode(matrix, encode(matrix, (1, 2, 3))) == (1, 2, 3)
