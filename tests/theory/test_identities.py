"""Identities of the proofs on realised runs, to 1e-12."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.theory import personalized as p
from fedtmle.theory.averaging import FitRound, personal_loss_budget
from fedtmle_paper import lemmas as lem
from tests.cases import TARGETS, targets
from tests.theory.runs import coded_run, personal_run

EXACT = 1e-12


@pytest.mark.parametrize("inner", ["step", "adaptive"])
@pytest.mark.parametrize("coordinates", ["raw", "whitened"])
@pytest.mark.parametrize("name", TARGETS)
def test_decreases_telescope_across_submodels(name: str, coordinates: Any, inner: Any) -> None:
    """l_{k+1}(0) = l_k(eps^k), so the steps' decreases add up to l_0(0) - l_K(0), by definition of L."""
    case = targets()[name]
    algorithm = ft.Coded(tolerance=case.tolerance, coordinates=coordinates, inner=inner)
    run = coded_run(case, case.split(3), algorithm)
    path, rows = run.path, case.pooled()
    steps = [path.loss[r] - path.loss[r + 1] for r, is_step in path.transitions() if is_step]
    fell = np.mean(case.problem.losses(case.law, rows)) - np.mean(case.problem.losses(run.result.law, rows))
    assert math.fsum(steps) == pytest.approx(float(fell), abs=EXACT)
    law = case.law
    for k, eps in enumerate(run.result.trajectory.accepted):
        law = case.problem.move(law, np.array(eps))
        recentred = np.mean(case.problem.losses(law, rows)) - np.mean(case.problem.losses(case.law, rows))
        assert path.loss[path.origins()[k + 1]] == pytest.approx(float(recentred), abs=EXACT)


@pytest.mark.parametrize("name", TARGETS)
def test_one_step_per_update_varies_by_kappa_alone(name: str) -> None:
    """Origins alone are asked: ||g_{m,r+1} - g_{m,r}|| <= kappa ||eps^k|| = (kappa/beta) ||g~_r||."""
    case = targets()[name]
    run = coded_run(case, case.split(3), ft.Coded(tolerance=case.tolerance, inner="step"))
    path, beta, kappa = run.path, run.known["beta"], run.known["kappa"]
    origins = path.origins()
    assert [r for r, asked in enumerate(path.queried) if asked] == origins
    norms = path.rounded_norms(beta)
    assert len(norms) == run.result.steps == run.result.updates == run.result.rounds - 1
    for a, b, norm in zip(origins, origins[1:], norms, strict=False):
        change = np.linalg.norm(path.gradient[b] - path.gradient[a], axis=1).max()
        assert change <= kappa / beta * norm * (1 + 1e-9)


@pytest.mark.parametrize("inner", ["step", "adaptive"])
def test_history_is_minus_the_sum_of_the_rounded_gradients(inner: Any) -> None:
    case = targets()["transport, logistic"]
    run = coded_run(case, case.split(3), ft.Coded(tolerance=case.tolerance, inner=inner))
    h, beta = float(run.lattice.h), float(run.lattice.beta)
    q = np.rint(np.einsum("m,rmd->rd", run.path.share, np.rint(run.path.gradient / h)))
    for k, end in enumerate(run.path.endpoints()):
        steps = [r for r, is_step in run.path.transitions() if is_step and run.path.update[r] == k]
        assert np.allclose(beta * run.path.u[end] / h, -q[steps].sum(axis=0), rtol=0, atol=1e-6)


Followed = tuple[ft.Result, tuple[FitRound, ...]]


@pytest.fixture(scope="module", params=itertools.product(TARGETS, ["size", "uniform"]), ids=str)
def followed(request: pytest.FixtureRequest) -> Followed:
    name, weights = request.param
    case = targets()[name]
    lattice = {"mean": 0.2, "two arms": 0.001}.get(name, 0.02)  # so that some silos retire on the way
    return personal_run(
        case, case.split(5, seed=3), ft.Personalized(weights=weights, lattice=lattice, max_updates=4)
    )


def test_v2_is_the_weighted_variance(followed: Followed) -> None:
    for r in followed[1]:
        assert pytest.approx(lem.spread(r.alpha, r.fits), rel=EXACT, abs=1e-25) == r.V_2


def test_chi_in_both_modes_is_the_common_form_and_its_sum_counts_participation(followed: Followed) -> None:
    result, rounds = followed
    sizes, n, M = result.sizes, result.n, len(result.sizes)
    retired = {name: local.retired_at for name, local in result.silos.items()}
    tau = [math.inf if retired[name] is None else retired[name] for name in sizes]
    by_size = math.isclose(rounds[0].alpha[0], sizes[rounds[0].active[0]] / n) if rounds else True
    for k, r in enumerate(rounds):
        assert set(r.active) == {name for name, t in zip(sizes, tau, strict=True) if k < t}
        mode = lem.chi_size(len(r.active), n) if by_size else lem.chi_uniform(r.sizes, M)
        assert r.chi == pytest.approx(mode, rel=EXACT, abs=1e-18)
        # eq. (proof-retire-sampling-moment)
        pairs = itertools.permutations(zip(r.alpha, r.sizes, strict=True), 2)
        total = math.fsum(a * b * (1 / N + 1 / L) for (a, N), (b, L) in pairs)
        assert total == pytest.approx(2 * math.fsum(r.alpha) * r.chi, rel=EXACT, abs=1e-18)
    realised = math.fsum(r.chi for r in rounds)
    K = len(rounds)
    if K:
        counted = (
            lem.chi_total_size(tau, K, n) if by_size else lem.chi_total_uniform(tau, list(sizes.values()), K)
        )
        assert realised == pytest.approx(counted, rel=EXACT, abs=1e-18)


