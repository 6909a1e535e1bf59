"""Missing covariates by declaration: indicators, multiple imputation, absent columns, omitted records."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedtmle as ft
from fedtmle.data import DataErrors, load_all, read_silo_file
from fedtmle.errors import InputError
from fedtmle.model.budget import chi_square, normal_quantile, stream_key, uniform_stream, uniforms
from fedtmle.programs.imputation import _poisson_quantile, combine
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.studies.preview import preview
from fedtmle.studies.risk import risk
from fedtmle.studyfile.file import file_plan, read_study, study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.text.result import render
from tests.attacks.honest import run_honest
from tests.attacks.refusals import masked
from tests.effects.studies import CENTRAL, NEWTON, change, expit

N = 240
KINDS: dict[str, dict[str, Any]] = {
    "w": {"kind": "number", "range": (-6, 6)},
    "z": {"kind": "binary"},
    "k": {"kind": "category", "levels": ["p", "q", "r"]},
    "c": {"kind": "count", "range": (0, 20)},
}
COVARIATES = "w + z + C(k) + c"


def columns(n: int = N, seed: int = 1, share: float = 0.2) -> dict[str, np.ndarray]:
    """A treatment and an outcome that depend on four covariates; each is missing for a share of the rows."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=n).clip(-6, 6)
    z = (rng.random(n) < expit(0.5 * w)).astype(float)
    k = rng.choice(["p", "q", "r"], size=n, p=[0.5, 0.3, 0.2]).astype(object)
    c = rng.poisson(np.exp(0.2 * w)).clip(0, 20).astype(float)
    a = (rng.random(n) < expit(0.4 * w + 0.3 * z - 0.2)).astype(int)
    y = (rng.random(n) < expit(0.5 * w + 0.5 * z + 0.4 * a - 0.5)).astype(float)
    for column in (w, z, c):
        column[rng.random(n) < share] = np.nan
    k[rng.random(n) < share] = None
    return {"w": w, "z": z, "k": k, "c": c, "a": a, "y": y}


def study(how: dict[str, str] | str, terms: str = COVARIATES, **options: Any) -> ft.Study:
    ways = dict.fromkeys(KINDS, how) if isinstance(how, str) else how
    declared = {name: {**kind, "missing": ways.get(name, "refuse")} for name, kind in KINDS.items()}
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(f"a + {terms}"),
        treatment_model=ft.GLM(terms),
        variables=ft.Variables({**declared, "a": {"kind": "binary"}, "y": {"kind": "binary"}}),
        **{"algorithm": NEWTON, "imputation_sweeps": 2, **options},
    )


def cut(data: dict[str, np.ndarray], ends: list[int]) -> dict[str, dict[str, np.ndarray]]:
    n = len(data["y"])
    parts = np.split(np.arange(n), ends)
    return {f"s{m}": {name: v[rows] for name, v in data.items()} for m, rows in enumerate(parts)}


def test_imputed_studies_are_the_same_for_any_partition() -> None:
    """Of four kinds of variable, one of them absent at a whole silo."""
    data = columns()
    data["w"][150:] = np.nan
    asked = study("impute", diagnostics=False)
    pooled = ft.run(change(asked, algorithm=CENTRAL), cut(data, [])).table()
    assert np.isfinite(pooled["std_error"]).all()
    table = ft.run(asked, cut(data, [40, 150])).table()
    for name in ("estimate", "std_error", "conf_low", "conf_high", "p_value"):
        np.testing.assert_allclose(table[name], pooled[name], rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_imputed_studies_of_random_partitions(seed: int) -> None:
    """Pooled are the silos' tables one after the other: any number of silos, cut anywhere."""
    data = columns()
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.choice(np.arange(1, N), size=rng.integers(1, 9), replace=False)).tolist()
    asked = study("impute", diagnostics=False)
    pooled = ft.run(change(asked, algorithm=CENTRAL), cut(data, [])).table()
    table = ft.run(asked, cut(data, ends)).table()
    for name in ("estimate", "std_error", "conf_low", "conf_high", "p_value"):
        np.testing.assert_allclose(table[name], pooled[name], rtol=1e-8)


