"""Bins: what a silo hides, what is pooled, and both as bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.model.table import AbstractBins, Forecast, Group
from fedtmle.protocol.bins import BinsQuery, BinTotal, CellsCode, Holders, add_holders
from fedtmle.protocol.codes import BitReader, BitWriter, decode, encode, golomb_length, golomb_order
from fedtmle.protocol.guard import Guard
from fedtmle.protocol.policy import UNGUARDED
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


@dataclass
class Piece:
    """Rows of three groups, and whether these share them."""

    bins: np.ndarray
    values: np.ndarray
    is_shared: bool


class ThreeGroups(AbstractBins[Any]):
    """Three groups, of which a copy of its values makes each a group of its own."""

    label = "test"
    sizes = (3, 3, 3)
    exponents = (2, 4)
    terms = (((0,), (0, 1)), ((1,), (0, 1)), ((1,), (1, 1)))

    def groups(self, piece: Any) -> list[Group]:
        bins, values, is_shared = piece.bins, piece.values, piece.is_shared
        return [
            Group(bins=bins, values=values if is_shared else values.copy(), sensitive=values[k % 2], terms=t)
            for k, t in enumerate(self.terms)
        ]


QUERY = BinsQuery(bins=OneGroup(), n=100)


@pytest.mark.parametrize("is_sorted", [True, False])
def test_groups_that_share_their_values_have_the_sums_of_groups_alone(is_sorted: bool) -> None:
    rng = np.random.default_rng(3)
    bins = rng.integers(0, 3, 90).astype(np.uint8)
    bins = np.sort(bins) if is_sorted else bins
    values = rng.uniform(-2, 2, (2, 90))
    query = BinsQuery(bins=ThreeGroups(), n=100)
    together, apart = (
        query.answer(SimpleNamespace(evaluate=lambda work, piece=piece: work(piece)))
        for piece in (Piece(bins, values, shared) for shared in (True, False))
    )
    assert [[(cell.count, cell.units) for cell in group if cell] for group in together] == [
        [(cell.count, cell.units) for cell in group if cell] for group in apart
    ]
    for group, terms in zip(together, ThreeGroups.terms, strict=True):
        for b, cell in enumerate(group):
            assert cell is not None
            found = [unit / 2.0**shift for unit, shift in zip(cell.units, query._shifts, strict=True)]
            rows = values[:, bins == b]
            np.testing.assert_allclose(found, [np.prod(rows[list(term)], axis=0).sum() for term in terms])


def answered(local: Any, floor: int = 5, query: BinsQuery = QUERY) -> Any:
    """The answer as it leaves a silo with this smallest cell."""
    policy = replace(UNGUARDED, min_cell=floor)
    return Guard(policy).release(query, query.answer(local), 100)


class OnAScale(OneGroup):
    """The same bins, of which neighbouring ones may be joined."""

    on_a_scale = True


SCALE = BinsQuery(bins=OnAScale(), n=100)
is_joined = Premise("some bins are joined and some are not", at_least=0.1)


@is_joined
@settings(deadline=None)  # kernels are compiled at their first call
@given(
    st.lists(st.integers(0, 16), min_size=3, max_size=3)
    | st.permutations([1, 14, 15])  # a small bin beside two that can stand alone
    | st.permutations([3, 15, 16]),
    st.integers(2, 7),
    st.booleans(),
)
def test_joined_bins_are_enough_and_add_up_to_the_whole(
    counts: list[int], floor: int, sensitive: bool
) -> None:
    bins = [b for b, count in enumerate(counts) for _ in range(count)]
    values = [float(k % 2) for k in range(len(bins))]
    (told,) = answered(silo(bins, values, values if sensitive else None), floor, SCALE)
    total, events = sum(counts), int(sum(values))
    rarest = min(events, total - events) if sensitive else total
    if total and min(total, rarest) < floor:  # not even as one bin
        assert told == (None, None, None)
        return
    taken = [cell.count for cell in told]
    is_joined.holds(sum(map(bool, counts)) > sum(map(bool, taken)) > 1)
    assert sum(taken) == total
    assert sum(cell.units[0] for cell in told) == sum(
        cell.units[0] for cell in SCALE.answer(silo(bins, values))[0]
    )
    for count, cell in zip(counts, told, strict=True):
        events = cell.units[0] / (1 << SCALE._shifts[0])
        assert cell.count == 0 or cell.count >= floor
        assert not sensitive or cell.count == 0 or min(events, cell.count - events) >= floor
        assert cell.count == 0 or count > 0  # a sum is told at a bin that has people
        assert cell.holders is None  # they stay in the silo


def test_no_finer_joining_would_be_allowed() -> None:
    """Against all partitions of five bins, by brute force."""

    class FiveBins(OnAScale):
        sizes = (5,)

    query = BinsQuery(bins=FiveBins(), n=100)
    rng = np.random.default_rng(0)
    for _ in range(60):
        counts, floor = rng.integers(0, 9, size=5), int(rng.integers(1, 9))
        bins = np.repeat(np.arange(5), counts).tolist()
        (told,) = answered(silo(bins, [1.0] * len(bins)), floor, query)
        most = 0
        for chosen in itertools.product([False, True], repeat=4):
            cuts = [0, *(k + 1 for k in range(4) if chosen[k]), 5]
            cells = [counts[i:j].sum() for i, j in itertools.pairwise(cuts)]
            if all(cell == 0 or cell >= floor for cell in cells):
                most = max(most, sum(cell > 0 for cell in cells))
        assert sum(bool(cell and cell.count) for cell in told) == most


def test_a_few_people_are_told_with_their_larger_neighbour() -> None:
    (told,) = answered(silo([0] * 9 + [1] * 2 + [2] * 7, [0.5] * 18), 5, SCALE)
    assert [cell.count for cell in told] in ([11, 0, 7], [9, 0, 9])
    (told,) = answered(silo([0] * 2 + [2] * 7, [0.5] * 9), 5, SCALE)
    assert [cell.count for cell in told] == [0, 0, 9]


class OfLeavers(OneGroup):
    """Four bins of those who leave, and those who stay."""

    sizes = (5,)
    of_leavers = True


LEAVERS = BinsQuery(bins=OfLeavers(), n=100)
some_hide = Premise("some numbers are hidden and some but the first are not", at_least=0.3)


@some_hide
@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=5, max_size=5) | st.permutations([0, 1, 5, 6, 9]), st.integers(2, 5)
)
def test_numbers_left_are_right_and_none_tells_of_a_few(counts: list[int], floor: int) -> None:
    bins = [b for b, count in enumerate(counts) for _ in range(count)]
    (told,) = answered(silo(bins, [1.0] * len(bins)), floor, LEAVERS)
    shown = [k for k, cell in enumerate(told) if cell is not None]
    assert shown[0] == 0
    assert 4 not in shown  # who stays is counted with the last who leave
    some_hide.holds(1 < len(shown) < 4)
    taken = [0 if cell is None else cell.count for cell in told]
    for k in shown:
        assert sum(taken[k:]) == sum(counts[k:])
        assert sum(taken[k:]) == 0 or sum(taken[k:]) >= floor
    ends = [*shown, 4]
    leavers = [sum(counts[i:j]) for i, j in itertools.pairwise(ends)]
    if (
        len(shown) > 1
    ):  # who leaves between two numbers, and after the last, if those who ever leave are known
        assert all(count == 0 or count >= floor for count in leavers)
    finest = 1
    for chosen in itertools.product([False, True], repeat=3):
        cuts = [0, *(k + 1 for k in range(3) if chosen[k]), 4]
        parts = [sum(counts[i:j]) for i, j in itertools.pairwise(cuts)]
        left = parts[-1] + counts[4]
        if all(part == 0 or part >= floor for part in (*parts, left)):
            finest = max(finest, len(parts))
    assert len(shown) == finest


def test_a_few_who_leave_are_told_with_all_who_stay_or_not_at_all() -> None:
    (told,) = answered(silo([0] + [4] * 9, [0.5] * 10), 5, LEAVERS)
    assert [cell and cell.count for cell in told] == [10, None, None, None, None]
    (told,) = answered(silo([0] + [4] * 3, [0.5] * 4), 5, LEAVERS)
    assert told == (None,) * 5


def test_a_silo_discloses_all_arms_or_none() -> None:
    answers = {
        "a": answered(silo([0] * 6 + [1] * 7, [0.5] * 13)),
        "b": answered(silo([0] * 5 + [1] * 2 + [2] * 9, [0.25] * 16)),
    }
    assert answers["b"] == ((None, None, None),)
    (pooled,) = QUERY.pool(answers, {"a": 13, "b": 16})
    assert [(cell.silos, cell.count) for cell in pooled] == [(1, 6), (1, 7), (1, 0)]
    assert [cell.sums for cell in pooled] == [(3.0,), (3.5,), (0.0,)]


def test_a_sum_that_would_tell_of_a_few_is_hidden() -> None:
    outcome = [1.0] * 3 + [0.0] * 20 + [1.0] * 10 + [0.0] * 10
    assert answered(silo([0] * 23 + [1] * 20, outcome, outcome)) == ((None, None, None),)  # three events
    assert answered(silo([1] * 23 + [1] * 20, outcome, outcome)) != ((None, None, None),)


def test_the_holders_of_the_rarest_value_are_counted_where_there_are_few_values() -> None:
    def rarest(values: np.ndarray) -> int:
        (holders,) = held = [Holders()]
        add_holders(held, values, np.zeros(len(values), dtype=np.uint8))
        return holders.rarest(len(values))

    assert rarest(np.ones(50)) == 0  # of all alike, everyone's is told
    assert rarest(np.arange(50.0)) == 50


def test_messages_round_trip_and_garbage_is_refused() -> None:
    answer = answered(silo([0] * 6 + [1] * 7, [0.1] * 13))
    assert decode(QUERY.answer_code, encode(QUERY.answer_code, answer)) == answer
    pooled = QUERY.pool({"a": answer}, {"a": 13})
    assert decode(QUERY.pooled_code, encode(QUERY.pooled_code, pooled)) == pooled
    negative = ((BinTotal(count=-1, units=(0,)), None, None),)
    with pytest.raises(DecodeError):
        decode(QUERY.answer_code, encode(QUERY.answer_code, negative))


@pytest.mark.parametrize("places", [None, (6, 6), (8, 3), (2, 11)])
@pytest.mark.parametrize("forecasts", [((0, 0), (1, 0)), (None, (1, 1)), ((0, 0), None)])
@given(
    cells=st.lists(
        st.tuples(st.integers(0, 985), st.integers(-(2**30), 2**30), st.integers(-5, 5)), max_size=9
    )
)
def test_cells_come_back_as_they_were_written(
    forecasts: tuple[Forecast, ...], places: tuple[int, ...] | None, cells: list[tuple[int, int, int]]
) -> None:
    code = CellsCode(largest=(985, 2**30, 5), places=places, forecasts=forecasts)
    out, bins = BitWriter(), [i % 3 for i in range(len(cells))]
    code.write(bins, cells, out)
    bits = BitReader(out.finish())
    assert code.read(bins, bits) == cells
    bits.finish()


@pytest.mark.parametrize("cell", [(-1, 0), (101, 0), (3, 401), (3, -401)])
def test_a_cell_out_of_its_range_is_refused(cell: tuple[int, int]) -> None:
    code = CellsCode(largest=(100, 400), places=(2,), forecasts=((0, 0),))
    out = BitWriter()
    code.write([0], [cell], out)
    with pytest.raises(DecodeError):
        code.read([0], BitReader(out.finish()))


def test_what_forecasts_tell_costs_one_bit() -> None:
    """Two arms and three binary covariates: x^2 is x, H is as before, and H x is x times the mean of H."""
    forecasts = ((0, 0), (1, 0), None, (1, 3))
    cells = [(80, x << 8, x << 12, 160 << 4, 2 * x << 8) for x in (20, 30, 40)]
    code = CellsCode(largest=(985, *(2**30,) * 4), places=(8, 12, 4, 8), forecasts=forecasts)
    out, orders = BitWriter(), 5 * 5
    code.write([0, 0, 0], cells, out)
    told = {80: [80, 0, 0], 160 << 4: [160 << 4, 0, 0]}
    expected = sum(golomb_length(steps, golomb_order(steps)) for steps in told.values())
    x_steps = [(cell[0] << 8) - cell[1] for cell in cells]
    expected += golomb_length([-step for step in x_steps], golomb_order([-step for step in x_steps])) + 6
    assert out.finish().length == orders + expected


hidden_later = Premise("a bin that is hidden was shown after the first", at_least=0.3)


@hidden_later
@settings(deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=5, max_size=5) | st.permutations([0, 1, 5, 6, 9]),
    st.sets(st.integers(1, 3), min_size=1) | st.sets(st.integers(0, 3)),
    st.integers(0, 3),
)
def test_numbers_left_are_right_where_all_silos_show_them(
    counts: list[int], hidden: set[int], floor: int
) -> None:
    """A bin that no silo is to show is counted with an earlier one."""
    rows = silo([b for b, count in enumerate(counts) for _ in range(count)], [1.0] * sum(counts))
    (shown,) = answered(rows, floor, LEAVERS)
    (kept,) = answered(rows, floor, LEAVERS.hiding(hidden))
    assert [cell is not None for cell in kept] == [
        cell is not None and k not in hidden and 0 not in hidden for k, cell in enumerate(shown)
    ]
    taken = [[0 if cell is None else cell.count for cell in cells] for cells in (shown, kept)]
    hidden_later.holds(any(k and shown[k] for k in hidden))
    for k, cell in enumerate(kept):
        assert cell is None or sum(taken[1][k:]) == sum(taken[0][k:])


@dataclass(frozen=True)
class Levels(AbstractBins[Any]):
    """The levels of a category, each a group with one bin for each of two arms."""

    levels: int

    label = "levels"
    exponents = (0,)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2,) * self.levels

    @property
    def partitions(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.levels)),)

    def groups(self, piece: Any) -> list[Group]:
        arm, level = piece.bins, piece.values
        indicators = [(level == k).astype(float) for k in range(self.levels)]
        return [Group(bins=arm, values=x[None], sensitive=x) for x in indicators]


complemented = Premise("some levels are hidden and some are shown", at_least=0.2)


@complemented
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=3, max_size=5), st.integers(2, 6))
def test_hidden_levels_have_enough_people_together_in_each_arm(
    counts: list[tuple[int, int]], floor: int
) -> None:
    """Their number is what the arm has beyond the levels that are shown."""
    arm = np.array([a for own in counts for a in (0, 1) for _ in range(own[a])], dtype=np.uint8)
    level = np.array([k for k, own in enumerate(counts) for _ in range(sum(own))], dtype=float)
    rows = SimpleNamespace(evaluate=lambda work: work(Piece(arm, level, is_shared=True)))
    told = answered(rows, floor, BinsQuery(bins=Levels(len(counts)), n=200))
    hidden = [own for own, cells in zip(counts, told, strict=True) if None in cells]
    complemented.holds(0 < len(hidden) < len(counts))
    if 0 < len(hidden) < len(counts):
        assert min(sum(own[a] for own in hidden) for a in (0, 1)) >= floor
    unit = 2 ** BinsQuery(bins=Levels(3), n=200)._shifts[0]
    for own, cells in zip(counts, told, strict=True):
        assert None in cells or tuple(cell.units[0] for cell in cells if cell) == tuple(n * unit for n in own)
