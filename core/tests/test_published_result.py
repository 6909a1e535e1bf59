"""A whole result, and the means of groups: what goes out is rounded as the rules say, and the rest stays."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from fedtmle_core.publish import NotPublishableError, published_emulation, published_result
from fedtmle_core.publish.groups import not_dominated

K = 10
EDGES = [0.0, 0.25, 0.5, 0.75, 1.0]


def estimate(value: float, error: float, scale: str = "difference") -> dict[str, Any]:
    low, high = value - 1.96 * error, value + 1.96 * error
    shown = {"estimand": "ATE", "estimate": value, "std_error": error, "conf_low": low, "conf_high": high}
    return {**shown, "p_value": 0.0123456, "scale": scale}


def covariate(name: str, **numbers: Any) -> dict[str, Any]:
    facts = {"name": name, "level": None, "label": name, "level_label": None, "unit": None, "hidden_in": 0}
    return {**facts, **numbers}


def document(**changes: Any) -> dict[str, Any]:
    """Return a result of 985 people in two arms, of whom 77 have no outcome; ``changes`` replace keys."""
    age = covariate(
        "age", means=[24.7123, 25.1234], sds=[6.0312, 5.9], weighted_means=[24.9, 24.95],
        differences=[0.0689], weighted_differences=[0.008],
    )  # fmt: skip
    male = covariate(
        "male", means=[312 / 608, 3 / 377], sds=None, weighted_means=[0.50556, 0.50558],
        differences=[-1.4], weighted_differences=[0.00004],
    )  # fmt: skip
    whole: dict[str, Any] = {
        "study": {
            "target": {"outcome_bounds": [40.0, 160.0], "response": "continuous"},
            "variables": {"age": {"range": [10.0, 60.0]}, "male": {"range": None}},
        },
        "arms": ["0", "1"],
        "names": ["E[Y(0)]", "E[Y(1)]"],
        "estimates": [estimate(9.339626689852793, 1.0930205079467221)],
        "psi": [84.0699848847946, 93.40961157464739],
        "std_error": [0.7510633726446748, 0.9532873228376038],
        "covariance": [[0.5640961897283936, 0.13907953940958429], [0.13907953940958429, 0.9087567198828858]],
        "interaction": [{"estimand": "ATE", "statistic": 1.4606218, "df": 1, "p_value": 0.2268312}],
        "ladder": [],
        "participants": {"records": 988, "omitted": 3, "analysed": 985, "with_outcome": 908},
        "n": 985,
        "arm_counts": [608, 377],
        "observed_counts": [561, 347],
        "truncated": [3, 17],
        "effective_sizes": {"E[Y(0)]": 556.04, "E[Y(1)]": 340.08},
        "overlap": {
            "is_poor": False,
            "thresholds": {"truncated_share": 0.05},
            "truncated_share": [3 / 985, 17 / 985],
            "components": [
                {"name": "E[Y(0)]", "effective": 556.04, "records": 561, "largest_share": 0.0416},
                {"name": "in east", "effective": 56.04, "records": None, "largest_share": 0.0416},
                {"name": "other", "effective": 56.04, "records": 123, "largest_share": 0.0416},
            ],
        },
        "sizes": {"a": 500, "b": 485},
        "balance": {
            "reference": "0", "arms": ["1"], "counts": [608, 377], "is_complete": True,
            "covariates": [age, male],
        },
        "learners": [
            {"model": model, "arm": None, "fold": fold, "learner": 1, "text": "x", "weight": 0.914028,
             "risk": risk}
            for model, fold, risk in (("outcome", 1, 310.123), ("treatment", 2, 0.2319))
        ],
        "diagnostics": {
            "overlap": [
                {"probability_of": "1", "arm": "0", "edges": EDGES, "counts": [4, 222, 382, 0],
                 "hidden_in": [0, 0, 0, 0]},
            ],
            "outcome_fit": {
                "r_squared": {"initial": 0.40472, "targeted": 0.40477},
                "deviance_explained": None,
                "calibration": {
                    "edges": [40.0, 71.6114, 87.978, 95.0, 160.0],
                    "counts": [75, 400, 0, 433],
                    "hidden_in": [0, 0, 0, 0],
                    "observed": [66.65, 77.45, None, 95.1],
                    "initial": [66.62, 77.4, None, 95.0],
                    "targeted": [66.6, 77.3, None, 95.2],
                },
            },
            "eif_mean": {"E[Y(0)]": -9.68e-10},
        },
        "transcript": "de6e29",
        "trajectory": {"points": [{"eps": [1.0]}]},
        "status_text": "the budget was used up",
        "warnings": [],
        "notes": [],
        "secret": 7,
    }  # fmt: skip
    return {**copy.deepcopy(whole), **changes}


def test_numbers_of_a_result() -> None:
    exact = document()
    shown = published_result(exact, K)
    assert exact == document(), "the exact one is left as it is"
    json.dumps(shown, allow_nan=False)
    assert "secret" not in shown
    assert shown["published"] == {"floor": 10}
    assert "nothing is of 1 to 9 people" in shown["notes"][-1]
    (row,) = shown["estimates"]
    assert (row["estimate"], row["std_error"], row["conf_low"], row["conf_high"]) == (9.34, 1.09, 7.2, 11.48)
    assert row["p_value"] == 1e-12  # of the published numbers, not the given one
    assert (shown["psi"], shown["std_error"]) == ([84.07, 93.41], [0.751, 0.953])
    assert (
        shown["covariance"][0][1]
        == shown["covariance"][1][0]
        == pytest.approx(0.19 * 0.751 * 0.953, abs=1e-6)
    )
    assert shown["covariance"][0][0] == 0.751**2
    (test,) = shown["interaction"]
    assert (test["statistic"], test["p_value"]) == (1.4641, 0.2)
    assert (shown["transcript"], shown["trajectory"]["points"]) == (None, [])
    assert shown["sizes"] == {"a": None, "b": None}


def test_a_component_that_does_not_vary_has_no_covariance() -> None:
    shown = published_result(document(std_error=[0.0, 0.9532873228376038]), K)
    assert shown["covariance"] == [[0.0, 0.0], [0.0, pytest.approx(0.953**2)]]


def test_counts_of_a_result() -> None:
    shown = published_result(document(), K)
    assert shown["participants"] == {"records": 985, "omitted": 0, "analysed": 985, "with_outcome": 908}
    assert (shown["n"], shown["arm_counts"], shown["observed_counts"]) == (985, [608, 377], [561, 347])
    assert shown["truncated"] == [0, 20]
    assert shown["overlap"]["truncated_share"] == [0.0, round(20 / 985, 4)]
    assert [each["records"] for each in shown["overlap"]["components"]] == [561, None, 120]
    assert shown["effective_sizes"] == {"E[Y(0)]": 560, "E[Y(1)]": 340}
    assert shown["balance"]["counts"] == [608, 377]
    (histogram,) = shown["diagnostics"]["overlap"]
    assert histogram["counts"] == [0, 230, 378, 0]
    calibration = shown["diagnostics"]["outcome_fit"]["calibration"]
    assert calibration["counts"] == [80, 400, 0, 428]


def test_few_without_an_outcome_are_nobody_or_k_everywhere() -> None:
    few = document(observed_counts=[605, 370])
    few["participants"]["with_outcome"] = 975
    few["overlap"]["components"][0]["records"] = 605
    few["diagnostics"]["outcome_fit"]["calibration"]["counts"] = [75, 400, 0, 500]
    shown = published_result(few, K)
    assert shown["observed_counts"] == [608, 367]
    assert shown["participants"]["with_outcome"] == 975
    assert shown["overlap"]["components"][0]["records"] == 608
    fewer = document(observed_counts=[605, 347])
    fewer["participants"]["with_outcome"] = 952
    fewer["diagnostics"]["outcome_fit"]["calibration"]["counts"] = [75, 400, 0, 477]
    shown = published_result(fewer, K)
    assert shown["participants"]["with_outcome"] == 955
    assert sum(shown["diagnostics"]["outcome_fit"]["calibration"]["counts"]) == 955


def test_a_histogram_of_some_hospitals_has_a_rounded_total() -> None:
    exact = document()
    exact["diagnostics"]["overlap"][0] |= {"counts": [None, 222, 385, 0], "hidden_in": [1, 0, 0, 0]}
    assert published_result(exact, K)["diagnostics"]["overlap"][0]["counts"] == [None, 220, 390, 0]


def test_means_and_shares_by_arm() -> None:
    age, male = published_result(document(), K)["balance"]["covariates"]
    assert age["means"] == [24.5, 25.0]  # 6.0/sqrt(608) = 0.24 and 5.9/sqrt(377) = 0.30, in steps of 0.5
    assert age["sds"] == [6.0, 5.9]
    assert age["weighted_means"] == [25.0, 25.0]
    assert (age["differences"], age["weighted_differences"]) == ([0.08], [0.0])
    assert male["means"] == [round(310 / 608, 4), 0.0]
    assert male["sds"] is None
    assert male["weighted_means"] == [0.505, 0.505]
    assert male["weighted_differences"] == [0.0]


@pytest.mark.parametrize(
    "change",
    [{"hidden_in": 1}, {"sds": [1.2, 1.1]}, {"sds": [None, None]}, {"means": [10.1, 10.1]},
     {"means": [None, None]}],
    ids=["of some hospitals", "one person may be most squares", "no deviation", "most at a bound", "unknown"],
)  # fmt: skip
def test_a_mean_that_may_be_one_persons_is_left_out(change: dict[str, Any]) -> None:
    exact = document()
    exact["balance"]["covariates"][0] |= change
    age, _ = published_result(exact, K)["balance"]["covariates"]
    assert (age["means"], age["sds"], age["weighted_means"]) == ([None, None],) * 3
    assert (age["differences"], age["weighted_differences"]) == ([None], [None])


def test_a_mean_without_declared_bounds_is_left_out() -> None:
    exact = document()
    exact["study"]["variables"]["age"]["range"] = None
    assert published_result(exact, K)["balance"]["covariates"][0]["means"] == [None, None]


def test_nobody_dominates() -> None:
    assert not_dominated(24.7, 6.0, 608, 10.0, 60.0)
    assert not not_dominated(10.1, 6.0, 608, 10.0, 60.0)  # 61 years above the bound in all: one has 50
    assert not not_dominated(24.7, 2.8, 608, 10.0, 60.0)  # 4,767 squares in all: one has 2,500
    for others in range(400):  # one person at the far bound, and others somewhat above the near one
        values = [60.0, *[11.0] * others]
        mean = sum(values) / len(values)
        sd = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        if not_dominated(mean, sd, len(values), 10.0, 60.0):
            assert sum(v - 10.0 for v in values) / 2 >= 50.0
            assert (60.0 - mean) ** 2 <= sum((v - mean) ** 2 for v in values) / 2


def calibration(response: str, **changes: Any) -> dict[str, Any]:
    exact = document()
    exact["study"]["target"] = {"outcome_bounds": [0.0, 1.0], "response": response}
    exact["diagnostics"]["outcome_fit"]["calibration"] = {
        "edges": [0.0, 0.2513, 0.5, 0.75, 1.0],
        "counts": [300, 208, 390, 10],
        "hidden_in": [0, 0, 0, 0],
        "observed": [0.02, 0.1, 0.5, 0.9],
        "initial": [0.021, 0.11, 0.5, 0.9],
        "targeted": [0.021, 0.11, 0.5, 0.9],
        **changes,
    }
    shown: dict[str, Any] = published_result(exact, K)["diagnostics"]["outcome_fit"]["calibration"]
    return shown


def test_bins_of_events_are_joined_until_events_and_others_are_k() -> None:
    shown = calibration("binary")
    # 6 events of 300, and 20.8 of 208, are 26.8 of 508: the place is that of most of them. The last 10 join.
    assert shown["counts"] == [510, 0, 398, 0]
    assert shown["observed"] == [0.06, None, 0.5, None]  # steps of 0.02 and 0.05: of ten people
    assert shown["initial"] == [0.058, None, 0.51, None]  # of one person
    assert shown["edges"] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bins_of_numbers_are_joined_until_nobody_is_more_than_half() -> None:
    shown = calibration("continuous", observed=[0.005, 0.1, 0.5, 0.9], initial=[0.001, 0.11, 0.5, 0.9])
    assert shown["counts"] == [510, 0, 398, 0]
    assert calibration("continuous")["counts"] == [300, 210, 398, 0]


def test_bins_of_nothing_but_one_outcome_are_left_out() -> None:
    shown = calibration("binary", observed=[0.0, 0.0, 0.0, 0.0])
    assert shown["counts"] == shown["observed"] == [None] * 4


def test_losses_to_what_one_record_can_change() -> None:
    outcome, treatment = published_result(document(), K)["learners"]
    assert (outcome["weight"], outcome["risk"]) == (0.91, 300.0)  # 120^2 * 2/985 = 29, in steps of 50
    assert treatment["risk"] == 0.23  # 2/985, in steps of 0.005


def test_over_time() -> None:
    shown = published_result(
        document(
            finer_grid={"subperiods": 2, "periods": 4, "estimates": [], "reason": "3 people left in period 7"},  # noqa: E501
            event_counts=[[61, 3], [40, 7]], events_hidden_in=[0, 0], observed_counts=[64, 47],
            at_risk={"periods": [1, 2, 3], "counts": [[608, 601, 322], [377, None, 8]],
                     "hidden_in": [[0, 0, 0], [0, 2, 0]]},
            curves=[{"arm": "0", "population": "", "cause": None, "horizons": [1, 2], "times": [4, 8],
                     "estimate": [0.0, 0.0712], "std_error": [0.0, 0.01234], "conf_low": [0.0, 0.047],
                     "conf_high": [0.0, 0.0954], "band_low": [0.0, 0.043], "band_high": [0.0, 0.0994]}],
        ),
        K,
    )  # fmt: skip
    assert shown["finer_grid"]["reason"] == "the fit on the finer grid failed"
    assert shown["event_counts"] == [[61, 0], [40, 10]]
    assert shown["observed_counts"] == [61, 50]
    assert shown["at_risk"]["counts"] == [[608, 590, 320], [377, None, 10]]
    (curve,) = shown["curves"]
    assert (curve["estimate"], curve["std_error"]) == ([0.0, 0.0712], [0.0, 0.0123])
    assert curve["conf_low"] == [0.0, pytest.approx(0.047, abs=3e-4)]
    partial = published_result(document(event_counts=[[61], [40]], events_hidden_in=[1, 0]), K)
    assert partial["event_counts"] == [[60], [40]]


def test_treatment_over_time() -> None:
    periods = [
        {"period": 1, "at_risk": 400, "censored": 24, "events": 3},
        {"period": 2, "at_risk": 373, "censored": 20, "events": 31},
    ]
    exact = document(
        n=400, arms=["0", "1", "rule"], arm_counts=[400, 400, 400], observed_counts=[356, 356, 356],
        first_arms={"0": 226, "1": 174}, periods=periods, truncated=[0, 0, 0],
        balance={**document()["balance"], "counts": [226, 174], "covariates": []},
        adherence=[{"rule": "rule", "at_risk": [400, 373], "followers": [166, 96], "hidden_in": [0, 0],
                    "weight_edges": [1.0], "weight_counts": [[150, 16], [92, None]],
                    "weights_hidden_in": [0, 0]}],
    )  # fmt: skip
    exact["participants"] = {"records": 400, "omitted": 0, "analysed": 400, "with_outcome": 356}
    exact["overlap"]["components"] = []
    shown = published_result(exact, K)
    assert (shown["arm_counts"], shown["first_arms"]) == ([400, 400, 400], {"0": 226, "1": 174})
    assert (shown["observed_counts"], shown["participants"]["with_outcome"]) == ([360, 360, 360], 360)
    assert [list(each.values()) for each in shown["periods"]] == [[1, 400, 20, 10], [2, 370, 20, 30]]
    (rule,) = shown["adherence"]
    assert (rule["at_risk"], rule["followers"]) == ([400, 370], [170, 100])
    assert rule["weight_counts"] == [[150, 20], [90, None]]
    assert shown["balance"]["counts"] == [226, 174]
    moved = published_result({**exact, "first_arms": {}, "balance": {**exact["balance"], "counts": [400]}}, K)
    assert moved["balance"]["counts"] == [400]


def test_counts_with_noise_are_shown_as_they_are() -> None:
    exact = document(privacy={"rows": {"east": 111.98}}, arm_counts=[612, 3], observed_counts=[600, 1])
    shown = published_result(exact, K)
    assert (shown["arm_counts"], shown["privacy"]) == ([612, 3], {"rows": {"east": 111.98}})


def test_sentences_with_numbers_are_replaced() -> None:
    sentences = [
        "the budget was used up",
        "2 of 3 silos took part. Without 'c': expired",
        "poor overlap: 7 of 985 records",
        "poor overlap: one record may carry 12 %",
        "3 people are special",
    ]
    shown = published_result(document(warnings=sentences, notes=["5 people are special"]), K)
    overlap = "poor overlap: the estimates rest on few records or on the bound of the propensity score"
    further = "the run has a further warning, which its hospitals can read"
    assert shown["warnings"] == [*sentences[:2], overlap, further]
    assert shown["notes"][0] == "the run has a further note, which its hospitals can read"


def test_the_floor_is_a_number_of_people() -> None:
    with pytest.raises(NotPublishableError, match="at least 1"):
        published_result(document(), 0)
    assert published_result(document(), 1)["truncated"] == [3, 17]


def test_a_result_is_not_published_twice() -> None:
    with pytest.raises(NotPublishableError, match="already"):
        published_result(published_result(document(), K), K)


def test_an_emulated_trial() -> None:
    arms = [{"name": "a", "people": 104, "events": 3, "unknown": None}]
    exact = {
        "trial": "t",
        "silos": {"a": {"people": [12345, 231, 104], "arms": arms}},
        "table1": {"x": 1},
        "new": 1,
    }
    shown = published_emulation(exact, 985, K)
    rounded = [{"name": "a", "people": 100, "events": 0, "unknown": None}]
    assert shown == {
        "trial": "t",
        "silos": {"a": {"people": [12350, 230, 100], "arms": rounded}},
        "table1": None,
    }
