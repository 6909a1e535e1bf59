"""beta along the steps: it bounds the curvature of each, is the same at all parties, and saves rounds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.coded import curvature_along, first_smoothness, sufficient_smoothness
from fedtmle.errors import InputError
from fedtmle.protocol.lattice import build_lattice, floating, whitener
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport

RNG = np.random.default_rng(3)
ROWS = gaussian_mixture(600, RNG)
SILOS = {f"s{m}": ROWS[m::3] for m in range(3)}
PROBLEMS = {
    name: OptimalTransport(spacing=0.25, fluctuation=fluctuation)
    for name, fluctuation in (("logistic", LogisticFluctuation()), ("tilt", ExponentialTilt()))
}
LAW = PROBLEMS["logistic"].start(gaussian_mixture(150, RNG))


def lattice_of(problem: OptimalTransport, beta: Fraction) -> Any:
    return build_lattice(delta=Fraction(1, 100), beta=beta, C=whitener(problem.curvature(LAW)))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("inner", ["step", "adaptive"])
def test_certified_along_the_steps_descends_in_a_fraction_of_the_rounds(name: str, inner: Any) -> None:
    problem = PROBLEMS[name]
    rounds = {}
    for along in ("segments", "everywhere"):
        algorithm = ft.Coded(
            tolerance=0.05, smoothness=ft.Certified(along=along, over="pooled"), inner=inner, max_rounds=150
        )
        result = ft.solve(problem, LAW, SILOS, algorithm, observe=along == "segments")
        rounds[along] = result.rounds
        assert result.certificate is not None
        assert not any("beta" in line for line in result.certificate.assumptions)
        if along == "segments":
            smoothness = result.certificate.smoothness
            assert smoothness is not None
            assert smoothness.basis == "certified along the steps"
            assert len(smoothness.by_step) == result.steps
            assert smoothness.value == max(smoothness.by_step)
    assert rounds["segments"] < 0.6 * rounds["everywhere"]


def test_beta_doubles_where_a_segment_needs_more_and_keeps_every_point() -> None:
    problem = PROBLEMS["tilt"]
    normaliser = problem.normaliser(LAW)
    small = lattice_of(problem, Fraction(1, 8))
    q = (40, -20, 10)
    raised = sufficient_smoothness(normaliser, np.zeros(3), small, q, Fraction(0))
    factor = raised.beta / small.beta
    assert factor in (2, 4, 8, 16, 32)
    assert curvature_along(normaliser, np.zeros(3), raised, q) <= raised.beta
    halved = build_lattice(delta=small.delta, beta=raised.beta / 2, C=small.C)
    assert curvature_along(normaliser, np.zeros(3), halved, q) > halved.beta
    point = small.eps((3, -7, 2))
    np.testing.assert_array_equal(raised.eps([int(factor) * a for a in (3, -7, 2)]), point)
    assert sufficient_smoothness(normaliser, np.zeros(3), raised, q, Fraction(0)) == raised


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_first_beta_bounds_rows_and_normaliser_on_the_step(name: str) -> None:
    problem = PROBLEMS[name]
    normaliser, rows = problem.normaliser(LAW), Fraction(5, 4) if name == "logistic" else Fraction(1, 64)
    lattice = lattice_of(problem, rows)
    for q in ((100, 20, -50), (-3, 400, 90)):
        settled = first_smoothness(normaliser, np.zeros(3), lattice, q)
        step = floating(settled.C).T @ (-float(settled.h / settled.beta) * np.array(q))
        largest = max(float(step @ normaliser.hessian(s * step) @ step) for s in np.linspace(0, 1, 101))
        length = float(settled.h / settled.beta) ** 2 * float(np.dot(q, q))
        assert float(settled.beta) >= float(rows) + max(0.0, largest / length)
        assert float(settled.beta) < 1.25 * (float(rows) + max(0.0, largest / length))


def test_masks_allow_the_pooled_rule_only() -> None:
    assert ft.Coded(smoothness=ft.Certified(over="pooled")).adds_integers
    assert not ft.Coded(smoothness=ft.Certified()).adds_integers


@pytest.mark.parametrize("wrong", [{"along": "path"}, {"over": "all"}])
def test_a_wrong_option_is_named(wrong: Any) -> None:
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name}: expected"):
        ft.Certified(**wrong)
