"""The exponential Golomb code: one form for every vector, short, and differences over changing grids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol.codes import (
    BitWriter,
    Golomb,
    Joined,
    Remembered,
    Uplink,
    decode,
    encode,
    gamma_length,
    golomb_length,
    golomb_order,
)

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
