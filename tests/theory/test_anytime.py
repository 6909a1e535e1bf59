"""Wherever a run stops, its estimate is within the stated distance of the estimate at convergence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

import fedtmle as ft
from fedtmle.model.problem import ConvergenceBounds
from fedtmle.theory.statistical import (
    NO_REACH,
    NOT_AT_ORIGIN,
    TOO_FAR,
    distance_to_convergence,
    root_distance,
)
from fedtmle_core.types import Array
from fedtmle_paper.optimal_transport import OptimalTransport
from tests.premise import Premise

BATCH = 1_000


def stop_at_random(rng: np.random.Generator, stops: int) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Small logistic fluctuations, one coordinate each, stopped at random; all written longhand.

    Returns, by problem, |psi - psi at the root|, the gradient and the Hessian where it stopped, the largest
    covariate of the rows, that of the plug-in, and whether the root was found.
    """
    n = 30
    floor = 10 ** rng.uniform(-1.5, -0.3, size=(stops, 1))
    g = np.maximum(rng.uniform(size=(stops, n)), floor)
    taken = rng.uniform(size=(stops, n)) < g
    x = taken / g
    offset = rng.normal(size=(stops, n)) * rng.choice([0.5, 2.0], size=(stops, 1))
    y = np.where(rng.uniform(size=(stops, 1)) < 0.5, rng.uniform(size=(stops, n)), expit(offset))
    y = np.clip(y + 0.3 * rng.normal(size=(stops, n)), 0.02, 0.98)

    def gradient(eps: Array) -> Array:
        return np.asarray((x * (expit(offset + eps[:, None] * x) - y)).mean(axis=1))

    def hessian(eps: Array) -> Array:
        q = expit(offset + eps[:, None] * x)
        return np.asarray((x * x * q * (1 - q)).mean(axis=1))

    def psi(eps: Array) -> Array:
        return np.asarray(expit(offset + eps[:, None] / g).mean(axis=1))

    low, high = np.full(stops, -60.0), np.full(stops, 60.0)
    for _ in range(200):  # bisection: the gradient rises in eps
        middle = 0.5 * (low + high)
        above = gradient(middle) > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    root = 0.5 * (low + high)
    found = taken.any(axis=1) & (np.abs(root) < 50)
    stop = root + rng.normal(size=stops) * 10 ** rng.uniform(-6, 0, size=stops) * floor[:, 0]
    gap = np.abs(psi(stop) - psi(root))
    return gap, gradient(stop), hessian(stop), x.max(axis=1), (1 / g).max(axis=1), found


