"""Meta-analysis of the silos' own estimates, against published numbers and independent computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, stats

from fedtmle.results.inference import Row, heterogeneity, leave_one_out, random_effects
from fedtmle.targets.effects.estimands import Scale

# Colditz et al. (1994), the 13 trials of the BCG vaccine: cases and others, vaccinated and not.
BCG = np.array(
    [
        [4, 119, 11, 128], [6, 300, 29, 274], [3, 228, 11, 209], [62, 13536, 248, 12619],
        [33, 5036, 47, 5761], [180, 1361, 372, 1079], [8, 2537, 10, 619], [505, 87886, 499, 87892],
        [29, 7470, 45, 7232], [17, 1699, 65, 1600], [186, 50448, 141, 27197], [5, 2493, 3, 2338],
        [27, 16886, 29, 17825],
    ],
    dtype=float,
)  # fmt: skip


def log_risk_ratios() -> tuple[np.ndarray, np.ndarray]:
    a, b, c, d = BCG.T
    return np.log(a / (a + b) / (c / (c + d))), 1 / a - 1 / (a + b) + 1 / c - 1 / (c + d)


def test_the_published_analysis_of_the_bcg_trials() -> None:
    """As printed by R's metafor for dat.bcg: rma(yi, vi), method = "DL", and test = "knha"."""
    y, v = log_risk_ratios()
    reml, moments = random_effects(y, v), random_effects(y, v, method="DL")
    assert round(reml.estimate, 4) == -0.7145
    assert round(reml.tau2, 4) == 0.3132
    assert round(100 * reml.I2, 2) == 92.22
    assert round(reml.Q, 4) == 152.2330
    assert (round(reml.conf_low, 4), round(reml.conf_high, 4)) == (-1.1084, -0.3206)  # Hartung-Knapp
    assert round(reml.p_value, 4) == 0.0019
    assert (round(moments.estimate, 4), round(moments.tau2, 4)) == (-0.7141, 0.3088)
    # The printed prediction interval of the normal model: exp(mu +- 1.96 sqrt(tau2 + SE^2)).
    error = math.sqrt(1 / np.sum(1 / (v + reml.tau2)))
    reach = 1.959964 * math.sqrt(reml.tau2 + error**2)
    assert [round(math.exp(reml.estimate + s * reach), 4) for s in (-1, 1)] == [0.1546, 1.5490]


@pytest.mark.parametrize("seed", range(4))
def test_reml_maximises_the_restricted_likelihood(seed: int) -> None:
    rng = np.random.default_rng(seed)
    k = int(rng.integers(3, 9))
    v = rng.uniform(0.05, 0.6, k)
    y = rng.normal(0.3, np.sqrt(v + 0.2 * seed), k)

    def deviance(tau2: float) -> float:
        w = 1 / (v + tau2)
        mu = w @ y / w.sum()
        return float(np.log(v + tau2).sum() + math.log(w.sum()) + w @ (y - mu) ** 2)

    best = optimize.minimize_scalar(deviance, bounds=(0, 50), method="bounded", options={"xatol": 1e-10})
    expected = best.x if best.fun < deviance(0.0) else 0.0
    assert random_effects(y, v).tau2 == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("method", ["REML", "DL"])
def test_intervals_longhand(method: str) -> None:
    y, v = np.array([0.1, 0.5, -0.2, 0.9]), np.array([0.04, 0.09, 0.05, 0.16])
    found = random_effects(y, v, method=method, confidence=0.9)  # type: ignore[arg-type]  # parametrized
    w = 1 / (v + found.tau2)
    mu = float(w @ y / w.sum())
    variance = float(w @ (y - mu) ** 2 / (3 * w.sum()))
    t = stats.t(3).ppf(0.95)
    assert found.estimate == pytest.approx(mu, rel=1e-12)
    assert found.conf_high - mu == pytest.approx(t * math.sqrt(variance), rel=1e-12)
    assert found.prediction_low == pytest.approx(mu - t * math.sqrt(variance + found.tau2), rel=1e-12)
    assert found.Q_p_value == pytest.approx(stats.chi2(3).sf(found.Q), rel=1e-12)
    if method == "DL":  # then metafor's I2 is the familiar one
        assert pytest.approx(max(0.0, (found.Q - 3) / found.Q), rel=1e-12) == found.I2


def rows(value: float, error: float, scale: Scale = Scale.DIFFERENCE) -> list[Row]:
    return [
        Row(estimand="x", estimate=value, std_error=error, conf_low=0, conf_high=0, p_value=None, scale=scale)
    ]


def test_ratios_are_summarised_as_logarithms() -> None:
    y, v = log_risk_ratios()
    ratios = {
        str(m): rows(math.exp(a), math.exp(a) * math.sqrt(b), Scale.RATIO)
        for m, (a, b) in enumerate(zip(y, v, strict=True))
    }
    (line,) = heterogeneity(ratios)
    whole = random_effects(y, v)
    assert line["summaries"][0]["estimate"] == pytest.approx(math.exp(whole.estimate), rel=1e-12)
    assert line["summaries"][0]["prediction_high"] == pytest.approx(math.exp(whole.prediction_high))
    assert sum(distance**2 for distance in line["distance"].values()) == pytest.approx(line["Q"], rel=1e-12)
    assert sum(line["weights"].values()) == pytest.approx(1)
    left = leave_one_out(ratios)
    assert set(left) == set(ratios)
    without = random_effects(y[1:], v[1:])
    assert left["0"][0].estimate == pytest.approx(math.exp(without.estimate), rel=1e-12)
    assert left["0"][0].conf_low == pytest.approx(math.exp(without.conf_low), rel=1e-12)


def test_like_silos_and_unlike_ones() -> None:
    unlike = heterogeneity({"a": rows(0.0, 1.0), "b": rows(10.0, 1.0)})
    assert unlike[0]["Q"] == pytest.approx(50.0)
    assert unlike[0]["I2"] == pytest.approx(0.98)
    assert heterogeneity({"a": rows(1.0, 1.0), "b": rows(1.0, 2.0)})[0]["I2"] == 0.0
    assert heterogeneity({"a": rows(1.0, 1.0)}) == heterogeneity({}) == []
    assert leave_one_out({"a": rows(1.0, 1.0), "b": rows(1.0, 2.0)}) == {}
    assert heterogeneity({"a": rows(1.0, 0.0), "b": rows(1.0, 2.0)}) == []  # no sampling error, no weight
