"""What of an attrition people other than the owner see."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fedtmle.text.certificate import render
from fedtmle.trials.cohort import ArmCounts, Attrition, document_of
from tests.trials.test_compile import BASE


def attrition(people: list[int], arms: list[tuple[int, int, int]], silo: str = "north") -> Attrition:
    return Attrition(
        silo=silo,
        steps=tuple(f"step number {k}" for k in range(len(people))),
        people=tuple(people),
        arms=tuple(
            ArmCounts(name=f"arm {k}", people=n, events=events, unknown=unknown)
            for k, (n, events, unknown) in enumerate(arms)
        ),
    )


def test_small_losses_are_not_shown() -> None:
    view = attrition([1000, 998, 500, 500, 497], [(300, 40, 0), (197, 3, 20)]).for_others(5)
    # 500 and 497 differ by 3, and so do not 998 and 497; 1000 and 998 differ by 2.
    assert view.people == (None, 998, None, None, 497)
    assert view.arms[0] == ArmCounts(name="arm 0", people=300, events=40, unknown=0)
    assert view.arms[1] == ArmCounts(name="arm 1", people=197, events=None, unknown=None)
    assert view.floor == 5


def test_an_outcome_that_everybody_has_is_not_shown() -> None:
    view = attrition([200], [(100, 0, 0), (100, 100, 0)]).for_others(5)
    assert [(arm.people, arm.events) for arm in view.arms] == [(100, None), (100, None)]


def test_an_arm_of_few_hides_the_other() -> None:
    view = attrition([100], [(96, 50, 0), (4, 2, 0)]).for_others(5)
    assert [arm.people for arm in view.arms] == [None, None]


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=8).map(lambda counts: sorted(counts, reverse=True)),
    st.integers(1, 30),
)
def test_every_number_that_can_be_derived_is_0_or_at_least_the_floor(people: list[int], floor: int) -> None:
    view = attrition(people, [(people[-1], 0, 0)]).for_others(floor)
    shown = [count for count in view.people if count is not None]
    assert all(count == 0 or count >= floor for count in shown)
    assert all(gap == 0 or gap >= floor for gap in (a - b for a, b in pairwise(shown)))
    assert all(mine in (None, count) for mine, count in zip(view.people, people, strict=True))
    if people[-1] == 0 or people[-1] >= floor:
        assert view.people[-1] == people[-1]


def test_the_text_adds_up_what_is_shown() -> None:
    views = {
        "north": attrition([100, 60], [(30, 10, 0), (30, 12, 5)]).for_others(5),
        "south": attrition([100, 98], [(50, 10, 0), (48, 3, 5)], "south").for_others(5),
    }
    text = render(document_of(BASE, views))
    assert "step number 0  100+    100      -" in text
    assert "step number 1   158     60     98" in text
    assert "arm 1      78     12+      13+       5+" in text
    assert "fewer than 5 people are not shown" in text
    many = {f"silo-{k}": attrition([100, 60], [(30, 10, 0), (30, 12, 5)], f"silo-{k}") for k in range(20)}
    text = render(document_of(BASE, many))
    assert "silo-3" not in text
    assert "2,000" in text
    assert max(map(len, text.splitlines())) <= 80
