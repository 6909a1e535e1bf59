"""A TMLE in plain numpy on pooled rows: the oracle, sharing no code with the package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.effects.studies import expit, logit


def irls(
    X: np.ndarray, y: np.ndarray, w: np.ndarray, offset: np.ndarray | float = 0.0, penalty=0.0
) -> np.ndarray:
    """Weighted logistic regression by Newton; X of shape (n, p), ``penalty`` a vector on squares / 2."""
    beta = np.zeros(X.shape[1])
    for _ in range(60):
        mu = expit(offset + X @ beta)
        gradient = X.T @ (w * (mu - y)) + penalty * beta
        hessian = X.T @ (X * (w * mu * (1 - mu))[:, None]) + np.diag(np.broadcast_to(penalty, len(beta)))
        step = np.linalg.lstsq(hessian, gradient, rcond=1e-12)[0]
        beta = beta - step
        if np.abs(step).max() < 1e-15:
            break
    return beta


def least_squares(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    root = np.sqrt(w)[:, None]
    return np.linalg.lstsq(X * root, y * root[:, 0], rcond=None)[0]


@dataclass(frozen=True)
class Longhand:
    """psi per component and the covariance of its estimator."""

    psi: np.ndarray
    covariance: np.ndarray
    eif: np.ndarray  # (n, components), weighted


def tmle(
    *,
    y: np.ndarray,  # unit scale, anything where missing
    observed: np.ndarray,
    arm: np.ndarray,
    q: np.ndarray,  # (arms, n)
    g: np.ndarray,
    pi: np.ndarray,
    d: np.ndarray,  # (components, arms, n)
    v: np.ndarray,  # (components, n)
    expected: np.ndarray,  # E[v | W], (components, n)
    w: np.ndarray,
    cluster: np.ndarray | None = None,
    floor: float = 0.0,
) -> Longhand:
    """One clever covariate per component, logistic fluctuation, sandwich by cluster."""
    n = len(y)
    y = np.where(observed, y, 0.0)
    w = w / w.mean()
    mass = (w * v).mean(axis=1)
    bounded = np.maximum(g * pi, floor)
    H = d * (expected / mass[:, None])[:, None, :] / bounded
    rows = np.arange(n)
    taken = H[:, arm, rows] * observed
    eps = irls(taken.T, y, w * observed, offset=logit(q[arm, rows]))
    moved = expit(logit(q) + np.einsum("r,ran->an", eps, H))
    m = (d * moved).sum(axis=1)
    psi = (w * v * m).mean(axis=1) / mass
    eif = w * (taken * (y - moved[arm, rows]) + v / mass[:, None] * (m - psi[:, None]))
    groups = rows if cluster is None else np.unique(cluster, return_inverse=True)[1]
    sums = np.zeros((len(psi), groups.max() + 1))
    np.add.at(sums.T, groups, eif.T)
    count = sums.shape[1]
    return Longhand(psi, count * np.atleast_2d(np.cov(sums, ddof=1)) / n**2, eif.T)
