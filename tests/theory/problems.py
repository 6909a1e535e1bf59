"""Small random problems: every target and fluctuation on data of both of the paper's DGPs."""

from __future__ import annotations

import numpy as np

import fedtmle as ft
from fedtmle_core.types import IntArray
from fedtmle_paper.benchmark import curved_mixture, gaussian_mixture
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm
from tests.cases import Case

KINDS = ("mean", "two arms", "transport, logistic", "transport, tilt")
GENERATORS = {1: gaussian_mixture, 2: curved_mixture}


def random_case(kind: str, dgp: int, seed: int) -> Case:
    """A problem whose size, start, tolerance and data depend on ``seed``."""
    rng = np.random.default_rng([seed, dgp, KINDS.index(kind)])
    n = int(rng.integers(60, 220))
    rows = GENERATORS[dgp](n, rng)
    fine = float(10 ** rng.uniform(-5, -2))
    if kind == "mean":
        y = np.clip(rows[:, seed % 2], -10, 30)
        mean = ft.Mean(bounds=(-10.0, 30.0))
        return Case(kind, mean, mean.start(float(rng.uniform(-2, 4))), lambda at: y[at], n, fine)
    if kind == "two arms":
        return _two_arms(rows, rng, fine)
    fluctuation = LogisticFluctuation() if kind == "transport, logistic" else ExponentialTilt()
    problem = OptimalTransport(fluctuation=fluctuation, spacing=0.25)
    law = problem.start(GENERATORS[dgp](int(rng.integers(150, 300)), rng))
    return Case(kind, problem, law, lambda at: rows[at], n, float(rng.uniform(0.3, 0.8)))


def _two_arms(rows: np.ndarray, rng: np.random.Generator, tolerance: float) -> Case:
    n, w = len(rows), np.clip(rows[:, 0], -4, 4)
    g = 1 / (1 + np.exp(-0.4 * w))
    a = (rng.random(n) < g).astype(float)
    columns = {
        "outcome": np.clip(rows[:, 1] + a, -19, 19),
        "treatment": a,
        "Q1": np.clip(1.0 + rng.normal() + 0.3 * w, -19, 19),
        "Q0": np.clip(rng.normal() + 0.3 * w, -19, 19),
        "g": g,
    }
    problem = TwoArm(outcome_bounds=(-20.0, 20.0), weight_ceiling=32.0)

    def take(at: IntArray) -> dict[str, np.ndarray]:
        return {name: column[at] for name, column in columns.items()}

    return Case("two arms", problem, problem.start(), take, n, tolerance)
