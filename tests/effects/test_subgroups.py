"""Asking for more changes no estimate: strata, rules and arms beside the overall effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

import fedtmle as ft
from fedtmle.targets.effects.components import component_blocks
from tests.effects.studies import CENTRAL, NEWTON, Columns, cut, expit

VARIABLES = ft.Variables(
    {
        "y": {"kind": "binary"},
        "t": {"kind": "binary"},
        "x": {"kind": "number", "range": (-8.0, 8.0)},
        "ward": {"kind": "category", "levels": ("a", "b", "c")},
    }
)


def people(n: int, seed: int, interaction: float = 0.0) -> Columns:
    """Strata with unlike overlap and a curved outcome that the models miss, so that targeting moves much."""
    rng = np.random.default_rng(seed)
    x, ward = rng.normal(size=n), rng.integers(0, 3, size=n)
    t = (rng.random(n) < expit(0.9 * x * (ward - 1) + 0.3 * ward)).astype(int)
    risk = expit(-0.4 + 0.7 * x**2 - 0.8 * t * x + 0.5 * ward + interaction * t * (ward == 2))
    return {"t": t, "x": x, "ward": np.array(["a", "b", "c"])[ward], "y": (rng.random(n) < risk).astype(int)}


def study(target: ft.AbstractEffect, **options: Any) -> ft.Study:
    return ft.Study(
        target=target,
        outcome_model=ft.GLM("C(t) + x"),
        treatment_model=ft.GLM("x"),
        variables=VARIABLES,
        **options,
    )


def estimates(result: ft.StudyResult) -> dict[str, tuple[float, float]]:
    rows = result.document["estimates"]
    return {row["estimand"]: (row["estimate"], row["std_error"]) for row in rows}


@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded(), CENTRAL], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("kind", [ft.ATE, ft.RR])
def test_strata_do_not_change_the_overall_effect(kind: type, algorithm: Any) -> None:
    silos = cut(people(900, 1), np.array_split(np.arange(900), 3))
    found = {}
    for strata in (None, "ward"):
        target = kind(outcome="y", treatment="t", strata=strata)
        result = ft.run(study(target, algorithm=algorithm), silos)
        assert result.run.status.is_converged
        found[strata] = result
    name = kind.__name__
    alone, beside = (estimates(found[strata])[name] for strata in (None, "ward"))
    reach = sum(result.run.certificate.residual_bound for result in found.values())
    assert abs(alone[0] - beside[0]) <= max(1e-5 * alone[1], 3 * reach)
    assert alone[1] == pytest.approx(beside[1], rel=1e-6)


def test_a_stratum_has_the_estimate_that_it_has_alone() -> None:
    """The estimate by stratum is that of the fluctuation of the stratum's own components."""
    data = people(900, 2)
    both = estimates(
        ft.run(study(ft.ATE(outcome="y", treatment="t", strata="ward"), algorithm=NEWTON), {"s": data})
    )
    means = estimates(
        ft.run(study(ft.TSM(outcome="y", treatment="t", strata="ward"), algorithm=NEWTON), {"s": data})
    )
    for ward in "abc":
        difference = means[f"E[Y(1)] in {ward}"][0] - means[f"E[Y(0)] in {ward}"][0]
        assert both[f"ATE in {ward}"][0] == pytest.approx(difference, abs=1e-12)


def test_further_rules_do_not_change_the_first() -> None:
    rules = (
        ft.Threshold("x", 0.3, arm="1", otherwise="0"),
        ft.Stochastic((0.5, 0.5)),
        ft.Static("1"),
        ft.Threshold("x", -0.5, arm="0", otherwise="1"),
    )
    silos = {"s": people(700, 3)}
    every = estimates(
        ft.run(study(ft.PolicyMeans(outcome="y", treatment="t", rules=rules), algorithm=NEWTON), silos)
    )
    for rule in rules:
        target = ft.PolicyMeans(outcome="y", treatment="t", rules=(rule,))
        ((name, alone),) = estimates(ft.run(study(target, algorithm=NEWTON), silos)).items()
        np.testing.assert_allclose(every[name], alone, rtol=1e-9)


def test_blocks_hold_components_that_no_record_shares() -> None:
    ate = ft.ATE(outcome="y", treatment="t", arms=("0", "1"), strata="ward").components(("a", "b"))
    assert component_blocks(ate) == ((0, 1), (2, 3, 4, 5))
    att = ft.ATT(outcome="y", treatment="t", arms=("0", "1", "2")).components(())
    assert component_blocks(att) == ((0, 1, 3), (2,))


@pytest.mark.parametrize("kind", [ft.ATE, ft.RR, ft.TSM])
def test_interaction_is_the_wald_test_of_equal_effects(kind: type) -> None:
    """Against the quadratic form longhand, from the result's own covariance."""
    result = ft.run(study(kind(outcome="y", treatment="t", strata="ward")), {"s": people(800, 4)})
    document = result.document
    psi, V = np.array(document["psi"]), np.array(document["covariance"])
    by_ward = psi.reshape(4, 2)[1:]  # everyone first; arms 0 and 1
    transforms = {
        "ATE": [(by_ward[:, 1] - by_ward[:, 0], np.kron(np.eye(4)[1:], [-1.0, 1.0]))],
        "RR": [
            (
                np.log(by_ward[:, 1] / by_ward[:, 0]),
                np.array([np.kron(np.eye(4)[s + 1], [-1 / m[0], 1 / m[1]]) for s, m in enumerate(by_ward)]),
            )
        ],
        "TSM": [(by_ward[:, a], np.kron(np.eye(4)[1:], np.eye(2)[a])) for a in (0, 1)],
    }[kind.__name__]
    assert len(document["interaction"]) == len(transforms)
    for test, (theta, gradient) in zip(document["interaction"], transforms, strict=True):
        C = np.array([[-1.0, 1.0, 0.0], [0.0, -1.0, 1.0]])
        middle = C @ gradient @ V @ gradient.T @ C.T
        statistic = (C @ theta) @ np.linalg.solve(middle, C @ theta)
        assert test["statistic"] == pytest.approx(statistic, rel=1e-8)
        assert test["df"] == 2
        assert test["p_value"] == pytest.approx(stats.chi2.sf(statistic, 2), rel=1e-10)


def test_without_strata_there_is_no_interaction() -> None:
    result = ft.run(study(ft.ATE(outcome="y", treatment="t")), {"s": people(300, 5)})
    assert result.document["interaction"] == []


@pytest.mark.slow
def test_the_interaction_test_has_its_level() -> None:
    """Of 1,000 studies with the same risk difference in all strata, near 5 % reject at 5 %."""
    rejected = 0
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        n = 600
        x, ward = rng.normal(size=n), rng.integers(0, 3, size=n)
        t = (rng.random(n) < expit(0.5 * x)).astype(int)
        y = (rng.random(n) < 0.3 + 0.1 * t + 0.1 * expit(x)).astype(int)
        data = {"t": t, "x": x, "ward": np.array(["a", "b", "c"])[ward], "y": y}
        target = ft.ATE(outcome="y", treatment="t", strata="ward")
        (test,) = ft.run(study(target, diagnostics=False), {"s": data}).document["interaction"]
        rejected += test["p_value"] < 0.05
    assert 0.03 <= rejected / 1000 <= 0.08
