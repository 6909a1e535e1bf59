"""Missing covariates of treatment over time by multiple imputation, at baseline and in every period."""

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
from fedtmle.programs.imputation import VariableResponse, imputed_variables
from fedtmle.programs.missing import EndOfPeriods, count_missing, filled, has_left, is_missing
from fedtmle.programs.regimes import RegimeDetails
from fedtmle.protocol.masks import MOST_ROWS
from fedtmle.protocol.plan import Plan, follow_alone, roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.results import inference
from fedtmle.results.inference import simultaneous_quantile
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.text.result import render
from fedtmle_core.publish.counts import multiple
from tests.attacks.honest import run_advised, run_honest
from tests.command import called
from tests.regimes.imputed import cut, draw, holed, study
from tests.time.test_imputed import rubin

N = 400
COMPLETE = draw(N, 2, 3)
RECORDS = holed(COMPLETE, 2, 3)
SURVIVAL = holed(draw(N, 2, 4, survival=True), 2, 4)


def local_rows(asked: ft.Study, records: pd.DataFrame) -> LocalRows:
    table = load_all({"all": records}, schema_of(asked))["all"]
    read: Any = StudyProgram.of(asked, ("all",)).at("all", table)
    local = LocalRows("all", read, read.n_rows)
    local.place(0)
    return local


def details_of(asked: ft.Study, records: pd.DataFrame) -> RegimeDetails:
    local = local_rows(asked, records)
    details = study_details(follow_alone(StudyProgram.of(asked, ("all",)).flow(local.n_rows), local))
    assert isinstance(details, RegimeDetails)
    return details


def numbers(result: ft.StudyResult) -> np.ndarray:
    keys = ("estimate", "std_error", "conf_low", "conf_high")
    shown = (*result.document["estimates"], *result.document["simultaneous"])
    return np.array([[row[key] for key in keys] for row in shown])


@pytest.mark.parametrize("survival", [False, True])
def test_complete_data_give_the_same_bits(survival: bool) -> None:
    records = draw(N, 2, 5, survival=survival)
    plain, imputed = (
        ft.run(study(how=how, survival=survival, diagnostics=True), cut(records, [150]))
        for how in ("refuse", "impute")
    )
    assert imputed.document["imputation"] is None
    assert (numbers(plain) == numbers(imputed)).all()
    for key in ("rules", "adherence", "balance", "silos"):
        assert plain.document[key] == imputed.document[key]


@pytest.mark.parametrize("survival", [False, True])
def test_rows_and_means_are_rubins_by_hand(survival: bool) -> None:
    horizons: dict[str, Any] = {"horizons": (1, 2), "survival": True} if survival else {}
    asked, records = study(imputations=6, **horizons), SURVIVAL if survival else RECORDS
    document = ft.run(asked, {"all": records}).document
    sets = details_of(asked, records).imputed
    assert len(sets) == 6
    q, u = np.stack([each.psi for each in sets]), np.stack([each.covariance for each in sets])
    times = len(q[0]) // 2
    for k, row in enumerate(document["estimates"]):
        slope = np.zeros(2 * times)
        slope[k], slope[times + k] = -1.0, 1.0
        estimate, t, nu, fmi = rubin(q @ slope, np.array([slope @ V @ slope for V in u]), N - 1)
        wide = stats.t(nu).ppf(0.975) * math.sqrt(t)
        found = (row["estimate"], row["std_error"], row["conf_low"], row["conf_high"])
        assert found == pytest.approx((estimate, math.sqrt(t), estimate - wide, estimate + wide), rel=1e-9)
        assert document["imputation"]["estimands"][k]["missing_information"] == pytest.approx(fmi, rel=1e-9)
    band = simultaneous_quantile(u.mean(axis=0) + 7 / 6 * np.cov(q, rowvar=False), 0.95, asked.seed)
    for k, rule in enumerate(document["rules"]):
        for h in range(times):
            at = k * times + h
            estimate, t, nu, _ = rubin(q[:, at], u[:, at, at], N - 1)
            assert rule["std_error"][h] == pytest.approx(math.sqrt(t), rel=1e-9)
            wide, wider = (stats.t(nu).ppf(p) * math.sqrt(t) for p in (0.975, NormalDist().cdf(band)))
            assert rule["conf_low"][h] == pytest.approx(estimate - wide, rel=1e-9)
            assert rule["band_high"][h] == pytest.approx(estimate + wider, rel=1e-9)


