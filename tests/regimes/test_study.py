"""Studies of treatment over time: special cases, partitions, rounds, options and bad input."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.report.page import render as page
from tests.regimes.law import NEWTON, draw, study


def numbers(result: ft.StudyResult) -> np.ndarray:
    document = result.to_dict()
    return np.array([document["psi"], document["std_error"]])


def test_one_period_is_the_point_treatment() -> None:
    """K = 1: the TMLE of each arm's mean with H in the weight, censoring as missingness."""
    records = draw(900, 1, 4)
    silos = {"north": records[:400], "south": records[400:]}
    over_time = study(periods=1, rules=(ft.Static("0"), ft.Static("1")), g_bounds=0.02)
    point = ft.Study(
        target=ft.TSM(outcome="b", treatment="a1"),
        outcome_model=ft.GLM("w + l1 + C(a1)"),
        treatment_model=ft.GLM("w + l1"),
        missingness_model=ft.GLM("l1 + C(a1)"),
        clever="weight",
        g_bounds=0.02,
        algorithm=NEWTON,
        diagnostics=False,
        variables=ft.Variables(
            {
                "b": {"kind": "binary"},
                "a1": {"kind": "binary"},
                "w": {"kind": "number", "range": (-3, 3)},
                "l1": {"kind": "number", "range": (-4, 4)},
            }
        ),
    )
    assert numbers(ft.run(over_time, silos)) == pytest.approx(numbers(ft.run(point, silos)), abs=1e-10)


def test_no_shift_is_the_observed_mean() -> None:
    records = draw(700, 3, 5, dose=True, censors=False)
    asked = study(periods=3, dose=True, censors=False, outcome="y", rules=(ft.Shift(),))
    (psi,), (error,) = numbers(ft.run(asked, {"north": records[:300], "south": records[300:]}))
    assert psi == pytest.approx(records["y"].mean(), abs=1e-10)
    assert error == pytest.approx(records["y"].std(ddof=1) / np.sqrt(700), rel=1e-9)


def test_a_shift_that_is_never_made_is_the_observed_mean() -> None:
    """Limits that forbid every change leave the classifier nothing to tell apart: all ratios are 1."""
    records = draw(500, 2, 6, dose=True, censors=False)
    asked = study(periods=2, dose=True, censors=False, outcome="y", rules=(ft.Shift(by=1.0, most=-6.0),))
    (psi,), _ = numbers(ft.run(asked, {"all": records}))
    assert psi == pytest.approx(records["y"].mean(), abs=1e-10)


def test_a_shift_moves_the_mean() -> None:
    """Against the truth of the law: each unit of the dose lowers the outcome, directly and through l."""
    records = draw(6000, 2, 8, dose=True, censors=False)
    rules = (ft.Shift(), ft.Shift(by=-0.5))
    asked = study(ft.RegimeDifference, periods=2, dose=True, censors=False, outcome="y", rules=rules)
    table = ft.run(asked, {"all": records}).table()
    # y has -0.8 a2 + 0.7 l2, and l2 has -0.4 a1; a2 has 0.3 l2 + 0.3 a1 before its own shift.
    direct = -0.8 * -0.5 + 0.7 * -0.4 * -0.5
    natural = -0.8 * (0.3 * -0.4 + 0.3) * -0.5
    assert abs(table["estimate"][0] - direct - natural) < 3.5 * table["std_error"][0]
    assert table["std_error"][0] < 0.06


@pytest.mark.parametrize("survival", [False, True])
def test_federated_is_pooled(survival: bool) -> None:
    """The same bits in any partition, with exact sums."""
    records = draw(600, 2, 9, survival=survival)
    asked = study(periods=2, survival=survival, sums="exact")
    pooled = numbers(ft.run(asked, {"all": records}))
    rng = np.random.default_rng(1)
    for _ in range(3):
        ends = [0, *sorted(rng.choice(np.arange(60, 540), 2, replace=False)), 600]
        silos = {f"s{k}": records[a:b] for k, (a, b) in enumerate(pairwise(ends))}
        assert (numbers(ft.run(asked, silos)) == pooled).all()


