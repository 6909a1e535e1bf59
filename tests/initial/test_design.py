"""Designs: every construct against longhand columns, and rows that cannot be used."""

from fractions import Fraction

import numpy as np
import pytest
import scipy.interpolate
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import DataError, InputError
from fedtmle.initial.design import column_names, design, scaled_design
from fedtmle.initial.syntax import Categorical, Formula, Name, parse_formula
from fedtmle.model.table import Factor, Table
from fedtmle_core.types import Array
from tests.initial.test_formula import formulas, variables
from tests.premise import Premise

X = np.array([0.5, 1.0, 2.5, 4.0, -3.0, 0.0, 7.0])
W = np.array([3.0, 0.25, 1.0, 2.0, 8.0, 0.5, 1.5])
SITE = ["b", "a", "d", "a", "b", "d", "d"]  # nobody at c
ARM = ["new", "old", "old", "new", "new", "old", "new"]
LEVELS = {"site": ("a", "b", "c", "d"), "arm": ("old", "new"), "x y": ("1", "2")}


def factor(values: list[str]) -> Factor:
    levels = tuple(sorted(set(values)))
    return Factor(np.array([levels.index(value) for value in values]), levels)


TABLE = Table(
    n_rows=7,
    numeric={"x": X, "w": W, "x y": X + 10},
    factors={"site": factor(SITE), "arm": factor(ARM), "x y": factor(["1"] * 7)},
)


def built(text: str, table: Table = TABLE) -> Array:
    return design(parse_formula(text), table, LEVELS)


def at(column: list[str], level: str) -> Array:
    return np.array([1.0 if value == level else 0.0 for value in column])


