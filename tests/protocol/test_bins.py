"""Bins: what a silo hides, what is pooled, and both as bits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol.bins import BinsQuery, Group, shown, smallest_cell
from fedtmle.protocol.bits import BitReader, BitWriter
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import Link


def silo(bins: list[int], values: list[float], sensitive: list[float] | None = None, floor: int = 5) -> Any:
    group = Group(
        bins=np.array(bins, dtype=np.uint8),
        values=np.array([values]),
        sensitive=None if sensitive is None else np.array(sensitive),
    )
    policy = replace(Policy.unguarded(), min_cell=floor)
    return SimpleNamespace(policy=policy, evaluate=lambda function: function(group))


QUERY = BinsQuery(groups=lambda group: [group], sizes=(3,), exponents=(2,), n=100, what="test")


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.integers(1, 9),
    st.data(),
)
def test_told_bins_are_empty_or_large_and_hide_none_or_enough(
    counts: list[int], floor: int, data: st.DataObject
) -> None:
    tellable = [data.draw(st.booleans()) for _ in counts]
    told = shown(counts, tellable, floor)
    for count, cell, may in zip(counts, told, tellable, strict=True):
        assert cell is None or cell == count
        assert cell is None or cell == 0 or (cell >= floor and may)
        assert cell is not None or count > 0
    hidden = sum(counts) - sum(cell or 0 for cell in told)
    assert hidden == 0 or hidden >= floor or all(cell in (None, 0) for cell in told)


def test_pooled_bins_are_sums_over_the_silos_that_tell() -> None:
    answers = {
        "a": QUERY.answer(silo([0] * 6 + [1] * 7, [0.5] * 13)),
        "b": QUERY.answer(silo([0] * 5 + [1] * 2 + [2] * 9, [0.25] * 16)),
    }
    assert answers["b"] == ((None, None, (9, *answers["b"][0][2][1:])),)  # 5 would tell the 2
    (pooled,) = QUERY.pool(answers, {})
    assert [(cell.silos, cell.count) for cell in pooled] == [(1, 6), (1, 7), (2, 9)]
    assert [cell.sums for cell in pooled] == [(3.0,), (3.5,), (2.25,)]


def test_a_sum_that_would_tell_of_a_few_is_hidden() -> None:
    outcome = [1.0] * 3 + [0.0] * 20 + [1.0] * 10 + [0.0] * 10
    (told,) = QUERY.answer(silo([0] * 23 + [1] * 20, outcome, outcome))
    assert told[0] is None  # three events
    assert told[1] is not None
    assert smallest_cell(np.ones(50)) == 0  # of all alike, everyone's is told
    assert smallest_cell(np.arange(50.0)) == 50


def test_messages_round_trip_and_garbage_is_refused() -> None:
    answer = QUERY.answer(silo([0] * 6 + [1] * 7, [0.1] * 13))
    out = BitWriter()
    QUERY.write_answer(answer, out, Link())
    assert QUERY.read_answer(BitReader(out.finish()), Link()) == answer
    pooled = QUERY.pool({"a": answer}, {})
    out = BitWriter()
    QUERY.write_pooled(pooled, out)
    assert QUERY.read_pooled(BitReader(out.finish())) == pooled
    out = BitWriter()
    QUERY.write_answer((((-1, 0), None, None),), out, Link())
    with pytest.raises(DecodeError):
        QUERY.read_answer(BitReader(out.finish()), Link())
