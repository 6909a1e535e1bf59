"""Formulas as terms: the same columns as the table's design, in the record's world and in any other."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.errors import InputError
from fedtmle.estimation.vocabulary import Vocabulary, monomial
from fedtmle.estimation.worlds import Both, World, scaled
from fedtmle.initial.design import column_names, columns_of, part_values
from fedtmle.initial.syntax import Computed, parse_formula
from fedtmle.model.table import Factor, Table
from fedtmle_core.dictionary import Categorical, Dictionary, Numeric
from fedtmle_core.evaluate import Workspace
from fedtmle_core.graph import intervals, ordered
from fedtmle_core.leaves import Between, Fold, Known, Level, Log, Number
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, ZERO, Apply, Constant, Kept, Pick, Softmax, Term, product, total

N = 400
RNG = np.random.default_rng(4)
NUMERIC = {
    "age": RNG.uniform(20.0, 90.0, N),
    "dose": RNG.uniform(0.5, 30.0, N).round(1),
    "bmi": RNG.uniform(-5.0, 5.0, N),
    "sex": RNG.integers(0, 2, N).astype(float),
}
LEVELS = {"site": ("a", "b", "c"), "arm": ("0", "1"), "sex": ("0", "1")}
CODES = {"site": RNG.integers(0, 3, N).astype(np.int16), "arm": RNG.integers(0, 2, N).astype(np.int16)}
RANGES = {"age": (18.0, 110.0), "dose": (0.5, 30.0), "bmi": (-5.0, 5.0), "sex": (0.0, 1.0)}
DECLARED = Dictionary(
    (
        *(Numeric(name=name, low=low, high=high) for name, (low, high) in RANGES.items()),
        Categorical(name="site", levels=LEVELS["site"]),
        Categorical(name="arm", levels=LEVELS["arm"]),
    )
)
VOCABULARY = Vocabulary.of(DECLARED, levels={"sex": LEVELS["sex"]})

FORMULAS = [
    "age + dose + C(site)",
    "0 + C(site) + age:C(site)",
    "arm*age + C(arm):bmi",
    "poly(age, 3) + I(bmi**2) + I(bmi*age) + I(age*age*dose)",
    "log(dose) + sqrt(age) + log(dose):C(site, ref='b')",
    "spline(age, knots=[30, 50, 70]) + bs(bmi, knots=[0], low=-5, high=5)",
    "C(sex)*sex + sex:age",
    "I(age/dose) + poly(bmi, 5) + I((age - 50)**2) + bs(age, knots=[50], low=0, high=120, degree=5)",
]


def table(numeric: dict[str, np.ndarray], codes: dict[str, np.ndarray]) -> Table:
    factors = {name: Factor(codes[name].astype(np.int64), LEVELS[name]) for name in codes}
    factors["sex"] = Factor(numeric["sex"].astype(np.int64), LEVELS["sex"])
    return Table(n_rows=N, numeric={**numeric, "arm": codes["arm"].astype(float)}, factors=factors)


def workspace(formula: str, numeric: dict[str, np.ndarray], codes: dict[str, np.ndarray]) -> Workspace:
    """Return the sheet of a table, with the columns that the loader computes for a formula."""
    loaded = VOCABULARY.loader_columns([parse_formula(formula)])
    rows = table(numeric, codes)
    declared = Dictionary((*DECLARED.variables, *(column.variable for column in loaded)))
    computed = {column.variable.name: part_values(column.part, rows, {}) for column in loaded}
    return Workspace(Sheet.read(declared, {**numeric, **computed}, codes))


def raw_columns(formula: str, world: World, space: Workspace) -> list[np.ndarray]:
    design = VOCABULARY.design(formula)
    columns = space.columns(world.of_all(design.columns))
    return [column * factor for column, factor in zip(columns, design.factors, strict=True)]


@pytest.mark.parametrize("formula", FORMULAS)
def test_columns_are_those_of_the_table(formula: str) -> None:
    parsed = parse_formula(formula)
    levels = {**LEVELS}
    design = VOCABULARY.design(formula)
    assert design.names == column_names(parsed, levels)
    found = raw_columns(formula, World({}), workspace(formula, NUMERIC, CODES))
    for name, one, other in zip(
        design.names, found, columns_of(parsed, table(NUMERIC, CODES), levels), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_unit_column_is_at_most_1(formula: str) -> None:
    design = VOCABULARY.design(formula)
    loaded = VOCABULARY.loader_columns([parse_formula(formula)])
    declared = Dictionary((*DECLARED.variables, *(column.variable for column in loaded)))
    bounds = intervals(design.columns, declared)
    for term, unit, name in zip(design.columns, design.unit_factors, design.names, strict=True):
        assert max(map(abs, bounds[term])) * abs(unit) <= 1.0 + 1e-9, name


SHIFTED = Apply("clip", Number("dose", 5) * 32.0 + 2.0, low=0.5, high=30.0)
WORLDS = {
    "arm": (VOCABULARY.world({"arm": 1}), {}, {"arm": np.ones(N, dtype=np.int16)}),
    "shift": (VOCABULARY.world({"dose": SHIFTED}), {"dose": np.clip(NUMERIC["dose"] + 2.0, 0.5, 30.0)}, {}),
    "number": (VOCABULARY.world({"age": Constant(64.0)}), {"age": np.full(N, 64.0)}, {}),
    "moved": (VOCABULARY.world({"bmi": Number("bmi", 3) * -4.0}), {"bmi": NUMERIC["bmi"] * -0.5}, {}),
    "both": (
        VOCABULARY.world({"sex": Both(code=1, number=ONE), "site": 2}),
        {"sex": np.ones(N)},
        {"site": np.full(N, 2)},
    ),
}


@pytest.mark.parametrize("world", list(WORLDS))
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_world_is_the_table_in_which_variables_are_set(formula: str, world: str) -> None:
    given, numeric, codes = WORLDS[world]
    space = workspace(formula, NUMERIC, CODES)
    expected = columns_of(parse_formula(formula), table({**NUMERIC, **numeric}, {**CODES, **codes}), LEVELS)
    for one, other in zip(raw_columns(formula, given, space), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


SPACE = Workspace(Sheet.read(DECLARED, NUMERIC, CODES))
ARM, AGE = Level("arm", 1), Number("age", 7)


def values(term: Term) -> np.ndarray:
    (column,) = SPACE.columns([term])
    return column


def test_setting_a_variable_makes_terms_simpler() -> None:
    treated, untreated = World({"arm": 1}), World({"arm": 0})
    predictor = total([ONE, ARM, AGE, product(ARM, AGE)], [0.5, -1.0, 2.0, 3.0])
    assert treated.of(predictor) == total([ONE, AGE], [-0.5, 5.0])
    assert untreated.of(predictor) == total([ONE, AGE], [0.5, 2.0])
    assert untreated.of(product(ARM, Apply("exp", predictor))) == ZERO
    assert treated.of(Known("arm", is_level=True)) == ONE
    assert treated.of(Pick("arm", (AGE, Kept(AGE)))) == Kept(AGE)
    assert World({"age": Constant(64.0)}).of(Apply("exp", AGE - 0.5)) == ONE
    assert World({"site": 1}).of(predictor) is predictor


def test_what_is_given_reads_the_record_as_it_is() -> None:
    swapped = World({"arm": (ARM, Level("arm", 0))})
    assert swapped.of(ARM) == Level("arm", 0)
    assert swapped.of(swapped.of(ARM)) == ARM
    assert swapped.of(Softmax((ARM, AGE), 0)) == Softmax((Level("arm", 0), AGE), 0)
    older = World({"age": AGE * 128.0 + 1.0})
    np.testing.assert_allclose(values(older.of(AGE)), (NUMERIC["age"] + 1.0) / 128.0)


def test_a_rule_sets_levels_to_terms() -> None:
    old = Apply("step", AGE, low=60 / 128)
    ruled = World({"arm": (1.0 - old, old)})
    np.testing.assert_array_equal(values(ruled.of(ARM)), NUMERIC["age"] >= 60)
    picked = ruled.of(Pick("arm", (Constant(3.0), AGE)))
    np.testing.assert_allclose(values(picked), np.where(NUMERIC["age"] >= 60, NUMERIC["age"] / 128, 3.0))


@pytest.mark.parametrize(("low", "high"), [(None, 5.0), (5.0, None), (5.0, 12.3)])
def test_a_cut_is_of_the_value_that_is_set(low: float | None, high: float | None) -> None:
    dose = NUMERIC["dose"] / 32.0 * 32.0 + 2.0
    assert (dose == 5.0).any()  # some are at a cut exactly
    expected = (dose > (-np.inf if low is None else low)) & (dose <= (np.inf if high is None else high))
    moved = World({"dose": Number("dose", 5) * 32.0 + 2.0})
    np.testing.assert_array_equal(values(moved.of(Between("dose", low, high))), expected)


def test_worlds_are_put_together() -> None:
    period = World.period(3)
    assert period.of(Number("period", 2)) == Constant(0.75)
    assert [period.of(Level("period", code)) for code in (1, 2)] == [ZERO, ONE]
    both = period.and_also(World({"arm": 0}))
    assert both.of(product(Level("period", 2), ARM)) == ZERO
    assert both.of(total([Level("period", 2), ARM])) == ONE


def test_a_deep_term_is_rewritten_without_recursion() -> None:
    term: Term = ARM
    for _ in range(5000):
        term = Apply("expit", total([term, AGE]))
    assert len(ordered([World({"arm": 1}).of(term)])) > 5000


@pytest.mark.parametrize(
    ("world", "term", "message"),
    [
        (World({"arm": 1}), Number("arm", 0), "'arm' is set to a level, and a model uses it as a number"),
        (World({"age": AGE}), Level("age", 1), "'age' is set as a number, and a model uses it as a factor"),
        (World({"age": AGE}), Number("I(age/dose)", 7), r"I\(age/dose\): 'dose' is combined with a variable"),
    ],
)
def test_what_a_world_cannot_set_is_refused(world: World, term: Term, message: str) -> None:
    with pytest.raises(InputError, match=message):
        world.of(term)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("age + site", r"column 'site' is categorical, write C\(site\)"),
        ("C(age)", r"column 'age' is numeric, write age without C\(\)"),
        ("weight", "the range of 'weight' is not declared"),
        ("I(1/bmi)", "a denominator may be 0"),
        ("log(bmi)", "the range of 'bmi' reaches 0 or below"),
    ],
)
def test_a_formula_outside_the_vocabulary_is_refused(formula: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        VOCABULARY.design(formula)


def test_free_arithmetic_is_left_to_the_loader() -> None:
    loaded = VOCABULARY.loader_columns(map(parse_formula, FORMULAS))
    assert [column.variable.name for column in loaded] == [
        "I(age/dose)",
        "I(bmi**4)",
        "I(bmi**5)",
        "I((age - 50)**2)",
        *(f"bs(age, knots=[50], low=0, high=120, degree=5)[{k}]" for k in range(1, 7)),
    ]
    assert loaded[0].variable == Numeric(name="I(age/dose)", low=18.0 / 30.0, high=220.0)
    expressions = {"I(age**2)": {"age": 2}, "I(age*bmi*age)": {"age": 2, "bmi": 1}, "I(2*age)": None}
    for text, powers in expressions.items():
        ((variable,),) = parse_formula(text).terms
        assert isinstance(variable, Computed)
        assert monomial(variable.expression) == powers


def test_missing_levels_of_a_number_are_in_no_level() -> None:
    sex = NUMERIC["sex"].copy()
    sex[:5] = np.nan
    space = Workspace(Sheet.read(DECLARED, {**NUMERIC, "sex": sex}, CODES))
    zero, one = VOCABULARY.design("0 + C(sex)").columns
    np.testing.assert_array_equal(np.stack(space.columns([zero, one]))[:, :5], 0.0)
    np.testing.assert_array_equal(space.columns([zero])[0][5:], 1.0 - sex[5:])


def test_a_number_is_in_its_own_unit() -> None:
    for name in ("age", "dose", "bmi", "sex"):
        np.testing.assert_array_equal(values(VOCABULARY.number(name)), NUMERIC[name])
    np.testing.assert_array_equal(values(VOCABULARY.number("arm")), CODES["arm"])
    doubled = Vocabulary.of(DECLARED, ranges={"twice": (0.0, 220.0)}, meanings=World({"twice": AGE * 256.0}))
    np.testing.assert_allclose(values(doubled.number("twice")), 2.0 * NUMERIC["age"])


def test_a_scaled_term_is_taken_apart() -> None:
    assert scaled(AGE * 4.0 * 0.5) == (AGE, 2.0)
    assert scaled(Constant(3.0)) == (ONE, 3.0)
    assert scaled(Constant(3.0) * 2.0) == (ONE, 6.0)
    assert scaled(ZERO) == (ZERO, 1.0)
    assert scaled(Fold(2, 1, "", 0)) == (Fold(2, 1, "", 0), 1.0)
    assert scaled(Log("dose")) == (Log("dose"), 1.0)