ONE = np.ones(7)
B, C, D, NEW = at(SITE, "b"), at(SITE, "c"), at(SITE, "d"), at(ARM, "new")
OLD = at(ARM, "old")
LONGHAND: dict[str, dict[str, Array]] = {
    "1": {"1": ONE},
    "x": {"1": ONE, "x": X},
    "0 + w + x": {"w": W, "x": X},
    "w + 1": {"1": ONE, "w": W},
    "x + w + x": {"1": ONE, "x": X, "w": W},
    "x:w + w:x": {"1": ONE, "x:w": X * W},
    "x*w": {"1": ONE, "x": X, "w": W, "x:w": X * W},
    "`x y`": {"1": ONE, "`x y`": X + 10},
    "C(`x y`)": {"1": ONE, "C(`x y`)[2]": 0 * X},
    "C(site)": {"1": ONE, "C(site)[b]": B, "C(site)[c]": C, "C(site)[d]": D},
    "0 + C(arm)": {"C(arm)[old]": OLD, "C(arm)[new]": NEW},  # without intercept, every level
    "C(arm) - 1 + C(site)": {
        **{"C(arm)[old]": OLD, "C(arm)[new]": NEW},
        **{"C(site)[b]": B, "C(site)[c]": C, "C(site)[d]": D},  # the first factor spans the constant
    },
    "0 + x + C(arm, ref='new')": {"x": X, "C(arm)[old]": OLD, "C(arm)[new]": NEW},
    "C(arm):x": {"1": ONE, "C(arm)[old]:x": OLD * X, "C(arm)[new]:x": NEW * X},  # a slope per arm
    "x + C(arm):x": {"1": ONE, "x": X, "C(arm)[new]:x": NEW * X},
    "C(arm):x + x": {"1": ONE, "C(arm)[new]:x": NEW * X, "x": X},
    "0 + C(arm)*x": {"C(arm)[old]": OLD, "C(arm)[new]": NEW, "x": X, "C(arm)[new]:x": NEW * X},
    "C(arm):C(`x y`)": {
        "1": ONE,
        "C(`x y`)[2]": 0 * X,
        "C(arm)[new]:C(`x y`)[1]": NEW,
        "C(arm)[new]:C(`x y`)[2]": 0 * X,
    },
    'C(arm, ref="new")': {"1": ONE, "C(arm)[old]": OLD},
    "C(arm) + C(arm, ref='new') + C(arm, ref='old')": {"1": ONE, "C(arm)[new]": NEW},
    "0 + C(arm):x + x:C(arm)": {"C(arm)[old]:x": OLD * X, "C(arm)[new]:x": NEW * X},
    "0 + x + C(arm):x + C(site, ref='c'):C(arm):x": {
        "x": X,
        "C(arm)[new]:x": NEW * X,
        **{
            f"C(site)[{s}]:C(arm)[{a}]:x": at(SITE, s) * at(ARM, a) * X for s in "abd" for a in ("old", "new")
        },
    },
    "0 + C(site):poly(x, 2)": {  # the last variable varies fastest
        "C(site)[a]:x": at(SITE, "a") * X,
        "C(site)[a]:I(x**2)": at(SITE, "a") * X * X,
        "C(site)[b]:x": B * X,
        "C(site)[b]:I(x**2)": B * X * X,
        "C(site)[c]:x": C * X,
        "C(site)[c]:I(x**2)": C * X * X,
        "C(site)[d]:x": D * X,
        "C(site)[d]:I(x**2)": D * X * X,
    },
    "0 + log(w) + sqrt(w)": {"log(w)": np.log(W), "sqrt(w)": np.sqrt(W)},
    "0 + poly(x, 3)": {"x": X, "I(x**2)": X * X, "I(x**3)": X * X * X},
    "0 + x + I(x**2) + poly(x, 2)": {"x": X, "I(x**2)": X * X},
    "0 + x + C(arm):x + x:C(arm, ref='old')": {"x": X, "C(arm)[new]:x": NEW * X},
    "0 + x + x:poly(x, 2)": {"x": X, "x:x": X * X, "x:I(x**2)": X * X * X},
    "0 + x:poly(x, 2)": {"x:x": X * X, "x:I(x**2)": X * X * X},
    "0 + spline(x, knots=[0, 1, 4]) + x": {
        "x": X,
        "spline(x, knots=[0, 1, 4])[2]": (
            np.maximum(X, 0) ** 3 - np.maximum(X - 1, 0) ** 3 * (4 / 3) + np.maximum(X - 4, 0) ** 3 * (1 / 3)
        )
        / 16,
    },
    "0 + bs(w, knots=[], low=0, high=10, degree=2)": {  # Bernstein's polynomials
        "bs(w, knots=[], low=0, high=10, degree=2)[1]": 2 * (W / 10) * (1 - W / 10),
        "bs(w, knots=[], low=0, high=10, degree=2)[2]": (W / 10) ** 2,
    },
    "0 + bs(w, knots=[2], low=0, high=8, degree=1)": {  # hats
        "bs(w, knots=[2], low=0, high=8, degree=1)[1]": np.interp(W, [0, 2, 8], [0, 1, 0]),
        "bs(w, knots=[2], low=0, high=8, degree=1)[2]": np.interp(W, [0, 2, 8], [0, 0, 1]),
    },
}


@pytest.mark.parametrize(("text", "expected"), LONGHAND.items(), ids=LONGHAND)
def test_longhand(text: str, expected: dict[str, Array]) -> None:
    columns = built(text)
    assert column_names(parse_formula(text), LEVELS) == tuple(expected)
    assert columns.shape == (len(expected), 7)
    assert columns.dtype == np.float64
    assert columns.flags.c_contiguous
    np.testing.assert_allclose(columns, np.stack(list(expected.values())), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I(x + w)", X + W),
        ("I(x - w - 2)", (X - W) - 2),
        ("I(x - (w - 2))", X - (W - 2)),
        ("I(x/w/4)", X / (4 * W)),
        ("I(x/(w/4))", 4 * X / W),
        ("I(x + w*2 - x/w)", (X + 2 * W) - (X / W)),
        ("I((x + w)*2)", 2 * X + 2 * W),
        ("I(-x**2)", -(X * X)),
        ("I((-x)**2)", X * X),
        ("I(2*-x)", -2 * X),
        ("I(--x)", X),
        ("I(w**-1)", 1 / W),
        ("I(w**2**3)", W**8),
        ("I((w**2)**3)", W**6),
        ("I(w**0.5)", np.sqrt(W)),
        ("I(2**x)", np.exp2(X)),
        ("I(x*(1 + 2)**2 - 3)", 9 * X - 3),
    ],
)
def test_arithmetic(text: str, expected: Array) -> None:
    np.testing.assert_allclose(built(f"0 + {text}")[0], expected, rtol=1e-14, atol=1e-15)


