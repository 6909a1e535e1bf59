"""Meta-analysis of the silos' own estimates: heterogeneity, a random-effects summary, and each silo left out.

With y_m the estimates (their logarithms for a ratio), v_m their squared standard errors, w_m = 1/v_m:

    Q    = sum w_m (y_m - y_w)^2,  y_w the mean with weights w_m
    tau2 = the variance between silos: DerSimonian-Laird's moment estimator, or REML
    mu   = the mean with weights 1/(v_m + tau2)
    I2   = tau2 / (tau2 + s2),  s2 = (k - 1) sum w / ((sum w)^2 - sum w^2)

The interval of mu is that of Hartung and Knapp: its variance is sum w*_m (y_m - mu)^2 / ((k - 1) sum w*_m),
w*_m = 1/(v_m + tau2), and its quantile that of t with k - 1 degrees of freedom. The prediction interval, for
the effect at another silo of the same kind, has tau2 added to that variance. All are as R's metafor has them
with test = "knha".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from scipy.special import chdtrc, stdtr, stdtrit

from fedtmle.layout import Document
from fedtmle.model.types import Array
from fedtmle.results.inference import Row, symmetric

Method = Literal["REML", "DL"]
METHODS: tuple[Method, ...] = ("REML", "DL")
MAX_STEPS = 1_000
STEP_GOAL = 1e-12  # relative to the variances


@dataclass(frozen=True, kw_only=True)
class RandomEffects:
    """The random-effects summary of k estimates, on the scale on which they were given."""

    method: Method
    estimate: float
    std_error: float  # Hartung-Knapp
    conf_low: float
    conf_high: float
    p_value: float
    prediction_low: float
    prediction_high: float
    tau2: float
    I2: float
    Q: float
    df: int
    Q_p_value: float
    weights: tuple[float, ...]  # shares


def random_effects(
    estimates: Sequence[float] | Array,
    variances: Sequence[float] | Array,
    *,
    method: Method = "REML",
    confidence: float = 0.95,
) -> RandomEffects:
    """Return the random-effects summary of at least two estimates with their variances."""
    y, v = np.asarray(estimates, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    k, w = len(y), 1.0 / v
    df = k - 1
    q = float(w @ (y - w @ y / w.sum()) ** 2)
    tau2 = _moments(q, w) if method == "DL" else _reml(y, v)
    star = 1.0 / (v + tau2)
    mu = float(star @ y / star.sum())
    error = math.sqrt(float(star @ (y - mu) ** 2) / (df * float(star.sum())))
    quantile = float(stdtrit(df, 0.5 + confidence / 2))
    typical = df * float(w.sum()) / float(w.sum() ** 2 - (w**2).sum())
    reach = quantile * math.sqrt(error**2 + tau2)
    return RandomEffects(
        method=method,
        estimate=mu,
        std_error=error,
        conf_low=mu - quantile * error,
        conf_high=mu + quantile * error,
        p_value=float(2 * stdtr(df, -abs(mu) / error)) if error > 0 else float(mu == 0),
        prediction_low=mu - reach,
        prediction_high=mu + reach,
        tau2=tau2,
        I2=tau2 / (tau2 + typical),
        Q=q,
        df=df,
        Q_p_value=float(chdtrc(df, q)),
        weights=tuple((star / star.sum()).tolist()),
    )


def _moments(q: float, w: Array) -> float:
    """Return DerSimonian and Laird's tau2 = (Q - (k - 1)) / (sum w - sum w^2 / sum w), at least 0."""
    scale = float(w.sum() - (w**2).sum() / w.sum())
    return max(0.0, (q - (len(w) - 1)) / scale)


