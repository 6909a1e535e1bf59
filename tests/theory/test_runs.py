"""No realised quantity exceeds its bound: 208 coded runs and 64 personalised ones on random problems."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.coded import Coded
from fedtmle.protocol.codes import gamma_length
from fedtmle.protocol.lattice import divide, floating
from fedtmle.theory import communication as c
from fedtmle.theory import statistical as s
from fedtmle.theory.path import first_gradient, loss_budget, realised_smoothness, recentering
from fedtmle_paper import lemmas as lem
from fedtmle_paper.history import history_integers
from tests.premise import Premise
from tests.theory.problems import KINDS, random_case
from tests.theory.runs import CodedRun, coded_run, personal_run

ROUNDING = 1 + 1e-9  # of the comparison, where an inequality is an equality in exact arithmetic
SEEDS = 13


def smoothness(kind: str, seed: int) -> ft.Certified | ft.Estimated:
    """Certified, everywhere or along the steps, or an estimate with room, now and then the pooled one."""
    if seed % 3 == 0:
        return ft.Certified(along="everywhere" if kind == "two arms" else "segments")
    return ft.Estimated(factor=1.5, over="pooled" if seed % 3 == 1 else "silos")


@pytest.mark.parametrize("dgp", [1, 2])
@pytest.mark.parametrize("coordinates", ["raw", "whitened"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_realised_quantity_exceeds_its_bound(kind: str, coordinates: Any, dgp: int) -> None:
    for seed in range(SEEDS):
        case = random_case(kind, dgp, seed)
        algorithm = Coded(
            tolerance=case.tolerance,
            coordinates=coordinates,
            smoothness=smoothness(kind, seed),
            inner="step" if seed % 2 else "adaptive",
        )
        run = coded_run(case, case.split(2 + seed % 4, seed), algorithm)
        certificate = run.result.certificate
        assert run.result.status is ft.Status.CONVERGED
        assert not any("beta" in text for text in certificate.assumptions), "every step descended"
        assert {check.name for check in certificate.checks} >= {"rounds R", "bits B, any path", "energy"}
        for check in certificate.checks:
            assert check.realised <= check.bound * ROUNDING, (seed, check)
        check_path(run)
        check_messages(run)


def check_path(run: CodedRun) -> None:
    """The single inequalities of S.2.1 and S.2.2 along the path, in the run's coordinates."""
    path, known, result = run.path, run.known, run.result
    beta, kappa, Delta = known["beta"], known["kappa"], known["Delta"]
    silo_beta = max(beta, known["beta, realised"])
    lowest = min(path.by_step, default=beta)  # of the steps, where they settled beta
    delta, h, d = c.scaled_tolerance(run.lattice), float(run.lattice.h), run.lattice.dim
    low, high = lem.spacing_range(delta, d)
    assert low < h <= high * ROUNDING
    norms = iter(path.rounded_norms(beta))
    for r, is_step in path.transitions():
        change = np.linalg.norm(path.gradient[r + 1] - path.gradient[r], axis=1).max()
        if is_step:
            norm = next(norms)
            assert norm > 0.75 * delta / ROUNDING
            decrease = path.loss[r] - path.loss[r + 1]
            assert decrease >= c.step_decrease(norm, beta) - 1e-13
            # An estimated beta may be a little small; the excess slope costs what the integral says.
            excess = (silo_beta - beta) * (norm / beta) ** 2 / 2
            assert decrease >= lem.rounded_step_decrease(norm, beta, h, d) - excess - 1e-13
            assert change <= lem.variation_within(norm) * silo_beta / lowest * ROUNDING
        else:
            size = float(np.linalg.norm(path.u[r]))
            assert change <= lem.variation_across(silo_beta, kappa, size) * ROUNDING
            origin = path.origins()[path.update[r]]
            residual = float(np.linalg.norm(path.pooled[origin]))
            end = float(np.linalg.norm(path.pooled[r]))
            assert residual <= c.residual_bound(silo_beta, size, end) * ROUNDING  # section 2.3
    S, K = result.steps, result.updates
    assert len(path.update) == lem.rounds(S, K)
    assert result.rounds == sum(path.queried)
    if run.one_step:
        assert S == K == result.rounds - 1
        assert path.variation().max() <= kappa / lowest * sum(path.rounded_norms(beta)) * ROUNDING
    else:
        assert all(path.queried)
    length = sum(float(np.linalg.norm(path.u[r])) for r in path.endpoints())
    assert length <= lem.path_length_bound(lowest, Delta, S) * ROUNDING
    assert length <= lem.path_length_ceiling(Delta, delta) * ROUNDING
    history = history_integers(run.lattice, result.trajectory.accepted)
    total = sum(abs(value) for vector in history for value in vector)
    assert total <= lem.history_sum_bound(d, beta, Delta, S, h) * math.sqrt(beta / lowest) * ROUNDING
    assert total <= lem.history_sum_ceiling(d, beta, Delta, delta) * ROUNDING
    assert s.history_bits(history) <= lem.history_bits_bound(K, d, total) * ROUNDING
    assert s.history_bits(history) <= lem.history_bits_rate(K, d, beta, Delta, delta) * ROUNDING