def spline_columns(x: Array, knots: list[float]) -> Array:
    return built(f"0 + spline(x, knots={knots})", Table(n_rows=len(x), numeric={"x": x}, factors={}))


def test_natural_spline_is_the_definition() -> None:
    knots = [-1.0, 0.5, 2.0, 3.0, 7.0]
    t = [Fraction(knot) for knot in knots]
    x = np.linspace(-3, 12, 61)

    def positive_cube(value: Fraction) -> Fraction:
        return max(value, Fraction(0)) ** 3

    expected = np.zeros((4, len(x)))
    for i, value in enumerate(map(Fraction, x)):
        expected[0, i] = float(value)
        for j in range(3):
            cubic = positive_cube(value - t[j])
            cubic -= positive_cube(value - t[3]) * (t[4] - t[j]) / (t[4] - t[3])
            cubic += positive_cube(value - t[4]) * (t[3] - t[j]) / (t[4] - t[3])
            expected[j + 1, i] = float(cubic / (t[4] - t[0]) ** 2)
    np.testing.assert_allclose(spline_columns(x, knots), expected, rtol=1e-13, atol=1e-14)


def test_natural_spline_is_linear_beyond_its_knots_and_keeps_its_digits_there() -> None:
    knots = [0.0, 1.0, 3.0, 4.0]
    below = spline_columns(np.array([-1e6, -2.0, -1.0, 0.0]), knots)
    above = spline_columns(np.array([4.0, 5.0, 6.0, 1e6 + 4]), knots)
    assert not below[1:].any()
    slope = above[:, 1] - above[:, 0]
    np.testing.assert_allclose(above[:, 2] - above[:, 1], slope, rtol=1e-14)
    np.testing.assert_allclose(above[:, 3], above[:, 0] + 1e6 * slope, rtol=1e-14)


def test_natural_spline_has_a_continuous_second_derivative() -> None:
    knots, h = [0.0, 1.0, 3.0, 4.0], 1e-4

    def curvature(x: float) -> Array:
        low, middle, high = spline_columns(np.array([x - h, x, x + h]), knots).T
        return (low - 2 * middle + high) / h**2

    for knot in knots:
        np.testing.assert_allclose(curvature(knot - 2 * h), curvature(knot + 2 * h), atol=1e-2)
    np.testing.assert_allclose(curvature(-1.0), 0, atol=1e-6)
    np.testing.assert_allclose(curvature(9.0), 0, atol=1e-6)
    assert np.abs(curvature(2.0)[1:]).min() > 0.1


