"""Bins of few people are joined with their neighbours, and nobody is left out."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from test_admit import JUDGED, PLAN_OF_FITS, fit
from test_blocks import A, X

from fedtmle_core.blocks import Cells, Moments
from fedtmle_core.cells import joined, shown
from fedtmle_core.plan import Question
from fedtmle_core.terms import ONE, product


def block(bins: int, groups: int = 1, sums: int = 1) -> Cells:
    return Cells(of=X, edges=tuple(map(float, range(bins - 1))), groups=(A,) * groups, sums=(ONE,) * sums)


def joined_counts(counts: list[int], floor: int) -> list[int]:
    totals = [number for count in counts for number in (count, 10 * count)]
    found = joined(block(len(counts)), totals, floor)
    assert found[1::2] == [10 * count for count in found[::2]]  # the sums go with the people
    return found[::2]


def test_bins_of_few_people_go_to_a_neighbour() -> None:
    assert joined_counts([7, 2, 9], 5) == [7, 0, 11]
    assert joined_counts([7, 2, 0], 5) == [9, 0, 0]
    assert joined_counts([3, 0, 4, 8], 5) == [0, 0, 7, 8]
    assert joined_counts([5, 0, 5], 5) == [5, 0, 5]
    assert joined_counts([0, 0], 5) == [0, 0]
    assert joined_counts([1, 2], 5) == [0, 0]  # a group that is too small by itself
    assert joined_counts([1, 2], 1) == [1, 2]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=9), st.integers(1, 9))
def test_each_shown_bin_is_empty_or_full_and_all_people_are_there(counts: list[int], floor: int) -> None:
    found = joined_counts(counts, floor)
    assert all(count == 0 or count >= floor for count in found)
    assert sum(found) == (sum(counts) if sum(counts) >= floor else 0)
    if all(count == 0 or count >= floor for count in counts):
        assert found == counts


def test_groups_are_joined_by_themselves_and_other_blocks_stay() -> None:
    cells = block(2, groups=2, sums=0)
    question = Question(blocks=(fit(), cells, Moments.of((A,)), cells))
    totals = [1, 2, 3, 4, 1, 6, 9, 8, 7, 1, 6, 0, 3]
    assert len(question.lanes(PLAN_OF_FITS)) == len(totals)
    assert shown(question, totals, JUDGED) == (1, 2, 3, 4, 0, 7, 9, 8, 7, 0, 7, 0, 0)


def test_sums_that_were_not_judged_are_multiples_of_what_two_people_change() -> None:
    """|x| is at most 5/8: two people change x x A by 25/32, and x A, which is judged, is exact."""
    question = Question(blocks=(Moments(columns=(product(X, A), X), products=((0,), (0, 1)), places=10),))
    step = 800
    for total in (0, 399, 400, 401, 1200, -1201, 123_456):
        exact, coarse = shown(question, (total, total), JUDGED)
        assert exact == total
        assert coarse == step * round(Fraction(total, step))
    named = JUDGED.with_named([product(X, A), X])
    assert shown(question, (401, 401), named) == (401, 401)


def test_a_sum_of_unjudged_columns_has_a_step_of_at_least_one() -> None:
    question = Question(blocks=(Moments(columns=(product(X, X),), products=((0,),), places=-4),))
    assert shown(question, (3,), JUDGED) == (3,)
