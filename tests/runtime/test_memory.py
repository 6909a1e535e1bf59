"""The rule of rosters beside a longhand one."""

from __future__ import annotations

import itertools
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.studies.memory import isolated
from tests.premise import Premise


def solved(rosters: list[frozenset[str]], silos: set[str]) -> bool:
    """Longhand: whether some combination of the rosters is zero outside ``silos`` and not zero inside."""
    names = sorted(frozenset().union(*rosters))
    outside = [[Fraction(int(n in roster)) for n in names if n not in silos] for roster in rosters]
    inside = [[Fraction(int(n in roster)) for n in names if n in silos] for roster in rosters]
    return any(any(_combined(inside, weights)) for weights in _null_space(outside))


def _combined(rows: list[list[Fraction]], weights: list[Fraction]) -> list[Fraction]:
    return [
        sum((w * x for w, x in zip(weights, column, strict=True)), Fraction(0))
        for column in zip(*rows, strict=True)
    ]


def _null_space(rows: list[list[Fraction]]) -> list[list[Fraction]]:
    """The combinations of rows that vanish, by elimination beside the identity."""
    count = len(rows)
    extended = [row + [Fraction(int(i == j)) for j in range(count)] for i, row in enumerate(rows)]
    rank, width = 0, len(rows[0])
    for column in range(width):
        pivot = next((i for i in range(rank, count) if extended[i][column]), None)
        if pivot is None:
            continue
        extended[rank], extended[pivot] = extended[pivot], extended[rank]
        for i in range(rank + 1, count):
            share = extended[i][column] / extended[rank][column]
            extended[i] = [x - share * y for x, y in zip(extended[i], extended[rank], strict=True)]
        rank += 1
    return [row[width:] for row in extended[rank:]]


is_solved = Premise("some silos' totals follow", at_least=0.2)


@is_solved
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=3), min_size=1, max_size=4), st.integers(0, 2)
)
def test_the_rank_rule_finds_what_elimination_finds(rosters: list[frozenset[str]], colluders: int) -> None:
    names = sorted(frozenset().union(*rosters))
    expected = [
        chosen
        for size in range(1, colluders + 2)
        for chosen in itertools.combinations(names, size)
        if solved(rosters, set(chosen))
    ]
    found = isolated(rosters, colluders)
    is_solved.holds(found is not None)
    assert found == (expected[0] if expected else None)