@pytest.mark.slow
def test_federated_is_pooled_in_many_partitions() -> None:
    records = draw(600, 2, 9).sample(frac=1.0, random_state=2).reset_index(drop=True)
    asked = study(periods=2, sums="exact")
    pooled = numbers(ft.run(asked, {"all": records}))
    rng = np.random.default_rng(3)
    for _ in range(50):
        silo = rng.integers(0, 4, len(records))
        silos = {f"s{k}": records[silo == k] for k in range(4)}
        assert (numbers(ft.run(asked, silos)) == pooled).all()


@pytest.mark.parametrize(
    "algorithm", [ft.Coded(), ft.OneStep(), ft.LocalAverage()], ids=lambda a: type(a).__name__
)
def test_other_algorithms(algorithm: Any) -> None:
    """Coded and averaged runs end at the same estimate; one step is another, close to it."""
    records = draw(900, 2, 10)
    silos = {"north": records[:400], "south": records[400:]}
    rules = (ft.Static("0"), ft.Static("1"))
    exact = numbers(ft.run(study(periods=2, rules=rules), silos))
    other = numbers(ft.run(study(periods=2, rules=rules, algorithm=algorithm), silos))
    errors = np.abs(other - exact)[0] / exact[1]
    assert (errors < (0.2 if isinstance(algorithm, ft.OneStep) else 1e-5)).all()
    assert (errors > 1e-5).all() == isinstance(algorithm, ft.OneStep)


def test_rounds_of_ten_periods() -> None:
    records = draw(2000, 10, 2)
    rules = (ft.Stochastic((0.5, 0.5)), ft.Stochastic((0.3, 0.7)))
    result = ft.run(
        study(periods=10, rules=rules, algorithm=ft.Coded(), diagnostics=True),
        {"north": records[:900], "south": records[900:]},
    )
    rounds = sum(result.to_dict()["account"]["rounds"].values())
    assert rounds <= 90


def test_rounded_fits_are_near_exact_ones() -> None:
    records = draw(900, 2, 10)
    silos = {"north": records[:400], "south": records[400:]}
    exact = numbers(ft.run(study(periods=2), silos))
    rounded = numbers(ft.run(study(periods=2, algorithm=ft.Coded(), sums="rounded"), silos))
    assert (np.abs(rounded - exact)[0] < 1e-5 * exact[1]).all()


def test_clusters_weights_and_super_learners() -> None:
    records = draw(800, 2, 12)
    silos = {"north": records[:400], "south": records[400:]}
    rules = (ft.Static("1"),)
    (plain,), (error,) = numbers(ft.run(study(periods=2, rules=rules), silos))
    (same,), (clustered,) = numbers(ft.run(study(periods=2, rules=rules, cluster="pair"), silos))
    assert same == pytest.approx(plain, abs=1e-9)
    assert clustered != pytest.approx(error, rel=1e-4)
    assert clustered == pytest.approx(error, rel=0.3)
    learners = ft.SuperLearner((ft.GLM("w + l + a + lag1_a"), ft.GLM("1")), folds=2)
    (learned,), _ = numbers(ft.run(study(periods=2, rules=rules, outcome_model=learners), silos))
    assert abs(learned - plain) < 0.5 * error


def test_planned_arms_follow_their_plan() -> None:
    records = draw(900, 2, 13)
    silos = {"north": records[:400], "south": records[400:]}
    both = numbers(ft.run(study(periods=2, rules=(ft.Static("1"), ft.Planned(("1", "1")))), silos))
    assert both[0, 0] == pytest.approx(both[0, 1], abs=1e-12)
    stop, always = numbers(ft.run(study(periods=2, rules=(ft.Planned(("1", "0")), ft.Static("1"))), silos))[0]
    assert stop - always > 0.05  # treatment in the last period lowers the outcome


