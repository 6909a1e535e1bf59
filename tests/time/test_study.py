"""Studies of time to an event: any partition, weights, clusters, strata, arms, folds, learners, streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.protocol.outcome import Status
from fedtmle.report.page import render as report
from fedtmle.results import inference
from tests.time.law import HAZARD, PERIODS, VARIABLES, Law, study
from tests.time.studies import NEWTON, rossi, split

RECORDS = Law(2).draw(400, seed=3)
ONE = Law(1).draw(400, seed=3)


def psi(result: ft.StudyResult) -> list[float]:
    return [row["estimate"] for row in result.document["estimates"]]


def errors(result: ft.StudyResult) -> list[float]:
    return [row["std_error"] for row in result.document["estimates"]]


def silos(records: pd.DataFrame, parts: int = 2) -> dict[str, pd.DataFrame]:
    return split(records, parts, seed=parts)


@pytest.mark.parametrize("partitions", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_any_partition_gives_the_bits_of_pooled_data(
    partitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "DRAWS", 1000)
    asked = study(ft.Risk, 2, horizons=(2, 4), diagnostics=False)
    pooled = ft.run(replace(asked, algorithm=ft.Central(optimizer=ft.Newton())), {"all": RECORDS})
    for seed in range(partitions):
        result = ft.run(asked, split(RECORDS, 2 + seed % 4, seed))
        assert psi(result) == psi(pooled)
        assert errors(result) == errors(pooled)


def test_coded_agrees_with_one_silo_and_with_newton() -> None:
    """The covariates move with the hazards, so that another path ends at another solution of the equation.

    Solutions differ by a term of second order: far less than a standard error, more than a certificate.
    """
    asked = study(ft.Risk, 2, horizons=(2, 4), algorithm=ft.Coded())
    coded = ft.run(asked, silos(RECORDS)).document
    alone = ft.run(asked, {"all": RECORDS}).document
    newton = ft.run(study(ft.Risk, 2, horizons=(2, 4)), silos(RECORDS)).document
    for one, *others in zip(coded["estimates"], alone["estimates"], newton["estimates"], strict=True):
        for other in others:
            assert one["estimate"] == pytest.approx(other["estimate"], abs=1e-3 * one["std_error"])


@pytest.mark.parametrize("algorithm", [None, ft.Gradient(optimizer=ft.Newton())], ids=["default", "Newton"])
def test_a_whole_curve_takes_at_most_thirty_rounds(algorithm: ft.AbstractAlgorithm | None) -> None:
    """Ten horizons in two arms, with all the rounds of the models, counts and diagnostics."""
    from tests.time.studies import colon, colon_study

    asked = colon_study(
        ft.Risk,
        horizons=tuple(range(1, 11)),
        hazard_model=ft.GLM("C(period)*C(rx) + age + node4"),
        treatment_model=ft.GLM("age + node4"),
        algorithm=algorithm or ft.Study.algorithm,
    )
    document = ft.run(asked, split(colon(), 3)).document
    assert document["converged"]
    assert sum(document["account"]["rounds"].values()) <= 25
    for curve in document["curves"]:
        assert (np.diff([0.0, *curve["estimate"]]) >= 0).all()
        for low, band, high in zip(curve["conf_low"], curve["band_low"], curve["estimate"], strict=True):
            assert band <= low <= high


def test_one_period_is_the_point_treatment_effect() -> None:
    """Risk in one period, nobody censored: the mean of a binary outcome."""
    records = ONE.assign(t=1, event=(ONE.what == "first").astype(int))
    variables = ft.Variables(
        {
            "t": {"kind": "count", "range": (0, 4)},
            "event": {"kind": "binary"},
            "a": {"kind": "category", "levels": ["0", "1"]},
            "x": {"kind": "number", "range": (-1, 1)},
            "z": {"kind": "binary"},
        }
    )
    shared: dict[str, Any] = {
        "treatment_model": ft.GLM("x + z"),
        "algorithm": ft.Gradient(optimizer=ft.Newton(), tolerance=1e-11),
        "variables": variables,
    }
    timed = ft.run(
        ft.Study(
            target=ft.Risk(outcome="event", time="t", treatment="a", periods=1),
            hazard_model=ft.GLM("C(a) + x + z"),
            **shared,
        ),
        silos(records),
    )
    point = ft.run(
        ft.Study(
            target=ft.TSM(outcome="event", treatment="a"), outcome_model=ft.GLM("C(a) + x + z"), **shared
        ),
        silos(records),
    )
    assert psi(timed) == pytest.approx(psi(point), abs=1e-10)
    larger = (len(records) / (len(records) - 1)) ** 0.5
    assert np.array(errors(timed)) * larger == pytest.approx(errors(point), abs=1e-10)


def test_measures_of_one_law_fit_together() -> None:
    """RMST and the times lost to the causes add up to the horizon; survival and risks to 1."""
    horizon = {"horizons": (PERIODS,)}
    saturated: dict[str, Any] = {
        "hazard_model": None,
        "censoring_model": None,
        "treatment_model": ft.GLM("1"),
    }
    values = {
        kind.__name__: psi(ft.run(study(kind, 2, **horizon, **saturated), silos(RECORDS)))
        for kind in (ft.RMST, ft.TimeLost, ft.Risk, ft.Survival, ft.RiskRatio, ft.RMSTRatio)
    }
    for arm in (0, 1):
        lost = values["TimeLost"][arm] + values["TimeLost"][2 + arm]
        assert values["RMST"][arm] + lost == pytest.approx(PERIODS, abs=1e-10)
        risks = values["Risk"][arm] + values["Risk"][2 + arm]
        assert values["Survival"][arm] + risks == pytest.approx(1.0, abs=1e-10)
    assert values["RiskRatio"][0] == pytest.approx(values["Risk"][1] / values["Risk"][0], rel=1e-10)
    assert values["RMSTRatio"][0] == pytest.approx(values["RMST"][1] / values["RMST"][0], rel=1e-10)


def test_strata_leave_the_estimates_of_everyone_as_they_are() -> None:
    tight: dict[str, Any] = {"algorithm": ft.Gradient(optimizer=ft.Newton(), tolerance=1e-10)}
    asked = study(ft.RiskDifference, horizons=(4,), target={"strata": "centre"}, **tight)
    with_strata = ft.run(asked, silos(ONE)).document["estimates"]
    without = ft.run(study(ft.RiskDifference, horizons=(4,), **tight), silos(ONE)).document["estimates"]
    assert [row["estimand"] for row in with_strata] == [
        "RiskDifference at 4",
        "RiskDifference at 4 in p",
        "RiskDifference at 4 in q",
    ]
    assert with_strata[0]["estimate"] == pytest.approx(without[0]["estimate"], abs=1e-8)


def test_weights_of_two_are_records_twice() -> None:
    """Estimates only: the standard error of doubled records is another."""
    records = RECORDS.assign(w=np.where(RECORDS.z > 0, 2.0, 1.0))
    doubled = pd.concat([records, records[records.z > 0]])
    asked = study(ft.Risk, 2, g_bounds=0.02, algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-10))
    weighted = ft.run(replace(asked, weights="w"), silos(records))
    assert psi(weighted) == pytest.approx(psi(ft.run(asked, {"all": doubled})), abs=1e-8)


def test_clusters_widen_by_the_sum_of_their_members() -> None:
    """Everyone twice in a cluster of two: the same estimate, and the standard error of one copy."""
    twice = pd.concat([ONE, ONE]).assign(pair=np.tile(np.arange(len(ONE)), 2).astype(str))
    asked = study(ft.Risk, g_bounds=0.02)
    alone = ft.run(asked, {"all": ONE})
    pairs = ft.run(replace(asked, cluster="pair", cluster_scope="silo"), {"all": twice})
    assert psi(pairs) == pytest.approx(psi(alone), abs=1e-8)
    assert errors(pairs) == pytest.approx(errors(alone), rel=1e-8)


def test_three_arms() -> None:
    rng = np.random.default_rng(0)
    records = ONE.assign(a=rng.integers(0, 3, len(ONE)))
    variables = ft.Variables(
        {
            **VARIABLES,
            "what": {"kind": "category", "levels": ["none", "first"]},
            "a": {"kind": "category", "levels": ["0", "1", "2"]},
        }
    )
    result = ft.run(study(ft.RiskDifference, variables=variables), silos(records))
    names = [row["estimand"] for row in result.document["estimates"]]
    assert names == ["RiskDifference 1 vs 0 at 4", "RiskDifference 2 vs 0 at 4"]


def test_folds_hold_whole_people_out() -> None:
    """The fit without a fold never sees its people, and each person is predicted by the fit without them."""
    asked = replace(study(ft.Risk, 2, diagnostics=False), folds=3)
    result = ft.run(asked, silos(RECORDS))
    plain = ft.run(study(ft.Risk, 2, diagnostics=False), silos(RECORDS))
    assert result.document["converged"]
    assert psi(result) != psi(plain)
    assert psi(result) == pytest.approx(psi(plain), abs=0.02)


def test_super_learners_of_hazards() -> None:
    learners = ft.SuperLearner((ft.GLM(HAZARD), ft.GLM("C(a) + C(period)"), ft.GLM("1")), folds=3)
    result = ft.run(study(ft.Risk, 2, hazard_model=learners), silos(RECORDS))
    weights = [row["weight"] for row in result.document["learners"] if row["model"] == "hazard"]
    assert len(weights) == 6  # three learners for each of two causes
    assert sum(weights) == pytest.approx(2.0)
    assert psi(result) == pytest.approx(psi(ft.run(study(ft.Risk, 2), silos(RECORDS))), abs=0.03)


@pytest.mark.parametrize(
    "algorithm", [ft.LocalAverage(max_updates=3), ft.Personalized(noise=0.5, max_updates=3)]
)
def test_local_algorithms_run(algorithm: ft.AbstractAlgorithm) -> None:
    result = ft.run(study(ft.Risk, algorithm=algorithm), silos(ONE))
    assert result.document["status_text"]


def test_silos_may_retire_in_the_first_round() -> None:
    """No query shares a round with one that may retire a silo."""
    retiring = ft.Personalized(noise=1000.0, max_updates=3)
    run = ft.run(study(ft.Risk, algorithm=retiring), silos(ONE)).run
    assert run is not None
    assert run.status is Status.ALL_RETIRED
    assert {outcome.retired_at for outcome in run.silos.values()} == {0}


def test_a_stream_gives_the_same_bits(tmp_path: Path) -> None:
    """One of the two silos reads its file anew at every query."""
    asked = study(
        ft.Risk, 2, censoring_model=None, algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-3)
    )
    parts = silos(RECORDS)
    (name, part), *rest = parts.items()
    part.to_csv(tmp_path / "part.csv", index=False)
    results = []
    for stream in ("true", "false"):
        text = f'[silo]\nname = "{name}"\n[data]\npath = "part.csv"\nstream = {stream}\n'
        (tmp_path / f"{stream}.toml").write_text(text)
        results.append(ft.run(asked, {name: tmp_path / f"{stream}.toml", **dict(rest)}))
    streamed, held = results
    assert streamed.document["transcript"] == held.document["transcript"]
    assert psi(streamed) == psi(held)


def test_a_grid_of_uneven_periods_and_an_entry() -> None:
    days = pd.DataFrame(
        {
            "in": [10.0, 0.0, 5.0, 20.0] * 20,
            "out": [40.0, 30.0, 95.0, 200.0] * 20,
            "died": [1, 0, 1, 0] * 20,
            "a": [0, 0, 1, 1] * 10 + [1, 1, 0, 0] * 10,
        }
    )
    target = ft.Risk(
        outcome="died", time="out", entry="in", treatment="a", grid=(30.0, 90.0, 200.0), horizons=(1, 2)
    )
    seen = target.follow_up
    assert seen.edges == (30.0, 90.0, 200.0)
    numbers = {name: {"kind": "number", "range": (0, 300)} for name in ("in", "out")}
    asked = ft.Study(
        target=target,
        treatment_model=ft.GLM("1"),
        algorithm=ft.Gradient(optimizer=ft.Newton()),
        variables=ft.Variables({**numbers, "died": {"kind": "binary"}, "a": {"kind": "binary"}}),
    )
    result = ft.run(asked, {"one": days[:40], "two": days[40:]})
    # 30 days after entry, the first group died; 90 days after entry the third did; the second left at 30.
    assert psi(result)[:2] == pytest.approx([1 / 4, 1 / 4], abs=1e-12)
    assert psi(result)[2:] == pytest.approx([1 / 4 + 3 / 4 * 1 / 2] * 2, abs=1e-12)


def test_one_row_per_person_and_period() -> None:
    """The last row of a person says when follow-up ended and whether with an event."""
    wide = rossi()
    wide = wide.assign(period_last=np.ceil(wide.week / 4).astype(int), arrest_last=wide.arrest)
    rows = wide.loc[wide.index.repeat(wide.period_last)].reset_index(names="person")
    rows["period"] = rows.groupby("person").cumcount() + 1
    rows["arrest"] = (rows.arrest == 1) & (rows.period == rows.period_last)
    rows = rows[["person", "period", "fin", "age", "arrest"]].sample(frac=1.0, random_state=1)
    asked = ft.Study(
        target=ft.Risk(
            outcome="arrest_last", time="period_last", treatment="fin", periods=13, horizons=(13,)
        ),
        hazard_model=ft.GLM("period + fin + age"),
        treatment_model=ft.GLM("age"),
        algorithm=NEWTON,
        variables=ft.Variables(
            {
                "period_last": {"kind": "number", "range": (0, 13)},
                "arrest_last": {"kind": "binary"},
                "fin": {"kind": "binary"},
                "age": {"kind": "number", "range": (15, 60)},
            }
        ),
    )
    mine = rows.person < 200
    parts = {"one": rows[mine], "two": rows[~mine]}
    long = {name: ft.LongTable(data=part, person="person", period="period") for name, part in parts.items()}
    result = ft.run(asked, long)
    assert result.document["psi"] == ft.run(asked, {"one": wide[:200], "two": wide[200:]}).document["psi"]


@pytest.mark.parametrize("weights", [None, "w"])
def test_baseline_characteristics_are_those_of_the_pooled_rows(weights: str | None) -> None:
    """Means and deviations by arm, and means weighted by the inverse propensity score."""
    records = Law(1).draw(900, seed=8)
    fitted = study(ft.RiskDifference, weights=weights, g_bounds=0.2)
    document = ft.run(fitted, silos(records, 3)).document
    w = records.w.to_numpy() if weights else np.ones(len(records))
    X = np.column_stack([np.ones(len(records)), records.x, records.z])
    beta = np.zeros(3)
    for _ in range(30):
        p = 1 / (1 + np.exp(-X @ beta))
        beta += np.linalg.solve((X.T * (w * p * (1 - p))) @ X, X.T @ (w * (records.a - p)))
    g = np.where(records.a == 1, p, 1 - p)
    assert (g < 0.2).any()
    by_name = {line["name"]: line for line in document["balance"]["covariates"]}
    assert document["balance"]["counts"] == [int((records.a == arm).sum()) for arm in (0, 1)]
    for name in ("x", "z"):
        means, weighted, squares = [], [], []
        for arm in (0, 1):
            here = records.a == arm
            x, plain, inverse = records[name][here], w[here], (w / np.maximum(g, 0.2))[here]
            means.append(np.average(x, weights=plain))
            weighted.append(np.average(x, weights=inverse))
            squares.append(np.average((x - means[-1]) ** 2, weights=plain))
        scale = np.sqrt(np.mean(squares))
        assert by_name[name]["means"] == pytest.approx(means, abs=1e-6)
        assert by_name[name]["weighted_means"] == pytest.approx(weighted, abs=1e-6)
        assert by_name[name]["differences"] == pytest.approx([(means[1] - means[0]) / scale], abs=1e-5)
        assert by_name[name]["weighted_differences"] == pytest.approx(
            [(weighted[1] - weighted[0]) / scale], abs=1e-5
        )
    assert by_name["x"]["sds"] == pytest.approx(
        [
            np.sqrt(np.average((records.x - m) ** 2, weights=w * (records.a == a)))
            for a, m in enumerate(by_name["x"]["means"])
        ],
        abs=1e-6,
    )
    html = report(document)
    assert "Baseline characteristics" in html
    assert "inverse probability of censoring weights" in html


def test_missing_covariates_are_in_the_report() -> None:
    records = ONE.assign(x=ONE.x.where(np.arange(len(ONE)) % 7 > 0))
    declared: dict[str, Any] = {
        **VARIABLES,
        "what": {"kind": "category", "levels": ["none", "first"]},
        "x": {"kind": "number", "range": (-1, 1), "missing": "indicator", "label": "Severity"},
    }
    document = ft.run(study(ft.Risk, variables=ft.Variables(declared)), silos(records)).document
    missing = int(records.x.isna().sum())
    html = report(document)
    assert document["missing"]["x"]["count"] == missing
    assert f"<td>{missing} ({missing / len(records):.0%})</td>" in html
    assert "a constant and an indicator" in html
    assert "have no outcome" not in html  # people without an event have been followed