def test_recentering_and_smoothness_against_constants_known_beforehand() -> None:
    """Constants of ass:recentering and ass:smooth from the formulas, not from the path that they bound.

    The mean: D(p) = y - mu and mu(eps) = mu - eps, so every silo's gradient moves by eps itself, inside a
    submodel and across: kappa = beta = 1 in raw coordinates, and G is the largest |mean_m - mu^0|.
    """
    inner: Any
    for seed, inner in itertools.product(range(6), ("step", "adaptive")):
        case = random_case("mean", 1, 300 + seed)
        parts = case.split(3, seed)
        algorithm = Coded(tolerance=1e-3, coordinates="raw", smoothness=2.0, inner=inner)
        run = coded_run(case, parts, algorithm)
        assert run.result.updates >= 1
        assert recentering(run.path).value == pytest.approx(1.0, rel=1e-9)
        assert realised_smoothness(run.path).value == pytest.approx(1.0, rel=1e-9)
        means = [float(np.mean(case.take(part))) for part in parts]
        G = max(abs(mean - case.law.mu) for mean in means)
        assert first_gradient(run.path).value == pytest.approx(G, rel=1e-9)
        pooled = float(np.mean(case.pooled()))
        Delta = ((pooled - case.law.mu) ** 2 - (pooled - run.result.law.mu) ** 2) / 2
        assert loss_budget(run.path).value == pytest.approx(Delta, rel=1e-6)
        S, beta = run.result.steps, 2.0
        variation = run.path.variation().max()
        assert variation <= c.variation_bound(beta, 1.0, Delta, S) * ROUNDING
        if inner == "step":  # kappa/beta of the steps' lengths, exactly: gradients move by eps
            assert variation == pytest.approx(sum(run.path.rounded_norms(beta)) / beta, rel=1e-9)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("transport")])
def test_recentering_from_the_influence_function_itself(kind: str) -> None:
    """kappa of a path again from D evaluated row by row at the laws, without the path's gradients."""
    case = random_case(kind, 2, 321)
    parts = case.split(3)
    run = coded_run(case, parts, Coded(tolerance=case.tolerance, coordinates="whitened"))
    C, B = floating(run.lattice.C), floating(run.lattice.B)
    rows = [case.problem.read(case.take(part)) for part in parts]

    def means(law: Any) -> np.ndarray:
        return np.array([case.problem.eif(law, own, law.psi).mean(axis=0) for own in rows])

    law, slopes = case.law, []
    for eps in run.result.trajectory.accepted:
        after = case.problem.move(law, np.array(eps))
        change = (means(after) - means(law)) @ C.T
        slopes.append(np.linalg.norm(change, axis=1).max() / np.linalg.norm(B.T @ np.array(eps)))
        law = after
    assert recentering(run.path).value == pytest.approx(max(slopes), rel=1e-6)


def check_messages(run: CodedRun) -> None:
    """Code lengths of the first and the later messages, from z and q computed again from the gradients."""
    path, known = run.path, run.known
    h, M, d, R = float(run.lattice.h), len(path.share), run.lattice.dim, sum(path.queried)
    asked = list(path.queried)
    z = np.rint(path.gradient[asked] / h).astype(int)
    sizes, n = list(run.result.sizes.values()), run.result.n
    q = np.array([[divide(int(total), n) for total in sizes @ each] for each in z])
    pooled_gradients = path.pooled[asked]
    error = np.linalg.norm(h * q - pooled_gradients, axis=1).max()
    assert error <= lem.rounding_bound(h, d) * ROUNDING

    def cost(values: np.ndarray) -> int:
        integers = values.ravel().tolist()
        length = sum(map(gamma_length, integers))
        assert length <= lem.code_length_bound(integers)
        return length

    first = cost(z[0]) + M * cost(q[0]) + 2 * M
    assert first <= lem.first_message_bits(M, d, known["G"], h)
    up, down = cost(np.diff(z, axis=0)), M * cost(np.diff(q, axis=0))
    variation = float(path.variation().mean())
    pooled = float(np.linalg.norm(np.diff(pooled_gradients, axis=0), axis=1).sum())
    assert up <= lem.upload_bits(M, d, R, h, variation)
    assert down <= lem.broadcast_bits(M, d, R, h, pooled)
    assert first + up + down + 2 * M * (R - 1) == run.result.bits


@pytest.mark.parametrize("dgp", [1, 2])
@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_averaging_error_or_gap_exceeds_its_bound(kind: str, weights: str, dgp: int) -> None:
    with has_gap:
        averaging_and_gaps(kind, weights, dgp)


has_gap = Premise("the silo's gap has a bound", at_least=0.1)


def averaging_and_gaps(kind: str, weights: str, dgp: int) -> None:
    wide = 20 if kind == "mean" else 1  # its fits are larger
    for seed, lattice in ((0, None), (1, None), (2, 0.02 * wide), (3, 0.1 * wide)):
        case = random_case(kind, dgp, 100 + seed)
        algorithm = ft.Personalized(weights=weights, max_updates=3, lattice=lattice)
        result, followed = personal_run(case, case.split(2 + seed % 3, seed), algorithm)
        certificate = result.certificate
        assert len(certificate.averaging) == len(followed) == result.updates
        for line in certificate.averaging:
            assert -1e-12 <= line.error <= line.quadratic_bound * ROUNDING + 1e-13, (seed, line)
            assert math.isfinite(line.fourth_order_bound)  # rounded fits have one too
            assert line.error <= line.fourth_order_bound * ROUNDING + 1e-13, (seed, line)
        for check in certificate.checks:
            assert check.realised <= check.bound * ROUNDING + 1e-13, (seed, check)
        for local in result.silos.values():
            if has_gap.holds(local.gap_bound is not None):
                assert math.isfinite(local.gap_bound)