def test_filled_studies_are_the_same_for_any_partition() -> None:
    data = columns()
    pooled = ft.run(change(study("indicator"), algorithm=CENTRAL), cut(data, [])).table()
    table = ft.run(study("indicator"), cut(data, [90, 150])).table()
    np.testing.assert_allclose(table["estimate"], pooled["estimate"], rtol=1e-8)
    np.testing.assert_allclose(table["std_error"], pooled["std_error"], rtol=1e-8)


@pytest.mark.parametrize("how", ["impute", "indicator"])
def test_complete_data_give_the_same_digits(how: str) -> None:
    silos = cut(columns(share=0.0), [100])
    plain, declared = ft.run(study("refuse"), silos), ft.run(study(how), silos)
    pd.testing.assert_frame_equal(plain.table(), declared.table(), check_exact=True)
    assert declared.document["imputation"] is None
    assert {line["count"] for line in declared.document["missing"].values()} == {0}


def test_an_indicator_is_the_study_with_a_constant_and_a_column() -> None:
    data = columns()
    found = ft.run(study({"w": "indicator", "c": "indicator"}, "w + c"), cut(data, [100])).table()
    byhand = {
        **data,
        "w": np.nan_to_num(data["w"], nan=0.0),
        "c": np.nan_to_num(data["c"], nan=10.0),
        "no_w": np.isnan(data["w"]).astype(float),
        "no_c": np.isnan(data["c"]).astype(float),
    }
    declared = {**KINDS, "no_w": {"kind": "binary"}, "no_c": {"kind": "binary"}}
    expected = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + w + c + no_w + no_c"),
        treatment_model=ft.GLM("w + c + no_w + no_c"),
        variables=ft.Variables({**declared, "a": {"kind": "binary"}, "y": {"kind": "binary"}}),
        algorithm=NEWTON,
    )
    table = ft.run(expected, cut(byhand, [100])).table()
    np.testing.assert_allclose(found["estimate"], table["estimate"], rtol=1e-9)
    np.testing.assert_allclose(found["std_error"], table["std_error"], rtol=1e-9)


def test_variables_that_are_missing_together_share_an_indicator() -> None:
    data = columns()
    data["c"] = np.where(np.isnan(data["w"]), np.nan, np.nan_to_num(data["c"], nan=1.0))
    result = ft.run(study({"w": "indicator", "c": "indicator"}, "w + c"), cut(data, [100]))
    assert result.document["converged"]
    counts = {name: line["count"] for name, line in result.document["missing"].items()}
    assert counts["w"] == counts["c"] > 0


def test_the_document_says_what_was_imputed_and_what_it_costs() -> None:
    result = ft.run(study({"w": "impute", "z": "indicator"}, "w + z"), cut(columns(), [100]))
    document = result.document
    assert {name: line["handled"] for name, line in document["missing"].items()} == {
        "w": "impute",
        "z": "indicator",
    }
    imputation = document["imputation"]
    assert imputation["datasets"] == 5
    (line,) = imputation["estimands"]
    assert 0 < line["missing_information"] < 1
    assert line["df"] < N
    text = render(document)
    assert "multiple imputation" in text
    assert "over 5 imputed data sets" in text
    other = ft.run(study({"w": "impute", "z": "indicator"}, "w + z", seed=1), cut(columns(), [100]))
    assert other.document["estimates"][0]["estimate"] != document["estimates"][0]["estimate"]


def test_silos_own_estimates_of_imputed_rows_are_combined() -> None:
    result = ft.run(study({"w": "impute"}, "w"), cut(columns(), [120]), release=["s0", "s1"])
    assert list(result.document["silos"]) == ["s0", "s1"]
    for rows in result.document["silos"].values():
        assert 0.02 < rows[0]["std_error"] < 0.3


@pytest.mark.parametrize("people", [4, 5])
def test_a_guarded_silo_imputes_unless_few_values_are_missing(people: int) -> None:
    """Completed data sets differ in these records alone; under masks the records of all silos count."""
    data = columns(share=0.0)
    data["w"][: 40 * people : 40] = np.nan
    imputed = study({"w": "impute"}, "w + z", algorithm=ft.Coded(), aggregation="masked")
    plan = study_plan(imputed, roster(["s0", "s1", "s2"]))
    rows = dict(load_all(cut(data, [80, 160]), schema_of(imputed)))
    ended = run_honest(masked(plan), rows, replace(UNGUARDED, min_support=5))
    assert ended == (("refused", "min_support") if people < 5 else ("finished", ""))
    assert run_honest(masked(plan), rows, UNGUARDED) == ("finished", "")


