"""The two rules of a judgement, its rounds at several hospitals, and plans that single somebody out."""

from typing import NamedTuple

import numpy as np
import pytest
from honest import HOSPITALS, Rows, exact_share, honest

from fedtmle_core.judgement import (
    BROKEN,
    LEAVE_OUT,
    RAISE,
    TABLE,
    Judge,
    Name,
    Outcome,
    Step,
    Verdict,
    counts,
    gram,
    verdict_of_counts,
    verdict_of_gram,
)
from fedtmle_core.span import COARSE, FINE, Layout, Pooled

K = 5


def columns_of(values, hospital, groups=("",)):
    """The columns of each hospital's people in each group."""
    named = [(Name(c, g), x) for g in groups for c, x in values.items()]
    names, whole = zip(*named, strict=True)
    whole = np.stack(whole) * 1.0
    return [Rows(names, whole[:, hospital == m], piece=90) for m in range(hospital.max() + 1)]


def joined(*columns):
    names = tuple(name for each in columns for name in each.names)
    return Rows(names, np.concatenate([each.values for each in columns]), piece=90)


def judges(counted, columns, *, k=K, people=1 << 20, advice=LEAVE_OUT):
    return [
        Judge(
            counted=joined(c, x),
            columns=x,
            bounds=tuple(range(len(c.names), len(c.names) + len(x.names))),
            layout=Layout.full(len(x.names)),
            people=people,
            hospitals=len(columns),
            k=k,
            advice=advice,
        )
        for c, x in zip(counted, columns, strict=True)
    ]


def run(judges, meddle=lambda _, pooled: pooled):
    """Take judgements to their end; return the steps on the way."""
    steps = []
    while not judges[0].is_over:
        steps.append(judges[0].step)
        pooled = [sum(own) for own in zip(*(judge.answer() for judge in judges), strict=True)]
        for total, reach in zip(pooled, judges[0].lanes(), strict=True):
            assert abs(total) <= reach
        pooled = meddle(steps[-1], pooled)
        heard = [judge.hear(pooled) for judge in judges]
        assert len(set(heard)) == 1
    return [*steps, heard[0]]


def products(parts, bits, dim):
    numbers = [sum(own) for own in zip(*parts, strict=True)]
    return Pooled(numbers=numbers, bits=bits, hospitals=len(parts), layout=Layout.full(dim))


def nobody(columns):
    return [Rows((), np.zeros((0, own.values.shape[1]))) for own in columns]


def decide(columns):
    found = judges(nobody(columns), columns)
    run(found)
    return found


# ---- The two rules ------------------------------------------------------------------------------------


def test_a_column_is_that_of_nobody_or_of_k_people_over_all_hospitals():
    names = (Name("a"), Name("b", "arm 1"), Name("c"))
    assert verdict_of_counts(names, (0, 5, 900), K).passed
    found = verdict_of_counts(names, (0, 4, 900), K)
    assert found.outcome is Outcome.REFUSED
    assert (found.column, found.group) == ("b", "arm 1")
    assert "fewer than 5 people" in found.remedy
    assert "'b' among arm 1" in found.remedy
    assert "and 1 more" in verdict_of_counts(names, (3, 2, 0), K).remedy
    assert verdict_of_counts(names, (3, 2, 0), K).column == "b"
    assert verdict_of_counts(names, (1, 1, 1), 1).passed


def test_people_are_counted_by_values_that_are_not_0():
    rows = Rows(
        (Name("x"), Name("y")), np.array([[0.0, -0.5, 1.0, 2.0**-40], [0.0, 0.0, -0.0, 0.0]]), piece=3
    )
    assert counts(rows) == (2, 0)


@pytest.mark.parametrize(("m", "refused"), [(1, True), (2, False), (3, False)])
def test_a_difference_rests_on_two_people(m, refused):
    """Two levels that differ in m people: the difference of their totals is those people's."""
    n = 400
    hospital = np.arange(n) % 4
    x = np.arange(n) < 60
    both = x & (np.arange(n) >= m)
    found = decide(columns_of({"1": np.ones(n), "x": x, "y": both}, hospital))
    assert (found[0].step is Step.REFUSED) is refused
    told = [judge.verdict for judge in found if judge.verdict.outcome is Outcome.REFUSED]
    assert len(told) == refused
    for verdict in told:  # one hospital has the person: its owner reads why, the others do not
        assert verdict.column in ("x", "y")
        assert verdict.share == pytest.approx(1.0, abs=0.01)
        assert "100%" in verdict.remedy


