"""Missing covariates of time to an event by multiple imputation: what it equals, its parts, and bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.errors import InputError
from fedtmle.model.table import Table
from fedtmle.programs.flow import StudyProgram, study_details
from fedtmle.programs.missing import EndOfFollowUp
from fedtmle.programs.time import TimeDetails
from fedtmle.protocol.masks import MOST_ROWS
from fedtmle.protocol.plan import Plan, follow_alone, roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.report.page import render as report
from fedtmle.results import inference
from fedtmle.results.inference import simultaneous_quantile
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.text.result import render
from tests.attacks.honest import run_advised, run_honest
from tests.attacks.refusals import masked
from tests.command import called
from tests.time.imputed import cut, draw, study
from tests.time.law import Law
from tests.time.law import study as of_law

RECORDS = draw(300, 3)
COMPLETE = draw(300, 3, holed=False)
COLUMNS = ("estimate", "std_error", "conf_low", "conf_high")
CENTRAL = ft.Central(optimizer=ft.Newton())


def same(one: ft.StudyResult, other: ft.StudyResult, rtol: float) -> None:
    """Check that estimates, bands and curves are equal."""
    for key in ("estimates", "simultaneous"):
        left, right = pd.DataFrame(one.document[key]), pd.DataFrame(other.document[key])
        assert list(left["estimand"]) == list(right["estimand"])
        for name in COLUMNS:
            np.testing.assert_allclose(left[name], right[name], rtol=rtol, atol=0)
    for left_curve, right_curve in zip(one.document["curves"], other.document["curves"], strict=True):
        for name in ("estimate", "std_error", "conf_low", "band_high"):
            np.testing.assert_allclose(left_curve[name], right_curve[name], rtol=rtol, atol=0)


# (a) Nothing is missing.


@pytest.mark.parametrize(
    "algorithm", [ft.Coded(), ft.Gradient(optimizer=ft.Newton())], ids=["Coded", "Newton"]
)
def test_complete_data_give_the_same_bits(algorithm: ft.AbstractAlgorithm) -> None:
    silos = cut(COMPLETE, [120])
    plain, imputed = (
        ft.run(study(ft.Risk, how, horizons=(2, 4), algorithm=algorithm, diagnostics=True), silos)
        for how in ("refuse", "impute")
    )
    assert imputed.document["imputation"] is None
    assert [line["count"] for line in imputed.document["missing"].values()] == [0, 0]
    same(plain, imputed, rtol=0.0)
    assert plain.document["at_risk"] == imputed.document["at_risk"]


# (b) Rubin's rules, by hand from the estimates of the run's own data sets.


def details_of(asked: ft.Study, records: pd.DataFrame) -> TimeDetails:
    table = load_all({"all": records}, schema_of(asked))["all"]
    read: Any = StudyProgram.of(asked, ("all",)).at("all", table)
    local = LocalRows("all", read, read.n_rows)
    local.place(0)
    details = study_details(follow_alone(StudyProgram.of(asked, ("all",)).flow(local.n_rows), local))
    assert isinstance(details, TimeDetails)
    return details


def rubin(q: np.ndarray, u: np.ndarray, complete: int) -> tuple[float, float, float, float]:
    """Return the estimate, its variance T, the degrees of freedom and the fraction of missing information."""
    m, b, w = len(q), float(np.var(q, ddof=1)), float(np.mean(u))
    t = w + (1 + 1 / m) * b
    share = (1 + 1 / m) * b / t
    old, seen = (m - 1) / share**2, (complete + 1) / (complete + 3) * complete * (1 - share)
    nu, r = 1 / (1 / old + 1 / seen), (1 + 1 / m) * b / w
    return float(np.mean(q)), t, nu, (r + 2 / (nu + 3)) / (1 + r)


@pytest.mark.parametrize(
    ("kind", "is_log"), [(ft.RiskDifference, False), (ft.RiskRatio, True), (ft.RMSTDifference, False)]
)
def test_rows_are_rubins_by_hand(kind: Any, is_log: bool) -> None:
    asked = study(kind, horizons=(2, 4), imputations=7)
    document = ft.run(asked, {"all": RECORDS}).document
    sets = details_of(asked, RECORDS).imputed
    assert len(sets) == 7
    values, variances = [], []
    for each in sets:
        psi, V = each.psi, each.covariance  # arm 0 at 2 and 4, arm 1 at 2 and 4
        slope = np.array([[-1, 0, 1, 0], [0, -1, 0, 1]]) * (-1.0 if kind is ft.RMSTDifference else 1.0)
        at = np.log(psi) if is_log else psi
        if is_log:
            V = V / np.outer(psi, psi)
        values.append(slope @ at)
        variances.append(slope @ V @ slope.T)
    q, u, n = np.array(values), np.array(variances), len(RECORDS)
    between = (q - q.mean(axis=0)).T @ (q - q.mean(axis=0)) / 6
    band = simultaneous_quantile(u.mean(axis=0) + 8 / 7 * between, 0.95, asked.seed)
    assert 2.0 < band < 2.25
    for k in range(2):
        estimate, t, nu, fmi = rubin(q[:, k], u[:, k, k], n - 1)
        row, wide = document["estimates"][k], document["simultaneous"][k]
        assert document["imputation"]["estimands"][k]["df"] == pytest.approx(nu, rel=1e-9)
        assert document["imputation"]["estimands"][k]["missing_information"] == pytest.approx(fmi, rel=1e-9)
        quantile, wider = stats.t(nu).ppf(0.975), stats.t(nu).ppf(NormalDist().cdf(band))
        ends = [estimate + c * math.sqrt(t) for c in (0, -quantile, quantile, -wider, wider)]
        point, low, high, band_low, band_high = np.exp(ends) if is_log else ends
        found = (row["estimate"], row["conf_low"], row["conf_high"], wide["conf_low"], wide["conf_high"])
        assert found == pytest.approx((point, low, high, band_low, band_high), rel=1e-9)
        assert row["std_error"] == pytest.approx(math.sqrt(t) * (point if is_log else 1.0), rel=1e-9)


def test_curves_have_rubins_errors_and_bands() -> None:
    asked = study(ft.Survival, horizons=(1, 2, 3, 4))
    document = ft.run(asked, {"all": RECORDS}).document
    sets = details_of(asked, RECORDS).imputed
    q, u = np.stack([each.psi for each in sets]), np.stack([each.covariance for each in sets])
    total = u.mean(axis=0) + 1.2 * np.cov(q, rowvar=False)
    band = simultaneous_quantile(total, 0.95, asked.seed)
    for a, curve in enumerate(document["curves"]):
        assert (np.diff([1.0, *curve["estimate"]]) <= 0).all()
        for h in range(4):
            k = 4 * a + h
            estimate, t, nu, _ = rubin(q[:, k], u[:, k, k], len(RECORDS) - 1)
            assert curve["estimate"][h] == pytest.approx(1 - estimate, rel=1e-12)
            assert curve["std_error"][h] == pytest.approx(math.sqrt(t), rel=1e-9)
            error = stats.t(nu).ppf(0.975) * math.sqrt(t)
            wider = stats.t(nu).ppf(NormalDist().cdf(band)) * math.sqrt(t)
            assert curve["conf_low"][h] == pytest.approx(max(1 - estimate - error, 0.0), rel=1e-9)
            assert curve["conf_high"][h] == pytest.approx(min(1 - estimate + error, 1.0), rel=1e-9)
            assert curve["band_low"][h] == pytest.approx(max(1 - estimate - wider, 0.0), rel=1e-9)
            assert wider > error
    (row,) = [row for row in document["estimates"] if row["estimand"] == "Survival(0) at 4"]
    assert row["conf_low"] == document["curves"][0]["conf_low"][3]


def test_a_finer_grid_is_combined_over_the_data_sets() -> None:
    asked = study(target={"compare_subperiods": 2})
    records = RECORDS.assign(t=RECORDS["t"] - 0.25)
    variables: dict[str, Any] = {**asked.variables, "t": {"kind": "number", "range": (0, 4)}}
    asked = replace(asked, variables=ft.Variables(variables))
    document = ft.run(asked, {"all": records}).document
    finer = details_of(asked, records).finer
    assert finer is not None
    q = np.array([each.psi[1] - each.psi[0] for each in finer.imputed])
    u = np.array(
        [each.covariance[0, 0] + each.covariance[1, 1] - 2 * each.covariance[0, 1] for each in finer.imputed]
    )
    estimate, t, _, _ = rubin(q, u, len(records) - 1)
    (row,) = document["finer_grid"]["estimates"]
    assert row["estimate"] == pytest.approx(estimate, rel=1e-9)
    assert row["std_error"] == pytest.approx(math.sqrt(t), rel=1e-9)


# (c) Any partition.


@pytest.mark.parametrize("kind", [ft.Risk, ft.RMSTDifference])
def test_federated_is_pooled(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four kinds of partition of the same rows, in one of which a silo has no value of x at all."""
    monkeypatch.setattr(inference, "DRAWS", 2000)
    records = RECORDS.copy()
    records.loc[220:, "x"] = np.nan
    records.loc[::9, "k"] = None
    newton = ft.Gradient(optimizer=ft.Newton())
    asked = study(kind, covariates="x + z + C(k)", horizons=(2, 4), algorithm=newton)
    pooled = ft.run(replace(asked, algorithm=CENTRAL), {"all": records})
    assert pooled.document["imputation"]["datasets"] == 5
    for ends in ([150], [60, 220], [50, 120, 240]):
        same(ft.run(asked, cut(records, ends)), pooled, rtol=1e-12)