def test_records_without_a_treatment_are_left_out_and_counted() -> None:
    data = columns(share=0.0)
    lost = np.arange(N) % 8 == 0
    data["a"] = np.where(lost, np.nan, data["a"])
    asked = study("refuse", "w")
    omitting = change(
        asked, variables=ft.Variables({**asked.variables, "a": {"kind": "binary", "missing": "omit"}})
    )
    with pytest.raises(DataErrors, match="column 'a'"):
        ft.run(asked, cut(data, [100]))
    found = ft.run(omitting, cut(data, [100]))
    kept = {name: column[~lost] for name, column in data.items()}
    kept["a"] = kept["a"].astype(int)
    expected = ft.run(asked, cut(kept, [int((~lost)[:100].sum())]))
    np.testing.assert_array_equal(found.table()["estimate"], expected.table()["estimate"])
    participants = found.document["participants"]
    assert participants == {"records": N, "omitted": 30, "analysed": 210, "with_outcome": 210}
    assert "30 of 240 records have no treatment" in " ".join(render(found.document).split())


def test_missing_outcomes_and_missing_covariates() -> None:
    data = columns()
    data["y"] = np.where(np.arange(N) % 7 == 0, np.nan, data["y"])
    asked = study({"w": "impute"}, "w", missingness_model=ft.GLM("a"))
    one, other = ft.run(asked, cut(data, [100])), ft.run(asked, cut(data, [30, 180]))
    np.testing.assert_allclose(one.table()["estimate"], other.table()["estimate"], rtol=1e-8)
    assert one.document["participants"]["with_outcome"] == int((~np.isnan(data["y"])).sum())


def write(folder: Path, *, stream: bool) -> Path:
    data = columns()
    for name, part in cut(data, [140]).items():
        frame = pd.DataFrame({key: part[key] for key in ("w", "z", "a", "y")})
        absent = name == "s1"
        (frame.drop(columns="w") if absent else frame).to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(
            f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n'
            + ("stream = true\n" if stream and absent else "")
            + ("[columns]\nw = {absent = true}\n" if absent else "")
        )
    path = folder / "study.toml"
    path.write_text(
        """
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
w = {kind = "number", range = [-6, 6], missing = "impute"}
z = {kind = "binary", missing = "indicator"}
a = {kind = "binary"}
y = {kind = "binary"}
[models.outcome]
formula = "a + w + z"
[models.treatment]
formula = "w + z"
[options]
imputations = 5
imputation_sweeps = 1
[silos]
s0 = "s0.toml"
s1 = "s1.toml"
"""
    )
    return path


def test_a_silo_file_says_that_a_column_is_absent(tmp_path: Path) -> None:
    file = read_study(write(tmp_path, stream=False))
    found = ft.run(file.study, file.silos).table()
    data = columns()
    data["w"][140:] = np.nan
    expected = ft.run(file.study, cut(data, [140])).table()
    np.testing.assert_array_equal(found["estimate"], expected["estimate"])
    seen = preview(file_plan(file), read_silo_file(tmp_path / "s0.toml"))
    assert (seen.refused_by, seen.stopped) == ("", "")
    audited = risk(file, "s0", attributes=["y"]).audit
    assert audited.answers > 20
    path = tmp_path / "study.toml"
    path.write_text(path.read_text().replace('"impute"', '"refuse"'))
    refused = read_study(path)
    with pytest.raises(DataErrors, match="the silo file declares column 'w' absent, but the study needs it"):
        ft.run(refused.study, refused.silos)


def test_a_stream_is_completed_as_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    held = read_study(write(tmp_path / "held", stream=False))
    streamed = read_study(write(tmp_path, stream=True))
    one = ft.run(change(held.study, diagnostics=False), held.silos).table()
    other = ft.run(change(streamed.study, diagnostics=False), streamed.silos).table()
    np.testing.assert_array_equal(one["estimate"], other["estimate"])


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        ({"y": "impute"}, "'y' declares missing = \"impute\", and is the outcome; give a missingness_model"),
        ({"a": "impute"}, "records are omitted for a missing treatment only"),
        ({"w": "omit"}, "records are omitted for a missing treatment only"),
    ],
)
def test_what_cannot_be_declared_is_refused(ways: dict[str, str], message: str) -> None:
    plain = study("refuse", "w")
    changed = {name: {"kind": plain.variables[name].kind, "missing": way} for name, way in ways.items()}
    for entry in changed.values():
        if entry["kind"] == "number":
            entry["range"] = (-6, 6)  # type: ignore[assignment]  # of another type than the other entries
    with pytest.raises(InputError, match=message):
        change(plain, variables=ft.Variables({**plain.variables, **changed}))


