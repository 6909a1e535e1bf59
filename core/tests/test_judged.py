"""What is judged of a plan: products read as factors, the lanes that they share, and the rule on a sheet."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from graphs import DICTIONARY, LEAVES, sheet
from honest import exact_share
from hypothesis import given, settings
from hypothesis import strategies as st
from test_judgement import run

from fedtmle_core.dictionary import Categorical, Dictionary, Numeric
from fedtmle_core.errors import DataError
from fedtmle_core.evaluate import Workspace
from fedtmle_core.factors import factors
from fedtmle_core.judged import about_the_middle, before_fits, describe, judge, layout
from fedtmle_core.judgement import RAISE, Name, Outcome, Step
from fedtmle_core.leaves import Draw, Known, Level, Number, Power
from fedtmle_core.plan import Member, Model, Plan
from fedtmle_core.sheet import Sheet
from fedtmle_core.span import COARSE, Layout
from fedtmle_core.terms import ONE, ZERO, Apply, Kept, Term, product, total

PEOPLE = sheet(400, seed=4)
MEMBERS = tuple(
    Member(name=name, signing=b"s" * 32, exchange=b"x" * 32) for name in ("north", "south", "east")
)
ATOMS = st.sampled_from([ONE, *LEAVES, Level("a", 2), Level("s", 1), 1.0 - Level("a", 1)])


def values(term: Term) -> np.ndarray:
    (column,) = Workspace(PEOPLE).columns([term])
    return column


def plan(columns: tuple[Term, ...], responses: tuple[Term, ...], groups: tuple[Term, ...] = ()) -> Plan:
    return Plan(
        dictionary=DICTIONARY,
        models=(Model(columns=columns, responses=(ONE, *responses), groups=groups),),
        members=MEMBERS,
        study=b"study",
        author="author",
    )


def parts(people: Sheet, hospitals: int = 3) -> list[Sheet]:
    ends = [people.n * m // hospitals for m in range(hospitals + 1)]
    return [people.part(slice(a, b)) for a, b in pairwise(ends)]


@given(st.lists(ATOMS, min_size=1, max_size=5))
@settings(max_examples=200)
def test_a_term_is_the_product_of_its_factors(terms: list[Term]) -> None:
    whole = product(terms[0], Kept(product(*terms[1:])) if terms[1:] else ONE)
    found = factors(whole)
    np.testing.assert_allclose(
        values(whole), values(product(*found)) if found is not None else 0.0, atol=1e-12
    )
    assert found == factors(*reversed(terms))


def test_factors_that_say_nothing_are_left_out() -> None:
    a, x, m = Level("a", 1), Number("x", 3), Number("m", 4)
    assert factors(product(a, x), a) == factors(a, x) == factors(x, Kept(a), ONE)
    assert factors(a, Level("a", 2)) is None
    assert factors(a, ZERO) is None
    assert factors(Known("m"), m) == (m,)
    assert factors(Known("s", is_level=True), Level("s", 0)) == (Level("s", 0),)
    assert factors(Known("m"), x) == factors(x, Known("m"), Known("m"))
    assert len(factors(Known("m"), x) or ()) == 2
    assert factors(x, x) == (x, x)
    assert factors(ONE) == ()


def test_entries_of_one_lane_are_one_product() -> None:
    columns = (ONE, Number("x", 3), Level("a", 1), Level("a", 2), Number("m", 4))
    products = [factors(r, c) for r in (ONE, Known("m"), Level("s", 0)) for c in columns]
    each = [found for found in dict.fromkeys(products) if found is not None]
    rows = [values(product(*found)) for found in each]
    entries: dict[int, list[np.ndarray]] = {}
    found = layout(each)
    sent = set()
    for j, k, lane in found.entries():
        sent.add((j, k))
        entries.setdefault(lane, []).append(rows[j] * rows[k])
    assert sorted(entries) == list(range(found.numbers))
    assert found.numbers < 0.7 * Layout.full(len(each)).numbers
    assert max(map(len, entries.values())) > 1
    for same in entries.values():
        for other in same:
            np.testing.assert_allclose(other, same[0], atol=1e-14)
    zeros = [(j, k) for j in range(len(each)) for k in range(j, len(each)) if (j, k) not in sent]
    assert zeros
    assert all((rows[j] * rows[k] == 0.0).all() for j, k in zeros)


def test_a_binary_outcome_and_21_columns_take_700_lanes() -> None:
    levels = [Level("f", code) for code in range(1, 8)]
    numbers = [Number(f"x{j}", 0) for j in range(12)]
    columns: list[Term] = [ONE, *numbers[:5], *[Level(f"i{j}", 1) for j in range(7)], *levels]
    a, y = Level("a", 1), Level("y", 1)
    each = [factors(r, c) for r in (ONE, a, y) for c in columns] + [factors(y, a)]
    products = [found for found in each if found is not None]
    assert len(products) == 61
    assert Layout.full(61).numbers == 1891
    assert layout(products).numbers == 700


NUMBERS = (Number("x", 3), Number("age", 7), Power("x", 3, 2))


def test_numbers_about_the_middle_span_the_same_and_are_conditioned_better() -> None:
    workspace = Workspace(PEOPLE)
    columns = (ONE, Number("age", 7), Level("a", 1), Number("m", 4))
    responses = (ONE, Level("s", 0), product(Known("m"), Number("m", 4)))
    found = judge(
        plan(columns, ()), workspace, 3, [Model(columns=tuple(columns), responses=tuple(responses))]
    )
    moved = np.concatenate(list(found.columns.pieces()), axis=1)
    raw = np.stack([values(product(r, c)) for r in responses for c in columns])
    assert np.abs(moved).max() <= 1.0
    assert np.abs(moved).max(axis=1).min() > 0.2
    ranks = [np.linalg.matrix_rank(each, tol=1e-9) for each in (moved, raw, np.concatenate([moved, raw]))]
    assert len(set(ranks)) == 1
    gains = []
    for each in (moved, raw):
        unit = each / np.linalg.norm(each, axis=1)[:, None]
        gains.append(np.linalg.eigvalsh(unit @ unit.T)[0])
    assert gains[0] > 2 * gains[1]
    lacking = np.count_nonzero(raw[3] == 0.0)  # of m, which is not 0 about the middle
    assert lacking > 50
    counted = np.concatenate(list(found.counted.pieces()), axis=1)
    for row, bound in zip(moved, found.bounds, strict=True):
        assert (counted[bound][row != 0.0] != 0.0).all()


def test_without_the_column_1_numbers_stay_where_they_are() -> None:
    found = judge(plan(NUMBERS, ()), Workspace(PEOPLE), 3, [Model(columns=NUMBERS)])
    moved = np.concatenate(list(found.columns.pieces()), axis=1)
    raw = np.stack([values(c) for c in NUMBERS])
    np.testing.assert_allclose(
        moved / np.abs(moved).max(axis=1)[:, None], raw / np.abs(raw).max(axis=1)[:, None]
    )


@pytest.mark.parametrize("column", [*NUMBERS, Number("m", 4)])
def test_the_middle_of_an_interval_goes_to_0_and_its_ends_to_1(column: Term) -> None:
    (low, high) = column.interval((), DICTIONARY)
    moved = about_the_middle(column, DICTIONARY)
    x = values(column)
    np.testing.assert_allclose(values(moved), (x - 0.5 * (low + high)) / (0.5 * (high - low)), atol=1e-11)
    least, most = moved.interval([(low, high), (1.0, 1.0)], DICTIONARY)
    assert -1.0 <= least <= -1.0 + 1e-11
    assert 1.0 - 1e-11 <= most <= 1.0


DECLARED = Dictionary(
    (
        Numeric(name="x", low=10.0, high=60.0),
        Numeric(name="y", low=40.0, high=160.0),
        Categorical(name="a", levels=("0", "1")),
        Categorical(name="f", levels=("p", "q", "r")),
    )
)


def study(seed: int, n: int, *, floor: int = 5) -> tuple[Plan, list[Sheet], dict[str, np.ndarray]]:
    """A study whose outcome some lack; returned with the products that its fits ask, longhand."""
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(15, 45, n), rng.uniform(50, 150, n)
    y[rng.random(n) < 0.1] = np.nan
    a, f = rng.integers(0, 2, n).astype(np.int16), rng.integers(0, 3, n).astype(np.int16)
    if seed % 3 == 0:
        x = np.where(np.arange(n) < 2 + seed % 2, 60.0, 30.0 + 0.01 * x)  # few are above everybody else
    whole = Sheet.read(DECLARED, {"x": x, "y": y}, {"a": a, "f": f})
    treated, seen, outcome = Level("a", 1), Known("y"), Number("y", 8)
    given = Plan(
        dictionary=DECLARED,
        models=(
            Model(
                columns=(ONE, Number("x", 6), Level("f", 1), Level("f", 2), treated),
                responses=(ONE, treated, seen, product(seen, outcome)),
                groups=(product(treated, seen), product(1.0 - treated, seen), 1.0 - seen),
            ),
        ),
        members=MEMBERS,
        study=b"study",
        author="author",
        floor=floor,
    )
    known = ~np.isnan(y)
    longhand = {}
    for r, response in {"1": 1.0, "a": a, "seen": known, "y": np.where(known, y, 0.0)}.items():
        for c, column in {"1": np.ones(n), "x": x, "q": f == 1, "r": f == 2, "a": a}.items():
            longhand[f"{r} {c}"] = response * column * 1.0
    return given, parts(whole), longhand


def responses(longhand: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [longhand[f"{r} 1"] for r in ("1", "a", "seen", "y")]


def test_a_plan_is_judged_by_the_rule_and_nothing_else() -> None:
    """Beside a longhand with everybody's rows: counts in groups, and shares of the joint span."""
    tally = {"rare": 0, "dominated": 0, "passed": 0}
    for seed in range(48):
        given, sheets, longhand = study(seed, int(np.random.default_rng(seed).integers(60, 400)))
        seen, a = longhand["seen 1"], longhand["1 a"]
        groups = [seen * a, seen * (1 - a), 1 - seen]
        columns = {c: longhand[f"1 {c}"] for c in "1xqra"}
        columns |= {"p": 1 - columns["q"] - columns["r"], "b": 1 - columns["a"]}
        inside = [g * x for g in (*groups, *responses(longhand)) for x in columns.values()]
        is_rare = any(0 < np.count_nonzero(v) < 5 for v in (*inside, *longhand.values()))
        share = exact_share((Name(name), v) for name, v in longhand.items())
        found = [before_fits(given, Workspace(people), 3) for people in sheets]
        steps = run(found)
        assert (steps[-1] is Step.PASSED) is (not is_rare and share <= 0.5)
        assert (steps[1] is Step.REFUSED) is is_rare
        told = [each.verdict for each in found if each.verdict.outcome is Outcome.REFUSED]
        assert bool(told) is (steps[-1] is Step.REFUSED)
        assert all(verdict.column and verdict.remedy for verdict in told)
        tally["rare" if is_rare else "dominated" if share > 0.5 else "passed"] += 1
    assert min(tally.values()) >= 5, tally


