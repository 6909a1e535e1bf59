"""Ranges of columns: interval arithmetic encloses what a silo computes, and refuses what it cannot bound."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedtmle.errors import InputError
from fedtmle.initial.design import Range, column_exponents, column_ranges, columns_of
from fedtmle.initial.syntax import parse_formula
from fedtmle.model.table import Factor, Table

LEVELS = {"site": ("a", "b", "c")}
NAMES = ("x", "y", "z")
ROWS = 50


def expression(rng: np.random.Generator, depth: int) -> str:
    """Return a random expression for I()."""
    if depth == 0 or rng.random() < 0.25:
        return str(rng.choice([*NAMES, "2", "0.5", "3", "1.7"]))
    kind = rng.choice(["+", "-", "*", "/", "**", "neg"])
    left = expression(rng, depth - 1)
    if kind == "neg":
        return f"(-({left}))"
    if kind == "**":
        return f"(({left})**{rng.choice(['2', '3', '0.5', '4', '(-1)', 'x'])})"
    return f"(({left}) {kind} ({expression(rng, depth - 1)}))"


def variable(rng: np.random.Generator) -> str:
    name = str(rng.choice(NAMES))
    forms = (
        name,
        f"log({name})",
        f"sqrt({name})",
        f"poly({name}, 3)",
        f"spline({name}, knots=[-1, 0.5, 2, 6])",
        f"bs({name}, knots=[1], low=-100, high=100)",
        "C(site)",
        f"I({name} * {expression(rng, 3)})",
        f"I({name} + {expression(rng, 2)})",
    )
    return str(rng.choice(forms))


def declared(rng: np.random.Generator) -> dict[str, Range]:
    ranges = {}
    for name in NAMES:
        low = float(rng.choice([-3.0, -0.5, 0.0, 0.25, 2.0, 40.0]))
        ranges[name] = (low, low + float(rng.choice([0.0, 0.5, 3.0, 50.0])))
    return ranges


def drawn(rng: np.random.Generator, ranges: dict[str, Range]) -> Table:
    """Return rows inside the ranges, with both ends of each range and 0 where it is inside."""
    numeric = {}
    for name, (low, high) in ranges.items():
        values = rng.uniform(low, high, ROWS)
        values[::10], values[5::10] = low, high
        values[3] = min(max(0.0, low), high)
        numeric[name] = values
    codes = rng.integers(0, 3, ROWS)
    return Table(n_rows=ROWS, numeric=numeric, factors={"site": Factor(codes=codes, levels=LEVELS["site"])})


def test_ranges_enclose_random_evaluations() -> None:
    rng = np.random.default_rng(1)
    evaluated = bounded = 0
    draws = 3_000
    for _ in range(draws):
        text = ":".join(variable(rng) for _ in range(rng.integers(1, 4)))
        formula, ranges = parse_formula(text), declared(rng)
        try:
            columns = column_ranges(formula, LEVELS, ranges)
        except InputError:
            continue
        bounded += 1
        exponents = column_exponents(formula, LEVELS, ranges)
        values = columns_of(formula, drawn(rng, ranges), LEVELS)
        for (low, high), power, column in zip(columns, exponents, values, strict=True):
            assert low <= column.min(), text
            assert column.max() <= high, text
            assert np.abs(column).max() < 2.0**power, text
            evaluated += len(column)
    assert bounded >= 0.4 * draws  # else the test says little
    assert evaluated >= 100_000


@pytest.mark.parametrize(
    ("text", "x", "expected"),
    [
        ("x", (-2.0, 5.0), (-2.0, 5.0)),
        ("I(x**2)", (-2.0, 5.0), (0.0, 25.0)),
        ("I(x**3)", (-2.0, 5.0), (-8.0, 125.0)),
        ("I(1/x)", (2.0, 4.0), (0.25, 0.5)),
        ("I(x - x)", (2.0, 4.0), (-2.0, 2.0)),  # each mention is looked at alone
        ("log(x)", (1.0, math.e), (0.0, 1.0)),
        ("sqrt(x)", (4.0, 9.0), (2.0, 3.0)),
        ("I(2**x)", (0.0, 3.0), (1.0, 8.0)),
        ("spline(x, knots=[0, 1, 2])", (-5.0, 0.0), (-5.0, 0.0)),
    ],
)
def test_ranges_by_hand(text: str, x: Range, expected: Range) -> None:
    _, (low, high), *_ = column_ranges(parse_formula(text), {}, {"x": x})
    assert low == pytest.approx(expected[0], abs=1e-14)
    assert high == pytest.approx(expected[1], rel=1e-14, abs=1e-14)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I(1/x)", "a denominator may be 0"),
        ("log(x)", "the range of 'x' reaches 0 or below"),
        ("sqrt(x)", "the range of 'x' reaches below 0"),
        ("I(x**0.5)", "a base that may be negative"),
        ("I(x**(-2))", "a base that may be 0"),
        ("I(10**(x*400))", "exceed the range of double precision"),
        ("bs(x, knots=[0], low=-0.5, high=1)", "goes beyond its low and high"),
    ],
)
def test_a_column_without_a_finite_range_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(InputError, match="has no finite range") as caught:
        column_ranges(parse_formula(text), {}, {"x": (-1.0, 1.0)})
    assert reason in str(caught.value)


def test_a_variable_without_a_declared_range_is_named() -> None:
    with pytest.raises(InputError, match="the range of 'dose' is not declared"):
        column_ranges(parse_formula("x + dose"), {}, {"x": (0.0, 1.0)})
