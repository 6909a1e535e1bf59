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


def softmax(X: np.ndarray, arm: np.ndarray, w: np.ndarray, arms: int) -> np.ndarray:
    """Probabilities of a multinomial logit by Newton, shape (arms, n); X of shape (n, p)."""
    n, p = X.shape
    beta, taken = np.zeros((arms - 1, p)), (arm == np.arange(1, arms)[:, None]).astype(float)
    for _ in range(60):
        powers = np.exp(np.vstack([np.zeros(n), beta @ X.T]))
        g = powers / powers.sum(axis=0)
        gradient = (w * (g[1:] - taken)) @ X
        hessian = np.block(
            [
                [X.T @ (X * (w * g[j] * ((j == k) - g[k]))[:, None]) for k in range(1, arms)]
                for j in range(1, arms)
            ]
        )
        step = np.linalg.solve(hessian, gradient.ravel())
        beta = beta - step.reshape(beta.shape)
        if np.abs(step).max() < 1e-15:
            break
    return g


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
    own: np.ndarray | None = None,  # (components, arms): where g cancels, so that pi alone is bounded
) -> Longhand:
    """One logistic fluctuation per component, sandwich by cluster."""
    n = len(y)
    y = np.where(observed, y, 0.0)
    w = w / w.mean()
    mass = (w * v).mean(axis=1)
    cancels = np.zeros(d.shape[:2], dtype=bool) if own is None else own
    bounded = np.where(cancels[:, :, None], np.maximum(pi, floor) * g, np.maximum(g * pi, floor))
    H = d * (expected / mass[:, None])[:, None, :] / bounded
    rows = np.arange(n)
    taken = H[:, arm, rows] * observed
    # Each component has a regression of its own, moved by its own covariate alone.
    eps = [irls(h[:, None], y, w * observed, offset=logit(q[arm, rows]))[0] for h in taken]
    moved = np.stack([expit(logit(q) + e * h) for e, h in zip(eps, H, strict=True)])
    m = (d * moved).sum(axis=1)
    psi = (w * v * m).mean(axis=1) / mass
    eif = w * (taken * (y - moved[:, arm, rows]) + v / mass[:, None] * (m - psi[:, None]))
    groups = rows if cluster is None else np.unique(cluster, return_inverse=True)[1]
    sums = np.zeros((len(psi), groups.max() + 1))
    np.add.at(sums.T, groups, eif.T)
    count = sums.shape[1]
    return Longhand(psi, count * np.atleast_2d(np.cov(sums, ddof=1)) / n**2, eif.T)
