"""E-values against published ones, robustness values against their equation, and both in a study's result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.results.sensitivity import robustness_value
from tests.effects.studies import NEWTON, Columns, expit, finish
from tests.narrow import targeted

# VanderWeele and Ding (2017), and the worked examples of the R package EValue.
PUBLISHED: dict[str, tuple[tuple[float, float, float], dict[str, Any], float, float]] = {
    "smoking, Hammond and Horn": ((10.73, 8.02, 14.36), {}, 20.94777, 15.52336),
    "breastfeeding, Victora et al.": ((3.9, 1.8, 8.7), {}, 7.263034, 3.0),
    "leukemia": ((0.80, 0.71, 0.91), {}, 1.809017, 1.428571),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_e_values(name: str) -> None:
    arguments, options, estimate, interval = PUBLISHED[name]
    found = ft.e_value(*arguments, **options)
    assert found.estimate == pytest.approx(estimate, abs=5e-6)
    assert found.interval == pytest.approx(interval, abs=5e-6)


def test_other_measures_are_converted_as_documented() -> None:
    root = math.sqrt(0.86)
    assert ft.e_value(0.86, 0.75, 0.99, measure="OR") == ft.e_value(root, math.sqrt(0.75), math.sqrt(0.99))
    assert ft.e_value(0.86, 0.75, 0.99, measure="OR", rare=True) == ft.e_value(0.86, 0.75, 0.99)
    # VanderWeele and Ding's formula for a common outcome, written out.
    hazard = (1 - 0.5 ** math.sqrt(0.56)) / (1 - 0.5 ** math.sqrt(1 / 0.56))
    assert ft.e_value(0.56, measure="HR").estimate == pytest.approx(ft.e_value(hazard).estimate)
    # A mean difference of d = 0.5 (SE 0.25): RR = exp(0.91 d), limits exp(0.91 d -+ 1.78 SE).
    found = ft.e_value(0.5, 0.5 - 1.96 * 0.25, 0.5 + 1.96 * 0.25, measure="SMD")
    ratio, limit = math.exp(0.91 * 0.5), math.exp(0.91 * 0.5 - 1.78 * 0.25)
    assert found.estimate == pytest.approx(ratio + math.sqrt(ratio * (ratio - 1)))
    assert found.interval == pytest.approx(limit + math.sqrt(limit * (limit - 1)), abs=0.02)


def test_a_confounder_of_that_strength_explains_the_estimate_away() -> None:
    """Ding and VanderWeele's bounding factor RR_UA RR_UY / (RR_UA + RR_UY - 1) at the E-value is the RR."""
    for ratio in (1.2, 2.0, 7.5):
        e = ft.e_value(ratio).estimate
        assert e * e / (2 * e - 1) == pytest.approx(ratio)
        assert ft.e_value(1 / ratio).estimate == pytest.approx(e)


def test_intervals_that_hold_the_null() -> None:
    assert ft.e_value(1.4, 0.9, 2.0).interval == 1.0
    assert ft.e_value(0.7, 0.5, 1.1).interval == 1.0
    assert ft.e_value(1.0).estimate == 1.0
    assert ft.e_value(2.0).interval is None
    assert ft.e_value(0.0).estimate == math.inf


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((-1.0,), {}),
        ((math.nan,), {}),
        ((2.0, 2.5, 3.0), {}),
        ((2.0,), {"measure": "RD"}),
        ((2.0, 1.0, 1.5), {}),
    ],
)
def test_what_is_no_estimate_is_refused(arguments: tuple[float, ...], options: Any) -> None:
    with pytest.raises(InputError):
        ft.e_value(*arguments, **options)


def test_the_published_robustness_value() -> None:
    """Cinelli and Hazlett (2020), Darfur: t = 4.18 on 783 degrees of freedom, RV 13.9 %, at 5 % 7.6 %."""
    f = 4.18445 / math.sqrt(783)
    assert robustness_value(f, 1.0) == pytest.approx(0.139, abs=5e-4)
    assert robustness_value((4.18445 - 1.963) / math.sqrt(783), 1.0) == pytest.approx(0.076, abs=5e-4)


@pytest.mark.parametrize("distance", [1e-9, 0.01, 0.4, 3.0, 1e5])
def test_the_robustness_value_solves_its_equation(distance: float) -> None:
    r = robustness_value(distance, 2.5)
    assert 2.5 * r / math.sqrt(1 - r) == pytest.approx(distance, rel=1e-6)
    assert robustness_value(0.0, 2.5) == robustness_value(-1.0, 2.5) == 0.0


VARIABLES: dict[str, dict[str, object]] = {
    "x": {"kind": "number", "range": (-8.0, 8.0)},
    "y": {"kind": "number", "range": (-30.0, 30.0)},
    "event": {"kind": "binary"},
    "a": {"kind": "binary"},
}