def test_gaps_split_into_descent_and_averaging_and_telescope(followed: Followed) -> None:
    """eq. (proof-retire-loss-identity), and each silo's loss falls by what its rounds sum to."""
    result, rounds = followed
    gaps = math.fsum(a * g for r in rounds for a, g in zip(r.alpha, r.gap, strict=True))
    fell = math.fsum(a * x for r in rounds for a, x in zip(r.alpha, r.decrease, strict=True))
    assert gaps == pytest.approx(fell + math.fsum(r.error for r in rounds), abs=EXACT)
    assert fell <= personal_loss_budget(rounds) + EXACT
    assert result.updates == len(rounds)


def test_a_silo_s_loss_falls_by_what_its_rounds_sum_to() -> None:
    case, parts = targets()["two arms"], targets()["two arms"].split(4)
    result, rounds = personal_run(case, parts, ft.Personalized(weights="uniform", max_updates=3))
    for m, part in enumerate(parts):
        rows = case.problem.read(case.take(part))
        before, after = (
            float(np.mean(case.problem.losses(law, rows)))
            for law in (case.law, result.silos[f"silo {m}"].law)
        )
        fell = math.fsum(r.decrease[r.active.index(f"silo {m}")] for r in rounds if f"silo {m}" in r.active)
        assert before - after == pytest.approx(fell, abs=EXACT)


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_the_personal_loss_budget_is_the_deepest_fall_of_each_silo(weights: str) -> None:
    """sum_m alpha_m max_k {l_m(p^0) - l_m(p^k)} over the laws that m had, from the rows' losses."""
    case, parts = targets()["two arms"], targets()["two arms"].split(4)
    result, rounds = personal_run(case, parts, ft.Personalized(weights=weights, lattice=0.001, max_updates=4))
    laws = [case.law]
    for eps in result.trajectory.accepted:
        laws.append(case.problem.move(laws[-1], np.array(eps)))
    budget = 0.0
    for m, part in enumerate(parts):
        rows, tau = case.problem.read(case.take(part)), result.silos[f"silo {m}"].retired_at
        losses = [
            float(np.mean(case.problem.losses(law, rows))) for law in laws[: None if tau is None else tau + 1]
        ]
        budget += (len(part) / case.n if weights == "size" else 0.25) * (losses[0] - min(losses))
    assert budget > 1e-4
    assert personal_loss_budget(rounds) == pytest.approx(budget, abs=EXACT)


def test_each_gap_is_at_least_its_squared_eif_norm_over_two_beta(followed: Followed) -> None:
    for r in followed[1]:
        for gap, score, alpha in zip(r.gap, r.score_norm, r.alpha, strict=True):
            assert gap >= p.gap_floor(r.smoothness, float(score)) - EXACT
            total = math.fsum(a * g for a, g in zip(r.alpha, r.gap, strict=True))
            assert gap <= lem.client_factor(alpha) * total + EXACT


def test_interpolation_and_trapezoid_identities_are_exact() -> None:
    """eq. (proof-retire-interpolation) and (proof-retire-trapezoid) on monomials t^m, in fractions."""
    for m in range(9):
        value = {order: [_monomial(m, order, t) for t in (0, 1)] for order in range(4)}
        fourth = Fraction(math.perm(m, 4)) if m >= 4 else Fraction(0)
        rest = fourth * _beta_integral(m - 3, 2) if m >= 4 else 0
        third = Fraction(value[1][1] + 2 * value[1][0], 3)
        sixth = Fraction(value[2][0] - rest) / 6
        assert value[0][1] - value[0][0] == third + sixth
        rest = fourth * _beta_integral(m - 3, 1) if m >= 4 else 0
        assert value[1][1] - value[1][0] == Fraction(value[2][0] + value[2][1], 2) - Fraction(1, 2) * rest


def _monomial(m: int, order: int, t: int) -> int:
    """The derivative of t^m of that order at t in {0, 1}."""
    if order > m:
        return 0
    return math.perm(m, order) * (1 if t == 1 or m == order else 0)


def _beta_integral(a: int, b: int) -> Fraction:
    """int_0^1 t^a (1-t)^b dt."""
    return Fraction(math.factorial(a) * math.factorial(b), math.factorial(a + b + 1))
