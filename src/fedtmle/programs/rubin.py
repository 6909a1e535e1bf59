"""Rubin's rules: one estimate from those of m completed data sets.

With Q_j the estimates and U_j their variances, Q the mean of Q_j, U that of U_j, and B the variance of Q_j
with divisor m - 1:

    T      = U + (1 + 1/m) B
    lambda = (1 + 1/m) B / T
    nu     = 1 / (1/nu_old + 1/nu_obs),   nu_old = (m - 1) / lambda^2,
             nu_obs = (nu_com + 1) / (nu_com + 3) nu_com (1 - lambda)        (Barnard and Rubin, 1999)
    fmi    = (r + 2 / (nu + 3)) / (r + 1),   r = (1 + 1/m) B / U

nu_com are the degrees of freedom of the complete data, fmi is the fraction of missing information.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtmle.model.problem import Estimate
from fedtmle.protocol.sites import OwnEstimate, OwnStatus


@dataclass(frozen=True, kw_only=True)
class MultiplyImputed:
    """One number over m data sets: its estimate and variance T, and how much of T is due to imputation."""

    estimate: float
    variance: float
    df: float
    missing_information: float
    increase: float  # r: the relative increase in variance


def combine(estimates: Sequence[float], variances: Sequence[float], complete_df: float) -> MultiplyImputed:
    """Return the estimate of m data sets by Rubin's rules, with Barnard and Rubin's degrees of freedom."""
    m = len(estimates)
    mean, within = math.fsum(estimates) / m, math.fsum(variances) / m
    between = math.fsum((each - mean) ** 2 for each in estimates) / (m - 1)
    added = (1.0 + 1.0 / m) * between
    total = within + added
    share = added / total if total > 0 else 0.0
    observed = (complete_df + 1) / (complete_df + 3) * complete_df * (1.0 - share)
    inverse = share * share / (m - 1) + (1.0 / observed if observed > 0 else math.inf)
    df = 1.0 / inverse if inverse > 0 else math.inf
    increase = added / within if within > 0 else math.inf if added > 0 else 0.0
    information = (increase + 2.0 / (df + 3.0)) / (increase + 1.0) if math.isfinite(increase) else 1.0
    return MultiplyImputed(
        estimate=mean,
        variance=total,
        df=df,
        missing_information=information if added > 0 else 0.0,
        increase=increase,
    )


def pool_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean of psi and the matrix T over the data sets."""
    psi = np.stack([each.psi for each in estimates])
    mean = psi.mean(axis=0)
    gaps = (psi - mean).T.tolist()
    # Sums by `fsum`, not a matrix product: every party finds the same bits.
    products = [[math.fsum(a * b for a, b in zip(one, two, strict=True)) for two in gaps] for one in gaps]
    spread = np.array(products) / (len(psi) - 1)
    within = np.mean([each.covariance for each in estimates], axis=0)
    return Estimate(psi=mean, covariance=within + (1.0 + 1.0 / len(psi)) * spread)


def combined_silos(by_set: Sequence[Sequence[OwnEstimate]]) -> tuple[OwnEstimate, ...]:
    """Return each silo's own estimate over the data sets; one without an estimate in some has none."""
    found = []
    for own in zip(*by_set, strict=True):
        failed = [each for each in own if not each.status.has_estimate]
        if failed:
            found.append(failed[0])
            continue
        parts = [
            Estimate(psi=each.psi, covariance=each.covariance)
            for each in own
            if each.psi is not None and each.covariance is not None
        ]
        pooled = pool_estimates(parts)
        penalised = any(each.status is OwnStatus.PENALISED for each in own)
        status = OwnStatus.PENALISED if penalised else OwnStatus.SENT
        found.append(OwnEstimate(status=status, psi=pooled.psi, covariance=pooled.covariance))
    return tuple(found)
