"""Formulas of a study: a right-hand side such as ``age + C(site)*log(dose)`` as a small frozen tree.

    sum         := product (("+" product) | ("-" 1))*     "0 +" and "- 1" leave the intercept out
    product     := interaction ("*" interaction)*         a*b = a + b + a:b
    interaction := primary (":" primary)*                 a:a = a, b:a = a:b
    primary     := "(" sum ")" | 1 | variable
    variable    := name | C(name) | C(name, ref="level") | I(arithmetic) | log(name) | sqrt(name)
                 | poly(name, k) | spline(name, knots=[..]) | bs(name, knots=[..], low=, high=[, degree=])
    arithmetic  := names and numbers with + - * / ** and parentheses, binding as in Python
    name        := letters, digits, "_" and "." after a letter or "_"; anything else in `back-quotes`

No text of a study reaches Python's evaluator. Length, depth and expansion are bounded, so that every
text is parsed or refused in a moment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NoReturn, TypeVar

from fedtmle.errors import InputError

# The syntax tree of a study's formula: frozen values whose text parses back to them.

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


MAX_LENGTH = 20_000  # characters, of the text and of the canonical text
MAX_DEPTH = 50  # open parentheses, signs and powers at one place
MAX_PRODUCTS = 20_000  # pairs of terms multiplied out by * and : over sums
MAX_ORDER = 20  # variables in one interaction
MAX_DEGREE = 10  # largest degree of poly and bs
MAX_KNOTS = 50

_TOKEN = re.compile(
    r"(?P<space>\s+)"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    rf"|(?P<name>{BARE_NAME.pattern})"
    r"|`(?P<quoted>[^`]+)`"
    r'|"(?P<double>(?:[^"\\]|\\["\\])*)"'
    r"|'(?P<single>[^'\\]*)'"
    r"|(?P<operator>\*\*|[-+*/:(),=\[\]])"
)


class FormulaError(InputError):
    """A formula is outside the grammar; the message shows the place with a caret."""

    def __init__(self, problem: str, text: str, position: int) -> None:
        self.problem = problem
        self.position = position
        start = max(0, position - 60)
        # Line breaks would move the caret, control characters could steer a terminal.
        shown = "".join(c if c.isprintable() else " " for c in text[start : position + 40])
        super().__init__(f"formula: {problem}\n    {shown}\n    {' ' * (position - start)}^")


@dataclass(frozen=True)
class _Token:
    kind: str  # name, quoted (a name in back-quotes), number, string, operator or end
    text: str
    position: int


_HINTS = {
    "~": "'~' is not needed: the left side comes from the target, write the right side only",
    "^": "'^' is not known: a power is written inside I(), as in I(name**2)",
    '"': 'a string has no closing quote (write \\" and \\\\ inside)',
    "'": "a string has no closing quote (no backslash inside)",
    "`": "a back-quoted name is empty or has no closing back-quote",
}


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastgroup is None:
            hint = _HINTS.get(text[position], "this character has no meaning in a formula")
            raise FormulaError(hint, text, position)
        kind, value = match.lastgroup, match[match.lastgroup]
        if kind != "space":
            if not value.isprintable():
                raise FormulaError("unprintable characters inside quotes", text, position)
            if kind == "double":
                value = re.sub(r"\\(.)", r"\1", value)
            yield _Token("string" if kind in ("double", "single") else kind, value, position)
        position = match.end()
    yield _Token("end", "", len(text))


# While parsing, a variable is its canonical text, whose hash Python keeps, and a sum maps the set of
# a term's variables, its identity, to the variables in the order written.
_Sum = dict[frozenset[str], tuple[str, ...]]
_INTERCEPT: frozenset[str] = frozenset()
_T = TypeVar("_T")


def _add(terms: _Sum, more: _Sum) -> None:
    """Append the terms of ``more`` that are new; the others stay as they were first written."""
    for identity, term in more.items():
        terms.setdefault(identity, term)


class _Parser:
    """Recursive descent over the tokens, one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = 0
        self.depth = 0
        self.products = 0
        self.removal: _Token | None = None  # the 0 or 1 that leaves the intercept out
        self.variables: dict[str, TermVariable] = {}

    @property
    def here(self) -> _Token:
        return self.tokens[self.at]

    def fail(self, problem: str, token: _Token | None = None) -> NoReturn:
        raise FormulaError(problem, self.text, (token or self.here).position)

    def expected(self, what: str) -> NoReturn:
        here = f"'{self.here.text[:30]}'" if self.here.kind != "end" else "the end"
        self.fail(f"expected {what}, found {here}")

    def take(self, kind: str, what: str) -> _Token:
        if self.here.kind != kind:
            self.expected(what)
        self.at += 1
        return self.tokens[self.at - 1]

    def sees(self, *operators: str, ahead: int = 0) -> bool:
        token = self.tokens[self.at + ahead]
        return token.kind == "operator" and token.text in operators

    def accept(self, *operators: str) -> str:
        """Return and pass over the operator here if it is one of these, else return None."""
        return self.take("operator", "").text if self.sees(*operators) else ""

    def demand(self, operator: str) -> None:
        if not self.accept(operator):
            self.expected(f"'{operator}'")

    def nested(self, rule: Callable[[], _T]) -> _T:
        """Return the result of a rule inside another of its kind, within the bound on depth."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"nested more than {MAX_DEPTH} deep")
        result = rule()
        self.depth -= 1
        return result

    def formula(self) -> Formula:
        terms = self.sum()
        if self.here.kind != "end":
            self.expected("'+', '-', ':', '*' or the end")
        if terms.pop(_INTERCEPT, None) is not None and self.removal:
            self.fail("the intercept is both written and left out", self.removal)
        if self.removal and not terms:
            self.fail("a formula without intercept needs a term", self.removal)
        formula = Formula(
            intercept=self.removal is None,
            terms=tuple(tuple(self.variables[text] for text in term) for term in terms.values()),
        )
        if len(str(formula)) > MAX_LENGTH:
            self.fail(f"multiplied out, longer than {MAX_LENGTH} characters")
        return formula

    def sum(self) -> _Sum:
        terms: _Sum = {}
        sign = self.accept("-") or "+"
        while sign:
            if self.here.kind == "number" and self.here.text == ("0" if sign == "+" else "1"):
                if self.depth:
                    self.fail("the intercept can be left out only outside parentheses")
                self.removal = self.take("number", "")
            elif sign == "-":
                self.expected("1 (only the intercept can be left out)")
            else:
                _add(terms, self.product())
            sign = self.accept("+", "-")
        return terms

    def product(self) -> _Sum:
        terms = self.interaction()
        while self.accept("*"):
            right = self.interaction()
            crossed = self.times(terms, right)
            _add(terms, right)
            _add(terms, crossed)
        return terms

    def interaction(self) -> _Sum:
        terms = self.primary()
        while self.accept(":"):
            terms = self.times(terms, self.primary())
        if self.sees("**"):
            self.fail("a power is written inside I(), as in I(name**2)")
        return terms

    def times(self, left: _Sum, right: _Sum) -> _Sum:
        """Return every term of ``left`` with every term of ``right``, ``left`` slowest."""
        self.products += len(left) * len(right) - 1
        if self.products > MAX_PRODUCTS:
            self.fail(f"multiplies out to more than {MAX_PRODUCTS} terms")
        terms: _Sum = {}
        for a in left.values():
            for b in right.values():
                term = tuple(dict.fromkeys(a + b))
                if len(term) > MAX_ORDER:
                    self.fail(f"an interaction of more than {MAX_ORDER} variables")
                terms.setdefault(frozenset(term), term)
        return terms

    def primary(self) -> _Sum:
        if self.accept("("):
            terms = self.nested(self.sum)
            self.demand(")")
            return terms
        if self.here.kind == "number" and self.here.text == "1":
            self.at += 1
            return {_INTERCEPT: ()}
        variable = self.variable()
        text = str(variable)
        self.variables[text] = variable
        return {frozenset({text}): (text,)}

    def variable(self) -> TermVariable:
        function = self.here
        if function.kind != "name" or not self.sees("(", ahead=1):
            return Name(self.name("a term (a column name, a function, '(' or 1)"))
        if function.text not in _FUNCTIONS:
            self.fail(f"there is no function '{function.text[:30]}'; there are {', '.join(_FUNCTIONS)}")
        self.at += 2
        variable = _FUNCTIONS[function.text](self)
        self.demand(")")
        return variable

    def name(self, what: str = "a column name") -> str:
        if self.here.kind == "name" and self.here.text in RESERVED:
            self.fail(f"write a column of this name in back-quotes: `{self.here.text}`")
        return self.take("quoted" if self.here.kind == "quoted" else "name", what).text

    def number(self) -> float:
        token = self.take("number", "a number")
        value = float(token.text)
        if math.isinf(value):
            self.fail("a number too large for double precision", token)
        return value

    def signed_number(self) -> float:
        return 0.0 - self.number() if self.accept("-") else self.number()

    def option(self, keyword: str) -> None:
        self.demand(",")
        if self.here.kind != "name" or self.here.text != keyword:
            self.expected(f"'{keyword}='")
        self.at += 1
        self.demand("=")

    def knots(self, at_least: int) -> tuple[float, ...]:
        self.option("knots")
        start = self.here
        self.demand("[")
        knots: list[float] = []
        while not self.accept("]"):
            if knots:
                self.demand(",")
            knots.append(self.signed_number())
        if not at_least <= len(knots) <= MAX_KNOTS:
            self.fail(f"{at_least} to {MAX_KNOTS} knots are needed", start)
        self.increasing(knots, start)
        return tuple(knots)

    def increasing(self, numbers: list[float], start: _Token) -> None:
        if any(a >= b for a, b in pairwise(numbers)):
            self.fail("knots, low and high included, must increase", start)

    def degree(self) -> int:
        token, degree = self.here, self.number()
        if not degree.is_integer() or not 1 <= degree <= MAX_DEGREE:
            self.fail(f"a degree is a whole number from 1 to {MAX_DEGREE}", token)
        return int(degree)

    def factor(self) -> Categorical:
        name = self.name()
        if not self.sees(","):
            return Categorical(name)
        self.option("ref")
        return Categorical(name, self.take("string", "a level in quotes").text)

    def polynomial(self) -> Polynomial:
        name = self.name()
        self.demand(",")
        return Polynomial(name, self.degree())

    def b_spline(self) -> BSpline:
        name, start = self.name(), self.here
        knots = self.knots(0)
        self.option("low")
        low = self.signed_number()
        self.option("high")
        high = self.signed_number()
        self.increasing([low, *knots, high], start)
        if not self.sees(","):
            return BSpline(name, knots, low, high)
        self.option("degree")
        return BSpline(name, knots, low, high, self.degree())

    def computed(self) -> Name | Computed:
        start = self.here
        expression = self.nested(self.arithmetic)
        if next(names_in(expression), None) is None:
            self.fail("I() needs a column name: a constant is the intercept", start)
        return expression if isinstance(expression, Name) else Computed(expression)

    def arithmetic(self) -> Arithmetic:
        return self.chain(self.arithmetic_product, "+", "-")

    def arithmetic_product(self) -> Arithmetic:
        return self.chain(self.signed, "*", "/")

    def chain(self, rule: Callable[[], Arithmetic], *operators: str) -> Arithmetic:
        first = rule()
        rest: list[tuple[str, Arithmetic]] = []
        while operator := self.accept(*operators):
            rest.append((operator, rule()))
        return Chain(first, tuple(rest)) if rest else first

    def signed(self) -> Arithmetic:
        if self.accept("-"):
            return Negative(self.nested(self.signed))
        base = self.operand()
        return Power(base, self.nested(self.signed)) if self.accept("**") else base

    def operand(self) -> Arithmetic:
        if self.accept("("):
            inner = self.nested(self.arithmetic)
            self.demand(")")
            return inner
        if self.here.kind == "number":
            return Number(self.number())
        name = Name(self.name("a column name, a number or '('"))
        if self.sees("("):
            self.fail("I() takes names and numbers with + - * / **, no functions")
        return name


_FUNCTIONS: dict[str, Callable[[_Parser], TermVariable]] = {
    "C": _Parser.factor,
    "I": _Parser.computed,
    "log": lambda parser: Transformed("log", parser.name()),
    "sqrt": lambda parser: Transformed("sqrt", parser.name()),
    "poly": _Parser.polynomial,
    "spline": lambda parser: NaturalSpline(parser.name(), parser.knots(3)),
    "bs": _Parser.b_spline,
}


def parse_formula(text: str) -> Formula:
    """Return the parsed formula; a `FormulaError` shows where it failed and what was expected."""
    if len(text) > MAX_LENGTH:
        raise FormulaError(f"longer than {MAX_LENGTH} characters", text, MAX_LENGTH)
    return _Parser(text).formula()