def check_stops(stops: int, seed: int) -> float:
    """Return the median of bound over truth, where there is a bound; no stop may break it."""
    rng = np.random.default_rng(seed)
    slack = []
    bounded = Premise("the residual is small enough for a bound", at_least=0.6)
    with bounded:
        for _ in range(stops // BATCH):
            for gap, g, H, x, largest, found in zip(*stop_at_random(rng, BATCH), strict=True):
                if not found or H <= 0:
                    continue
                known = ConvergenceBounds(curvature=((H,),), covariates=(x,), slopes=((largest / 4,),))
                distance = distance_to_convergence((abs(g),), known)
                if bounded.holds(distance.bounds is not None):
                    (bound,) = distance.bounds or (0.0,)
                    assert gap <= bound * (1 + 1e-9) + 1e-13
                    if gap > 1e-9:
                        slack.append(bound / gap)
    return float(np.median(slack))


def test_no_stop_breaks_the_bound() -> None:
    assert 1 <= check_stops(1_000, seed=1) < 6


@pytest.mark.slow
def test_no_stop_of_a_hundred_thousand_breaks_the_bound() -> None:
    assert 1 <= check_stops(100_000, seed=2) < 6


def test_the_distance_to_a_root_is_attained_by_an_exponential_loss() -> None:
    """l(s) = e^-s + b s has l''' = -l'': the worst case of rate 1, with its minimum at s = -log b."""
    for b in (0.1, 0.5, 0.9):
        decrement = (1 - b) / math.sqrt(1.0)  # |l'(0)| / sqrt(l''(0))
        assert root_distance(decrement, 1.0) == pytest.approx(-math.log(b), rel=1e-12)
    assert root_distance(0.3, 0.0) == 0.3
    assert root_distance(1.0, 1.0) == math.inf


def test_coordinates_are_joined_by_the_curvature() -> None:
    """A quadratic loss: the root is at -H^-1 g, and the bound is attained when the signs agree."""
    H = np.array([[2.0, 0.5], [0.5, 1.0]])
    g = np.array([0.3, 0.2])
    known = ConvergenceBounds(
        curvature=tuple(map(tuple, H.tolist())), covariates=(0.0, 0.0), slopes=((1.0, 0.0), (0.0, 1.0))
    )
    bounds = distance_to_convergence(g.tolist(), known).bounds
    assert bounds is not None
    worst = max(math.sqrt(v @ np.linalg.inv(H) @ v) for v in (g, g * [1, -1]))
    np.testing.assert_array_less(np.abs(np.linalg.solve(H, g)), bounds)
    size = np.sqrt(np.diag(np.linalg.inv(H)))
    np.testing.assert_allclose(bounds, worst * size, rtol=1e-12)


@pytest.mark.parametrize(
    ("residuals", "known", "reason"),
    [
        ((math.inf,), None, NOT_AT_ORIGIN),
        ((0.1,), None, NO_REACH),
        ((0.1,), ConvergenceBounds(curvature=((0.0,),), covariates=(1.0,), slopes=((1.0,),)), NO_REACH),
        ((0.1,), ConvergenceBounds(curvature=((1.0,),), covariates=(10.0,), slopes=((1.0,),)), TOO_FAR),
    ],
)
def test_where_there_is_no_bound_the_reason_is_given(residuals: Any, known: Any, reason: str) -> None:
    distance = distance_to_convergence(residuals, known)
    assert (distance.bounds, distance.reason) == (None, reason)


STUDY = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.GLM("w"),
    treatment_model=ft.GLM("w"),
    variables=ft.Variables(
        {
            "y": {"kind": "number", "range": (0, 10)},
            "a": {"kind": "binary"},
            "w": {"kind": "number", "range": (-4, 4)},
        }
    ),
)


def silos(seed: int) -> dict[str, dict[str, Array]]:
    rng = np.random.default_rng(seed)
    w = np.clip(rng.normal(size=240), -4, 4)
    a = (rng.uniform(size=240) < expit(0.8 * w)).astype(float)
    y = np.clip(5 + a + np.sin(2 * w) + w * a + rng.normal(size=240), 0, 10)
    return {f"s{m}": {"y": y[m::3], "a": a[m::3], "w": w[m::3]} for m in range(3)}


@pytest.mark.parametrize("seed", range(4))
def test_a_study_stopped_at_any_round_is_within_the_distance_it_states(seed: int) -> None:
    tables = silos(seed)
    full = ft.run(replace(STUDY, algorithm=ft.Coded(tolerance=1e-10)), tables)
    (end,) = full.document["convergence"]["estimands"]
    early = Premise("the run stopped early", at_least=0.4)
    bounded = Premise("its residual is small enough for a bound", at_least=0.5)
    with early, bounded:
        for rounds in range(1, 7):
            stopped = ft.run(replace(STUDY, algorithm=ft.Coded(max_rounds=rounds)), tables)
            early.holds(not stopped.document["converged"])
            stated = stopped.document["convergence"]
            if not bounded.holds(stated["reason"] is None):
                assert stated["reason"] == TOO_FAR
                continue
            (row,) = stated["estimands"]
            one, other = (each.document["estimates"][0]["estimate"] for each in (full, stopped))
            assert abs(one - other) <= row["bound"] + end["bound"]
            largest = max(abs(one - other), stopped.document["certificate"]["tolerance"])
            assert row["bound"] < 300 * largest


def test_a_density_states_why_it_has_no_bound() -> None:
    problem = OptimalTransport(spacing=0.25)
    rng = np.random.default_rng(0)
    law = problem.start(rng.normal(size=(60, 2)))
    result = ft.solve(problem, law, {"a": rng.normal(size=(50, 2))}, ft.Coded(tolerance=0.5))
    assert result.certificate is not None
    assert result.certificate.distance is not None
    assert result.certificate.distance.reason == NO_REACH