def test_verdicts_are_those_of_the_rule_itself_on_honest_studies():
    """Beside a longhand of the rule, which sees everybody's rows."""
    tally = {True: 0, False: 0}
    for seed in range(60):
        study = honest(np.random.default_rng([11, seed]))
        exact = exact_share(study.products())
        found = decide_honest(study)
        assert abs(exact - 0.5) > 1e-3
        assert (found[0].step is Step.REFUSED) is (exact > 0.5 or not enough(study))
        if enough(study):
            tally[exact > 0.5] += 1
        for judge in found:
            if judge.verdict.outcome is Outcome.REFUSED:
                assert judge.verdict.column
                assert judge.verdict.remedy
    assert tally[False] > 15
    assert tally[True] > 1


def enough(study):
    everything = [*study.of_groups(), *study.products()]
    return all(not 0 < (v != 0).sum() < K for _, v in everything)


def decide_honest(study):
    found = judges(study.split(study.of_groups()), study.split(study.products()))
    run(found)
    return found


# ---- Plans that single a person out: each is refused, and passes without the column that does it ------


class Population(NamedTuple):
    base: dict
    a: np.ndarray
    y: np.ndarray
    hospital: np.ndarray


def population(n=1200):
    rng = np.random.default_rng(5)
    x, z = rng.uniform(-1, 1, (2, n))
    level = rng.integers(0, 3, n)
    a, y = rng.random(n) < 0.5, rng.random(n) < 0.4
    base = {"1": np.ones(n), "x": x, "z": z, "level 1": level == 1, "level 2": level == 2}
    return Population(base, a, y, rng.integers(0, HOSPITALS, n))


def one(n, person):
    return (np.arange(n) == person) * 1.0


def shifted(x, person, by):
    moved = np.array(x, dtype=float)
    moved[person] += by
    return moved


PERSON = 77
PLANS = {
    "a column of one person": lambda _: {"p": one(1200, PERSON)},
    "a column of all but one": lambda _: {"p": 1 - one(1200, PERSON)},
    "a column of few people": lambda _: {"p": np.arange(1200) < K - 1},
    "levels that differ in one person": lambda p: {"p": np.abs(p.base["level 1"] - one(1200, PERSON))},
    "cut-offs around one person": lambda p: {
        "p": p.base["x"] >= np.sort(p.base["x"])[700],
        "q": p.base["x"] >= np.sort(p.base["x"])[701],
    },
    "a product that differs from its factor in one person": lambda _: {
        "q": np.arange(1200) < 9,
        "p": (np.arange(1200) < 9) & (np.arange(1200) != 3),
    },
    "a long tail": lambda p: {"p": shifted(1e-3 * p.base["x"], PERSON, 0.9)},
    "a tail of two, in different arms": lambda p: {
        "p": 1e-3 * p.base["x"] + 0.9 * (one(1200, p.a.argmax()) + one(1200, p.a.argmin()))
    },
    "a sum that misses one person": lambda p: {
        "p": shifted(
            1.0 * p.base["level 1"] + p.base["level 2"], PERSON, -1.0 if p.base["level 1"][PERSON] else 0.5
        )
        / 1.5
    },
    "a number that is another's but for one person's thousandth": lambda p: {
        "p": shifted(p.base["x"], PERSON, 1e-3 if p.base["x"][PERSON] < 0 else -1e-3)
    },
    "the same by a hundred-thousandth": lambda p: {
        "p": shifted(p.base["x"], PERSON, 1e-5 if p.base["x"][PERSON] < 0 else -1e-5)
    },
    "the same by a millionth": lambda p: {
        "p": shifted(p.base["x"], PERSON, 1e-6 if p.base["x"][PERSON] < 0 else -1e-6)
    },
    "the same by a ten-millionth": lambda p: {
        "p": shifted(p.base["x"], PERSON, 1e-7 if p.base["x"][PERSON] < 0 else -1e-7)
    },
    "one event in a level": lambda p: {
        "p": (np.cumsum(~p.y) <= 30) & ~p.y | (one(1200, int(np.flatnonzero(p.y)[0])) > 0)
    },
    "a level of one arm but for one person": lambda p: {
        "p": (np.cumsum(p.a) <= 40) & p.a | (one(1200, int(np.flatnonzero(~p.a)[9])) > 0)
    },
}


