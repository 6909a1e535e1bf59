"""From closing sums to the table: against numpy and formulas written longhand."""

from __future__ import annotations

import json
import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.protocol import sites
from fedtmle.protocol.sites import OWN_PLACES
from fedtmle.results.inference import simultaneous_quantile
from tests.declare import declare
from tests.effects.studies import NEWTON, VARIABLES, Columns, change, cut, finish, population
from tests.narrow import targeted

Z = NormalDist().inv_cdf(0.975)
BOUNDS = (0.0, 10.0)
ATE = ft.ATE(outcome="y", treatment="a")


def study(target: ft.AbstractEffect = ATE, **options: Any) -> ft.Study:
    return ft.Study(
        target=target,
        outcome_model=ft.GLM("a + w + z" if len(target.arms) < 3 else "C(a) + w + z"),
        treatment_model=ft.GLM("w + z"),
        algorithm=NEWTON,
        variables=declare(VARIABLES, a=list(target.arms)) if len(target.arms) > 2 else VARIABLES,
        **options,
    )


def silos(n: int = 240, **options: Any) -> dict[str, Columns]:
    data = population(n, seed=31, **options)
    return cut(data, [np.arange(n // 3), np.arange(n // 3, n // 2), np.arange(n // 2, n)])


def rows(result: ft.StudyResult) -> list[dict[str, Any]]:
    return result.to_dict()["estimates"]


@pytest.mark.parametrize("cluster", [None, "family"])
@pytest.mark.parametrize("weights", [None, "weight"])
def test_the_standard_error_is_that_of_the_eif(weights: str | None, cluster: str | None) -> None:
    """sd(D)/sqrt(n) with divisor n - 1; by clusters, C/(C - 1) sum of squared cluster sums / n^2."""
    own = study(weights=weights, cluster=cluster)
    pooled = {name: np.concatenate([silo[name] for silo in silos().values()]) for name in silos()["silo 0"]}
    finished, tables = finish(own, {"all": pooled})
    outcome = targeted(finished)
    eif = outcome.problem.eif(outcome.law, tables["all"], outcome.estimate.psi) @ [-1.0, 1.0]
    n = len(eif)
    assert abs(eif.mean()) < 1e-9
    if cluster is None:
        variance = np.var(eif, ddof=1) / n
    else:
        sums = pd.Series(eif).groupby(pooled["family"]).sum().to_numpy()
        variance = len(sums) / (len(sums) - 1) * (sums @ sums - sums.sum() ** 2 / len(sums)) / n**2
    (row,) = rows(ft.run(own, silos()))
    assert row["std_error"] == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert row["conf_low"] == pytest.approx(row["estimate"] - Z * row["std_error"], rel=1e-12)
    assert row["conf_high"] == pytest.approx(row["estimate"] + Z * row["std_error"], rel=1e-12)
    score = abs(row["estimate"]) / row["std_error"]
    assert row["p_value"] == pytest.approx(2 * (1 - NormalDist().cdf(score)), rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("kind", [ft.RR, ft.OR])
def test_ratios_have_intervals_on_the_log_scale(kind: type) -> None:
    own = study(kind(outcome="event", treatment="a"), confidence=0.9)
    result = ft.run(own, silos())
    (row,) = rows(result)
    (zero, one), cov = result.run.psi, result.run.covariance
    if kind is ft.RR:
        value, slopes = one / zero, np.array([-1 / zero, 1 / one])  # of log RR
    else:
        value = one * (1 - zero) / (zero * (1 - one))
        slopes = np.array([-1 / (zero * (1 - zero)), 1 / (one * (1 - one))])  # of log OR
    spread = math.sqrt(slopes @ cov @ slopes)
    z = NormalDist().inv_cdf(0.95)
    assert row["estimate"] == pytest.approx(value, rel=1e-12)
    assert row["std_error"] == pytest.approx(value * spread, rel=1e-10)
    assert row["conf_low"] == pytest.approx(value * math.exp(-z * spread), rel=1e-10)
    assert row["conf_high"] == pytest.approx(value * math.exp(z * spread), rel=1e-10)
    score = abs(math.log(value)) / spread
    assert row["p_value"] == pytest.approx(2 * (1 - NormalDist().cdf(score)), rel=1e-6)


def test_contrasts_of_three_arms_share_one_covariance() -> None:
    data = silos(arms=3)
    arms = ("0", "1", "2")
    means = ft.run(study(ft.TSM(outcome="y", treatment="a", arms=arms)), data)
    ates = ft.run(study(ft.ATE(outcome="y", treatment="a", arms=arms)), data)
    assert [row["estimand"] for row in rows(ates)] == ["ATE 1 vs 0", "ATE 2 vs 0"]
    assert [row["p_value"] for row in rows(means)] == [None] * 3
    for row, contrast in zip(rows(ates), ([-1, 1, 0], [-1, 0, 1]), strict=True):
        c = np.array(contrast)
        assert row["estimate"] == pytest.approx(c @ means.run.psi, rel=1e-12)
        assert row["std_error"] == pytest.approx(math.sqrt(c @ means.run.covariance @ c), rel=1e-12)


def test_the_simultaneous_quantile_is_that_of_the_largest_score() -> None:
    """Bivariate, correlation 0.6: P(max |Z| <= c) by brute force over a fine grid."""
    covariance = np.array([[4.0, 1.2], [1.2, 1.0]])
    c = simultaneous_quantile(covariance, 0.95, seed=0)
    z = np.linspace(-c, c, 20_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    normal = NormalDist().cdf
    inner = np.array([normal((c - 0.6 * x) / 0.8) - normal((-c - 0.6 * x) / 0.8) for x in z])
    assert np.trapezoid(density * inner, z) == pytest.approx(0.95, abs=2e-3)
    independent = simultaneous_quantile(np.eye(3), 0.95, seed=0)
    assert independent == pytest.approx(NormalDist().inv_cdf(0.5 + 0.95 ** (1 / 3) / 2), abs=0.02)
    same = simultaneous_quantile(np.ones((2, 2)), 0.95, seed=0)
    assert same == pytest.approx(Z, abs=0.02)
    assert simultaneous_quantile(np.eye(1), 0.95, seed=0) == pytest.approx(Z, rel=1e-12)


def test_simultaneous_intervals_are_wider_by_one_factor() -> None:
    own = study(ft.TSM(outcome="y", treatment="a", arms=("0", "1", "2")))
    result = ft.run(own, silos(arms=3))
    c = simultaneous_quantile(result.run.covariance, 0.95, own.seed)
    assert c > Z
    joint = result.table(simultaneous=True)
    np.testing.assert_allclose(joint.conf_high - joint.estimate, c * joint.std_error, rtol=1e-10)
    pd.testing.assert_series_equal(joint.std_error, result.table().std_error)


# Part of the silos: one-step estimates at the pooled law, only where released.


@pytest.mark.parametrize("weights", [None, "weight"])
@pytest.mark.parametrize("kind", [ft.ATE, ft.ATT])
@pytest.mark.parametrize("places", [OWN_PLACES, 34])
def test_a_silos_own_estimate_is_the_study_of_that_silo(
    kind: type, weights: str | None, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to half a unit of the grid on which it is sent; a finer grid shows that nothing else differs."""
    monkeypatch.setattr(sites, "OWN_PLACES", places)
    unit = 2.0**-places
    own = study(kind(outcome="y", treatment="a"), weights=weights)
    data = silos()
    found = ft.run(own, data, release=["silo 0", "silo 2"]).to_dict()
    assert set(found["silos"]) == {"silo 0", "silo 2"}  # silo 1 did not consent
    for silo in ("silo 0", "silo 2"):
        (row,), (alone,) = found["silos"][silo], ft.run(own, {silo: data[silo]}).to_dict()["estimates"]
        off = 0.5 * unit * alone["std_error"] + 1e-7
        assert row["estimate"] == pytest.approx(alone["estimate"], rel=0, abs=off)
        assert row["std_error"] == pytest.approx(alone["std_error"], rel=0.5 * unit + 1e-6)


def test_without_consent_nothing_of_a_single_silo_is_shown() -> None:
    found = ft.run(study(), silos()).to_dict()
    assert found["silos"] == found["without"] == {}
    assert found["heterogeneity"] == []


def test_a_silo_that_lacks_an_arm_has_no_estimate_of_its_own() -> None:
    """Its plug-in would be the other silos' regression, with an error that knows nothing of theirs."""
    data = population(240, seed=31)
    treated = np.flatnonzero(data["a"] == 1)[:40]
    rest = np.setdiff1d(np.arange(240), treated)
    result = ft.run(
        study(), cut(data, [treated, rest[:100], rest[100:]]), release=["silo 0", "silo 1", "silo 2"]
    )
    found = result.to_dict()
    assert set(found["silos"]) == {"silo 1", "silo 2"}
    assert found["without"] == {}  # a summary of one silo would be its own estimate
    assert found["heterogeneity"][0]["silos"] == 2
    (note,) = (note for note in result.notes if "silo 0" in note)
    assert note.endswith("an arm has too few records with an outcome there")
    result.to_json()


def test_a_silo_without_the_target_population_or_of_one_row_breaks_nothing() -> None:
    data = population(240, seed=31)
    untreated = np.flatnonzero(data["a"] == 0)[:30]
    rest = np.setdiff1d(np.arange(240), untreated)
    parts = [untreated, rest[:1], rest[1:100], rest[100:]]
    names = [f"silo {m}" for m in range(4)]
    att = study(ft.ATT(outcome="y", treatment="a"))
    result = ft.run(att, cut(data, parts), release=names)
    assert set(result.to_dict()["silos"]) == {"silo 2", "silo 3"}
    result.to_json()


def test_a_ratio_that_is_no_ratio_in_one_silo_is_left_out() -> None:
    """A small silo may have no event at all; the study's own ratio stands."""
    n = 200
    data = population(n, seed=2)
    data["event"] = (np.arange(n) % 9 == 0).astype(float)
    small = np.flatnonzero(data["event"] == 0)[:6]
    own = study(ft.RR(outcome="event", treatment="a"))
    result = ft.run(own, cut(data, [small, np.setdiff1d(np.arange(n), small)]), release=["silo 0", "silo 1"])
    assert "silo 1" in result.to_dict()["silos"]
    result.to_json()


def test_truncation_is_counted_and_the_weights_effective_size_is_kish() -> None:
    own = study(g_bounds=0.35)
    result = ft.run(own, silos())
    finished, tables = finish(own, silos())
    problem = targeted(finished).problem
    g = np.concatenate([problem.prepare.propensities(table)[0] for table in tables.values()], axis=1)
    assert result.document["truncated"] == [int((g[0] < 0.35).sum()), int((g[1] < 0.35).sum())]
    assert min(result.document["truncated"]) > 0
    a = np.concatenate([silo["a"] for silo in silos().values()])
    for arm, size in zip((0, 1), result.document["effective_sizes"].values(), strict=True):
        h = 1 / np.maximum(g[arm], 0.35)[a == arm]
        assert size == pytest.approx(h.sum() ** 2 / (h**2).sum(), rel=1e-10)


def test_the_automatic_bound_uses_the_pooled_count() -> None:
    assert ft.run(study(), silos()).document["g_floor"] == pytest.approx(5 / math.sqrt(240) / math.log(240))


def test_an_unsupported_interval_is_said_to_be_so() -> None:
    lax = ft.Gradient(tolerance=5.0, optimizer=ft.Newton())
    rough = ft.run(change(study(), outcome_model=ft.GLM("1"), algorithm=lax), silos())
    assert any("not supported" in warning for warning in rough.warnings)
    assert ft.run(study(), silos()).warnings == ()


def test_a_saved_result_is_the_same(tmp_path) -> None:
    result = ft.run(study(), silos(), release=["silo 0"])
    result.save(tmp_path / "result.json")
    loaded = ft.load(tmp_path / "result.json")
    assert loaded.to_dict() == json.loads(result.to_json())
    pd.testing.assert_frame_equal(loaded.table(), result.table())
    assert list(result.table().columns) == [
        "estimand",
        "estimate",
        "std_error",
        "conf_low",
        "conf_high",
        "p_value",
        "scale",
    ]


def test_the_linear_fluctuation_solves_the_same_equation() -> None:
    own = study(link="linear")
    pooled = {name: np.concatenate([silo[name] for silo in silos().values()]) for name in silos()["silo 0"]}
    finished, tables = finish(own, {"all": pooled})
    outcome = targeted(finished)
    rows_ = outcome.problem.rows(tables["all"])
    n, at = 240, np.arange(240)
    H = np.stack([rows_.taken(r) for r in range(2)])
    base = rows_.q[rows_.arm, at]
    eps = np.linalg.solve(H @ H.T, H @ (rows_.y - base))
    q = rows_.q + eps[:, None] * np.stack([rows_.terms[a][0].H for a in range(2)])
    np.testing.assert_allclose(outcome.estimate.psi, 10 * q.mean(axis=1), atol=1e-8)
    eif = 10 * (H * (rows_.y - q[rows_.arm, at]) + q - q.mean(axis=1)[:, None])
    np.testing.assert_allclose(outcome.estimate.covariance, np.cov(eif) / n, rtol=1e-7)


def test_changing_the_release_changes_no_estimate() -> None:
    one, other = ft.run(study(), silos()), ft.run(study(), silos(), release=["silo 1"])
    assert rows(one) == rows(other)
