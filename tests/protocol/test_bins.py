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
from fedtmle.model.statistics import AbstractBins, Group
from fedtmle.protocol.bins import BinsQuery, BinTotal, CellsCode, shown, smallest_cell
from fedtmle.protocol.codes import BitReader, BitWriter, decode, encode
from fedtmle.protocol.guard import Guard, Policy
from tests.premise import Premise


def silo(bins: list[int], values: list[float], sensitive: list[float] | None = None) -> Any:
    group = Group(
        bins=np.array(bins, dtype=np.uint8),
        values=np.array([values]),
        sensitive=None if sensitive is None else np.array(sensitive),
    )
    return SimpleNamespace(evaluate=lambda function: function(group))


class OneGroup(AbstractBins[Group]):
    """The rows are a group themselves, in three bins, with one value each below 4."""

    label = "test"
    sizes = (3,)
    exponents = (2,)

    def groups(self, piece: Group) -> list[Group]:
        return [piece]


QUERY = BinsQuery(bins=OneGroup(), n=100)


def answered(local: Any, floor: int = 5) -> Any:
    """The answer as it leaves a silo with this smallest cell."""
    policy = replace(Policy.unguarded(), min_cell=floor)
    return Guard(policy).release(QUERY, QUERY.answer(local), 100)


is_partly_hidden = Premise("some taken bins are told and others are hidden", at_least=0.15)


@is_partly_hidden
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
    is_partly_hidden.holds(None in told and any(told))
    for count, cell, may in zip(counts, told, tellable, strict=True):
        assert cell is None or cell == count
        assert cell is None or cell == 0 or (cell >= floor and may)
        assert cell is not None or count > 0
    hidden = sum(counts) - sum(cell or 0 for cell in told)
    assert hidden == 0 or hidden >= floor or all(cell in (None, 0) for cell in told)


def test_pooled_bins_are_sums_over_the_silos_that_tell() -> None:
    answers = {
        "a": answered(silo([0] * 6 + [1] * 7, [0.5] * 13)),
        "b": answered(silo([0] * 5 + [1] * 2 + [2] * 9, [0.25] * 16)),
    }
    (disclosed,) = answers["b"]
    assert [cell and cell.count for cell in disclosed] == [None, None, 9]  # 5 would disclose the 2
    (pooled,) = QUERY.pool(answers, {"a": 13, "b": 16})
    assert [(cell.silos, cell.count) for cell in pooled] == [(1, 6), (1, 7), (2, 9)]
    assert [cell.sums for cell in pooled] == [(3.0,), (3.5,), (2.25,)]


def test_a_sum_that_would_tell_of_a_few_is_hidden() -> None:
    outcome = [1.0] * 3 + [0.0] * 20 + [1.0] * 10 + [0.0] * 10
    (told,) = answered(silo([0] * 23 + [1] * 20, outcome, outcome))
    assert told[0] is None  # three events
    assert told[1] is not None
    assert smallest_cell(np.ones(50)) == 0  # of all alike, everyone's is told
    assert smallest_cell(np.arange(50.0)) == 50


def test_messages_round_trip_and_garbage_is_refused() -> None:
    answer = answered(silo([0] * 6 + [1] * 7, [0.1] * 13))
    assert decode(QUERY.answer_code, encode(QUERY.answer_code, answer)) == answer
    pooled = QUERY.pool({"a": answer}, {"a": 13})
    assert decode(QUERY.pooled_code, encode(QUERY.pooled_code, pooled)) == pooled
    negative = ((BinTotal(count=-1, units=(0,)), None, None),)
    with pytest.raises(DecodeError):
        decode(QUERY.answer_code, encode(QUERY.answer_code, negative))


@pytest.mark.parametrize("places", [None, 6])
@given(
    cells=st.lists(
        st.tuples(st.integers(0, 985), st.integers(-(2**30), 2**30), st.integers(-5, 5)), max_size=9
    )
)
def test_cells_come_back_as_they_were_written(places: int | None, cells: list[tuple[int, int, int]]) -> None:
    code = CellsCode(largest=(985, 2**30, 5), places=places)
    out = BitWriter()
    code.write(cells, out)
    bits = BitReader(out.finish())
    assert code.read(len(cells), bits) == cells
    bits.finish()


@pytest.mark.parametrize("cell", [(-1, 0), (101, 0), (3, 401), (3, -401)])
def test_a_cell_out_of_its_range_is_refused(cell: tuple[int, int]) -> None:
    code = CellsCode(largest=(100, 400), places=2)
    out = BitWriter()
    code.write([cell], out)
    with pytest.raises(DecodeError):
        code.read(1, BitReader(out.finish()))