def judged(columns, a, y, hospital):
    """The judged columns: every column times treatment, outcome and 1."""
    responses = {"": 1.0, "arm 1": a * 1.0, "events": y * 1.0}
    named = {f"{c}|{g}": x * r for g, r in responses.items() for c, x in columns.items()}
    return columns_of(named, hospital)


def test_the_population_passes_without_them():
    base, a, y, hospital = population()
    assert decide(judged(base, a, y, hospital))[0].step is Step.PASSED


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_single_a_person_out_are_refused(name):
    base, a, y, hospital = given = population()
    found = decide(judged({**base, **PLANS[name](given)}, a, y, hospital))
    assert found[0].step is Step.REFUSED
    told = [judge.verdict for judge in found if judge.verdict.outcome is Outcome.REFUSED]
    assert told
    assert all(verdict.column and verdict.remedy for verdict in told)


@pytest.mark.parametrize("differ", [1, 2])
def test_treatment_and_outcome_that_differ_in_one_person_are_refused(differ):
    """All groups are large; the difference of the two models' sums is that person's row."""
    base, a, _, hospital = population()
    y = a.copy()
    y[[PERSON, PERSON + 1][:differ]] ^= True
    responses = {"arm 1": a, "events": y}
    each = [
        decide(columns_of({f"{c}|{g}": x * r for c, x in base.items()}, hospital))
        for g, r in responses.items()
    ]
    assert all(found[0].step is Step.PASSED for found in each)
    found = decide(judged(base, a, y, hospital))
    assert found[0].step is Step.REFUSED  # two people have five columns between them
    only = decide(columns_of({"1": base["1"], "a": a, "y": y}, hospital))
    assert (only[0].step is Step.REFUSED) is (differ == 1)


# ---- Rounds -------------------------------------------------------------------------------------------


def small(n=60, hospitals=3):
    rng = np.random.default_rng(3)
    values = {"1": np.ones(n), "x": rng.uniform(-1, 1, n), "b": np.arange(n) % 5 == 0}
    return columns_of(values, np.arange(n) % hospitals)


def test_a_plain_judgement_takes_three_rounds():
    columns = small()
    assert run(judges(columns, columns)) == [Step.COUNTS, Step.COARSE, Step.COARSE_VERDICTS, Step.PASSED]


def test_what_coarse_products_prove_is_refused_at_once():
    n = 300
    values = {"1": np.ones(n), "x": np.arange(n) < 60, "y": (np.arange(n) < 60) & (np.arange(n) > 0)}
    columns = columns_of(values, np.arange(n) % 3)
    assert run(judges(columns, columns))[-2:] == [Step.COARSE_VERDICTS, Step.REFUSED]


def test_exact_collinearity_takes_two_more_and_passes():
    columns = small()
    doubled = [Rows((*c.names, Name("again")), np.vstack([c.values, c.values[2]]), 90) for c in columns]
    assert run(judges(columns, doubled)) == [
        Step.COUNTS,
        Step.COARSE,
        Step.COARSE_VERDICTS,
        Step.FINE,
        Step.FINE_VERDICTS,
        Step.PASSED,
    ]


def test_a_rare_column_ends_after_the_counts():
    columns = small()
    rare = [Rows((Name("r", "arm 0"),), np.eye(1, c.values.shape[1]), 90) for c in columns]  # one a hospital
    found = judges(rare, columns, k=4)
    assert run(found) == [Step.COUNTS, Step.REFUSED]
    assert {judge.verdict.group for judge in found} == {"arm 0"}
    assert run(judges(rare, columns, k=3))[-1] is Step.PASSED


