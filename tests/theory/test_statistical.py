"""thm:statistical and cor:inference in simulation, where p_0, R_2 and the distance of EIFs are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.theory import statistical
from fedtmle_paper import lemmas as lem

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
        x = lem.code_allowance(result.certificate.history_bits, 1, xi)
        error = abs(float(result.psi[0]) - truth - (rows.mean() - truth))
        distance = abs(truth - float(result.psi[0]))
        bound = lem.remainder_bound(1, n, 1e-3, 0.0, G, x, distance)
        assert error <= 1e-3
        misses += error > bound
    assert misses <= 40 * xi


def test_conditions_are_open_where_data_cannot_tell() -> None:
    open_ = lem.inference_conditions(n=400, d=3, H=50.0, G=2.0)
    assert (open_.remainder, open_.process) == (None, None)
    assert open_.envelope == pytest.approx(2 * math.sqrt(3) * (50 + math.log(400)) / 20)
    known = lem.inference_conditions(n=400, d=3, H=50.0, G=2.0, R_2=0.01, eif_distance=0.1)
    assert known.remainder == pytest.approx(0.2)
    assert known.process == pytest.approx(math.sqrt(50 + math.log(400)) * 0.1)


def test_schedule_and_orders() -> None:
    """delta_n sqrt(n) -> 0 at the rate 1/a_n, and log2(2 + A u) <= constant times log2(2 + u)."""
    assert statistical.tolerance_schedule(10_000, 4.0) * 100 == pytest.approx(1 / 4)
    assert statistical.negligible_tolerance(0.2, 0.01) == 0.002
    for A in (0.1, 1.0, 30.0):
        for u in (0.0, 0.5, 10.0, 1e6):
            assert math.log2(2 + A * u) <= lem.history_order_constant(A) * math.log2(2 + u) + 1e-12
    # With K bounded and a_n subpolynomial, H_K is of order log n.
    ratios = [lem.history_order(2, 3, n, math.log(n)) / math.log(n) for n in (10**4, 10**8, 10**16)]
    assert max(ratios) / min(ratios) < 1.5
