"""thm:statistical and cor:inference in simulation, where p_0, R_2 and the distance of EIFs are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.theory import statistical
from fedtmle_paper import lemmas as lem
from fedtmle_paper.optimal_transport import OptimalTransport

ATOMS = np.array([0.0, 1.0, 2.0, 7.0])
MASSES = np.array([0.4, 0.3, 0.2, 0.1])


def test_remainder_bound_covers_the_error_of_coded_runs() -> None:
    """The mean: R_2 = 0 and D(p) - D(p_0) = Psi(p_0) - Psi(p), so every term of the bound is known."""
    rng = np.random.default_rng(30)
    problem = ft.Mean(bounds=(0.0, 8.0))
    truth, n, xi, G = float(ATOMS @ MASSES), 60, 0.1, 8.0
    misses = 0
    for _ in range(40):
        rows = rng.choice(ATOMS, size=n, p=MASSES)
        silos = {"a": rows[:25], "b": rows[25:]}
        result = ft.solve(problem, problem.start(4.0), silos, ft.Coded(tolerance=1e-3))
        x = statistical.code_allowance(result.certificate.history_bits, 1, xi)
        error = abs(float(result.psi[0]) - truth - (rows.mean() - truth))
        distance = abs(truth - float(result.psi[0]))
        bound = lem.remainder_bound(1, n, 1e-3, 0.0, G, x, distance)
        assert error <= 1e-3
        misses += error > bound
    assert misses <= 40 * xi


SPREAD = 0.9
CENTRES = np.array([[-1.5, 0.5], [1.0, 1.2], [0.8, -1.4]])
SHARES = np.array([0.5, 0.3, 0.2])


def gauss_hermite(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (2, N) and masses of the Gaussian mixture: a product rule at each centre."""
    x, w = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack([axis.ravel() for axis in np.meshgrid(x, x)])
    mass = np.outer(w, w).ravel() / (2 * math.pi)
    nodes = np.concatenate([centre[:, None] + SPREAD * grid for centre in CENTRES], axis=1)
    return nodes, np.concatenate([share * mass for share in SHARES])


def test_remainder_bound_where_the_influence_function_moves() -> None:
    """Transport: D(p^K) - D(p_0) is no constant, so the process term is needed, and R_2 is not zero.

    All terms of eq:plugin-expansion are computed, P_0 by Gauss-Hermite quadrature. Start, C and beta are no
    functions of the sample, so that H_K is the history's code alone.
    """
    rng = np.random.default_rng(31)

    def draw(count: int) -> np.ndarray:
        at = rng.choice(3, size=count, p=SHARES)
        return CENTRES[at] + SPREAD * rng.normal(size=(count, 2))

    problem = OptimalTransport(spacing=0.25)
    nodes, masses = gauss_hermite(30)
    truth = problem.functional(nodes, masses, None)
    law, n, xi, runs, delta = problem.start(draw(120)), 150, 0.1, 12, 2e-3
    misses = needed = 0
    for _ in range(runs):
        rows = draw(n)
        silos = {"a": rows[:60], "b": rows[60:]}
        result = ft.solve(problem, law, silos, ft.Coded(tolerance=delta, smoothness=2.0))
        reached = result.law.functional
        difference = reached.eif(rows.T) - truth.eif(rows.T)
        population = reached.eif(nodes) - truth.eif(nodes)
        process = difference.mean(axis=1) - population @ masses
        R_2 = reached.psi - truth.psi + reached.eif(nodes) @ masses
        error = reached.psi - truth.psi - truth.eif(rows.T).mean(axis=1)
        expansion = -reached.eif(rows.T).mean(axis=1) + process + R_2
        np.testing.assert_allclose(error, expansion, atol=1e-9)  # eq:plugin-expansion, P_0 D(p_0) = 0
        G = max(float(np.abs(f.vertices).max()) for f in (reached, truth))
        x = statistical.code_allowance(result.certificate.history_bits, 3, xi)
        distance = math.sqrt(float((population**2).sum(axis=0) @ masses))
        size, remainder = float(np.linalg.norm(error)), float(np.linalg.norm(R_2))
        assert np.linalg.norm(process) <= statistical.process_bound(3, n, G, x, distance)
        misses += size > lem.remainder_bound(3, n, delta, remainder, G, x, distance)
        needed += size > delta + remainder
        # The bound is the sum of its parts, each to be seen: no part of it is left out or counted twice.
        parts = delta + remainder + math.sqrt(2 * x / n) * distance + 4 * G * math.sqrt(3) * x / (3 * n)
        assert lem.remainder_bound(3, n, delta, remainder, G, x, distance) == pytest.approx(parts, rel=1e-12)
    assert misses <= runs * xi
    assert needed >= runs / 3  # without the process term the bound would be broken


def test_conditions_are_open_where_data_cannot_tell() -> None:
    open_ = statistical.inference_conditions(n=400, d=3, H=50.0, G=2.0)
    assert (open_.remainder, open_.process) == (None, None)
    assert open_.envelope == pytest.approx(2 * math.sqrt(3) * (50 + math.log(400)) / 20)
    known = statistical.inference_conditions(n=400, d=3, H=50.0, G=2.0, R_2=0.01, eif_distance=0.1)
    assert known.remainder == pytest.approx(0.2)
    assert known.process == pytest.approx(math.sqrt(50 + math.log(400)) * 0.1)


def test_schedule_and_orders() -> None:
    """delta_n sqrt(n) -> 0 at the rate 1/a_n, and log2(2 + A u) <= constant times log2(2 + u)."""
    assert statistical.tolerance_schedule(10_000, 4.0) * 100 == pytest.approx(1 / 4)
    assert statistical.negligible_tolerance(0.2, 0.01) == 0.002
    for A in (0.1, 1.0, 30.0):
        for u in (0.0, 0.5, 10.0, 1e6):
            assert math.log2(2 + A * u) <= lem.history_order_constant(A) * math.log2(2 + u) + 1e-12
    assert lem.history_order_constant(1.0) == 1  # attained: both logarithms are the same
    # eq:history-length at delta_n is at most 20 (1 + log2 A_+)/log 2 times the order, and nearly attains it.
    for A, n in ((1.0, 10**8), (9.0, 10**4)):
        K, d, a_n = 30, 9, math.log(n)
        delta = statistical.tolerance_schedule(n, a_n)
        realised = statistical.history_bits_ceiling(K, d, A, 1.0, delta)
        bound = 20 * lem.history_order_constant(A) / math.log(2) * lem.history_order(K, d, n, a_n)
        assert realised <= bound * (1 + 1e-12)
        if A == 1.0:
            assert realised >= 0.99 * bound
    # With K bounded and a_n subpolynomial, H_K is of order log n.
    ratios = [lem.history_order(2, 3, n, math.log(n)) / math.log(n) for n in (10**4, 10**8, 10**16)]
    assert max(ratios) / min(ratios) < 1.5