def test_lanes_follow_from_the_plan():
    columns = small()
    other = [Rows(c.names, np.zeros((3, 2)), 90) for c in columns]
    for mine, theirs in zip(judges(columns, columns), judges(other, other), strict=True):
        for step in Step:
            mine.step = theirs.step = step
            assert mine.lanes() == theirs.lanes()
            assert bool(mine.lanes()) is not mine.is_over


def test_every_step_that_can_follow_is_in_the_table():
    rounds = {step for step in Step if step not in (Step.PASSED, Step.REFUSED)}
    assert {step for step, _ in TABLE} == rounds
    for step in (Step.COARSE_VERDICTS, Step.FINE_VERDICTS):
        assert {told for at, told in TABLE if at is step} == set(Outcome)


@pytest.mark.parametrize(("refused", "unclear"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("own", list(Outcome))
@pytest.mark.parametrize("step", [Step.COARSE_VERDICTS, Step.FINE_VERDICTS])
def test_one_refusal_refuses_and_one_doubt_asks_again(step, own, refused, unclear):
    columns = small()
    (judge, *_) = judges(columns, columns)
    judge.step, judge.verdict = step, Verdict(outcome=own)
    assert judge.answer() == (own is Outcome.REFUSED, own is Outcome.UNCLEAR)
    after = judge.hear((refused, unclear))
    if refused or own is Outcome.REFUSED:
        assert after is Step.REFUSED
    elif unclear or own is Outcome.UNCLEAR:
        assert after is (Step.FINE if step is Step.COARSE_VERDICTS else Step.REFUSED)
    else:
        assert after is Step.PASSED


def test_counts_that_hide_own_people_are_refused():
    columns = small()
    for change in (-1000, 1 << 30):
        found = judges(columns, columns)
        assert run(found, lambda _, pooled, by=change: [total + by for total in pooled])[-1] is Step.REFUSED
        assert {judge.verdict.remedy for judge in found} == {BROKEN}


def test_products_that_are_nobodys_are_refused():
    """Less the own, what another hospital subtracts or makes up is no matrix of records."""
    columns = small()

    def meddle(step, pooled):
        return [-total for total in pooled] if step is Step.COARSE else pooled

    found = judges(columns, columns)
    assert run(found, meddle)[-1] is Step.REFUSED
    assert found[0].verdict.remedy == BROKEN
    pooled_counts = (60, 60, 12)
    own = gram(columns[0], pooled_counts, COARSE, Layout.full(3))
    for times, is_possible in ((0.5, False), (3, True)):
        total = products([[int(times * x) for x in own]], COARSE, 3)
        verdict = verdict_of_gram(columns[0], pooled_counts, total, own=own)
        assert verdict.passed is is_possible
        assert (verdict.remedy == BROKEN) is not is_possible


def test_coarse_products_leave_open_what_fine_ones_tell():
    n = 300
    values = {"1": np.ones(n), "x": 0.999 + 1e-4 * np.random.default_rng(1).random(n)}
    (columns,) = columns_of(values, np.zeros(n, dtype=int))
    outcomes = []
    for bits in (COARSE, FINE):
        own = gram(columns, (n, n), bits, Layout.full(2))
        outcomes.append(verdict_of_gram(columns, (n, n), products([own], bits, 2)).outcome)
    assert outcomes == [Outcome.UNCLEAR, Outcome.PASSED]


def test_the_advice_is_that_of_the_phase():
    n = 300
    values = {"1": np.ones(n), "clever": shifted(np.full(n, 1e-3), 4, 0.9)}
    columns = columns_of(values, np.arange(n) % 3)
    found = judges(nobody(columns), columns, advice=RAISE)
    assert run(found)[-1] is Step.REFUSED
    assert RAISE in found[1].verdict.remedy
    assert found[0].verdict.passed


def test_the_share_may_be_given():
    columns = small()
    pooled_counts = (60, 60, 12)
    total = products([gram(c, pooled_counts, COARSE, Layout.full(3)) for c in columns], COARSE, 3)
    shares = [verdict_of_gram(c, pooled_counts, total).share for c in columns]
    for limit in (max(shares) * 1.01, max(shares) * 0.9):
        found = [verdict_of_gram(c, pooled_counts, total, limit=limit) for c in columns]
        assert all(v.passed for v in found) is (limit > max(shares))
