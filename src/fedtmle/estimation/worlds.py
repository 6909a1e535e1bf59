"""Worlds: terms with some variables set to a level, a number or another term, for everyone.

An arm for everyone, a period of follow-up, a shifted dose and a filled value are worlds. Setting a variable
makes terms simpler: a level that is set is 0 or 1, and a product with 0 vanishes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias, final

import numpy as np

from fedtmle.errors import FedTMLEError, InputError
from fedtmle.initial.syntax import (
    Arithmetic,
    BSpline,
    Chain,
    Computed,
    Name,
    Negative,
    Number,
    Power,
    TermVariable,
    names_in,
    parse_formula,
)
from fedtmle_core import graph, leaves
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Pick, Product, Sum, Term, product, total


class Both(NamedTuple):
    """A variable that formulas use as a number and as a factor, such as a period of follow-up."""

    code: int
    number: Term


# A level by its place in the list, a number in its own unit, a term for each level, or a code and a number.
Given: TypeAlias = "int | Term | tuple[Term, ...] | Both"

LARGEST = 2.0**40  # beyond every range: a clip without an end
LOADED = re.compile(r"((?:I|bs)\(.*\))(?:\[(\d+)\])?")  # a column of the loader: a variable, and its piece
_ONE_PERSON = Sheet(n=1, numbers={}, levels={})  # a term of constants reads no record


@final
@dataclass(frozen=True)
class World:
    """What some variables are for everyone; terms that are ``given`` read the record as it is.

    ``others`` are the numbers of variables that are not set, for columns of the loader that combine them with
    one that is (`Vocabulary.world`).
    """

    given: Mapping[str, Given]
    others: Mapping[str, Term] = field(default_factory=dict)

    @classmethod
    def period(cls, k: int, name: str = "period") -> World:
        """Return the world in which the period is number k, counted from 1."""
        return cls({name: Both(code=k - 1, number=Constant(float(k)))})

    def and_also(self, other: World) -> World:
        """Return the world where the variables of another are set too; the other's come first."""
        return World({**self.given, **other.given}, {**self.others, **other.others})

    def of(self, term: Term) -> Term:
        """Return the term as it is in this world."""
        return self.of_all([term])[0]

    def of_all(self, terms: Iterable[Term]) -> tuple[Term, ...]:
        """Return terms as they are in this world; parts that they share are rewritten once."""
        roots = tuple(terms)
        if not self.given:
            return roots
        done: dict[Term, Term] = {}
        for term in graph.ordered(roots):
            done[term] = self._rewritten(term, [done[part] for part in term.parts])
        return tuple(done[root] for root in roots)

    def _rewritten(self, term: Term, parts: Sequence[Term]) -> Term:
        if isinstance(term, leaves.Level | leaves.Known | leaves.Between | leaves.AbstractPiece):
            return self._leaf(term)
        if isinstance(term, Pick) and term.name in self.given:
            return self._picked(self.given[term.name], term.name, parts)
        if list(term.parts) == list(parts):
            return term
        return simplified(term, parts)

    def _leaf(self, leaf: leaves.Level | leaves.Known | leaves.Between | leaves.AbstractPiece) -> Term:
        given = self.given.get(leaf.name)
        if given is None:
            return self._computed(leaf) if isinstance(leaf, leaves.Number) else leaf
        match leaf:
            case leaves.Known():
                return ONE
            case leaves.Level(name, code):
                return self._picked(
                    given, name, [Constant(float(k == code)) for k in range(_count(given, code))]
                )
        return _piece_of(leaf, self._number(leaf.name, given))

    def _picked(self, given: Given, name: str, parts: Sequence[Term]) -> Term:
        """Return the part of the level that is given."""
        match given:
            case Both(code=code) | int(code):
                return parts[code]
            case tuple(levels):
                return total([product(level, part) for level, part in zip(levels, parts, strict=True)])
        raise InputError(f"'{name}' is set as a number, and a model uses it as a factor")

    def _number(self, name: str, given: Given) -> Term:
        match given:
            case Both(number=number):
                return number
            case Term():
                return given
            case tuple() if len(given) == 2:  # a binary variable: its number is the second level
                return given[1]
        raise InputError(f"'{name}' is set to a level, and a model uses it as a number")

    def _computed(self, leaf: leaves.Number) -> Term:
        """Return a column of the loader, written out in terms if one of its variables is set."""
        variable, index = loaded(leaf.name)
        match variable:
            case Computed(expression) if self.given.keys() & set(names_in(expression)):
                return _times(
                    written_out(expression, lambda name: self._other(name, leaf)), 2.0**-leaf.exponent
                )
            case BSpline(name, knots, low, high, degree) if name in self.given:
                piece = leaves.BSpline(name, knots, low, high, degree, index)
                return _times(_piece_of(piece, self._number(name, self.given[name])), 2.0**-leaf.exponent)
        return leaf

    def _other(self, name: str, leaf: leaves.Number) -> Term:
        if name in self.given:
            return self._number(name, self.given[name])
        if name not in self.others:
            raise InputError(f"{leaf.name}: '{name}' is combined with a variable that is set")
        return self.others[name]