def test_bad_numbers_of_data_sets_and_algorithms_are_refused() -> None:
    with pytest.raises(InputError, match="imputations: expected at least 5 data sets, not 2"):
        study("impute", imputations=2)
    with pytest.raises(InputError, match="Personalized has none"):
        study("impute", algorithm=ft.Personalized())
    data = columns()
    data["w"][:] = np.nan
    with pytest.raises(InputError, match="'w' is missing in every record of every silo"):
        ft.run(study({"w": "impute"}, "w"), cut(data, [100]))


# Rubin's rules, and draws.


def test_rubins_rules_longhand() -> None:
    q, u = [0.9, 1.1, 1.3, 0.8, 1.0], [0.04, 0.05, 0.045, 0.05, 0.04]
    found = combine(q, u, 100.0)
    b = float(np.var(q, ddof=1))
    t = np.mean(u) + 1.2 * b
    r, share = 1.2 * b / np.mean(u), 1.2 * b / t
    old, observed = 4 / share**2, 101 / 103 * 100 * (1 - share)
    nu = old * observed / (old + observed)
    assert found.estimate == pytest.approx(np.mean(q))
    assert found.variance == pytest.approx(t)
    assert found.df == pytest.approx(nu)
    assert found.increase == pytest.approx(r)
    assert found.missing_information == pytest.approx((r + 2 / (nu + 3)) / (1 + r))
    # With much complete data the degrees of freedom are Rubin's (1987), (m - 1)(1 + 1/r)^2.
    assert combine(q, u, 1e12).df == pytest.approx(4 * (1 + 1 / r) ** 2, rel=1e-6)
    same = combine([1.0] * 5, u, 100.0)
    assert same.missing_information == 0.0
    assert same.variance == pytest.approx(np.mean(u))


def test_rubins_intervals_cover() -> None:
    """The mean of normal data with missing values, imputed from its posterior: theory gives the coverage."""
    rng = np.random.default_rng(5)
    hits, repetitions, n, m, seen = 0, 800, 60, 5, 40
    for _ in range(repetitions):
        x = rng.normal(size=seen)
        sets = []
        for _ in range(m):
            variance = x.var(ddof=1) * (seen - 1) / rng.chisquare(seen - 1)
            mean = rng.normal(x.mean(), math.sqrt(variance / seen))
            full = np.concatenate([x, rng.normal(mean, math.sqrt(variance), n - seen)])
            sets.append((full.mean(), full.var(ddof=1) / n))
        found = combine([q for q, _ in sets], [u for _, u in sets], n - 1)
        hits += abs(found.estimate) <= stats.t(found.df).ppf(0.975) * math.sqrt(found.variance)
    assert abs(hits / repetitions - 0.95) < 3 * math.sqrt(0.95 * 0.05 / repetitions)


def test_draws_follow_their_laws() -> None:
    for p in (*np.linspace(0.001, 0.999, 999), 1e-15, 1e-9, 1 - 1e-12):
        assert normal_quantile(float(p)) == pytest.approx(stats.norm.ppf(p), rel=1e-13, abs=1e-13)
    u = uniforms(stream_key("a"), np.arange(200_000.0))
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    other = uniforms(stream_key("b"), np.arange(200_000.0))
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.01
    np.testing.assert_array_equal(uniforms(stream_key("a"), np.array([7.0, 3.0])), u[[7, 3]])
    draws = uniform_stream(stream_key("c"))
    for df in (1, 2, 7, 400):
        assert stats.kstest([chi_square(draws, df) for _ in range(500)], stats.chi2(df).cdf).pvalue > 1e-3


def test_quantiles_of_counts_are_scipys() -> None:
    from scipy.stats import poisson

    draw = np.random.default_rng(1)
    u, mean = draw.uniform(size=2000), 10.0 ** draw.uniform(-3, 4, size=2000)
    assert np.array_equal(_poisson_quantile(u, mean), poisson.ppf(u, mean))