def test_followers_and_weights_are_shown() -> None:
    records = draw(900, 2, 14)
    document = ft.run(study(periods=2, diagnostics=True), {"all": records}).to_dict()
    shown = document["adherence"][1]
    follows = (records["a1"] == 1) & (records["c1"] == 0)
    then = follows & (records["a2"] == 1) & (records["c2"] == 0)
    assert shown["rule"] == "1"
    assert shown["followers"] == [int(follows.sum()), int(then.sum())]
    assert shown["at_risk"] == [900, int((records["c1"] == 0).sum())]
    assert [sum(counts) for counts in shown["weight_counts"]] == shown["followers"]
    assert shown["weights_hidden_in"] == [0, 0]
    assert document["periods"][0]["censored"] == int((records["c1"] == 1).sum())


def test_baseline_characteristics_are_those_of_period_1() -> None:
    records = draw(900, 2, 14)
    silos = {"one": records[:500], "two": records[500:]}
    document = ft.run(study(periods=2, diagnostics=True), silos).to_dict()
    assert document["balance"]["counts"] == [int((records["a1"] == arm).sum()) for arm in (0, 1)]
    by_name = {line["name"]: line for line in document["balance"]["covariates"]}
    X = np.column_stack([np.ones(900), records["w"], records["l1"]])
    a, beta = records["a1"].to_numpy(dtype=float), np.zeros(3)
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ beta))
        beta += np.linalg.solve((X.T * (p * (1 - p))) @ X, X.T @ (a - p))
    inverse = 1 / np.where(a == 1, p, 1 - p)
    for name, column in (("w", "w"), ("l", "l1")):
        here = [records[column][a == arm] for arm in (0, 1)]
        weighted = [np.average(x, weights=inverse[a == arm]) for arm, x in enumerate(here)]
        assert by_name[name]["means"] == pytest.approx([x.mean() for x in here], abs=1e-6)
        assert by_name[name]["sds"] == pytest.approx([x.std(ddof=0) for x in here], abs=1e-6)
        assert by_name[name]["weighted_means"] == pytest.approx(weighted, abs=1e-6)
    html = page(document)
    assert "Covariates in period 1, by the treatment in that period, unweighted." in html