def test_which_level_is_the_reference_changes_no_verdict_of_counts() -> None:
    given, sheets, _ = study(1, 300)
    for codes in ((1, 2), (0, 1), (0, 2)):
        columns = (ONE, *(Level("f", code) for code in codes))
        for few, refused in ((4, True), (5, False), (0, False)):
            people = sheets[0]
            f = np.where(np.arange(people.n) < few, 0, 1 + np.arange(people.n) % 2).astype(np.int16)
            changed = replace(people, levels={**people.levels, "f": f}, whole=None)
            model = Model(columns=columns, groups=given.models[0].groups[:1])
            found = judge(given, Workspace(changed), 1, [model])
            found.answer()
            inside = np.isfinite(people.numbers["y"]) & (people.levels["a"] == 1)
            is_rare = any(0 < np.count_nonzero(g & (f == 0)) < 5 for g in (inside, f >= 0))
            assert is_rare is refused or few == 5
            assert (found.hear(found.answer()) is Step.REFUSED) is is_rare


def test_lanes_do_not_depend_on_records() -> None:
    lanes = []
    for seed in (1, 2):
        given, sheets, _ = study(seed, 90)
        judges = [before_fits(given, Workspace(people), 3) for people in sheets]
        for each in judges:
            each.step = Step.COARSE
        lanes += [each.lanes() for each in judges]
    assert len(set(lanes)) == 1
    assert len(lanes[0]) < 0.75 * Layout.full(len(judges[0].columns.names)).numbers