AS_IT_IS = World({})  # everyone as the record says


def _count(given: Given, code: int) -> int:
    """Return how many levels to list for a variable of which one is given."""
    match given:
        case Both(code=own) | int(own):
            return max(own, code) + 1
        case tuple():
            return len(given)
    return 0


@lru_cache(maxsize=256)
def loaded(name: str) -> tuple[TermVariable | None, int]:
    """Return which formula's variable a column of the loader is, and its piece; None for a plain variable."""
    found = LOADED.fullmatch(name)
    if found is None:
        return None, 0
    try:
        ((variable,),) = parse_formula(found[1]).terms
    except (FedTMLEError, ValueError):
        return None, 0
    return variable, int(found[2] or 0)


def _times(term: Term, factor: float) -> Term:
    return simplified(Sum((term,), (factor,)), [term])


def written_out(expression: Arithmetic, number: Callable[[str], Term]) -> Term:
    """Return arithmetic as a term; denominators must be positive, and bases of powers that are not whole."""
    match expression:
        case Number(value):
            return Constant(value)
        case Name(name):
            return number(name)
        case Negative(operand):
            return -written_out(operand, number)
        case Power(base, Number(value)):
            return _raised(written_out(base, number), value)
        case Power(base, Negative(Number(value))):
            return Apply("inverse", _raised(written_out(base, number), value))
        case Power(base, exponent):
            return Apply("exp", written_out(exponent, number) * Apply("log", written_out(base, number)))
        case Chain(first, rest):
            result = written_out(first, number)
            for operator, operand in rest:
                other = written_out(operand, number)
                match operator:
                    case "+":
                        result = result + other
                    case "-":
                        result = result - other
                    case "*":
                        result = result * other
                    case _:
                        result = result * simplified(Apply("inverse", other), [other])
            return result


def _raised(base: Term, power: float) -> Term:
    if power.is_integer() and power <= 10:
        return product(*[base] * int(power))
    return Apply("exp", Apply("log", base) * power)


def scaled(term: Term) -> tuple[Term, float]:
    """Return a term without its constant factor, and that factor."""
    factor = 1.0
    while isinstance(term, Sum) and len(term.terms) == 1:
        factor, term = factor * term.factors[0], term.terms[0]
    if isinstance(term, Constant) and term.value not in (0.0, 1.0):
        return ONE, factor * term.value
    return term, factor


def simplified(term: Term, parts: Sequence[Term]) -> Term:
    """Return an operation on other parts: constants are computed, like terms of a sum put together."""
    match term:
        case Sum():
            return _sum(parts, term.factors)
        case Product():
            pieces = [scaled(part) for part in parts]
            factor = math.prod(factor for _, factor in pieces)
            return product(*(piece for piece, _ in pieces)) * factor
    made = _with_parts(term, parts)
    if parts and all(isinstance(part, Constant) for part in parts) and isinstance(made, Apply):
        (value,) = made.values(
            [np.array([part.value]) for part in parts if isinstance(part, Constant)], _ONE_PERSON
        )
        return Constant(float(value))
    return made


