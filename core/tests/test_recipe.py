"""Recipes: each column is there when it is needed, once, and is let go after its last use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from graphs import TERMS, sheet
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle_core.evaluate import Workspace
from fedtmle_core.leaves import Level, Number
from fedtmle_core.recipe import recipe
from fedtmle_core.terms import Apply, Kept, Term, product

X, A = Number("x", 3), Level("a", 1)
PEOPLE = sheet(40)


@given(st.lists(st.lists(TERMS, max_size=3), min_size=1, max_size=4))
@settings(max_examples=200)
def test_groups_have_the_values_of_their_terms(groups: list[list[Term]]) -> None:
    how = recipe(tuple(map(tuple, groups)), frozenset())
    kept = how.at_hand({})
    for terms, values in zip(groups, how.values(kept, slice(0, 40), PEOPLE), strict=True):
        assert len(values) == len(terms)
        for term, column in zip(terms, values, strict=True):
            np.testing.assert_array_equal(column, Workspace(PEOPLE).columns([term])[0])
    computed = [step.term for step in how.steps]
    assert len(computed) == len(set(computed))
    freed = [place for step in how.steps for place in step.frees]
    freed += [place for group in how.groups for place in group.frees]
    assert sorted(freed) == list(range(len(how.steps)))


def test_a_long_product_holds_few_columns() -> None:
    """Groups of a running product need the one before, not all of them."""
    terms: list[Term] = [Apply("expit", X)]
    for k in range(50):
        terms.append(product(terms[-1], Apply("expit", (0.1 * k) * X)))
    assert recipe(tuple((term,) for term in terms), frozenset()).most <= 5
    assert recipe((tuple(terms),), frozenset()).most > 50


def test_a_kept_column_stands_for_all_that_it_is_made_of() -> None:
    term = Kept(Apply("expit", X))
    how = recipe(((product(term, A),),), frozenset({term}))
    assert X not in [step.term for step in how.steps]
    column = np.linspace(0.0, 1.0, 40)
    ((values,),) = how.values(how.at_hand({term: column}), slice(10, 20), PEOPLE.part(slice(10, 20)))
    np.testing.assert_array_equal(values, column[10:20] * Workspace(PEOPLE).columns([A])[0][10:20])


def test_kept_columns_are_computed_in_one_pass() -> None:
    """Each of a chain of kept columns is made of the one before; no part is computed twice."""
    calls: list[int] = []

    @dataclass(frozen=True, eq=False)
    class Counting(Term):
        name: str

        def interval(self, *_):
            return 0.0, 1.0

        def values(self, _, rows):
            calls.append(rows.n)
            return np.full(rows.n, 0.5)

    chain: list[Term] = [Kept(Counting("start"))]
    for _ in range(20):
        chain.append(Kept(product(chain[-1], Apply("expit", chain[-1]))))
    workspace = Workspace(PEOPLE)
    workspace._keep(chain)
    assert calls == [40]
    assert list(workspace.kept) == chain