def test_products_share_lanes_when_they_are_coarse_and_each_has_its_own_when_they_are_fine() -> None:
    given, sheets, _ = study(1, 200)
    (whole,) = [before_fits(given, Workspace(people), 1) for people in parts(sheets[0], 1)]
    lanes = {}
    for step in (Step.COARSE, Step.FINE):
        whole.step = step
        lanes[step] = len(whole.lanes())
    assert lanes[Step.FINE] == Layout.full(len(whole.columns.names)).numbers > lanes[Step.COARSE]


def test_indicators_fill_their_lanes() -> None:
    """Of a column that is 1 for everybody who has it, the sum of squares is their number: 1 in its scale."""
    given, sheets, _ = study(1, 200)
    (whole,) = [before_fits(given, Workspace(people), 1) for people in parts(sheets[0], 1)]
    assert whole.hear(whole.answer()) in (Step.COARSE, Step.REFUSED)
    whole.step = Step.COARSE
    answer = whole.answer()
    assert all(abs(number) <= 1 << COARSE for number in answer)
    columns = np.concatenate(list(whole.columns.pieces()), axis=1)
    filled = 0
    for j, k, lane in whole.layout.entries():
        if j == k and columns[j].any() and set(columns[j]) <= {0.0, 1.0}:
            filled += 1
            assert answer[lane] == 1 << COARSE
    assert filled > 5


