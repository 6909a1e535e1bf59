"""The test of whether silos come from one population: its statistic longhand, its null law and its power."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import fedtmle as ft
from fedtmle.protocol.sites import MOST_GROUPS
from fedtmle_paper.two_arm import TwoArm
from tests.effects.studies import VARIABLES, cut, population

BOUNDS = (-8.0, 8.0)


def compared(silos: dict[str, np.ndarray], **options: Any) -> ft.Result:
    problem = ft.Mean(bounds=BOUNDS)
    algorithm = ft.LocalAverage(tolerance=1e-3, max_updates=1)
    return ft.solve(problem, problem.start(0.2), silos, algorithm, populations=True, **options)


def longhand(silos: dict[str, np.ndarray]) -> float:
    """T for the mean: N_m times the squared distances of the means, over the variance within silos."""
    y = np.concatenate(list(silos.values()))
    within = sum(float(((rows - rows.mean()) ** 2).sum()) for rows in silos.values())
    f = len(y) - len(silos)
    between = sum(len(rows) * float(rows.mean() - y.mean()) ** 2 for rows in silos.values())
    return between / (within / f) * (f - 2) / f


def test_the_statistic_is_that_of_one_way_analysis_of_variance() -> None:
    rng = np.random.default_rng(3)
    silos = {"a": rng.normal(size=40), "b": 0.4 + rng.normal(size=90), "c": rng.normal(size=25)}
    result = compared(silos)
    assert result.populations is not None
    assert result.populations.statistic == pytest.approx(longhand(silos), abs=1e-5)
    assert (result.populations.df, result.populations.silos) == (2, 3)
    f = stats.f_oneway(*silos.values()).statistic  # T/2 is F but for the factor (f - 2)/f
    assert result.populations.statistic / 2 * 152 / 150 == pytest.approx(f, rel=1e-5)
    assert "one population of all silos: chi2" in repr(result)


def test_it_asks_two_rounds_and_changes_nothing_else() -> None:
    rng = np.random.default_rng(4)
    silos = {"a": rng.normal(size=30), "b": rng.normal(size=30)}
    problem = ft.Mean(bounds=BOUNDS)
    algorithm = ft.LocalAverage(tolerance=1e-3, max_updates=1)
    plain = ft.solve(problem, problem.start(0.2), silos, algorithm)
    result = compared(silos)
    assert plain.populations is None
    assert sum(result.account.rounds.values()) == sum(plain.account.rounds.values()) + 2
    assert result.psi == plain.psi
    assert result.rounds == plain.rounds


def test_silos_with_many_rows_use_the_means_of_groups() -> None:
    rng = np.random.default_rng(5)
    silos = {"a": rng.normal(size=5000), "b": rng.normal(size=7000)}
    result = compared(silos)
    assert result.populations is not None
    f = 2 * (MOST_GROUPS - 1)
    between = longhand(silos) / (11998 - 2) * 11998  # without the factor for f
    assert result.populations.statistic == pytest.approx(between * (f - 2) / f, rel=0.3)  # 510 df: 6 % sd


@pytest.mark.parametrize("silos", [{"a": np.array([1.0]), "b": np.array([2.0])}, {"a": np.full(20, 0.5)}])
def test_without_spread_there_is_no_test(silos: dict[str, np.ndarray]) -> None:
    assert compared(silos).populations is None


def test_one_silo_has_nothing_to_compare() -> None:
    result = compared({"a": np.random.default_rng(1).normal(size=30)})
    assert result.populations is not None
    assert (result.populations.df, result.populations.p_value) == (0, 1.0)


@pytest.mark.parametrize("algorithm", [ft.LocalAverage(), ft.Personalized(noise=0.5)])
def test_a_study_reports_it(algorithm: Any) -> None:
    asked = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + w"),
        treatment_model=ft.GLM("w"),
        algorithm=algorithm,
        variables=VARIABLES,
    )
    silos = cut(population(600, 2), [np.arange(300), np.arange(300, 600)])
    found = {test["model"]: test for test in ft.run(asked, silos).document["site_tests"]}
    assert found["influence function"]["df"] == 2  # one coordinate for each arm
    assert found["influence function"]["p_value"] > 0.01
    differing = silos | {"silo 1": silos["silo 1"] | {"y": 10 - silos["silo 1"]["y"]}}
    document = ft.run(asked, differing).document
    assert any("samples of one population" in warning for warning in document["warnings"])
    coded = ft.run(replace(asked, algorithm=ft.Coded()), silos).document
    assert "influence function" not in {test["model"] for test in coded["site_tests"]}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(60, 60, 60), (200, 40, 80, 120)])
def test_under_one_law_it_is_chi_squared(sizes: tuple[int, ...]) -> None:
    """2,000 samples with two coordinates: no distance of Kolmogorov beyond chance, and 5 % beyond 95 %."""
    rng = np.random.default_rng(11)
    statistics = [two_arm(rng, sizes, 0.0) for _ in range(2000)]
    df = 2 * (len(sizes) - 1)
    assert stats.kstest(statistics, stats.chi2(df).cdf).pvalue > 0.01
    assert np.mean(np.array(statistics) > stats.chi2(df).ppf(0.95)) == pytest.approx(0.05, abs=0.015)


@pytest.mark.slow
def test_its_power_is_that_of_the_noncentral_law() -> None:
    rng = np.random.default_rng(12)
    sizes, shift = (150, 150, 150), 0.12
    found = np.array([two_arm(rng, sizes, shift) for _ in range(1000)])
    power = np.mean(found > stats.chi2(4).ppf(0.95))
    assert power == pytest.approx(expected_power(sizes, shift), abs=0.05)
    assert power > 0.4


def two_arm(rng: np.random.Generator, sizes: tuple[int, ...], shift: float) -> float:
    """T for the two-arm law of the paper's appendix, with responses moved by ``shift`` in the first silo."""
    problem = TwoArm()
    silos = {f"s{m}": rows(rng, size, shift if m == 0 else 0.0) for m, size in enumerate(sizes)}
    algorithm = ft.LocalAverage(tolerance=1e-3, max_updates=0)
    result = ft.solve(problem, problem.start(), silos, algorithm, populations=True)
    assert result.populations is not None
    return result.populations.statistic


def rows(rng: np.random.Generator, size: int, shift: float) -> dict[str, np.ndarray]:
    """Fair arms and fair responses, so that gradients have the covariance I/2 and the mean ``shift``."""
    half = np.full(size, 0.5)
    return {
        "outcome": (rng.random(size) < 0.5 + shift).astype(float),
        "treatment": rng.integers(0, 2, size=size).astype(float),
        "Q1": half,
        "Q0": half,
        "g": half,
    }


def expected_power(sizes: tuple[int, ...], shift: float) -> float:
    means = np.array([shift] + [0.0] * (len(sizes) - 1))
    middle = np.average(means, weights=sizes)
    noncentrality = 2 * float(np.array(sizes) @ (means - middle) ** 2) / 0.5
    df = 2 * (len(sizes) - 1)
    return float(stats.ncx2(df, noncentrality).sf(stats.chi2(df).ppf(0.95)))
