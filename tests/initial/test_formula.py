"""Formulas: what each construct means, the canonical text, and refusal of everything else."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import InputError
from fedtmle.initial.syntax import (
    MAX_DEPTH,
    MAX_LENGTH,
    Arithmetic,
    BSpline,
    Categorical,
    Chain,
    Computed,
    Formula,
    FormulaError,
    Name,
    NaturalSpline,
    Negative,
    Number,
    Polynomial,
    Power,
    Term,
    TermVariable,
    Transformed,
    parse_formula,
)
from tests.premise import Premise

A, B, D = Name("a"), Name("b"), Name("d")


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("a", [(A,)]),
        ("  a\n + b ", [(A,), (B,)]),
        ("1 + a", [(A,)]),
        ("a + 1", [(A,)]),
        ("1", []),
        ("a + b + a", [(A,), (B,)]),
        ("a:b", [(A, B)]),
        ("a:b + b:a", [(A, B)]),
        ("a:a", [(A,)]),
        ("a*b", [(A,), (B,), (A, B)]),
        ("b*a + a:b", [(B,), (A,), (B, A)]),
        ("a*b*d", [(A,), (B,), (A, B), (D,), (A, D), (B, D), (A, B, D)]),
        ("a*b:d", [(A,), (B, D), (A, B, D)]),
        ("(a + b):d", [(A, D), (B, D)]),
        ("d:(a + b)", [(D, A), (D, B)]),
        ("(a + b)*(a + d)", [(A,), (B,), (D,), (A, D), (B, A), (B, D)]),
        ("(1 + a):b", [(B,), (A, B)]),
        ("((a))", [(A,)]),
        ("x.1_y + größe", [(Name("x.1_y"),), (Name("größe"),)]),
        ("`body mass (kg)` + `lambda` + `a`", [(Name("body mass (kg)"),), (Name("lambda"),), (A,)]),
        ("`+` + `(`", [(Name("+"),), (Name("("),)]),
        ("C + log + I", [(Name("C"),), (Name("log"),), (Name("I"),)]),
        ("C(a) + C(`a b`, ref='x')", [(Categorical("a"),), (Categorical("a b", "x"),)]),
        (r'C(a, ref="say \"x\\y\"")', [(Categorical("a", r'say "x\y"'),)]),
        ("log(a):sqrt(b)", [(Transformed("log", "a"), Transformed("sqrt", "b"))]),
        ("poly(a, 3)", [(Polynomial("a", 3),)]),
        ("spline(a, knots=[-1.5, 0, 2e1])", [(NaturalSpline("a", (-1.5, 0.0, 20.0)),)]),
        ("bs(a, knots=[], low=-1, high=.5)", [(BSpline("a", (), -1.0, 0.5, 3),)]),
        ("bs(a, knots=[1], low=0, high=2, degree=1)", [(BSpline("a", (1.0,), 0.0, 2.0, 1),)]),
        ("I(a)", [(A,)]),
        ("I(a**2)", [(Computed(Power(A, Number(2.0))),)]),
        ("I(a + b*2)", [(Computed(Chain(A, (("+", Chain(B, (("*", Number(2.0)),))),))),)]),
        ("I(a - b + d)", [(Computed(Chain(A, (("-", B), ("+", D)))),)]),
        ("I(-a**b**d)", [(Computed(Negative(Power(A, Power(B, D)))),)]),
        ("I((-a)**-b)", [(Computed(Power(Negative(A), Negative(B))),)]),
    ],
)
def test_what_a_text_means(text: str, terms: list[Term]) -> None:
    formula = parse_formula(text)
    assert formula == Formula(intercept=True, terms=tuple(terms))
    assert parse_formula(str(formula)) == formula


@pytest.mark.parametrize("text", ["0 + a", "a + 0", "a - 1", "-1 + a", "- 1 + a - 1"])
def test_without_intercept(text: str) -> None:
    assert parse_formula(text) == Formula(intercept=False, terms=((A,),))


def test_canonical_text() -> None:
    written = "  b*C(site,ref='x') -1+ I( (a+b)*2.50/ -d ) +poly(a,2) + `odd name`:log(a)"
    assert str(parse_formula(written)) == (
        '0 + b + C(site, ref="x") + b:C(site, ref="x") + I((a + b)*2.5/-d) + poly(a, 2) + `odd name`:log(a)'
    )
    assert str(parse_formula("1")) == "1"
    assert (
        str(parse_formula("spline(a, knots=[1e-9, 0.1, 1e20])")) == "1 + spline(a, knots=[1e-09, 0.1, 1e+20])"
    )


def test_names_by_use_in_order_of_first_use() -> None:
    formula = parse_formula("I(e**2 - f/g**-h):C(b) + a + log(d)*C(a) + spline(s, knots=[1, 2, 3]) + C(b):e")
    assert formula.numeric_names == ("e", "f", "g", "h", "a", "d", "s")
    assert formula.factor_names == ("b", "a")


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "expected a term"),
        ("y ~ a", 2, "left side comes from the target"),
        ("~ a", 0, "left side comes from the target"),
        ("a +", 3, "expected a term"),
        ("+ a", 0, "expected a term"),
        ("a b", 2, "found 'b'"),
        ("a / b", 2, "found '/'"),
        ("a `+` b", 2, "found '\\+'"),
        ("log `(` a)", 4, "found '\\('"),
        ("a**2", 1, r"I\(name\*\*2\)"),
        ("(a + b)**2", 7, r"I\(name\*\*2\)"),
        ("a^2", 1, r"I\(name\*\*2\)"),
        ("a - b", 4, "only the intercept"),
        ("a - 0", 4, "only the intercept"),
        ("0", 0, "needs a term"),
        ("1 + a - 1", 8, "both written and left out"),
        ("(a - 1):b", 5, "only outside parentheses"),
        ("b:(0 + a)", 3, "only outside parentheses"),
        ("2 + a", 0, "expected a term"),
        ("1.0 + a", 0, "expected a term"),
        ("(a + b", 6, r"expected '\)'"),
        ("a)", 1, "found '\\)'"),
        ("exp(a)", 0, "no function 'exp'"),
        ("`log`(a)", 5, "found '\\('"),
        ("log(a + 1)", 6, r"expected '\)'"),
        ("log(2)", 4, "expected a column name"),
        ("log()", 4, "expected a column name"),
        ("C(a, b)", 5, "expected 'ref='"),
        ("C(a, ref=b)", 9, "level in quotes"),
        ("C(a, ref='b)", 9, "no closing quote"),
        (r'C(a, ref="\n")', 9, "no closing quote"),
        ("C(a, ref='b\x1b')", 9, "unprintable"),
        ("`a\nb`", 0, "unprintable"),
        ("``", 0, "back-quote"),
        ("poly(a, 0)", 8, "whole number from 1"),
        ("poly(a, 2.5)", 8, "whole number from 1"),
        ("poly(a, 1e9)", 8, "whole number from 1"),
        ("poly(a)", 6, "expected ','"),
        ("spline(a, 3)", 10, "expected 'knots='"),
        ("spline(a, knots=[1, 2])", 16, "3 to 50 knots"),
        (f"spline(a, knots={list(range(51))})", 16, "3 to 50 knots"),
        ("spline(a, knots=[1, 3, 3])", 16, "must increase"),
        ("spline(a, knots=[1, 2, b])", 23, "expected a number"),
        ("spline(a, knots=[1, 2, 1e999])", 23, "too large"),
        ("bs(a, knots=[1], low=1, high=2)", 4, "must increase"),
        ("bs(a, knots=[1], low=0, high=1)", 4, "must increase"),
        ("bs(a, knots=[1], high=2)", 17, "expected 'low='"),
        ("I(2)", 2, "needs a column name"),
        ("I(log(a))", 5, "no functions"),
        ("I(a +)", 5, "expected a column name, a number"),
        ("I(a:b)", 3, r"expected '\)'"),
        ("I('a')", 2, "expected a column name"),
        ("lambda: a", 0, "back-quotes"),
        ("lambda a: a", 0, "back-quotes"),
        ('__import__("os").system("x")', 16, "no meaning"),
        ('__import__("os")', 0, "no function"),
        ("a.b()", 0, "no function 'a.b'"),
        ("a.__class__.__mro__[1]", 19, "found '\\['"),
        ("eval('1')", 0, "no function"),
        ("I(__import__('os'))", 12, "no functions"),
        ("[a for a in b]", 0, "expected a term"),
        ("{a}", 0, "no meaning"),
        ("f'{a}'", 1, "found '{a}'"),
        ("a if b else d", 2, "found 'if'"),
        ("a := 1", 3, "expected a term"),
        ("a; b", 1, "no meaning"),
        ("a # b", 2, "no meaning"),
        ("\ud800", 0, "no meaning"),
        ("a\x00", 1, "no meaning"),
    ],
)
def test_refusals_show_the_place(text: str, position: int, words: str) -> None:
    with pytest.raises(FormulaError, match=words) as refusal:
        parse_formula(text)
    assert isinstance(refusal.value, InputError)
    assert refusal.value.position == position
    _, shown, caret = str(refusal.value).split("\n")
    assert caret == "    " + " " * position + "^"
    assert shown == "    " + "".join(c if c.isprintable() else " " for c in text[: position + 40])


def test_a_long_text_is_shown_around_the_place() -> None:
    with pytest.raises(FormulaError) as refusal:
        parse_formula("a + " * 1000 + "!" + " + a" * 1000)
    _, shown, caret = str(refusal.value).split("\n")
    assert shown[caret.index("^")] == "!"
    assert len(shown) < 110


HOSTILE = {
    "length": ("a+" * (MAX_LENGTH // 2) + "a", f"longer than {MAX_LENGTH}"),
    "parentheses": ("(" * MAX_LENGTH, "deep"),
    "arithmetic": ("I(" + "(" * 9_000, "deep"),
    "signs": ("I(" + "-" * 9_000 + "a)", "deep"),
    "powers": ("I(" + "a**" * 5_000 + "a)", "deep"),
    "crossing": ("*".join(f"a{i}" for i in range(40)), "multiplies out"),
    "sums": (":".join(["(a + b + c + d + e)"] * 900), "multiplies out"),
    "again": ("a*b*c*d*e*f*g*h*i*j*k" + "*a" * 9_000, "multiplies out"),
    "order": (":".join(f"a{i}" for i in range(40)), "more than 20 variables"),
    "text": ("(" + "+".join(f"a_rather_long_name_{i}" for i in range(400)) + "):(b + c)", "longer than"),
    "quotes": ('"' * 9_999, "no closing quote"),
    "digits": ("I(a*" + "9" * 10_000 + ")", "too large"),
}


@pytest.mark.parametrize(("text", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts_are_refused_at_once(text: str, words: str) -> None:
    start = time.process_time()
    with pytest.raises(FormulaError, match=words):
        parse_formula(text)
    assert time.process_time() - start < 2


def test_what_is_within_the_bounds_is_accepted() -> None:
    wide = parse_formula("I(" + " + ".join(["a"] * 4_000) + ") + " + " + ".join(f"x{i}" for i in range(200)))
    deep = parse_formula("I(" + "(a*b + " * (MAX_DEPTH - 1) + "d" + ")" * (MAX_DEPTH - 1) + ")")
    nested = parse_formula("(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH)
    for formula in (wide, deep, nested):
        assert parse_formula(str(formula)) == formula
        assert hash(parse_formula(str(formula))) == hash(formula)
    with pytest.raises(FormulaError, match="deep"):
        parse_formula("(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1))


# Printable text, back-quotes apart: odd column names and levels.
ODD_TEXT = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="`", include_characters=" "),
    min_size=1,
    max_size=6,
)
NAMES = st.sampled_from(["a", "b", "x.1", "_y", "C", "I", "log", "lambda"]) | ODD_TEXT
NUMBERS = st.floats(0, 1e308).map(abs) | st.integers(0, 5).map(float)
KNOTS = st.lists(
    st.floats(-1e300, 1e300) | st.integers(-9, 9).map(float), min_size=3, max_size=6, unique=True
)


def _larger(inner: st.SearchStrategy[Arithmetic]) -> st.SearchStrategy[Arithmetic]:
    def chain(operators: str) -> st.SearchStrategy[Arithmetic]:
        rest = st.lists(st.tuples(st.sampled_from(operators), inner), min_size=1, max_size=3).map(tuple)
        return st.builds(Chain, inner, rest)

    return chain("+-") | chain("*/") | st.builds(Power, inner, inner) | st.builds(Negative, inner)


EXPRESSIONS: st.SearchStrategy[Arithmetic] = st.recursive(
    st.builds(Number, NUMBERS) | st.builds(Name, NAMES), _larger, max_leaves=8
)
COMPUTED = EXPRESSIONS.map(lambda e: Computed(Chain(Name("a"), (("+", e),))))


def variables(
    names: st.SearchStrategy[str], factors: st.SearchStrategy[str], levels: st.SearchStrategy[str]
) -> st.SearchStrategy[TermVariable]:
    """Every kind of variable, of these columns; arithmetic apart."""
    return (
        st.builds(Name, names)
        | st.builds(Categorical, factors, st.none() | levels)
        | st.builds(Transformed, st.sampled_from(["log", "sqrt"]), names)
        | st.builds(Polynomial, names, st.integers(1, 10))
        | st.builds(NaturalSpline, names, KNOTS.map(sorted).map(tuple))
        | st.builds(
            lambda name, knots, degree: BSpline(name, tuple(knots[1:-1]), knots[0], knots[-1], degree),
            names,
            KNOTS.map(sorted),
            st.integers(1, 10),
        )
    )


def formulas(variable: st.SearchStrategy[TermVariable]) -> st.SearchStrategy[Formula]:
    """Formulas as the parser leaves them: no term twice, no variable twice in a term."""
    term = st.lists(variable, min_size=1, max_size=3, unique=True).map(tuple)
    terms = st.lists(term, min_size=1, max_size=4, unique_by=frozenset).map(tuple)
    return st.builds(Formula, intercept=st.booleans(), terms=terms)


ANY_FORMULA = formulas(variables(NAMES, NAMES, ODD_TEXT | st.just("")) | COMPUTED)


@settings(max_examples=200, deadline=2000)
@given(ANY_FORMULA)
def test_canonical_text_parses_back(formula: Formula) -> None:
    assert parse_formula(str(formula)) == formula


FRAGMENTS = [
    *"ab01+-*/:()[],=~`'\"\\ ^.{",
    *("**", "C(", "I(", "log(", "poly(", "spline(", "knots=", "ref=", "low=", "1e5", "lambda", "(a + b)"),
]


PIECES = st.sampled_from(["a", "b", "1", "C(a)", "log(b)", "I(a + 1)", "poly(a, 2)", "-1", "(a + b)"])
JOINED = st.lists(PIECES, min_size=1, max_size=5).flatmap(
    lambda pieces: st.sampled_from([" + ", ":", "*", "", "-"]).map(lambda sign: sign.join(pieces))
)
parses = Premise("the text is a formula", at_least=0.1)


@parses
@settings(max_examples=300, deadline=2000)
@given(st.text(max_size=60) | st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join) | JOINED)
def test_any_text_parses_or_is_refused(text: str) -> None:
    parses.holds(_parses_or_is_refused(text))


still_parses = Premise("the damaged text is a formula", at_least=0.15)


@still_parses
@settings(max_examples=200, deadline=2000)
@given(ANY_FORMULA.map(str), st.data())
def test_a_damaged_formula_parses_or_is_refused(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 3)))
    damaged = text[:start] + data.draw(st.sampled_from(["", *FRAGMENTS])) + text[end:]
    still_parses.holds(_parses_or_is_refused(damaged))


def _parses_or_is_refused(text: str) -> bool:
    try:
        formula = parse_formula(text)
    except FormulaError:
        return False
    assert parse_formula(str(formula)) == formula
    return True