def test_natural_spline_spans_the_natural_interpolants() -> None:
    rng = np.random.default_rng(7)
    knots = [-2.0, 0.0, 0.7, 3.0, 5.0, 6.0]
    interpolant = scipy.interpolate.CubicSpline(knots, rng.standard_normal((6, 4)), bc_type="natural")
    x = np.linspace(-2, 6, 400)
    columns = np.vstack([np.ones_like(x), spline_columns(x, knots)])
    fitted = columns.T @ np.linalg.lstsq(columns.T, interpolant(x), rcond=None)[0]
    np.testing.assert_allclose(fitted, interpolant(x), atol=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_b_splines_against_scipy(degree: int) -> None:
    low, knots, high = -1.0, [0.0, 0.5, 3.0], 4.0
    x = np.array([*np.linspace(low, high, 101), *knots])
    t = np.array([low] * (degree + 1) + knots + [high] * (degree + 1))
    expected = scipy.interpolate.BSpline.design_matrix(x, t, degree).toarray()[:, 1:]
    table = Table(n_rows=len(x), numeric={"x": x}, factors={})
    columns = built(f"0 + bs(x, knots={knots}, low={low}, high={high}, degree={degree})", table)
    np.testing.assert_allclose(columns.T, expected, atol=1e-14)


def test_levels_that_look_like_columns_are_quoted() -> None:
    formula, levels = parse_formula("C(g):x + x"), {"g": ("0", "1", '1]:x "', "a-b.c")}
    names = ("1", "C(g)[1]:x", r'C(g)["1]:x \""]:x', "C(g)[a-b.c]:x", "x")
    assert column_names(formula, levels) == names


def test_rows_do_not_see_each_other() -> None:
    text = "C(site)*spline(x, knots=[0, 1, 4]) + log(w):bs(w, knots=[1], low=0, high=9) + I((x - w)**3/w)"
    whole, rows = built(text), np.array([4, 0, 6])
    assert built(text, TABLE.take(rows)).tobytes() == np.ascontiguousarray(whole[:, rows]).tobytes()
    assert built(text, TABLE.take(np.array([], dtype=np.int64))).shape == (len(whole), 0)


def test_scales_divide_by_powers_of_two() -> None:
    formula = parse_formula("x + log(w)")
    whole = design(formula, TABLE, {})
    divided = scaled_design(formula, TABLE, {}, (0, 3, -2))
    assert (divided.part(slice(None)) == whole / np.array([[1.0], [8.0], [0.25]])).all()
    assert divided.columns[1] is TABLE.numeric["x"]  # where it is, not copied
    np.testing.assert_array_equal(divided.largest, np.abs(whole).max(axis=1))


def test_blocks_give_the_same_bytes_and_the_same_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "C(site)*x + log(w) + I(x**2)"
    whole = built(text)
    wrong = {
        "missing": (np.nan, "has missing values in 3 rows"),
        "negative": (-1.0, "not positive in 3 rows"),
    }
    monkeypatch.setattr("fedtmle_core.parallel.BLOCK", 2)
    assert built(text).tobytes() == whole.tobytes()
    for value, message in wrong.values():
        with pytest.raises(DataError, match=message):
            built(text, TABLE.with_numeric("w", np.where(np.arange(len(W)) % 2 == 1, value, W)))
    with pytest.raises(DataError, match=r"I\(x\*\*2\) is not finite in 3 rows"):
        built(text, TABLE.with_numeric("x", np.where(np.arange(len(X)) % 2 == 1, 1e200, X)))


def test_the_table_is_left_alone() -> None:
    before = np.stack([X, W])
    built("x*w + I(-x) + log(w):x")[:] = 0
    np.testing.assert_array_equal(np.stack([X, W]), before)


def test_unknown_columns_are_named_together_with_near_matches() -> None:
    with pytest.raises(InputError) as refusal:
        design(parse_formula("sites + w + x:C(arms) + zzz"), TABLE, {**LEVELS, "arms": ("a", "b")})
    assert str(refusal.value) == (
        "there is no column 'sites', near matches: site; there is no column 'zzz'; "
        "there is no column 'arms', near matches: arm"
    )
    assert not isinstance(refusal.value, DataError)


def test_columns_of_the_other_kind_are_named() -> None:
    with pytest.raises(InputError, match=r"'site' is categorical, write C\(site\)"):
        built("I(site + x)")
    with pytest.raises(InputError, match=r"'x' is numeric, write x without C\(\)"):
        design(parse_formula("C(x)"), TABLE, {"x": ("1", "2")})


def test_levels_must_be_declared() -> None:
    with pytest.raises(InputError, match=r"no levels for C\(site\)"):
        column_names(parse_formula("C(site)"), {})
    with pytest.raises(InputError, match='reference is not one of the study\'s levels "old", "new"'):
        column_names(parse_formula("C(arm, ref='none')"), LEVELS)


def test_missing_values_are_counted_by_column() -> None:
    table = TABLE.with_numeric("w", np.where(X > 2, np.nan, W))
    table = table.with_factor("arm", Factor(np.array([-1, 0, 0, 1, 0, 0, 0]), ("old", "new")))
    assert built("x + C(site)", table).shape == (5, 7)  # not in what the formula uses
    with pytest.raises(DataError) as refusal:
        built("log(w) + C(arm) + x", table)
    assert str(refusal.value) == (
        "column 'w' has missing values in 3 rows; column 'arm' has missing values in 1 row"
    )


def test_a_level_outside_the_study_is_counted_and_not_quoted() -> None:
    values = ["a", "SECRET", "b", "SECRET", "a", "a", "d"]
    table = TABLE.with_factor("site", factor(values))
    with pytest.raises(DataError) as refusal:
        built("C(site):x", table)
    assert str(refusal.value) == "column 'site' has a level that the study does not declare in 2 rows"
    kept = table.take(np.array([0, 2, 6]))  # the level is still listed, no row has it
    np.testing.assert_array_equal(built("C(site)", kept), [[1, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("log(x)", "log(x): column 'x' is not positive in 2 rows"),
        ("w:log(x)", "log(x): column 'x' is not positive in 2 rows"),
        ("sqrt(x)", "sqrt(x): column 'x' is negative in 1 row"),
        ("I(w/x)", "I(w/x) is not finite in 1 row"),
        ("I(x**0.5)", "I(x**0.5) is not finite in 1 row"),
        ("I(x/0)", "I(x/0) is not finite in 7 rows"),
        ("I(x*10**400)", "I(x*10**400) is not finite in 7 rows"),
        ("I(w*1e308)", "I(w*1e+308) is not finite in 3 rows"),
        ("I(w*1e200):I(w*1e108)", "I(w*1e+200):I(w*1e+108) is not finite in 4 rows"),
        (
            "bs(x, knots=[], low=0, high=5, degree=1)",
            "bs(x, knots=[], low=0, high=5, degree=1)[1]: column 'x' is outside low and high in 2 rows",
        ),
    ],
)
def test_rows_outside_the_domain_are_counted(text: str, message: str) -> None:
    with pytest.raises(DataError) as refusal:
        built(text)
    assert str(refusal.value) == message


def test_an_infinite_value_is_refused() -> None:
    with pytest.raises(DataError, match="x is not finite in 1 row"):
        built("x", TABLE.with_numeric("x", np.where(X == 7, np.inf, X)))


def test_the_number_of_columns_is_bounded() -> None:
    levels = {name: tuple(map(str, range(100))) for name in ("site", "arm")}
    with pytest.raises(InputError, match="more than 5000 columns"):
        column_names(parse_formula("C(site):C(arm)"), levels)


@pytest.mark.parametrize(
    "text",
    [
        *("C(f)", "0 + C(f)", "C(f):C(g)", "0 + C(g):C(f) + C(f)", "C(f)*C(g)*C(h)", "C(f):C(g):C(h) + C(h)"),
        *("C(f):x", "0 + x + C(f):x + C(g)", "C(f):C(g):x + x", "0 + C(f) + C(g) + C(h)", "C(f)*x - 1"),
    ],
)
def test_a_coding_spans_what_the_indicators_of_all_levels_span_and_is_never_collinear(text: str) -> None:
    """Against the rank of the model that has a column for every level of every factor in every term."""
    rng = np.random.default_rng(1)
    levels = {"f": ("a", "b", "c"), "g": ("a", "b"), "h": ("a", "b", "c", "d")}
    codes = {name: rng.integers(0, len(own), 300) for name, own in levels.items()}
    factors = {name: Factor(code, levels[name]) for name, code in codes.items()}
    x = rng.normal(size=300)
    formula = parse_formula(text)
    ours = design(formula, Table(n_rows=300, numeric={"x": x}, factors=factors), levels)
    every = [np.ones((1, 300))] if formula.intercept else []
    for term in formula.terms:
        block = np.ones((1, 300))
        for variable in term:
            assert isinstance(variable, Name | Categorical)
            own = (
                x[None]
                if variable == Name("x")
                else np.eye(len(levels[variable.name]))[codes[variable.name]].T
            )
            block = (block[:, None] * own[None]).reshape(-1, 300)
        every.append(block)
    full = np.concatenate(every)
    rank = np.linalg.matrix_rank(full)
    assert len(ours) == np.linalg.matrix_rank(ours) == rank == np.linalg.matrix_rank(np.vstack([full, ours]))


ANY_FORMULA = formulas(variables(st.sampled_from(["x", "w"]), st.just("site"), st.sampled_from("abcd")))
ANY_COLUMN = st.lists(st.floats(), min_size=7, max_size=7).map(np.array)


is_design = Premise("the formula has a design on these rows", at_least=0.3)


@is_design
@settings(max_examples=150, deadline=2000)
@given(ANY_FORMULA, ANY_COLUMN | st.just(W))
def test_any_formula_on_any_rows_is_a_finite_design_or_an_input_error(formula: Formula, x: Array) -> None:
    try:
        columns = design(formula, TABLE.with_numeric("x", x), LEVELS)
    except InputError:
        is_design.holds(False)
        return
    is_design.holds(True)
    assert np.isfinite(columns).all()
    names = column_names(formula, LEVELS)
    assert len(names) == len(set(names)) == len(columns)