def test_closing_terms_are_judged_as_they_are() -> None:
    given, sheets, _ = study(1, 200)
    clever = product(Level("a", 1), 1.0 / 0.05 * Power("x", 6, 3), 1.0 - Level("f", 2))
    found = [
        judge(given, Workspace(people), 3, [Model(columns=(ONE, clever))], advice=RAISE) for people in sheets
    ]
    assert {each.advice for each in found} == {RAISE}
    assert run(found)[-1] is Step.PASSED
    assert {str(name) for name in found[0].columns.names} == {
        "'everybody'",
        "'" + describe(clever, DECLARED) + "'",
    }


def test_columns_are_named_in_the_owners_words() -> None:
    names = {
        ONE: "everybody",
        Level("f", 1): "f = q",
        Known("y"): "y known",
        Kept(Number("x", 6)): "number of x",
        1.0 - Known("y"): "not y known",
        product(Level("a", 1), Level("a", 0)): "nobody",
        Apply("clip", 0.5 * Number("y", 8) + Known("y"), low=0.0, high=1.0): "clip of number of y, y known",
        Draw(3, 1): "draw",
        total(
            [Level("f", 0), Level("f", 1), Known("y"), Number("x", 6)]
        ): "sum of f = p, f = q, y known, more",
    }
    assert {term: describe(term, DECLARED) for term in names} == names
    both = describe(product(Level("a", 1), Number("x", 6)), DECLARED)
    assert both in ("a = 1 x number of x", "number of x x a = 1")


def test_the_last_level_of_a_required_variable_is_counted_and_not_spanned() -> None:
    """Its column is the rest of the others: with it every Gram would be singular, and asked for twice."""
    for required in (True, False):
        dictionary = Dictionary((Categorical(name="a", levels=("0", "1", "2"), required=required),))
        people = Sheet.read(dictionary, {}, {"a": np.array([0, 1, 2] * 20, dtype=np.int16)})
        levels = tuple(Level("a", code) for code in range(3))
        given = Plan(
            dictionary=dictionary,
            models=(Model(columns=(ONE,), responses=(ONE, *levels)), Model(columns=levels[1:])),
            members=MEMBERS,
            study=b"study",
            author="author",
        )
        judges = [before_fits(given, Workspace(people), 1)]
        steps = run(judges)
        assert (Step.FINE in steps) is not required
        assert steps[-1] is Step.PASSED
        assert len(judges[0].columns.names) == 4 - required
        assert len(judges[0].counted.names) == 4


def test_a_required_variable_is_nowhere_missing() -> None:
    dictionary = Dictionary((Categorical(name="a", levels=("0", "1"), required=True),))
    with pytest.raises(DataError, match="'a' is missing in 1 record"):
        Sheet.read(dictionary, {}, {"a": np.array([0, -1, 1], dtype=np.int16)})
