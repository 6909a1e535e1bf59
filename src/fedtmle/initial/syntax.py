"""The syntax tree of a study's formula: frozen values whose text parses back to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

BARE_NAME = re.compile(r"[^\W\d][\w.]*")
RESERVED = frozenset({"lambda"})  # `lambda: x` would otherwise read as an interaction


def _plain(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _listed(numbers: tuple[float, ...]) -> str:
    return "[" + ", ".join(map(_plain, numbers)) + "]"


def _bare_or_quoted(name: str) -> str:
    return name if BARE_NAME.fullmatch(name) and name not in RESERVED else f"`{name}`"


def quoted_level(level: str) -> str:
    """Return a level as a formula's string literal."""
    return '"' + level.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True)
class Number:
    """A non-negative constant inside I()."""

    value: float
    binding = 5  # how tightly the printed form holds together

    def __str__(self) -> str:
        return _plain(self.value)


@dataclass(frozen=True)
class Name:
    """A numeric column."""

    name: str
    binding = 5

    def __str__(self) -> str:
        return _bare_or_quoted(self.name)


@dataclass(frozen=True)
class Power:
    """base ** exponent."""

    base: Arithmetic
    exponent: Arithmetic
    binding = 4

    def __str__(self) -> str:
        return f"{_bound(self.base, 5)}**{_bound(self.exponent, 3)}"


@dataclass(frozen=True)
class Negative:
    """- operand."""

    operand: Arithmetic
    binding = 3

    def __str__(self) -> str:
        return f"-{_bound(self.operand, 3)}"


@dataclass(frozen=True)
class Chain:
    """first, then (operator, operand) from left to right, all of + and - or all of * and /.

    A flat list: a sum of a hundred names is no deeper than a sum of two.
    """

    first: Arithmetic
    rest: tuple[tuple[str, Arithmetic], ...]

    @property
    def binding(self) -> int:
        """1 for sums, 2 for products."""
        return 1 if self.rest[0][0] in "+-" else 2

    def __str__(self) -> str:
        tighter = self.binding + 1
        pieces = [_bound(self.first, tighter)]
        for operator, operand in self.rest:
            pieces += [f" {operator} " if tighter == 2 else operator, _bound(operand, tighter)]
        return "".join(pieces)


Arithmetic = Number | Name | Power | Negative | Chain


def _bound(expression: Arithmetic, binding: int) -> str:
    return str(expression) if expression.binding >= binding else f"({expression})"


def names_in(expression: Arithmetic) -> Iterator[str]:
    """Yield the names in an expression."""
    return (leaf.name for leaf in _leaves(expression) if isinstance(leaf, Name))


def numbers_in(expression: Arithmetic) -> Iterator[Number]:
    """Yield the constants of an expression."""
    return (leaf for leaf in _leaves(expression) if isinstance(leaf, Number))


def _leaves(expression: Arithmetic) -> Iterator[Arithmetic]:
    match expression:
        case Power(left, right):
            yield from _leaves(left)
            yield from _leaves(right)
        case Negative(operand):
            yield from _leaves(operand)
        case Chain(first, rest):
            yield from _leaves(first)
            for _, operand in rest:
                yield from _leaves(operand)
        case leaf:
            yield leaf


@dataclass(frozen=True)
class Computed:
    """I(expression): arithmetic of numeric columns."""

    expression: Arithmetic

    def __str__(self) -> str:
        return f"I({self.expression})"


@dataclass(frozen=True)
class Categorical:
    """C(name): an indicator of every level but the reference, by default the first of the study's list."""

    name: str
    reference: str | None = None

    def __str__(self) -> str:
        reference = "" if self.reference is None else f", ref={quoted_level(self.reference)}"
        return f"C({_bare_or_quoted(self.name)}{reference})"


@dataclass(frozen=True)
class Transformed:
    """log(name) or sqrt(name)."""

    function: str
    name: str

    def __str__(self) -> str:
        return f"{self.function}({_bare_or_quoted(self.name)})"


@dataclass(frozen=True)
class Polynomial:
    """poly(name, degree): the raw powers 1 to degree."""

    name: str
    degree: int

    def __str__(self) -> str:
        return f"poly({_bare_or_quoted(self.name)}, {self.degree})"


@dataclass(frozen=True)
class NaturalSpline:
    """spline(name, knots=[..]): a cubic spline that is linear beyond the first and last of the knots."""

    name: str
    knots: tuple[float, ...]

    def __str__(self) -> str:
        return f"spline({_bare_or_quoted(self.name)}, knots={_listed(self.knots)})"


@dataclass(frozen=True)
class BSpline:
    """bs(name, knots=[..], low=, high=, degree=): B-splines on [low, high], the first left out."""

    name: str
    knots: tuple[float, ...]
    low: float
    high: float
    degree: int = 3

    def __str__(self) -> str:
        ends = f"low={_plain(self.low)}, high={_plain(self.high)}"
        return f"bs({_bare_or_quoted(self.name)}, knots={_listed(self.knots)}, {ends}, degree={self.degree})"


TermVariable = Name | Computed | Categorical | Transformed | Polynomial | NaturalSpline | BSpline
Term = tuple[TermVariable, ...]


@dataclass(frozen=True)
class Formula:
    """Terms in the order written, multiplied out, each once; the intercept, if any, comes first.

    ``str(formula)`` is canonical: it parses back to an equal formula.
    """

    intercept: bool
    terms: tuple[Term, ...]

    @cached_property
    def numeric_names(self) -> tuple[str, ...]:
        """Columns used as numbers, in order of first use."""
        return tuple(dict.fromkeys(name for variable in self._variables() for name in _numeric_in(variable)))

    @cached_property
    def factor_names(self) -> tuple[str, ...]:
        """Columns used inside C(), in order of first use."""
        return tuple(dict.fromkeys(v.name for v in self._variables() if isinstance(v, Categorical)))

    def _variables(self) -> Iterator[TermVariable]:
        for term in self.terms:
            yield from term

    def __str__(self) -> str:
        return " + ".join(["1" if self.intercept else "0", *(":".join(map(str, t)) for t in self.terms)])


def _numeric_in(variable: TermVariable) -> Iterator[str]:
    if isinstance(variable, Computed):
        yield from names_in(variable.expression)
    elif not isinstance(variable, Categorical):
        yield variable.name
