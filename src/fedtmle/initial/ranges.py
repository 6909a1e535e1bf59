"""Ranges of a formula's columns, from the declared ranges of its variables: interval arithmetic.

A study that declares the range of every variable knows public bounds of every column of its models, so no
silo is asked for the size of its values. Every operation is monotone in each argument on the pieces that are
looked at, and so is rounding to the nearest double: the corners of a box, computed as a silo computes its
rows, enclose all rows. Powers and logarithms are not correctly rounded everywhere; their ends move outward
by a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import product

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.design import DesignPart, Levels, design_columns, natural_spline
from fedtmle.initial.syntax import (
    Arithmetic,
    BSpline,
    Categorical,
    Chain,
    Computed,
    Formula,
    Name,
    NaturalSpline,
    Negative,
    Number,
    Power,
    Transformed,
)

Range = tuple[float, float]  # the least and the largest value
Ranges = Mapping[str, Range]  # ranges of numeric columns, by name

SLACK = 4  # units in the last place by which an elementary function may err
UNIT: Range = (0.0, 1.0)
ONE: Range = (1.0, 1.0)


def column_ranges(formula: Formula, levels: Levels, ranges: Ranges) -> tuple[Range, ...]:
    """Return the range of each column of the formula's design, in its order.

    ``ranges`` has the declared range of every numeric column that the formula names. A column that these do
    not bound, such as ``I(1/x)`` where x may be 0, is an `InputError` that names it.
    """
    missing = [name for name in formula.numeric_names if name not in ranges]
    if missing:
        raise InputError(f"the range of {', '.join(map(repr, missing))} is not declared")
    return tuple(
        reduce(_times, (part_range(part, ranges) for part in column), ONE)
        for column in design_columns(formula, levels)
    )


def column_exponents(formula: Formula, levels: Levels, ranges: Ranges) -> tuple[int, ...]:
    """Return for each column the least e with every value below 2^e in magnitude."""
    return tuple(range_exponent(each) for each in column_ranges(formula, levels, ranges))


def range_exponent(bounds: Range) -> int:
    """Return the least e with every value of a range below 2^e in magnitude."""
    return math.frexp(max(abs(bounds[0]), abs(bounds[1])))[1]


def part_range(part: DesignPart, ranges: Ranges) -> Range:
    """Return the range of one variable's column."""
    label = part.label
    match part.variable:
        case Categorical():
            return UNIT
        case Name(name):
            return ranges[name]
        case Computed(expression):
            return _arithmetic(expression, ranges, label)
        case Transformed("log", name):
            low, high = ranges[name]
            if not low > 0:
                raise _unbounded(label, f"the range of '{name}' reaches 0 or below")
            return _outward((math.log(low), math.log(high)), label)
        case Transformed(_, name):
            low, high = ranges[name]
            if low < 0:
                raise _unbounded(label, f"the range of '{name}' reaches below 0")
            return math.sqrt(low), math.sqrt(high)
        case NaturalSpline(name, knots):
            ends = natural_spline(
                np.array(ranges[name]), knots, part.index
            )  # convex, and 0 at the left: it rises
            return _outward((float(ends[0]), float(ends[1])), label)
        case BSpline(name, _, low, high, _):
            declared = ranges[name]
            if declared[0] < low or declared[1] > high:
                raise _unbounded(label, f"the range of '{name}' goes beyond its low and high")
            return _outward(UNIT, label)
        case _:
            raise AssertionError(f"{label}: a variable of another kind")


def _arithmetic(expression: Arithmetic, ranges: Ranges, label: str) -> Range:
    match expression:
        case Number(value):
            return value, value
        case Name(name):
            return ranges[name]
        case Negative(operand):
            low, high = _arithmetic(operand, ranges, label)
            return -high, -low
        case Power(base, raised_to):
            return _power(_arithmetic(base, ranges, label), _arithmetic(raised_to, ranges, label), label)
        case Chain(first, rest):
            result = _arithmetic(first, ranges, label)
            for operator, operand in rest:
                result = _OPERATIONS[operator](result, _arithmetic(operand, ranges, label), label)
            return result


def _plus(left: Range, right: Range, label: str) -> Range:
    return _finite((left[0] + right[0], left[1] + right[1]), label)


def _minus(left: Range, right: Range, label: str) -> Range:
    return _finite((left[0] - right[1], left[1] - right[0]), label)


def _product(left: Range, right: Range, label: str) -> Range:
    return _finite(_times(left, right), label)


def _quotient(left: Range, right: Range, label: str) -> Range:
    if right[0] <= 0 <= right[1]:
        raise _unbounded(label, "a denominator may be 0")
    return _finite(_hull(a / b for a, b in product(left, right)), label)


_OPERATIONS: dict[str, Callable[[Range, Range, str], Range]] = {
    "+": _plus,
    "-": _minus,
    "*": _product,
    "/": _quotient,
}


def _power(base: Range, raised_to: Range, label: str) -> Range:
    """Return the range of base ** exponent.

    A power is monotone in each argument while the base stays positive. An integer exponent also allows a
    base of either sign: an even one turns at 0.
    """
    is_integer = raised_to[0] == raised_to[1] and raised_to[0].is_integer()
    if base[0] < 0 and not is_integer:
        raise _unbounded(label, "a power that is not a fixed integer has a base that may be negative")
    if base[0] <= 0 <= base[1] and raised_to[0] < 0:
        raise _unbounded(label, "a negative power has a base that may be 0")
    corners = [_raised(b, e) for b, e in product(base, raised_to)]
    if base[0] < 0 < base[1] and is_integer and raised_to[0] % 2 == 0:
        corners.append(_raised(0.0, raised_to[0]))
    low, high = _outward(_hull(corners), label)
    return (max(low, 0.0), high) if base[0] >= 0 or (is_integer and raised_to[0] % 2 == 0) else (low, high)


def _raised(base: float, exponent: float) -> float:
    with np.errstate(all="ignore"):  # beyond the range of a double: refused as unbounded
        return float(np.float64(base) ** np.float64(exponent))


def _times(left: Range, right: Range) -> Range:
    return _hull(a * b for a, b in product(left, right))


def _hull(corners: Iterable[float]) -> Range:
    values = list(corners)
    return min(values), max(values)


def _outward(bounds: Range, label: str) -> Range:
    low, high = bounds
    for _ in range(SLACK):
        low, high = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    return _finite((low, high), label)


def _finite(bounds: Range, label: str) -> Range:
    if not (math.isfinite(bounds[0]) and math.isfinite(bounds[1])):
        raise _unbounded(label, "its values may exceed the range of double precision")
    return bounds


def _unbounded(label: str, reason: str) -> InputError:
    return InputError(
        f"{label} has no finite range: {reason}; narrow the declared range of its variables, or write the "
        "term in another way"
    )
