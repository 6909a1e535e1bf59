"""Formulas as terms of the language: the columns of a design, and what they are in another world.

A formula names variables in their own units; a leaf of the language is a number over a power of two. A raw
column is its term times a known factor, so that reported coefficients are those of the formula's own columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.estimation.worlds import AS_IT_IS, Given, World, scaled
from fedtmle.initial.design import (
    DesignPart,
    Levels,
    Range,
    Ranges,
    column_names,
    column_ranges,
    design_columns,
    part_range,
    range_exponent,
)
from fedtmle.initial.syntax import (
    Arithmetic,
    BSpline,
    Categorical,
    Chain,
    Computed,
    Formula,
    Name,
    NaturalSpline,
    Number,
    Power,
    Transformed,
    parse_formula,
)
from fedtmle_core import dictionary, leaves
from fedtmle_core.blocks import Layer
from fedtmle_core.leaves import HIGHEST_POWER
from fedtmle_core.terms import ONE, Term, product, total
from fedtmle_core.types import Array


@final
@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The names that formulas may use: numbers with their ranges, and levels of categorical variables.

    ``meanings`` says what a name stands for that is no variable of the dictionary, or one of another kind:
    ``World({"treated": Level("treated", 1)})`` for a binary variable that formulas use as a number.
    """

    ranges: Ranges
    levels: Levels
    meanings: World = AS_IT_IS

    @classmethod
    def of(
        cls,
        declared: dictionary.Dictionary,
        *,
        ranges: Ranges | None = None,
        levels: Levels | None = None,
        meanings: World = AS_IT_IS,
    ) -> Vocabulary:
        """Return the vocabulary of a dictionary, and of further names; a period of follow-up is one.

        A categorical variable of two levels is also the number of its second one, and a number from 0 to 1
        whose ``levels`` are given is also a factor.
        """
        ranges, levels = dict(ranges or {}), dict(levels or {})
        given: dict[str, Given] = {}
        for variable in declared.variables:
            match variable:
                case dictionary.Numeric(name=name, low=low, high=high):
                    ranges.setdefault(name, (low, high))
                    if name in levels:
                        number = leaves.Number(name, variable.exponent) * 2.0**variable.exponent
                        given[name] = (leaves.Known(name) - number, number)
                case dictionary.Categorical(name=name, levels=listed):
                    levels.setdefault(name, listed)
                    if len(listed) == 2:
                        ranges.setdefault(name, (0.0, 1.0))
                        given[name] = (leaves.Level(name, 0), leaves.Level(name, 1))
                case dictionary.Identifier():
                    pass
        return cls(ranges=ranges, levels=levels, meanings=World({**given, **meanings.given}))

    def number(self, name: str) -> Term:
        """Return a name's number in its own unit."""
        term, factor = self._column((DesignPart(Name(name), 0, name),))
        return term * factor

    def world(self, given: Mapping[str, Given]) -> World:
        """Return the world in which some variables are set, also in columns that the loader computes."""
        return World(given, {name: self.number(name) for name in self.ranges if name not in given})

    def design(self, formula: Formula | str) -> Design:
        """Return the columns of a formula; `InputError` names what is not declared or has no range."""
        parsed = parse_formula(formula) if isinstance(formula, str) else formula
        self._require(parsed)
        parts = design_columns(parsed, self.levels)
        ranges = column_ranges(parsed, self.levels, self.ranges)
        columns = [self._column(column) for column in parts]
        return Design(
            formula=parsed,
            names=column_names(parsed, self.levels),
            columns=tuple(term for term, _ in columns),
            factors=tuple(factor for _, factor in columns),
            ranges=ranges,
            of_levels=tuple(any(isinstance(p.variable, Categorical) for p in column) for column in parts),
        )

    def loader_columns(self, formulas: Iterable[Formula]) -> tuple[LoaderColumn, ...]:
        """Return the columns that the loader computes before the core sees the table, each once."""
        found: dict[str, LoaderColumn] = {}
        for formula in formulas:
            for column in design_columns(formula, self.levels):
                for part in column:
                    if self._is_computed(part):
                        low, high = part_range(part, self.ranges)
                        found.setdefault(part.label, LoaderColumn(part=part, low=low, high=high))
        return tuple(found.values())

    def _require(self, formula: Formula) -> None:
        problems = [
            f"column '{name}' is categorical, write C({Name(name)})"
            if name in self.levels
            else f"the range of '{name}' is not declared"
            for name in formula.numeric_names
            if name not in self.ranges
        ]
        problems += [
            f"column '{name}' is numeric, write {Name(name)} without C()"
            for name in formula.factor_names
            if name not in self.levels and name in self.ranges
        ]
        if problems:
            raise InputError("; ".join(problems))

    def _column(self, column: tuple[DesignPart, ...]) -> tuple[Term, float]:
        """Return a column's term, and the factor between the raw column and it."""
        pieces = [self._piece(part) for part in column]
        term, factor = scaled(self.meanings.of(product(*(term for term, _ in pieces))))
        return term, factor * math.prod(factor for _, factor in pieces)

    def _piece(self, part: DesignPart) -> tuple[Term, float]:
        match part.variable:
            case Categorical(name):
                return leaves.Level(name, part.index), 1.0
            case Name(name):
                return leaves.Number(name, self._exponent(name)), self._scale(name)
            case Computed(expression) if (powers := monomial(expression)) is not None:
                pieces = [self._power(name, power) for name, power in powers.items()]
                return product(*(term for term, _ in pieces)), math.prod(factor for _, factor in pieces)
            case Transformed("log", name):
                return leaves.Log(name), 1.0
            case Transformed("sqrt", name):
                return leaves.Root(name), 1.0
            case NaturalSpline(name, knots):
                exponent = _exponent(part_range(part, self.ranges))
                return leaves.Spline(name, exponent, knots, part.index), 2.0**exponent
            case BSpline(name, knots, low, high, degree) if degree <= HIGHEST_POWER:
                return leaves.BSpline(name, knots, low, high, degree, part.index), 1.0
        exponent = _exponent(part_range(part, self.ranges))
        return leaves.Number(part.label, exponent), 2.0**exponent

    def _power(self, name: str, power: int) -> tuple[Term, float]:
        if power == 1:
            return leaves.Number(name, self._exponent(name)), self._scale(name)
        return leaves.Power(name, self._exponent(name), power), self._scale(name) ** power

    def _is_computed(self, part: DesignPart) -> bool:
        term, _ = self._piece(part)
        return (isinstance(term, leaves.Number) and not isinstance(part.variable, Name | Computed)) or (
            isinstance(part.variable, Computed) and monomial(part.variable.expression) is None
        )

    def _exponent(self, name: str) -> int:
        return _exponent(self.ranges[name])

    def _scale(self, name: str) -> float:
        return 2.0 ** self._exponent(name)