def test_a_treatment_without_arms_has_the_characteristics_of_everyone() -> None:
    records = draw(600, 2, 15, dose=True)
    shifted = study(periods=2, rules=(ft.Shift(by=-0.5),), dose=True, diagnostics=True)
    document = ft.run(shifted, {"all": records}).to_dict()
    described = document["balance"]
    assert (described["reference"], described["arms"], described["counts"]) == ("all", [], [600])
    line = next(line for line in described["covariates"] if line["name"] == "l")
    assert line["means"] == pytest.approx([records["l1"].mean()], abs=1e-6)
    assert "Baseline characteristics" in page(document)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "columns of other lengths": (
        {"over_time": {"a": ("a1", "a2"), "l": ("l1",), "c": ("c1", "c2")}},
        "over_time: 'l' has 1 column",
    ),
    "treatment not over time": (
        {"over_time": {"l": ("l1", "l2")}},
        "over_time: list the columns of the treat",
    ),
    "a column twice": (
        {"over_time": {"a": ("a1", "a1"), "l": ("l1", "l2"), "c": ("c1", "c2")}},
        "over_time: 'a1' is listed twice",
    ),
    "censoring elsewhere": ({"censoring": "w"}, "censoring: 'w' is not in over_time"),
    "horizons of a point outcome": ({"horizons": (1,)}, "horizons: 'b' is measured once"),
    "plan of another length": (
        {"rules": (ft.Planned(("1",)),)},
        "plan: expected an arm for each of 2 periods",
    ),
    "unknown arm": ({"rules": (ft.Static("7"),)}, "rules: '7' is not one of the arms"),
    "the same rule twice": ({"rules": (ft.Static("1"), ft.Static("1"))}, "rules: two of them are the same"),
    "a shift of arms": ({"rules": (ft.Shift(by=1.0),)}, "Shift is for"),
    "lag in a rule": ({"rules": (ft.Threshold("lag1_l", 0.0, "1", "0"),)}, "rules: 'lag1_l' does not exist"),
    "strata over time": ({"strata": "l"}, "strata: 'l' changes over time"),
    "no rule": ({"rules": ()}, "rules: RegimeMean needs at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_targets_are_refused(name: str) -> None:
    arguments, message = BAD[name]
    good = study(periods=2)
    with pytest.raises(ft.InputError, match=message.replace("[", r"\[")):
        replace(good, target=replace(good.target, **arguments))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"censoring_model": None}, "censoring_model: give one if and only if"),
        ({"treatment_model": ft.GLM("l + a")}, "treatment_model: it uses 'a'"),
        ({"outcome_model": ft.GLM("l + c")}, "outcome_model: it uses 'c'"),
        ({"outcome_model": ft.GLM("l1 + a")}, "variables: the dictionary does not declare 'l1'"),
        ({"outcome_model": ft.Supplied("q")}, "cannot be supplied"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        study(periods=2, **options)


def test_a_shift_of_a_treatment_that_is_no_number_is_refused() -> None:
    asked: dict[str, Any] = {"rules": (ft.Shift(by=0.5),), "treatment_model": ft.GLM("a + l")}
    with pytest.raises(ft.InputError, match="Shift is for a treatment that is a number, and 'a' is declared"):
        study(periods=2, **asked)
    assert study(periods=2, dose=True, **asked)


def test_a_missing_value_at_risk_names_the_column() -> None:
    records = draw(300, 2, 15)
    records.loc[records.index[records["c1"] == 0][:3], "l2"] = np.nan
    with pytest.raises(
        ft.DataError, match=r"column 'l2' is missing in 3 row\(s\) of people who are at risk in period 2"
    ):
        ft.run(study(periods=2), {"all": records})


def test_a_rule_that_nobody_follows_is_refused() -> None:
    records = draw(300, 2, 15)
    records["a2"] = records["a2"].where(records["a1"] != 1, other=0)
    with pytest.raises(ft.FedTMLEError, match=r"treatment model of period 2|nobody follows"):
        ft.run(study(periods=2, rules=(ft.Static("1"),), treatment_model=ft.GLM("w")), {"all": records})


def test_a_rule_with_too_few_followers_is_refused() -> None:
    records = draw(400, 2, 2)
    records.loc[(records["a1"] == 0) & (records["a2"] == 0) & records["b"].notna(), "b"] = 0.0
    with pytest.raises(ft.FedTMLEError, match="all who follow '0' uncensored through period 2"):
        ft.run(study(periods=2, rules=(ft.Static("0"),), outcome_model=ft.GLM("w + l")), {"all": records})


def test_a_risk_that_falls_from_period_to_period_is_no_constant_outcome() -> None:
    """The fit of period 1 begins at that of period 2, whose risk is a tenth of it."""
    rng = np.random.default_rng(1)
    records = draw(1200, 2, 3, survival=True, censors=False)
    first = rng.random(len(records)) < 0.4
    second = ~first & (rng.random(len(records)) < 0.04)
    records["y1"] = first.astype(float)
    records["y2"] = np.where(first, np.nan, second.astype(float))
    records.loc[first, ["l2", "a2"]] = pd.NA
    records["l2"] = records["l2"].where(first | records["l2"].notna(), other=0.0)
    records["a2"] = records["a2"].where(first | records["a2"].notna(), other=records["a1"])
    asked = study(periods=2, survival=True, censors=False, rules=(ft.Stochastic((0.5, 0.5)),))
    (psi,), (error,) = numbers(ft.run(asked, {"all": records}))
    assert abs(psi - (first | second).mean()) < 3 * error


def test_nobody_at_risk_is_refused() -> None:
    records = draw(300, 2, 16)
    records["c1"] = 1.0
    records[["l2", "a2", "c2", "b"]] = pd.NA
    with pytest.raises(ft.FedTMLEError, match="nobody is at risk and uncensored in period 1"):
        ft.run(study(periods=2), {"all": records})