def test_causes_weights_clusters_strata_and_folds_are_the_same_in_any_partition() -> None:
    records = Law(2).draw(300, 5)
    records = records.assign(pair=[f"p{i // 2}" for i in range(300)])
    rng = np.random.default_rng(1)
    records.loc[rng.random(300) < 0.25, "x"] = np.nan
    for options in (
        {"weights": "w", "cluster": "pair"},
        {"target": {"strata": "centre"}, "treatment_model": ft.GLM("x")},
        {"folds": 2, "cluster": "pair"},
    ):
        asked = of_law(ft.RiskDifference, 2, diagnostics=False, **options)
        variables: dict[str, Any] = {
            **asked.variables,
            "x": {"kind": "number", "range": (-1, 1), "missing": "impute"},
        }
        asked = replace(asked, variables=ft.Variables(variables))
        one, other = ft.run(asked, {"all": records}), ft.run(asked, cut(records, [130]))
        assert one.document["imputation"] is not None
        if "folds" not in options:  # folds follow the silos
            same(one, other, rtol=1e-8)
        assert other.document["converged"]


# (d) Masked.


def test_masked_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under masks records have other numbers, and so other draws; with these numbers all is the same."""
    silos = cut(RECORDS, [100, 200])
    asked = study(ft.Risk, horizons=(2, 4), sums="exact", algorithm=ft.Coded())
    hidden = ft.run(replace(asked, aggregation="masked"), silos)
    plain = ft.run(replace(asked, aggregation="open"), silos)
    assert hidden.document["estimates"][0]["estimate"] != plain.document["estimates"][0]["estimate"]
    monkeypatch.setattr(Plan, "first_row", lambda plan, silo, _: plan.silos.index(silo) * MOST_ROWS)
    same(ft.run(replace(asked, aggregation="open"), silos), hidden, rtol=1e-12)


# The imputation models, and the guard.


def test_the_outcome_is_in_the_imputation_models() -> None:
    asked = study(ft.Risk)
    follow_up = asked.target.follow_up  # type: ignore[attr-defined]  # a target of time to an event
    columns = EndOfFollowUp(follow_up=follow_up, censors=True)
    table = load_all({"all": COMPLETE}, schema_of(asked))["all"]
    assert isinstance(table, Table)
    found = columns.of(table)
    assert list(found) == list(columns.ranges)
    died, t = COMPLETE["died"].to_numpy(), COMPLETE["t"].to_numpy()
    np.testing.assert_array_equal(found["died of cause 1"], died)
    np.testing.assert_array_equal(found["died censored"], (died == 0) & (t < 4))
    np.testing.assert_array_equal(found["t until exit"], t / 4)
    np.testing.assert_array_equal(found["t until exit squared"], (t / 4) ** 2)


def test_imputed_values_depend_on_the_event() -> None:
    """z raises the hazard: where it is missing, it is drawn more often for the dead than for the living."""
    records = draw(2000, 6, holed=False)
    lost = np.random.default_rng(2).random(2000) < 0.4
    truth = records["z"].to_numpy().copy()
    records.loc[lost, "z"] = np.nan
    asked = study(covariates="x + z")
    seen: list[np.ndarray] = []

    from fedtmle.programs import imputation

    class Watched(imputation.Draw):  # type: ignore[misc]  # it is final, and this is a test
        def fill(self, table: Table) -> Table:
            done = super().fill(table)
            seen.append(done.numeric["z"])
            return done

    original = imputation.Draw
    imputation.Draw = Watched  # type: ignore[misc]
    try:
        details_of(asked, records)
    finally:
        imputation.Draw = original  # type: ignore[misc]
    died = records["died"].to_numpy() == 1
    for part in (died, ~died):
        drawn = np.mean([z[lost & part].mean() for z in seen[-5:]])
        assert drawn == pytest.approx(truth[lost & part].mean(), abs=0.06)
    gap = truth[died].mean() - truth[~died].mean()
    assert gap > 0.15


@pytest.mark.parametrize("people", [1, 60])
def test_an_open_silo_with_few_missing_values_refuses(people: int) -> None:
    """Sums over two completed data sets differ by these people alone, in the hazard models, too."""
    records = draw(600, 4, holed=False)
    records.loc[: people - 1, "x"] = np.nan
    only_hazard = study(
        covariates="x",
        treatment_model=ft.GLM("1"),
        censoring_model=None,
        algorithm=ft.Coded(),
        aggregation="open",
    )
    plan = study_plan(only_hazard, roster(["s0", "s1"]))
    rows = dict(load_all(cut(records, [300]), schema_of(only_hazard)))
    ended, why, advice = run_advised(plan, rows, replace(UNGUARDED, min_people=1.2))
    if people == 1:
        assert (ended, why) == ("refused", "min_people")
        assert "lack a value that is imputed" in advice[0]
    else:
        assert (ended, why) == ("finished", "")
    assert run_honest(plan, rows, UNGUARDED) == ("finished", "")


@pytest.mark.parametrize("people", [4, 5])
def test_a_masked_silo_refuses_if_few_of_all_silos_lack_a_value(people: int) -> None:
    records = draw(300, 4, holed=False)
    records.loc[: people * 30 - 1 : 30, "x"] = np.nan
    asked = study(covariates="x", algorithm=ft.Coded(), aggregation="masked")
    plan = masked(study_plan(asked, roster(["s0", "s1", "s2"])))
    rows = dict(load_all(cut(records, [100, 200]), schema_of(asked)))
    ended = run_honest(plan, rows, replace(UNGUARDED, min_support=5))
    assert ended == (("refused", "min_support") if people < 5 else ("finished", ""))


# What a user sees.

FILE = """
[target]
kind = "RiskDifference"
outcome = "died"
time = "t"
treatment = "a"
periods = 4
horizons = [2, 4]
[variables]
t = {kind = "count", range = [0, 4]}
died = {kind = "binary"}
a = {kind = "binary"}
x = {kind = "number", range = [-4, 4], missing = "impute"}
z = {kind = "binary", missing = "indicator"}
[models.hazard]
formula = "a + x + z + period"
[models.treatment]
formula = "x + z"
[models.censoring]
formula = "a + x"
[options]
imputation_sweeps = 1
[silos]
s0 = "s0.toml"
s1 = "s1.toml"
"""


def write(folder: Path, *, stream: bool = False) -> Path:
    for name, part in cut(draw(800, 8), [400]).items():
        part.drop(columns="k").to_csv(folder / f"{name}.csv", index=False)
        text = f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n' + "stream = true\n" * stream
        (folder / f"{name}.toml").write_text(text)
    (folder / "study.toml").write_text(FILE)
    return folder / "study.toml"


def test_every_command(tmp_path: Path) -> None:
    path, out, html = write(tmp_path), tmp_path / "result.json", tmp_path / "report.html"
    called("validate", path)
    assert "x" in called("preflight", path)
    assert "stopped" not in called("silo", "preview", path, "--silo", tmp_path / "s0.toml")
    called("run", path, "--out", out)
    text = called("show", out)
    assert "multiple imputation" in text
    assert "a constant and an indicator" in text
    assert "over 5 imputed data sets" in text
    called("report", out, "--out", html)
    page = html.read_text()
    assert "multiple imputation" in page
    assert "over 5 imputed data sets" in page
    assert "Survival curves" in page


def test_a_stream_gives_the_same(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    held, streamed = (
        ft.read_study(write(folder, stream=s)) for folder, s in ((tmp_path / "held", False), (tmp_path, True))
    )
    one = ft.run(replace(held.study, diagnostics=False), held.silos)
    other = ft.run(replace(streamed.study, diagnostics=False), streamed.silos)
    same(one, other, rtol=0.0)


def test_diagnostics_own_estimates_and_the_page() -> None:
    result = ft.run(
        study(ft.Risk, horizons=(2, 4), diagnostics=True), cut(draw(500, 2), [250]), release=["s0", "s1"]
    )
    assert list(result.document["silos"]) == ["s0", "s1"]
    assert result.document["at_risk"]["counts"][0][0] > 100
    assert result.document["balance"] is not None
    assert "over 5 imputed data sets" in " ".join(render(result.document).split())
    assert "missing covariate" in report(result.document)


# (f) Bad input.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("t", "'t' declares missing = \"impute\", and is the time of follow-up"),
        ("died", "'died' declares missing = \"impute\", and is the event"),
        ("a", "records are omitted for a missing treatment only"),
    ],
)
def test_what_cannot_be_imputed_is_refused(name: str, message: str) -> None:
    asked = study(how="refuse")
    variables: dict[str, Any] = {**asked.variables, name: {**_entry(asked, name), "missing": "impute"}}
    with pytest.raises(InputError, match=message):
        replace(asked, variables=ft.Variables(variables))


def _entry(asked: ft.Study, name: str) -> dict[str, Any]:
    variable = asked.variables[name]
    return {"kind": variable.kind, **({} if variable.range is None else {"range": variable.range})}


def test_a_covariate_that_a_rule_reads_is_not_imputed() -> None:
    rules = (ft.Threshold("x", 0.0, arm="1", otherwise="0"),)
    with pytest.raises(InputError, match="'x' declares missing = \"impute\", and is what a rule reads"):
        study(ft.PolicyRisk, target={"rules": rules})


def test_values_that_no_silo_has_are_refused() -> None:
    records = RECORDS.assign(x=np.nan)
    with pytest.raises(InputError, match="'x' is missing in every record of every silo"):
        ft.run(study(), cut(records, [150]))
    with pytest.raises(ft.FedTMLEError, match="every record that has 'z' has the same value of it") as error:
        ft.run(study(), cut(RECORDS.assign(z=RECORDS["z"] * 0.0), [150]))
    assert "0.0" not in str(error.value)
    late = RECORDS.assign(t=RECORDS["t"].astype(float))
    late.loc[7, "t"] = np.nan
    with pytest.raises(ft.FedTMLEError, match="'t'"):
        ft.run(study(), cut(late, [150]))