def _with_parts(term: Term, parts: Sequence[Term]) -> Term:
    if "terms" in term.__dataclass_fields__:  # type: ignore[attr-defined]  # every term is a dataclass
        return replace(term, terms=tuple(parts))  # type: ignore[type-var]
    (part,) = parts
    return replace(term, of=part)  # type: ignore[type-var]


def _sum(parts: Sequence[Term], factors: Sequence[float]) -> Term:
    found: dict[Term, float] = {}
    for part, factor in zip(parts, factors, strict=True):
        term, own = scaled(part)
        inner = zip(term.terms, term.factors, strict=True) if isinstance(term, Sum) else ((term, 1.0),)
        for each, times in inner:
            bare, more = scaled(each)
            found[bare] = found.get(bare, 0.0) + factor * own * times * more
    if ONE in found and len({*found} - {ZERO}) == 1:
        return Constant(found[ONE])
    return total(list(found), list(found.values()))


def _piece_of(leaf: Term, number: Term) -> Term:
    """Return a leaf's function of a number that is a term, in the unit of the dictionary."""
    match leaf:
        case leaves.Number(exponent=exponent):
            return _times(number, 2.0**-exponent)
        case leaves.Power(exponent=exponent, power=power):
            return simplified(Product(()), [_times(number, 2.0**-exponent)] * power)
        case leaves.Log():
            return simplified(Apply("log", number), [number])
        case leaves.Root():
            return simplified(Apply("root", number), [number])
        case leaves.Between(low=low, high=high):
            return product(
                *([] if low is None else [1.0 - _at_most(number, low)]),
                *([] if high is None else [_at_most(number, high)]),
            )
        case leaves.Spline() if isinstance(number, Constant):
            return Constant(float(leaf.of(np.array([number.value]))[0]))
        case leaves.Spline():
            return _spline(leaf, number)
        case leaves.BSpline() if isinstance(number, Constant):
            return Constant(float(leaf.of(np.array([number.value]))[0]))
        case leaves.BSpline():
            return _b_spline(leaf, number)
    raise AssertionError("a leaf of another kind")


def _at_most(number: Term, most: float) -> Term:
    """Return 1 where a number is at most a bound, else 0."""
    negative = -number
    return simplified(Apply("step", negative, low=-most), [negative])


def _below(number: Term, end: float) -> Term:
    """Return 1 where a number is below an end, else 0."""
    return 1.0 - Apply("step", number, low=end)


def _spline(leaf: leaves.Spline, number: Term) -> Term:
    """Return a piece of a natural spline; see `leaves.Spline`."""
    knots, j = leaf.knots, leaf.index
    inner, last = knots[-2], knots[-1]
    inside = Apply("clip", number, low=-LARGEST, high=last)

    def cube_above(knot: float) -> Term:
        above = Apply("clip", inside - knot, low=0.0, high=LARGEST)
        return Product((above, above, above))

    scale = 2.0**-leaf.exponent / ((last - knots[0]) * (last - knots[0]))
    slope = 3.0 * (last - knots[j]) * (inner - knots[j])
    return total(
        [cube_above(knots[j]), cube_above(inner), number, inside],
        [scale, -scale * (last - knots[j]) / (last - inner), scale * slope, -scale * slope],
    )


def _b_spline(leaf: leaves.BSpline, number: Term) -> Term:
    """Return a piece of a B-spline by the recursion of Cox and de Boor; see `leaves.BSpline`."""
    degree, index = leaf.degree, leaf.index
    t = [leaf.low] * (degree + 1) + list(leaf.knots) + [leaf.high] * (degree + 1)
    last = len(t) - degree - 2
    pieces = [
        ZERO
        if t[m] == t[m + 1]
        else product(Apply("step", number, low=t[m]), ONE if m == last else _below(number, t[m + 1]))
        for m in range(index, index + degree + 1)
    ]
    for order in range(1, degree + 1):
        for i in range(degree + 1 - order):
            m = index + i
            rising, falling = t[m + order] - t[m], t[m + order + 1] - t[m + 1]
            rise = product(pieces[i], (number - t[m]) * (1.0 / rising)) if rising else ZERO
            fall = product(pieces[i + 1], (t[m + order + 1] - number) * (1.0 / falling)) if falling else ZERO
            pieces[i] = rise + fall
    return pieces[0]
