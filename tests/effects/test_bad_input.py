"""What a study refuses: a typed error that names the place and the count, and quotes no record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.errors import DataError, FedTMLEError, InputError
from fedtmle.text.result import render
from tests.declare import declare
from tests.effects.studies import NEWTON, VARIABLES, Columns, change, cut, population

any_ft: Any = ft  # for arguments of a wrong type, which mypy would refuse

SECRET = 7654.25  # a value that only a record holds
ATE = ft.ATE(outcome="y", treatment="a")
WIDE = declare(VARIABLES, weight=(0, 1e7), always=(0, 5), twice=(-40, 40))


def study(target: Any = ATE, **options: Any) -> ft.Study:
    models = {"outcome_model": ft.GLM("a + w + z"), "treatment_model": ft.GLM("w + z"), "algorithm": NEWTON}
    return ft.Study(target=target, **{**models, "variables": WIDE, **options})


def silos(n: int = 120, **changed: Any) -> dict[str, Columns]:
    data = {**population(n, seed=40), **changed}
    return cut(data, [np.arange(n // 2), np.arange(n // 2, n)])


def refused(own: ft.Study, data: dict[str, Columns], *said: str, kind: type = InputError) -> str:
    with pytest.raises(kind) as caught:
        ft.run(own, data)
    assert isinstance(caught.value, FedTMLEError)
    message = str(caught.value)
    for words in said:
        assert words in message
    assert "7654" not in message
    return message


def with_secret(name: str, *rows: int) -> dict[str, Any]:
    column = population(120, seed=40)[name].astype(float)
    column[list(rows)] = SECRET
    return {name: column}


def test_an_unknown_column_is_named_with_its_silo_and_the_nearest() -> None:
    data = silos()
    data["silo 1"]["W"] = data["silo 1"].pop("w")
    message = refused(study(), data, "silo 'silo 1'", "column 'w'", "did you mean 'W'", kind=DataError)
    assert "silo 'silo 0'" not in message


def test_an_outcome_outside_its_bounds_is_counted() -> None:
    data = silos(**with_secret("y", 3, 5, 100))
    refused(
        study(), data, "column 'y'", "outside the declared range", "in 2 rows", "in 1 row", kind=DataError
    )


def test_a_binary_outcome_is_zero_or_one() -> None:
    data = silos(**with_secret("event", 3))
    binary = ft.ATE(outcome="event", treatment="a")
    refused(
        study(binary), data, "silo 'silo 0'", "column 'event'", "neither 0 nor 1 in 1 row", kind=DataError
    )


def test_text_where_a_number_is_expected_is_counted() -> None:
    data = silos(w=np.array(["7654.25x", *(["1.5"] * 119)]))
    refused(study(), data, "column 'w'", "text where a number is expected in 1 row", kind=DataError)


def test_a_level_never_declared_is_counted() -> None:
    arm = population(120, seed=40)["a"]
    arm[:4] = 7654
    refused(study(), silos(a=arm), "column 'a'", "is neither 0 nor 1 in 4 rows", kind=DataError)


def test_a_treatment_in_words_is_one_defect_whose_mapping_is_shown() -> None:
    arm = np.where(population(120, seed=40)["a"] == 1, "yes", "no")
    with pytest.raises(DataError) as caught:
        ft.run(study(), silos(a=arm))
    assert str(caught.value).count("column 'a'") == 2  # once for each silo
    assert "a = {levels = {no = 0, yes = 1}}" in str(caught.value)


@pytest.mark.parametrize("name", ["y", "w", "a", "weight", "family", "old"])
def test_missing_where_none_is_declared_is_counted(name: str) -> None:
    column = population(120, seed=40)[name].astype(float)
    column[[70, 80]] = np.nan
    known: dict[str, Any] = {name: column}
    own = study(ft.ATE(outcome="y", treatment="a", strata="old"), weights="weight")
    own = change(own, cluster="family")
    refused(
        own,
        silos(**known),
        "silo 'silo 1'",
        f"column '{name}'",
        "missing",
        "2 rows",
        kind=DataError,
    )


def test_all_defects_of_all_silos_are_reported_together() -> None:
    data = silos(**with_secret("y", 3, 100))
    del data["silo 0"]["w"]
    data["silo 1"]["z"][5] = np.nan
    message = refused(study(), data, kind=DataError)
    assert message.startswith("4 defects")
    for words in ("column 'w'", "column 'z'", "silo 'silo 0'", "silo 'silo 1'"):
        assert words in message


def test_one_arm_overall_is_refused_one_arm_in_a_silo_is_not() -> None:
    refused(study(), silos(a=np.ones(120, dtype=int)), "treatment", "arm '0'")
    data = population(120, seed=40)
    apart = cut(data, [np.flatnonzero(data["a"] == arm) for arm in (0, 1)])
    assert ft.run(study(), apart).run.status.is_converged


def test_an_arm_whose_outcomes_are_all_missing_is_refused() -> None:
    data = population(120, seed=40)
    own = study(missingness_model=ft.GLM("w"))
    refused(
        own, silos(y=np.where(data["a"] == 1, np.nan, data["y"])), "no silo has an observed outcome", "'1'"
    )


def test_perfect_separation_is_refused_unless_ridge_is_given() -> None:
    data = population(120, seed=40)
    arm = (data["w"] > 0.1).astype(int)
    message = refused(study(), silos(a=arm), "treatment model")
    assert "perfectly predicted, mostly by w, so" in message
    own = study(treatment_model=ft.GLM("w + z", ridge=0.1), g_bounds=0.05)
    assert ft.run(own, silos(a=arm)).run.status.is_converged


def test_quasi_separation_by_a_level_is_refused() -> None:
    data = population(120, seed=40)
    arm = np.where(data["site"] == "west", 1, data["a"])
    own = study(treatment_model=ft.GLM("w + C(site)"))
    message = refused(own, silos(a=arm), "treatment model")
    assert "perfectly predicted, mostly by C(site)[west], so" in message


def test_g_at_the_bound_for_most_rows_is_refused() -> None:
    data = population(120, seed=40)
    chance = np.where(np.arange(120) % 3 > 0, 0.001, 0.5)
    arm = data["a"].copy()
    own = study(treatment_model=ft.Supplied("p"), g_bounds=0.05)
    refused(own, silos(a=arm, p=chance), "g_bounds", "arm '1'", "80 of 120 rows")


def test_an_inverse_probability_beyond_the_declared_one_is_counted() -> None:
    chance = np.full(120, 0.5)
    chance[:2] = 1e-9
    own = study(treatment_model=ft.Supplied("p"), g_bounds=None)
    arm = population(120, seed=40)["a"]
    arm[:2] = 1
    refused(own, silos(a=arm, p=chance), "silo 'silo 0'", "2 row(s)", "inverse probability", kind=DataError)


def test_collinear_covariates_are_named() -> None:
    data = population(120, seed=40)
    own = study(outcome_model=ft.GLM("a + w + z + twice"))
    refused(own, silos(twice=2 * data["w"] - data["z"]), "outcome model", "twice", "determined by")
    ridged = change(own, outcome_model=ft.GLM("a + w + z + twice", ridge=0.01))
    assert ft.run(ridged, silos(twice=2 * data["w"] - data["z"])).run.status.is_converged


def test_a_constant_column_is_named() -> None:
    own = study(outcome_model=ft.GLM("a + w + always"))
    refused(own, silos(always=np.full(120, 3.0)), "outcome model", "always")


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "w.mean()",
        "w if z else 1",
        "y ~ w",
        "exec(w)",
        "w[0]",
        "lambda: w",
        "w +",
    ],
)
def test_a_formula_outside_the_grammar_is_refused_and_never_evaluated(formula: str) -> None:
    with pytest.raises(InputError, match="formula"):
        ft.GLM(formula)


def test_an_unreadable_file_is_named(tmp_path) -> None:
    good = tmp_path / "good.csv"
    pd.DataFrame(silos()["silo 0"]).to_csv(good, index=False)
    with pytest.raises(DataError, match=r"absent\.csv.*north"):
        ft.run(study(), {"south": good, "north": tmp_path / "absent.csv"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.csv"]  # nothing half-done


def test_missing_outcomes_need_a_model_of_them() -> None:
    data = population(120, seed=40, missing=True)
    refused(study(), silos(y=data["y"]), "column 'y'", "missing", kind=DataError)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [("p", 1.2, "not between 0 and 1 in 3 row(s)"), ("p", -0.1, "not between 0 and 1 in 3 row(s)")],
)
def test_supplied_probabilities_are_probabilities(column: str, value: float, said: str) -> None:
    chance = np.full(120, 0.5)
    chance[:3] = value
    known: dict[str, Any] = {column: chance}
    own = study(treatment_model=ft.Supplied(column))
    refused(
        own,
        silos(**known),
        "silo 'silo 0'",
        f"column '{column}'",
        said,
        kind=DataError,
    )


def test_supplied_columns_are_counted() -> None:
    half = np.full(120, 0.5)
    for options, said in (
        ({"treatment_model": ft.Supplied("p", "p", "p")}, "treatment_model: expected 1 or 2"),
        ({"outcome_model": ft.Supplied("p")}, "outcome_model: expected 2"),
        ({"missingness_model": ft.Supplied("p", "p", "p")}, "missingness_model: expected 1 or 2"),
    ):
        refused(study(**options), silos(p=half), said)


def test_weights_that_are_too_unequal_or_all_zero_or_negative() -> None:
    weight = np.ones(120)
    weight[:2] = 1e6
    own = study(weights="weight", weight_ceiling=16.0)
    refused(
        own, silos(weight=weight), "silo 'silo 0'", "column 'weight'", "16 times", "2 row(s)", kind=DataError
    )
    refused(own, silos(weight=np.zeros(120)), "weights", "'weight'", "zero in every row")
    refused(own, silos(weight=-np.ones(120)), "column 'weight'", "outside the declared range", kind=DataError)


def test_a_stratum_without_one_arm_is_named() -> None:
    data = population(120, seed=40)
    arm = np.where(data["old"] == 1, 1, data["a"])
    own = study(ft.ATE(outcome="y", treatment="a", strata="old"))
    refused(own, silos(a=arm), "no observed outcome contributes", "E[Y(0)] in 1")


def test_a_rule_that_nobody_followed_is_named() -> None:
    data = population(120, seed=40)
    contrary = (data["w"] < 0.1).astype(int)
    rule = ft.Threshold("w", 0.1, arm="1", otherwise="0")
    target = ft.PolicyMeans(outcome="y", treatment="a", rules=(rule,))
    own = study(target, treatment_model=ft.Supplied("p"))
    half = np.full(120, 0.5)
    refused(own, silos(a=contrary, p=half), "no observed outcome contributes", "1 if w >= 0.1 else 0")
    assert ft.run(own, silos(p=half)).run.status.is_converged


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ft.ATE(outcome="y"), "treatment"),
        (lambda: ft.ATT(outcome="y"), "treatment"),
        (lambda: ft.OutcomeMean(outcome="y", treatment="a"), "treatment"),
        (lambda: ft.ATE(outcome="y", treatment="a", arms=("1",)), "arms"),
        (lambda: ft.ATE(outcome="y", treatment="a", arms=("1", "1")), "arms"),
        (lambda: study(ft.ATE(outcome="y", treatment="a", arms=("0", "2"))), "arms: expected the levels"),
        (lambda: study(variables=declare(WIDE, a=(0, 1))), "arms: 'a' is declared as a number"),
        (lambda: study(variables=5), "variables: expected a dictionary"),
        (lambda: ft.ATT(outcome="y", treatment="a", strata="s"), "strata"),
        (lambda: ft.ATO(outcome="y", treatment="a", strata="s"), "strata"),
        (lambda: ft.Stochastic((0.5, 0.6)), "shares"),
        (lambda: ft.Stochastic((float("nan"), 0.6)), "shares"),
        (lambda: ft.PolicyMeans(outcome="y", treatment="a", rules=()), "rules"),
        (
            lambda: ft.PolicyMeans(outcome="y", treatment="a", rules=(ft.Static("2"),), arms=("0", "1")),
            "rules",
        ),
        (
            lambda: ft.PolicyMeans(
                outcome="y", treatment="a", rules=(ft.Stochastic((1.0,)),), arms=("0", "1")
            ),
            "shares",
        ),
        (
            lambda: ft.PolicyMeans(
                outcome="y",
                treatment="a",
                arms=("0", "1"),
                rules=(ft.Threshold("w", 0.0, arm="1", otherwise="x"),),
            ),
            "rules",
        ),
        (
            lambda: study(ft.PolicyMeans(outcome="y", treatment="a", rules=(ft.Static("2"),))),
            "rules",
        ),
        (lambda: study(treatment_model=None), "treatment_model"),
        (lambda: study(g_bounds=0.7), "g_bounds"),
        (lambda: study(g_bounds=float("nan")), "g_bounds"),
        (lambda: study(folds=1), "folds"),
        (lambda: study(confidence=1.5), "confidence"),
        (lambda: study(link="probit"), "link"),
        (lambda: study(clever="both"), "clever"),
        (lambda: study(weight_ceiling=0.0), "weight_ceiling"),
        (lambda: study(largest_cluster=0), "largest_cluster"),
        (lambda: study(ft.RR(outcome="y", treatment="a"), submodel="contrast"), "submodel"),
        (lambda: ft.GLM("w", ridge=-1.0), "ridge"),
        (lambda: any_ft.GLM("w", family="gamma"), "family"),
        (ft.Supplied, "Supplied"),
    ],
)
def test_a_study_that_cannot_be_meant_is_refused_when_it_is_written(make, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


def test_a_release_of_nobody_is_named() -> None:
    with pytest.raises(InputError, match="silo 9"):
        ft.run(study(), silos(), release=["silo 9"])
    with pytest.raises(InputError, match="silos"):
        ft.run(study(), {})


def test_a_ratio_of_zero_is_refused() -> None:
    own = study(ft.RR(outcome="event", treatment="a"), outcome_model=ft.GLM("1", ridge=1.0))
    with pytest.raises(FedTMLEError):
        ft.run(own, silos(event=np.zeros(120)))


def test_a_cluster_larger_than_declared_is_refused() -> None:
    own = study(cluster="family", cluster_scope="silo", largest_cluster=4)
    refused(own, silos(family=np.zeros(120, dtype=int)), "cluster", "'family'", kind=DataError)


def test_a_missingness_model_is_left_out_where_no_outcome_is_missing() -> None:
    without = ft.run(study(), silos())
    for model in (ft.GLM("w + z"), ft.SuperLearner((ft.GLM("w"), ft.GLM("1")), folds=2)):
        result = ft.run(study(missingness_model=model), silos())
        assert result.document["estimates"] == without.document["estimates"]
        assert [note for note in result.notes if "no outcome is missing" in note]
        assert not result.warnings  # it puts no estimate in doubt
    assert not without.warnings
    assert not without.notes


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"weights": "weight"}])
def test_a_constant_outcome_is_called_so(value: float, options: dict[str, str]) -> None:
    binary = ft.ATE(outcome="event", treatment="a")
    message = refused(study(binary, **options), silos(event=np.full(120, value)), "outcome model: every obs")
    assert "is the same" in message
    one_other = np.full(120, value)
    one_other[7] = 1 - value
    with pytest.raises(InputError, match="perfectly predicted"):
        ft.run(study(binary, outcome_model=ft.GLM("a + w + z + C(old)"), **options), silos(event=one_other))


def test_a_constant_treatment_or_missingness_is_called_so() -> None:
    arm = np.zeros(120, dtype=int)
    arm[4] = 1  # alone, so that the folds without it have one arm
    refused(study(folds=2), silos(a=arm), "treatment model (fold ", "has the same treatment", "fewer folds")
    y = population(120, seed=40)["y"]
    y[4] = np.nan
    own = study(missingness_model=ft.GLM("w"), folds=2)
    refused(own, silos(y=y), "missingness model (fold ", "is observed, or every one", "fewer folds")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"treatment_model": ft.GLM("w + y")}, "treatment_model: it uses 'y', which is the study's outcome"),
        ({"treatment_model": ft.GLM("w + C(y)")}, "treatment_model: it uses 'y'"),
        (
            {"treatment_model": ft.GLM("w + C(a)")},
            "treatment_model: it uses 'a', which is the study's t",
        ),
        ({"outcome_model": ft.GLM("a + w + I(y**2)")}, "outcome_model: it uses 'y'"),
        ({"outcome_model": ft.Supplied("w", "y")}, "outcome_model: it uses 'y'"),
        ({"missingness_model": ft.GLM("a + y")}, "missingness_model: it uses 'y'"),
        (
            {"treatment_model": ft.SuperLearner((ft.GLM("w"), ft.Pilot(ft.GLM("y"), at="n")))},
            "treatment_model: it uses 'y'",
        ),
    ],
)
def test_no_model_uses_what_it_predicts_or_what_comes_later(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        study(**options)
    assert str(caught.value).startswith(said)


def test_a_count_is_a_whole_number_from_zero() -> None:
    own = study(variables=declare(WIDE, y=("count", 10)))
    y = np.round(population(120, seed=40)["y"])
    assert ft.run(own, silos(y=y)).run.status.is_converged
    y[[3, 70]] = 1.25, -2.0
    message = refused(own, silos(y=y), "silo 'silo 0'", "column 'y'", kind=DataError)
    assert message.count("is not a count (0, 1, 2, ...) in 1 row") == 2
    assert "1.25" not in message


def test_a_result_says_what_the_outcome_was_taken_as() -> None:
    told = {}
    for kind in ("continuous", "count"):
        own = study(variables=declare(WIDE, y=("count", 10) if kind == "count" else (0, 10)))
        document = ft.run(own, silos(y=np.round(population(120, seed=40)["y"]))).document
        told[kind] = [line for line in render(document).splitlines() if line.startswith("outcome  ")]
        family = "poisson" if kind == "count" else "gaussian"
        assert document["study"]["models"]["outcome"] == f"a + w + z ({family})"
        assert document["study"]["target"]["response"] == kind
    assert [line.split(maxsplit=1)[1] for lines in told.values() for line in lines] == [
        "continuous, 0 to 10",
        "count, 0 to 10",
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: study(target="ATE"), "target: expected an effect"),
        (lambda: study(target=ft.ATE), "target: expected an effect such as .*, not the class ATE: call it"),
        (lambda: study(outcome_model="C(a) + w"), r"outcome_model: expected a model such as GLM\("),
        (lambda: study(outcome_model=None), "outcome_model: expected a model"),
        (lambda: study(treatment_model="w"), "treatment_model: expected a model"),
        (lambda: study(missingness_model=ft.GLM), "missingness_model: expected .* the class GLM"),
        (lambda: study(algorithm="Gradient"), "algorithm: expected an algorithm .* of type str"),
        (lambda: study(algorithm=ft.Gradient), r"algorithm: .* class Gradient: call it, as in Gradient\(\)"),
        (lambda: study(folds=2.5), "folds: expected an integer"),
        (lambda: study(seed="1"), "seed: expected an integer"),
        (lambda: study(largest_cluster=2.5), "largest_cluster: expected an integer"),
        (lambda: study(weights=pd.Series([SECRET])), "weights: expected the name of a column"),
        (lambda: study(cluster=5), "cluster: expected the name of a column"),
        (lambda: study(confidence="0.95"), "confidence: expected a number"),
        (lambda: study(g_bounds=[0.1]), "g_bounds: expected a number"),
        (lambda: any_ft.GLM(5), "formula: expected text"),
        (lambda: any_ft.GLM("w", ridge="0.1"), "ridge: expected a number"),
        (lambda: any_ft.ATE(outcome="y", treatment="a", arms="01"), "arms: expected the levels"),
        (lambda: any_ft.ATE(outcome="y", treatment="a", arms=(0.5, 1)), "arms: expected an integer"),
        (lambda: any_ft.ATE(outcome=5, treatment="a"), "outcome: expected the name"),
        (lambda: any_ft.ATE(outcome="y", treatment=["a"]), "treatment: expected the name"),
        (lambda: ft.ATE(outcome="y", treatment="y"), "treatment: 'y' is the outcome"),
        (lambda: any_ft.run(study(), list(silos().values())), "silos: expected a mapping"),
        (lambda: any_ft.run(study, silos()), "study: expected a Study"),
        (lambda: ft.run(study(), silos(), release="silo 0"), r"release: expected .* \['silo 0'\]"),
    ],
)
def test_arguments_of_another_type_are_named_at_once(make, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        make()
    assert "7654" not in str(caught.value)


def test_arms_may_be_written_as_numbers() -> None:
    numbers = any_ft.ATE(outcome="y", treatment="a", arms=[0, np.int64(1)])
    assert study(numbers) == study(ATE)
    assert ft.run(study(numbers), silos()).document["estimates"]


def test_strata_are_few() -> None:
    many = declare(WIDE, old=[str(k) for k in range(60)])
    with pytest.raises(InputError, match="strata: 'old' has 60 levels, more than 50; group its values"):
        study(ft.ATE(outcome="y", treatment="a", strata="old"), variables=many)