@pytest.mark.parametrize("case", ["outcome", "survival", "dose", "factor", "weights"])
def test_federated_is_pooled(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covariates of baseline and of every period; one silo has no l of period 2 at all."""
    monkeypatch.setattr(inference, "DRAWS", 2000)
    records = SURVIVAL.copy() if case == "survival" else RECORDS.copy()
    options: dict[str, Any] = {"sums": "exact"}
    if case == "survival":
        options |= {"survival": True, "horizons": (1, 2)}
    if case == "weights":
        options |= {"weights": "weight", "cluster": "pair"}
    if case == "dose":
        records = holed(draw(N, 2, 6, dose=True, censors=False), 2, 6)
        shift = (ft.Shift(), ft.Shift(by=-0.5))
        options |= {"dose": True, "censors": False, "outcome": "y", "rules": shift}
    records.loc[300:, "l2"] = np.nan
    asked = study(**options)
    if case == "factor":
        for t in (1, 2):
            codes = pd.cut(records[f"l{t}"], [-9, -0.5, 0.5, 9], labels=["p", "q", "r"])
            records[f"l{t}"] = codes.astype(object).where(codes.notna(), None)
        k = {"kind": "category", "levels": ["p", "q", "r"], "missing": "impute"}
        asked = replace(
            asked,
            variables=ft.Variables({**asked.variables, "l": k}),
            outcome_model=ft.GLM("w + C(l) + a + lag1_a"),
            treatment_model=ft.GLM("w + C(l) + lag1_a"),
            censoring_model=ft.GLM("C(l) + a"),
        )
    pooled = ft.run(asked, {"all": records})
    assert pooled.document["missing"]["l2"]["count"] > 80
    assert pooled.document["imputation"]["datasets"] == 5
    for ends in ([200], [90, 300]):
        np.testing.assert_allclose(numbers(ft.run(asked, cut(records, ends))), numbers(pooled), rtol=1e-9)


def test_masked_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    silos = cut(RECORDS, [130, 260])
    asked = study(algorithm=ft.Coded(), sums="exact")
    hidden = ft.run(replace(asked, aggregation="masked"), silos)
    monkeypatch.setattr(Plan, "first_row", lambda plan, silo, _: plan.silos.index(silo) * MOST_ROWS)
    plain = ft.run(replace(asked, aggregation="open"), silos)
    np.testing.assert_allclose(numbers(plain), numbers(hidden), rtol=1e-12)


@pytest.mark.parametrize("people", [1, 60])
@pytest.mark.parametrize("role", ["outcome", "treatment"])
def test_an_open_silo_with_few_missing_values_refuses(people: int, role: str) -> None:
    """Sums over two completed data sets differ by these people alone, whichever model has the covariate."""
    records = draw(600, 2, 14)
    records.loc[: people - 1, "l1"] = np.nan
    formulas: dict[str, Any] = {
        f"{name}_model": ft.GLM("a" if name != "treatment" else "lag1_a") for name in ("outcome", "treatment")
    }
    formulas[f"{role}_model"] = ft.GLM("l + a" if role == "outcome" else "l")
    asked = study(aggregation="open", algorithm=ft.Coded(), **formulas, censoring_model=ft.GLM("a"))
    plan = study_plan(asked, roster(["s0", "s1"]))
    rows = dict(load_all(cut(records, [300]), schema_of(asked)))
    ended, why, advice = run_advised(plan, rows, replace(UNGUARDED, min_people=1.2))
    if people == 1:
        assert (ended, why) == ("refused", "min_people")
        assert "lack a value that is imputed" in advice[0]
    else:
        assert (ended, why) == ("finished", "")
    assert run_honest(plan, rows, UNGUARDED) == ("finished", "")


# Who has a value, and what the models read.


def test_people_who_left_have_no_missing_value() -> None:
    asked = study()
    document = ft.run(asked, cut(RECORDS, [200])).document
    stays = COMPLETE["l2"].notna()
    assert 0 < (~stays).sum() < N / 3
    assert document["missing"]["l2"]["of"] == stays.sum() == document["periods"][1]["at_risk"]
    assert document["missing"]["l2"]["count"] == (RECORDS["l2"].isna() & stays).sum()
    assert document["missing"]["l1"]["of"] == N
    local = local_rows(asked, RECORDS)
    counts = follow_alone(count_missing(asked, N), local)
    table = local.evaluate(filled(asked, counts, asked.levels).of)
    assert isinstance(table, Table)
    np.testing.assert_array_equal(table.numeric[has_left("l2")], (~stays).astype(float))
    np.testing.assert_array_equal(
        table.numeric[is_missing("l2")], (RECORDS["l2"].isna() & stays).astype(float)
    )
    assert not np.isnan(table.numeric["l2"]).any()
    (variable,) = (each for each in imputed_variables(asked, counts, asked.levels) if each.name == "l2")
    response = VariableResponse(variable=variable, missing=counts.counts["l2"], is_over_time=True)
    np.testing.assert_array_equal(response.of(table)[1], RECORDS["l2"].notna().astype(float))


@pytest.mark.parametrize("survival", [False, True])
def test_the_outcome_is_in_the_imputation_models(survival: bool) -> None:
    records = draw(N, 3, 8, survival=survival)
    asked = study(periods=3, survival=survival, how="refuse")
    assert asked.timeline is not None
    columns = EndOfPeriods(timeline=asked.timeline, bounds=asked.outcome_bounds)
    table = load_all({"all": records}, schema_of(asked))["all"]
    assert isinstance(table, Table)
    found = columns.of(table)
    assert list(found) == list(columns.ranges)
    last = np.array(
        [max(t for t in (1, 2, 3) if not np.isnan(row[f"l{t}"])) for _, row in records.iterrows()]
    )
    censored = (records[["c1", "c2", "c3"]] == 1).any(axis=1)
    np.testing.assert_array_equal(found["c in any period"], censored)
    np.testing.assert_array_equal(found["a until exit"], last / 3)
    np.testing.assert_array_equal(found["a until exit squared"], (last / 3) ** 2)
    if survival:
        np.testing.assert_array_equal(
            found["y in any period"], (records[["y1", "y2", "y3"]] == 1).any(axis=1)
        )
    else:
        np.testing.assert_array_equal(found["b or least"], records["b"].fillna(0.0))


def drawn_values(asked: ft.Study, records: pd.DataFrame) -> list[Table]:
    """Return the completed data sets of a run."""
    from fedtmle.programs.imputation import impute

    local = local_rows(asked, records)
    counts = follow_alone(count_missing(asked, local.n_rows), local)
    base = filled(asked, counts, asked.levels)
    views = follow_alone(impute(asked, counts, base, asked.levels, local.n_rows), local)
    tables = [local.evaluate(view.of) for view in views]
    assert all(isinstance(table, Table) for table in tables)
    return tables


def test_values_of_a_period_are_drawn_from_past_and_future() -> None:
    """l2 given its past, treatment and outcome: drawn values have the regression of the lost ones."""
    whole = draw(3000, 2, 9)
    records = whole.copy()
    stays = whole["l2"].notna().to_numpy()
    lost = stays & (np.random.default_rng(5).random(3000) < 0.35)
    records.loc[lost, "l2"] = np.nan
    asked = study(imputations=20)
    tables = drawn_values(asked, records)
    known = lost & whole["b"].notna().to_numpy()
    part = whole[known]
    X = np.column_stack([np.ones(len(part)), part[["w", "l1", "a1", "a2", "b"]].to_numpy(dtype=float)])
    expected, residual, _, _ = np.linalg.lstsq(X, part["l2"].to_numpy(), rcond=None)
    error = np.sqrt(np.diag(np.linalg.inv(X.T @ X)) * residual[0] / (len(X) - 6))
    fits = [np.linalg.lstsq(X, table.numeric["l2"][known], rcond=None)[0] for table in tables]
    assert abs(expected[5]) > 4 * error[5]  # the outcome matters
    assert (np.abs(np.mean(fits, axis=0) - expected) < 4 * error).all()
    for table in tables:
        np.testing.assert_array_equal(table.numeric["l2"][stays & ~lost], whole["l2"][stays & ~lost])


# What a user sees.


def write(folder: Path, *, long: bool) -> Path:
    records = holed(draw(700, 2, 12), 2, 12).drop(columns=["y", "weight", "pair"])
    for name, wide in cut(records, [350]).items():
        part, data = wide, f'path = "{name}.csv"\n'
        if long:
            rows = pd.wide_to_long(wide.reset_index(names="person"), ["l", "a", "c"], i="person", j="visit")
            part = rows.reset_index().dropna(subset="a")
            data += 'person = "person"\nperiod = "visit"\n'
        part.to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(f'[silo]\nname = "{name}"\n[data]\n{data}')
    (folder / "study.toml").write_text(
        """
[target]
kind = "RegimeDifference"
outcome = "b"
treatment = "a"
censoring = "c"
over_time = {a = ["a1", "a2"], l = ["l1", "l2"], c = ["c1", "c2"]}
rules = [{kind = "Static", arm = "0"}, {kind = "Static", arm = "1"}]
[variables]
w = {kind = "number", range = [-3, 3], missing = "impute"}
l = {kind = "number", range = [-4, 4], missing = "impute"}
a = {kind = "binary"}
c = {kind = "binary"}
b = {kind = "binary"}
[models.outcome]
formula = "w + l + a + lag1_a"
[models.treatment]
formula = "w + l + lag1_a"
[models.censoring]
formula = "l + a"
[options]
imputation_sweeps = 1
[silos]
s0 = "s0.toml"
s1 = "s1.toml"
"""
    )
    return folder / "study.toml"


def test_every_command_and_long_input(tmp_path: Path) -> None:
    (tmp_path / "long").mkdir()
    path, out, html = write(tmp_path, long=False), tmp_path / "result.json", tmp_path / "report.html"
    called("validate", path)
    lost = sum(pd.read_csv(tmp_path / f"{name}.csv")["l1"].isna().sum() for name in ("s0", "s1"))
    assert f" l {multiple(lost, 5)} " in called("preflight", path).split("missing values")[1]
    assert "stopped" not in called("silo", "preview", path, "--silo", tmp_path / "s0.toml")
    called("run", path, "--out", out)
    text = called("show", out)
    assert "multiple imputation" in text
    assert "over 5 imputed data sets" in text
    called("report", out, "--out", html)
    assert "multiple imputation" in html.read_text()
    assert "over 5 imputed data sets" in html.read_text()
    wide = ft.read_study(path)
    long = ft.read_study(write(tmp_path / "long", long=True))
    one, other = (ft.run(file.study, file.silos) for file in (wide, long))
    assert (numbers(one) == numbers(other)).all()


def test_diagnostics_and_own_estimates() -> None:
    records = holed(draw(700, 2, 13), 2, 13)
    result = ft.run(study(diagnostics=True), cut(records, [350]), release=["s0", "s1"])
    assert list(result.document["silos"]) == ["s0", "s1"]
    assert result.document["adherence"] is not None
    assert "l2" in " ".join(render(result.document).split())


# Bad input.


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        (
            "l",
            {"kind": "number", "range": (-4, 4), "missing": "indicator"},
            "'l' declares missing = \"indicator\"",
        ),
        ("a", {"kind": "binary", "missing": "impute"}, "records are omitted for a missing treatment only"),
        (
            "c",
            {"kind": "binary", "missing": "impute"},
            "'c' declares missing = \"impute\", and is the censoring",
        ),
        (
            "b",
            {"kind": "binary", "missing": "impute"},
            "'b' declares missing = \"impute\", and is the outcome",
        ),
    ],
)
def test_what_cannot_be_imputed_is_refused(name: str, entry: dict[str, Any], message: str) -> None:
    asked = study(how="refuse")
    with pytest.raises(InputError, match=message):
        replace(asked, variables=ft.Variables({**asked.variables, name: entry}))


def test_a_covariate_that_a_rule_reads_is_not_imputed() -> None:
    rules = (ft.Static("0"), ft.Threshold("l", 0.2, arm="1", otherwise="0"))
    with pytest.raises(InputError, match="'l' declares missing = \"impute\", and is what a rule reads"):
        study(rules=rules)


def test_a_period_without_values_is_refused() -> None:
    with pytest.raises(InputError, match="'l2' is missing for everyone at risk in it; take it out"):
        ft.run(study(), cut(RECORDS.assign(l2=np.nan), [200]))
    lacking = RECORDS.assign(w=COMPLETE["w"], l1=COMPLETE["l1"])
    with pytest.raises(ft.FedTMLEError, match="column 'l2' is missing in") as error:
        ft.run(study(how="refuse"), cut(lacking, [200]))
    assert "of people who are at risk in period 2" in str(error.value)