def _exponent(bounds: Range) -> int:
    low, high = bounds
    return dictionary.Numeric(name="", low=low, high=high).exponent


def monomial(expression: Arithmetic) -> dict[str, int] | None:
    """Return the power of each variable in a product of powers up to 3; None for other arithmetic."""
    match expression:
        case Name(name):
            return {name: 1}
        case Power(Name(name), Number(value)) if value in (1.0, 2.0, 3.0):
            return {name: int(value)}
        case Chain(first, rest) if all(operator == "*" for operator, _ in rest):
            powers: dict[str, int] = {}
            for factor in (first, *(operand for _, operand in rest)):
                of_factor = monomial(factor)
                if of_factor is None:
                    return None
                for name, power in of_factor.items():
                    powers[name] = powers.get(name, 0) + power
            return powers if max(powers.values()) <= HIGHEST_POWER else None
    return None


@final
@dataclass(frozen=True, kw_only=True)
class LoaderColumn:
    """A column that a loader computes from the table, and the variable that the dictionary has for it."""

    part: DesignPart
    low: float
    high: float

    @property
    def variable(self) -> dictionary.Numeric:
        """The dictionary's variable: its name is the formula's text, such as ``I(dose/weight)``."""
        return dictionary.Numeric(name=self.part.label, low=self.low, high=self.high)


FAR = 4.0  # half widths from 0: nearer, a column in place is as good


def _centre(low: float, high: float) -> float:
    middle = 0.5 * (low + high)
    return middle if abs(middle) > FAR * 0.5 * (high - low) > 0.0 else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Design:
    """The columns of a formula: raw column j is ``columns[j]`` times ``factors[j]``.

    Fits work in unit columns: the raw ones over the least power of two above their range (``exponents``),
    less the middle of a range that is far from 0, such as a year's (``centres``).
    """

    formula: Formula
    names: tuple[str, ...]
    columns: tuple[Term, ...]
    factors: tuple[float, ...]
    ranges: tuple[Range, ...]  # of the raw columns
    of_levels: tuple[bool, ...]  # whether a column is zero but for people of some level
    exponents: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exponents", tuple(range_exponent(bounds) for bounds in self.ranges))

    @property
    def has_intercept(self) -> bool:
        return self.names[:1] == ("1",)

    @property
    def centres(self) -> tuple[float, ...]:
        """What is taken off each unit column: without an intercept nothing is."""
        if not self.has_intercept:
            return (0.0,) * len(self.columns)
        return (0.0, *(_centre(low, high) for low, high in self.unit_ranges[1:]))

    @property
    def unit_ranges(self) -> tuple[Range, ...]:
        """The ranges of the unit columns before they are centred."""
        pairs = zip(self.ranges, self.exponents, strict=True)
        return tuple((math.ldexp(low, -e), math.ldexp(high, -e)) for (low, high), e in pairs)

    @property
    def unit_factors(self) -> tuple[float, ...]:
        """The factor between each unit column and its term."""
        return tuple(math.ldexp(f, -e) for f, e in zip(self.factors, self.exponents, strict=True))

    def layer(
        self,
        world: World = AS_IT_IS,
        *,
        y: Term | None = None,
        w: Term | None = None,
        offset: Term | None = None,
    ) -> Layer:
        """Return one record of each person, with the unit columns as they are in a world."""
        X, factors = [], []
        units = zip(world.of_all(self.columns), self.unit_factors, self.centres, strict=True)
        for term, unit, centre in units:
            bare, factor = scaled(term if not centre else total([term, ONE], [unit, -centre]))
            X.append(bare)
            factors.append(factor if centre else factor * unit)
        return Layer(X=tuple(X), factors=tuple(factors), y=y, w=w, offset=offset)

    def raw(self, eps: Array) -> tuple[float, ...]:
        """Return the coefficients of the raw columns, given those of unit columns."""
        unit = np.array(eps)
        if self.has_intercept:
            moved = math.fsum(e * centre for e, centre in zip(eps.tolist(), self.centres, strict=True))
            unit[0] -= math.ldexp(moved, self.exponents[0])  # the intercept's column is 2^-exponent
        return tuple(np.ldexp(unit, -np.array(self.exponents)).tolist())

    def predictor(self, coefficients: Iterable[float], world: World = AS_IT_IS) -> Term:
        """Return the linear predictor of coefficients on the raw columns, as it is in a world."""
        betas = [b * factor for b, factor in zip(coefficients, self.factors, strict=True)]
        return world.of(total(self.columns, betas))