def _reml(y: Array, v: Array) -> float:
    """Return the REML tau2, by Fisher scoring: tau2 + (y' P P y - tr P) / tr P P, at least 0."""
    tau2 = max(0.0, float(np.var(y, ddof=1) - v.mean()))
    for _ in range(MAX_STEPS):
        w = 1.0 / (v + tau2)
        P = np.diag(w) - np.outer(w, w) / w.sum()
        Py = P @ y
        step = float((Py @ Py - np.trace(P)) / np.trace(P @ P))
        after = max(0.0, tau2 + step)
        if abs(after - tau2) <= STEP_GOAL * (float(v.mean()) + after):
            return after
        tau2 = after
    return tau2


def _usable(rows: Mapping[str, Sequence[Row]], index: int) -> dict[str, Row]:
    """Return each silo's row of one estimand; silos whose standard error is zero are left out."""
    return {silo: table[index] for silo, table in rows.items() if table[index].std_error > 0}


def _summary(rows: Mapping[str, Row], method: Method, confidence: float) -> RandomEffects:
    pairs = [symmetric(row) for row in rows.values()]
    return random_effects([y for y, _ in pairs], [v for _, v in pairs], method=method, confidence=confidence)


def heterogeneity(rows: Mapping[str, Sequence[Row]], confidence: float = 0.95) -> list[Document]:
    """Return the heterogeneity of the silos' own estimates and their random-effects summary, by estimand.

    ``rows`` has the table of each silo that released its own estimate. Numbers of a ratio are on its own
    scale, except tau2 and the distances, which are on the log scale.
    """
    found: list[Document] = []
    for index, first in enumerate(next(iter(rows.values()), ())):
        usable = _usable(rows, index)
        if len(usable) < 2:
            continue
        by_method = {method: _summary(usable, method, confidence) for method in METHODS}
        chosen = by_method["REML"]
        y, v = zip(*(symmetric(row) for row in usable.values()), strict=True)
        w = [1.0 / each for each in v]
        centre = sum(a * b for a, b in zip(w, y, strict=True)) / sum(w)
        found.append(
            {
                "estimand": first.estimand,
                "silos": len(usable),
                "Q": chosen.Q,
                "df": chosen.df,
                "p_value": chosen.Q_p_value,
                "I2": chosen.I2,
                "tau2": chosen.tau2,
                "distance": {s: (a - centre) / math.sqrt(b) for s, a, b in zip(usable, y, v, strict=True)},
                "weights": dict(zip(usable, chosen.weights, strict=True)),
                "summaries": [_shown(each, first) for each in by_method.values()],
            }
        )
    return found


def _shown(summary: RandomEffects, like: Row) -> Document:
    """Return a summary on the estimand's own scale."""
    shown = asdict(summary)
    for key in ("Q", "df", "Q_p_value", "weights"):
        del shown[key]
    if like.scale.is_log:
        for key in ("estimate", "conf_low", "conf_high", "prediction_low", "prediction_high"):
            shown[key] = math.exp(shown[key])
        shown["std_error"] *= shown["estimate"]
    return shown


def leave_one_out(rows: Mapping[str, Sequence[Row]], confidence: float = 0.95) -> dict[str, list[Row]]:
    """Return the random-effects summary (REML) of the other silos' own estimates, for each silo left out.

    This needs at least three silos, because one remaining silo has no summary.
    """
    found: dict[str, list[Row]] = {}
    for left_out in rows if len(rows) >= 3 else ():
        others = {silo: table for silo, table in rows.items() if silo != left_out}
        table = []
        for index, like in enumerate(rows[left_out]):
            usable = _usable(others, index)
            if len(usable) < 2:
                break
            shown = _shown(_summary(usable, "REML", confidence), like)
            table.append(
                Row(
                    estimand=like.estimand,
                    estimate=shown["estimate"],
                    std_error=shown["std_error"],
                    conf_low=shown["conf_low"],
                    conf_high=shown["conf_high"],
                    p_value=None if like.scale.null is None else shown["p_value"],
                    scale=like.scale,
                )
            )
        if len(table) == len(rows[left_out]):
            found[left_out] = table
    return found