def confounded(n: int, seed: int, strength: float = 1.0) -> Columns:
    """An unmeasured u moves treatment and outcome; treatment does nothing."""
    rng = np.random.default_rng(seed)
    x, u = rng.normal(size=n), rng.choice([-1.0, 1.0], size=n)
    a = (rng.random(n) < expit(0.4 * x + strength * u)).astype(int)
    y = x + 1.5 * strength * u + rng.normal(size=n)
    return {
        "x": x,
        "u": u,
        "a": a,
        "y": y,
        "event": (rng.random(n) < expit(0.5 * x + strength * u)).astype(int),
    }


def study(kind: type, outcome: str, **options: Any) -> ft.Study:
    used = {name: VARIABLES[name] for name in ("x", "a", outcome)}
    return ft.Study(
        target=kind(outcome=outcome, treatment="a"),
        outcome_model=ft.GLM("C(a) + x"),
        treatment_model=ft.GLM("x"),
        algorithm=NEWTON,
        variables=ft.Variables(used),
        **options,
    )


@pytest.mark.parametrize("kind", [ft.ATE, ft.RR, ft.OR, ft.ATT, ft.ATO])
def test_a_binary_outcome_has_the_e_value_of_its_risk_ratio(kind: type) -> None:
    result = ft.run(study(kind, "event"), {"s": confounded(900, 1)})
    (row,) = result.document["sensitivity"]
    zero, one = result.document["psi"]
    V = np.array(result.document["covariance"])
    slope = np.array([-1 / zero, 1 / one])
    error = math.sqrt(slope @ V @ slope)
    expected = ft.e_value(
        one / zero, *(one / zero * math.exp(k * 1.959963984540054 * error) for k in (-1, 1))
    )
    assert row["e_value"] == pytest.approx(expected.estimate)
    assert row["e_value_interval"] == pytest.approx(expected.interval)
    if kind is ft.RR:
        own = result.document["estimates"][0]
        assert row["risk_ratio"] == pytest.approx([own["estimate"], own["conf_low"], own["conf_high"]])


def test_the_scale_of_the_bias_is_that_of_the_pooled_rows() -> None:
    """S^2 = P_n (Y - Q*)^2 P_n (H_1 - H_0)^2, longhand from the prepared rows."""
    own, data = study(ft.ATE, "y"), confounded(700, 2)
    finished, tables = finish(own, {"s": data})
    outcome = targeted(finished)
    rows = outcome.problem.rows(tables["s"])
    residual = 60.0 * (rows.y - outcome.problem.factual(outcome.law, rows))
    scale = math.sqrt((residual**2).mean() * ((rows.covariates[1] - rows.covariates[0]) ** 2).mean())
    (row,) = ft.run(own, {"s": data}).document["sensitivity"]
    assert row["bias_scale"] == pytest.approx(scale, rel=1e-9)
    estimate = outcome.estimate.psi[1] - outcome.estimate.psi[0]
    assert row["robustness_value"] == pytest.approx(robustness_value(abs(estimate), scale), rel=1e-9)
    sd = data["y"].std()
    assert row["risk_ratio"][0] == pytest.approx(math.exp(0.91 * estimate / sd), rel=1e-9)


def test_the_bound_holds_for_a_confounder_that_is_known() -> None:
    """With u at hand: its C_Y and C_A bound the bias of the estimate without it (truth 0)."""
    data = confounded(200_000, 3)
    (row,) = ft.run(study(ft.ATE, "y"), {"s": data}).document["sensitivity"]
    (estimate,) = ft.run(study(ft.ATE, "y", diagnostics=False), {"s": data}).document["estimates"]
    x, u, a, y = (data[name] for name in ("x", "u", "a", "y"))
    # Short and long residuals of the outcome (linear and Gaussian here), and the long and short alpha.
    short = y - np.linalg.lstsq(np.column_stack([np.ones_like(x), a, x]), y, rcond=None)[0] @ [
        1 + 0 * x,
        a,
        x,
    ]
    explained = 1 - (y - x - 1.5 * u).var() / short.var()
    g_long = expit(0.4 * x + u)
    g_short = 0.5 * (expit(0.4 * x + 1) + expit(0.4 * x - 1))
    alpha_long = a / g_long - (1 - a) / (1 - g_long)
    alpha_short = a / g_short - (1 - a) / (1 - g_short)
    added = 1 - (alpha_short**2).mean() / (alpha_long**2).mean()
    bound = row["bias_scale"] * math.sqrt(explained * added / (1 - added))
    assert 0.3 * bound < abs(estimate["estimate"]) <= 1.02 * bound


def test_without_diagnostics_or_with_weights_there_is_no_bound() -> None:
    data = confounded(400, 4) | {"w": np.random.default_rng(0).uniform(0.5, 1.5, size=400)}
    (row,) = ft.run(study(ft.ATE, "y", diagnostics=False), {"s": data}).document["sensitivity"]
    assert (row["e_value"], row["robustness_value"]) == (None, None)
    result = ft.run(study(ft.TSM, "y"), {"s": data})
    assert result.document["sensitivity"] == []  # a mean is compared with nothing
