"""Bins: what a silo hides, what is pooled, and both as bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.model.statistics import AbstractBins, Group
from fedtmle.protocol.bins import BinsQuery, BinTotal, SeparableQuery, smallest_cell
from fedtmle.protocol.codes import decode, encode
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


def separable(local: Any, floor: int) -> Any:
    policy = replace(Policy.unguarded(), min_cell=floor)
    return Guard(policy).release(SEPARABLE, SEPARABLE.answer(local), 100)


SEPARABLE = SeparableQuery(bins=OneGroup())
is_merged = Premise("some bins are merged and some are not", at_least=0.1)


@is_merged
@settings(deadline=None)  # kernels are compiled at their first call
@given(
    st.lists(st.lists(st.integers(0, 16), min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(2, 7),
    st.booleans(),
)
def test_merged_bins_are_enough_at_every_silo_and_add_up_to_the_whole(
    counts: list[list[int]], floor: int, sensitive: bool
) -> None:
    locals_ = []
    for own in counts:
        bins = [b for b, count in enumerate(own) for _ in range(count)]
        values = [float(k % 2) for k in range(len(bins))]
        locals_.append(silo(bins, values, values if sensitive else None))
    pooled = SEPARABLE.pool({str(k): separable(local, floor) for k, local in enumerate(locals_)}, {})
    query = SEPARABLE.merged(pooled, 100)
    ((*firsts,),) = query.partition
    is_merged.holds(1 < len(firsts) < 3)
    guard = Guard(replace(Policy.unguarded(), min_cell=floor))
    answers = {str(k): guard.release(query, query.answer(local), 100) for k, local in enumerate(locals_)}
    whole = 0
    for own, (cells,) in zip(counts, answers.values(), strict=True):
        merged = [sum(own[i:j]) for i, j in itertools.pairwise((*firsts, 3))]
        shown = [cell and cell.count for cell in cells]
        assert shown in (merged, [None] * len(firsts))  # all of a silo's bins, or none
        events = [sum(k % 2 for k in range(*place)) for place in _places(own, firsts)]
        for count, event, cell in zip(merged, events, cells, strict=True):
            if cell is not None and count:
                assert count >= floor
                assert not sensitive or min(event, count - event) >= floor
        # A silo withholds the group only if it may not even show it as one bin.
        total, of_all = sum(own), sum(k % 2 for k in range(sum(own)))
        rare = min(of_all, total - of_all) if sensitive else total
        assert (shown == merged) == (total == 0 or (total >= floor and rare >= floor))
        whole += total if shown == merged else 0
    (pooled_bins,) = query.pool(answers, {})
    assert sum(cell.count for cell in pooled_bins) == whole


def _places(own: list[int], firsts: list[int]) -> list[tuple[int, int]]:
    starts = [0, *itertools.accumulate(own)]
    return [(starts[i], starts[j]) for i, j in itertools.pairwise((*firsts, 3))]


def test_no_finer_merging_would_be_allowed() -> None:
    """Against all partitions of five bins, by brute force."""

    class FiveBins(OneGroup):
        sizes = (5,)

    query = SeparableQuery(bins=FiveBins())
    rng = np.random.default_rng(0)
    for _ in range(60):
        counts = rng.integers(0, 9, size=(2, 5))
        floor = int(rng.integers(1, 9))
        guard = Guard(replace(Policy.unguarded(), min_cell=floor))
        answers = {}
        for k, own in enumerate(counts):
            bins = np.repeat(np.arange(5), own).tolist()
            answers[str(k)] = guard.release(query, query.answer(silo(bins, [1.0] * len(bins))), 100)
        ((*firsts,),) = query.partition(query.pool(answers, {}))
        able = [own for own in counts if own.sum() == 0 or own.sum() >= floor]
        sizes = []
        for chosen in itertools.product([False, True], repeat=4):
            cuts = [0, *(k + 1 for k in range(4) if chosen[k]), 5]
            cells = [own[i:j].sum() for own in able for i, j in itertools.pairwise(cuts)]
            if all(cell == 0 or cell >= floor for cell in cells):
                sizes.append(len(cuts) - 1)
        assert len(firsts) == max(sizes)


def test_groups_of_one_family_are_merged_alike() -> None:
    class Pair(AbstractBins[Any]):
        label = "pair"
        sizes = (3, 3)
        families = (0, 0)
        exponents = ()

        def groups(self, piece: Any) -> list[Group]:
            return [Group(bins=np.array(bins, dtype=np.uint8)) for bins in piece]

    query = SeparableQuery(bins=Pair())
    local: Any = SimpleNamespace(
        evaluate=lambda f: f(([0] * 9 + [1] * 9 + [2] * 9, [0] * 9 + [1] * 2 + [2] * 9))
    )
    answer = Guard(replace(Policy.unguarded(), min_cell=5)).release(query, query.answer(local), 100)
    first, second = query.partition(query.pool({"a": answer}, {}))
    assert first == second
    assert len(first) == 2


def test_a_silo_discloses_all_bins_of_a_group_or_none() -> None:
    answers = {
        "a": answered(silo([0] * 6 + [1] * 7, [0.5] * 13)),
        "b": answered(silo([0] * 5 + [1] * 2 + [2] * 9, [0.25] * 16)),
    }
    assert answers["b"] == ((None, None, None),)
    (pooled,) = QUERY.pool(answers, {})
    assert [(cell.silos, cell.count) for cell in pooled] == [(1, 6), (1, 7), (1, 0)]
    assert [cell.sums for cell in pooled] == [(3.0,), (3.5,), (0.0,)]


def test_a_sum_that_would_tell_of_a_few_is_hidden() -> None:
    outcome = [1.0] * 3 + [0.0] * 20 + [1.0] * 10 + [0.0] * 10
    assert answered(silo([0] * 23 + [1] * 20, outcome, outcome)) == ((None, None, None),)  # three events
    assert answered(silo([1] * 23 + [1] * 20, outcome, outcome)) != ((None, None, None),)
    assert smallest_cell(np.ones(50)) == 0  # of all alike, everyone's is told
    assert smallest_cell(np.arange(50.0)) == 50


def test_messages_round_trip_and_garbage_is_refused() -> None:
    answer = answered(silo([0] * 6 + [1] * 7, [0.1] * 13))
    assert decode(QUERY.answer_code, encode(QUERY.answer_code, answer)) == answer
    pooled = QUERY.pool({"a": answer}, {})
    assert decode(QUERY.pooled_code, encode(QUERY.pooled_code, pooled)) == pooled
    negative = ((BinTotal(count=-1, units=(0,)), None, None),)
    with pytest.raises(DecodeError):
        decode(QUERY.answer_code, encode(QUERY.answer_code, negative))
