"""The sequential regression written out in numpy, row by row, with no part of the package."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

NUMBERS = ("w", "b", "y")


class Longhand(NamedTuple):
    """The estimate, its standard error, and the cumulative weights, shape (horizon, N)."""

    psi: float
    std_error: float
    weights: np.ndarray


def expit(value: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-value))


def logit(p: Any) -> Any:
    return np.log(p / (1.0 - p))


def logistic(X: np.ndarray, y: np.ndarray, w: np.ndarray, offset: np.ndarray | None = None) -> np.ndarray:
    """Return the coefficients of a weighted fractional logistic regression, by Newton's method."""
    beta, base = np.zeros(X.shape[1]), np.zeros(len(X)) if offset is None else offset
    for _ in range(60):
        mean = expit(base + X @ beta)
        step = np.linalg.solve((X.T * (w * mean * (1 - mean))) @ X, X.T @ (w * (y - mean)))
        beta = beta + step
        if np.abs(step).max() < 1e-14:
            break
    return beta


def linear(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.lstsq(X * np.sqrt(w)[:, None], y * np.sqrt(w), rcond=None)[0])


def arms_under(rule: str, records: pd.DataFrame, t: int) -> np.ndarray:
    """Return the probability of arm 1 in period t under a rule."""
    n = len(records)
    if rule == "0":
        return np.zeros(n)
    if rule == "1":
        return np.ones(n)
    if rule == "threshold":
        return (records[f"l{t}"].to_numpy() >= 0.2).astype(float)
    if rule == "onset":
        columns = [f"l{s}" for s in range(1, t + 1)]
        return (records[columns].to_numpy() >= 0.5).any(axis=1).astype(float)
    return np.full(n, 0.7)


def sequential(
    records: pd.DataFrame,
    rule: str,
    horizon: int,
    outcome: str,
    *,
    survival: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
    largest: float = np.inf,
    weight: np.ndarray | None = None,
    binary: bool = True,
    carry_unfluctuated: bool = False,
    folds: np.ndarray | None = None,
    inside: np.ndarray | None = None,
) -> Longhand:
    """Return the estimate by backward regression.

    ``carry_unfluctuated`` makes the known mistake: those who are censored in a period keep the prediction
    before its fluctuation. ``folds`` has the fold of each person, from 0: models are then fitted without each
    fold, those of the outcome to what the models without the same fold predict. ``inside`` says who is in the
    stratum whose mean is estimated; models are fitted to everyone.
    """
    n, low, width = len(records), bounds[0], bounds[1] - bounds[0]
    obs = np.ones(n) if weight is None else weight / weight.mean()
    fold = np.zeros(n, dtype=int) if folds is None else folds
    own = fold, np.arange(n)
    share = np.ones(n) if inside is None else inside / np.average(inside, weights=obs)
    column = {name: records[name].to_numpy(dtype=float) for name in NUMBERS if name in records}
    column |= {
        f"{name}{t}": records[f"{name}{t}"].to_numpy(dtype=float)
        for name in "lacy"
        for t in range(1, horizon + 1)
        if f"{name}{t}" in records
    }

    def fitted(fit: Any, X: np.ndarray, y: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
        """Return coefficients without each fold; ``y`` has a row for each."""
        parts = [rows if folds is None else rows & (fold != v) for v in range(len(y))]
        return [fit(X[part], each[part], obs[part]) for part, each in zip(parts, y, strict=True)]

    number = 1 if folds is None else int(fold.max()) + 1
    at_risk, uncensored = [], []
    here = np.ones(n, dtype=bool)
    for t in range(1, horizon + 1):
        at_risk.append(here)
        here = here & (column[f"c{t}"] == 0)
        uncensored.append(here)
        if survival:
            here = here & (column[f"y{t}"] == 0)
    W, so_far = np.zeros((horizon, n)), np.ones(n)
    for t in range(1, horizon + 1):
        rows = at_risk[t - 1]
        a, level = column[f"a{t}"], column[f"l{t}"]
        lag = [column[f"a{t - 1}"]] if t > 1 else []
        X = np.column_stack([np.ones(n), column["w"], level, *lag])
        V = np.column_stack([np.ones(n), level, a])
        gone = (~uncensored[t - 1]).astype(float)
        g = np.stack([expit(X @ beta) for beta in fitted(logistic, X, np.stack([a] * number), rows)])[own]
        leaves = np.stack([expit(V @ beta) for beta in fitted(logistic, V, np.stack([gone] * number), rows)])
        p = arms_under(rule, records, t)
        ratio = np.where(a == 1, p / g, (1 - p) / (1 - g))
        so_far = np.where(uncensored[t - 1], so_far * ratio / (1 - leaves[own]), 0.0)
        W[t - 1] = np.minimum(so_far, largest)
    D, later = np.zeros(n), np.full((number, n), np.nan)
    for t in range(horizon, 0, -1):
        rows = uncensored[t - 1]
        if t == horizon:
            Z = np.stack([column[f"y{t}"] if survival else (column[outcome] - low) / width] * number)
        else:
            Z = np.where(column[f"y{t}"] == 1, 1.0, later) if survival else later
        lag = [column[f"a{t - 1}"]] if t > 1 else []

        def design(a: Any, t: int = t, lag: list[np.ndarray] = lag) -> np.ndarray:
            return np.column_stack([np.ones(n), column["w"], column[f"l{t}"], a, *lag])

        betas = fitted(logistic if binary else linear, design(column[f"a{t}"]), Z, rows)

        def predict(a: Any, betas: list[np.ndarray] = betas, design: Any = design) -> np.ndarray:
            eta = np.stack([design(a) @ beta for beta in betas])
            return logit(np.clip(expit(eta) if binary else eta, 1e-6, 1 - 1e-6))

        natural, z = predict(column[f"a{t}"])[own], Z[own]
        w = obs * W[t - 1] * share
        eps = logistic(np.ones((rows.sum(), 1)), z[rows], w[rows], natural[rows])[0]
        p = arms_under(rule, records, t)
        D[rows] += width * W[t - 1][rows] * (z[rows] - expit(natural[rows] + eps))
        shift = np.where(rows, eps, 0.0) if carry_unfluctuated else eps
        one, zero = expit(predict(np.ones(n)) + shift), expit(predict(np.zeros(n)) + shift)
        later = p * one + (1 - p) * zero
    first = later[own]
    psi = float((obs * share * first).mean())
    D = obs * share * (D + width * (first - psi))
    return Longhand(low + width * psi, float(np.sqrt(D.var(ddof=1) / n)), W)
