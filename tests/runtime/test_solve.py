"""`solve` says which argument is wrong, before a round is run."""

from __future__ import annotations

from typing import Any

import pytest

import fedtmle as ft

MEAN = ft.Mean(bounds=(0.0, 10.0))
GOOD: dict[str, Any] = {
    "problem": MEAN,
    "law": MEAN.start(5.0),
    "silos": {"a": [1.0, 2.0], "b": [6.0]},
    "algorithm": ft.Gradient(),
}


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [
        ("problem", ft.Mean, "problem: expected a target, such as ft.Mean(), not the class Mean: call it"),
        ("problem", "mean", "problem: expected a target, such as ft.Mean(), not something of type str"),
        ("algorithm", ft.Coded, "algorithm: expected an algorithm, such as ft.Coded(), not the class Coded"),
        ("law", 5.0, r"law: Mean expects a law of its own, such as problem.start(...), not something of type"),
        ("silos", [[1.0]], "silos: expected a mapping of at least one name to data"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_wrong_argument_is_named(argument: str, value: object, expected: str) -> None:
    with pytest.raises(ft.InputError) as caught:
        ft.solve(**GOOD | {argument: value})
    assert expected in str(caught.value)
    assert ft.solve(**GOOD).psi[0] == pytest.approx(3.0)
