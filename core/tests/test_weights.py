"""Weights are terms that are never negative: their public intervals say so to the last digit."""

from __future__ import annotations

import pytest

from fedtmle_core.dictionary import Dictionary, Numeric
from fedtmle_core.graph import intervals
from fedtmle_core.leaves import Fold, Known, Number
from fedtmle_core.terms import ONE, Apply, Term, total

DECLARED = Dictionary((Numeric(name="x", low=-2.0, high=3.0), Numeric(name="w", low=0.0, high=0.7)))
FOLD, SHARE = Fold(5, 1, "", 2), Apply("expit", Number("x", 2) * 400.0)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (1.0 - FOLD, (0.0, 1.0)),
        (1.0 - SHARE, (0.0, None)),
        (total([ONE, SHARE, FOLD], [1.0, -0.5, -0.5]), (None, None)),
        (1.0 - FOLD - Known("x"), (-1.0, 1.0)),
        (SHARE * (1.0 - FOLD), (0.0, None)),
        (Number("w", 0) * 0.3, (0.0, None)),
        (total([Number("w", 0), Known("x")], [0.1, 0.2]), (0.0, None)),
        (Number("w", 0) - 0.1, (None, None)),
    ],
)
def test_ends_that_are_whole_are_exact(term: Term, expected: tuple[float | None, float | None]) -> None:
    found = intervals([term], DECLARED)[term]
    for end, known in zip(found, expected, strict=True):
        assert known is None or end == known


def test_a_difference_that_is_not_whole_may_be_negative() -> None:
    term = total([Number("w", 0), Number("w", 0)], [0.3, -0.3])
    low, high = intervals([term], DECLARED)[term]
    assert low < -0.21 < 0.21 < high
