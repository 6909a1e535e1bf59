"""The count of premises fails a test whose premise seldom holds, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.premise import Premise


def drawn(premise: Premise, held: int, draws: int) -> None:
    with premise:
        for draw in range(draws):
            premise.holds(draw < held)


@pytest.mark.parametrize(("held", "draws"), [(0, 10), (4, 10), (0, 0), (499, 1000)])
def test_a_premise_that_seldom_holds_fails(held: int, draws: int) -> None:
    with pytest.raises(AssertionError, match=rf"'it rains' held in {held} of {draws} draws .*at least 50%"):
        drawn(Premise("it rains", at_least=0.5), held, draws)


@pytest.mark.parametrize(("held", "draws"), [(5, 10), (10, 10), (1, 1)])
def test_a_premise_that_holds_passes(held: int, draws: int) -> None:
    drawn(Premise("it rains", at_least=0.5), held, draws)


def test_the_error_of_the_test_itself_comes_first() -> None:
    with pytest.raises(ZeroDivisionError), Premise("it rains", at_least=0.5):
        raise ZeroDivisionError


@pytest.mark.parametrize("at_least", [0, -0.1, 1.1])
def test_a_share_of_nothing_is_refused(at_least: float) -> None:
    with pytest.raises(ValueError, match="at_least"):
        Premise("it rains", at_least=at_least)


def test_all_draws_of_hypothesis_are_counted_together_and_anew_each_time() -> None:
    small = Premise("the number is small", at_least=0.5)

    @small
    @given(st.integers(0, 99))
    @settings(max_examples=60, database=None, derandomize=True)
    def property_of(number: int) -> None:
        small.holds(number < limit)

    limit = 90
    for _ in range(2):
        property_of()
        assert 30 <= small.draws <= 100
    limit = 2
    with pytest.raises(AssertionError, match="the number is small"):
        property_of()


decorated = Premise("pytest passes its arguments on", at_least=1.0)


@decorated
@pytest.mark.parametrize("word", ["a", "b"])
@given(number=st.integers())
@settings(max_examples=5)
def test_a_decorated_test_keeps_its_parameters(word: str, number: int) -> None:
    decorated.holds(word in "ab" and isinstance(number, int))
