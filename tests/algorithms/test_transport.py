"""The paper's transport target end to end: its endpoint, and its path against longhand numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import special

import fedtmle as ft
from fedtmle_paper import benchmark
from fedtmle_paper.optimal_transport import OptimalTransport

DGPS = [benchmark.gaussian_mixture, benchmark.curved_mixture]
Z = np.array([(-2, -2), (2, -2), (-2, 2), (2, 2)], dtype=float)


@pytest.mark.parametrize("generate", DGPS)
def test_targeted_to_1e9_psi_is_the_direct_pooled_solution(generate: Callable[..., Any]) -> None:
    rng = np.random.default_rng(3)
    problem = OptimalTransport()
    law, rows = problem.start(generate(2_000, rng)), generate(10_000, rng)
    parts = benchmark.random_partition(benchmark.client_sizes(10_000, 10), rng)
    silos = {f"silo {m}": rows[part] for m, part in enumerate(parts)}
    result = ft.solve(problem, law, silos, ft.Gradient(tolerance=1e-9, optimizer=ft.Newton()))
    assert result.status is ft.Status.CONVERGED
    assert np.abs(result.psi - problem.direct(rows)).max() <= 1e-8
    # ... which is the root of the empirical first-order equation, written longhand.
    shares = special.softmax(np.r_[result.psi, 0] - 0.5 * ((rows[:, None] - Z) ** 2).sum(-1), axis=1)
    assert np.abs(shares.mean(axis=0) - 0.25).max() <= 1e-8


@dataclass
class Longhand:
    """S.3 in plain numpy: densities on Gauss-Legendre panels, no grid of ours, no kernel of ours."""

    pilot: np.ndarray
    rows: np.ndarray

    def __post_init__(self) -> None:
        x, w = np.polynomial.legendre.leggauss(5)
        lows, highs = self.pilot.min(axis=0) - 4.5, self.pilot.max(axis=0) + 4.5
        axes, weights = [], []
        for low, high in zip(lows, highs, strict=True):
            edges = np.linspace(low, high, int(np.ceil((high - low) / 0.45)) + 1)
            half = np.diff(edges)[:, None] / 2
            axes.append((edges[:-1, None] + half * (x + 1)).ravel())
            weights.append((half * w).ravel())
        self.nodes = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
        self.log_p = {"nodes": self.kde(self.nodes), "rows": self.kde(self.rows)}
        self.weights = np.outer(*weights).ravel()
        self.theta = np.zeros(3)

    def kde(self, points: np.ndarray) -> np.ndarray:
        n0 = len(self.pilot)
        covariance = np.cov(self.pilot.T) * n0 ** (-1 / 3)
        root = np.linalg.inv(np.linalg.cholesky(covariance))
        log_norm = np.log(2 * np.pi) + 0.5 * np.linalg.slogdet(covariance)[1] + np.log(n0)
        out = np.empty(len(points))
        for start in range(0, len(points), 2000):
            block = (points[start : start + 2000, None] - self.pilot) @ root.T
            out[start : start + 2000] = special.logsumexp(-0.5 * (block**2).sum(-1), axis=1) - log_norm
        return out

    def shares(self, points: np.ndarray) -> np.ndarray:
        return special.softmax(np.r_[self.theta, 0] - 0.5 * ((points[:, None] - Z) ** 2).sum(-1), axis=1)[
            :, :3
        ]

    def recentre(self) -> None:
        """Psi, H and D at the current density."""
        self.p = np.exp(self.log_p["nodes"]) * self.weights
        for _ in range(30):
            s = self.shares(self.nodes)
            H = np.diag(self.p @ s) - s.T @ (s * self.p[:, None])
            self.theta = self.theta - np.linalg.solve(H, self.p @ s - 0.25)
        s = self.shares(self.nodes)
        H = np.diag(self.p @ s) - s.T @ (s * self.p[:, None])
        self.D = {
            "nodes": -np.linalg.solve(H, (s - 0.25).T).T,
            "rows": -np.linalg.solve(H, (self.shares(self.rows) - 0.25).T).T,
        }

    def log_z(self, eps: np.ndarray) -> float:
        return float(np.log(self.p @ (2 / (1 + np.exp(2 * self.D["nodes"] @ eps)))))

    def loss(self, eps: np.ndarray) -> float:
        factor = np.logaddexp(0, 2 * self.D["rows"] @ eps) - np.log(2)
        return float(np.mean(-self.log_p["rows"] + factor)) + self.log_z(eps)

    def gradient(self, eps: np.ndarray) -> np.ndarray:
        rows = (2 * special.expit(2 * self.D["rows"] @ eps)[:, None] * self.D["rows"]).mean(axis=0)
        factor = self.p * special.expit(-2 * self.D["nodes"] @ eps)
        slope = -2 * special.expit(2 * self.D["nodes"] @ eps)[:, None] * self.D["nodes"]
        return rows + factor @ slope / factor.sum()

    def accept(self, eps: np.ndarray) -> None:
        z = self.log_z(eps)
        for where in ("nodes", "rows"):
            self.log_p[where] = self.log_p[where] - np.logaddexp(0, 2 * self.D[where] @ eps) + np.log(2) - z
        self.recentre()


@pytest.mark.parametrize("generate", DGPS)
def test_twenty_raw_rounds_agree_with_longhand_numpy(generate: Callable[..., Any]) -> None:
    """The root is blind to the density, so the path is compared: loss and residual to 1e-6."""
    rng = np.random.default_rng(5)
    pilot, rows = generate(400, rng), generate(1_500, rng)
    step, inner, updates = 0.001, 5, 4
    problem = OptimalTransport()
    parts = benchmark.random_partition(benchmark.client_sizes(1_500, 5), rng)
    result = ft.solve(
        problem,
        problem.start(pilot),
        {f"silo {m}": rows[part] for m, part in enumerate(parts)},
        ft.Gradient(
            tolerance=1e-12,
            optimizer=ft.GradientDescent(step=step, max_steps=inner, stop=1e-9),
            max_updates=updates,
        ),
        observe=True,
    )
    longhand = Longhand(pilot, rows)
    longhand.recentre()
    points = iter(zip(result.trajectory.points, result.trajectory.loss_by_round, strict=True))
    for k in range(updates + 1):
        eps = np.zeros(3)
        for t in range(inner if k < updates else 1):
            point, loss = next(points)
            assert (point.update, point.step) == (k, t)
            g = longhand.gradient(eps)
            assert point.gradient_norm == pytest.approx(float(np.linalg.norm(g)), abs=1e-6)
            assert loss == pytest.approx(longhand.loss(eps), abs=1e-6)
            eps = eps - step * g
        if k < updates:
            assert np.allclose(result.trajectory.accepted[k], eps, atol=1e-7)
            longhand.accept(eps)
    assert next(points, None) is None
    assert result.rounds == updates * inner + 1 == 21
    assert result.residual < 0.5 * result.trajectory.residual[0]  # the path really moved
