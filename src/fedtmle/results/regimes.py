"""The further parts of the document of a study of treatment over time: periods, adherence and weights."""

from __future__ import annotations

import numpy as np

from fedtmle.layout import Document
from fedtmle.programs.regimes import Adherence, RegimeDetails
from fedtmle.programs.study import Study
from fedtmle.results.inference import mean_intervals
from fedtmle.runtime.result import Result
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.statistics import WEIGHT_EDGES


def regime_document(study: Study, details: RegimeDetails, result: Result, silos: int) -> Document:
    """Return counts by period, each rule's mean or risk, who followed the rules, and their weights."""
    target = study.target
    if not isinstance(target, AbstractRegimeEffect):
        raise TypeError("this study is not of treatment over time")
    tally = details.tally
    uncensored = tally.at_risk[0] - sum(tally.censored)
    return {
        "arms": [rule.label for rule in target.rules],
        "first_arms": dict(zip(target.arms, tally.arms, strict=False)),
        "participants": {
            "records": result.n + details.omitted,
            "omitted": details.omitted,
            "analysed": result.n,
            "with_outcome": uncensored,
        },
        "periods": [
            {"period": t + 1, "at_risk": risk, "censored": censored, "events": events}
            for t, (risk, censored, events) in enumerate(
                zip(tally.at_risk, tally.censored, tally.events, strict=True)
            )
        ],
        "weight_bound": 1.0 / details.g_floor if details.g_floor else None,
        "rules": _means(study, target, details, result),
        "adherence": None
        if details.adherence is None
        else [
            {"rule": rule.label, **_followed(details.adherence, k, tally.at_risk, silos)}
            for k, rule in enumerate(target.rules)
        ],
    }


def _means(
    study: Study, target: AbstractRegimeEffect, details: RegimeDetails, result: Result
) -> list[Document]:
    """Return each rule's mean, or its risks by horizon, with pointwise intervals and simultaneous bands."""
    if result.psi is None or result.covariance is None:
        return []
    everyone = slice(len(target.chains))  # strata come after
    found = mean_intervals(study, result.covariance, details.imputed, result.n, everyone)
    low, high = study.outcome_bounds

    def within(values: np.ndarray) -> list[float]:
        return [float(value) for value in np.clip(values, low, high)]

    horizons = list(target.horizons) or [target.periods]
    shown: list[Document] = []
    for k, rule in enumerate(target.rules):
        place = slice(k * len(horizons), (k + 1) * len(horizons))
        value, spread = np.asarray(result.psi[place]), found.std_error[place]
        inner, outer = found.pointwise[place] * spread, found.simultaneous[place] * spread
        shown.append(
            {
                "rule": rule.label,
                "horizons": horizons,
                "estimate": [float(each) for each in value],
                "std_error": [float(each) for each in spread],
                "conf_low": within(value - inner),
                "conf_high": within(value + inner),
                "band_low": within(value - outer),
                "band_high": within(value + outer),
            }
        )
    return shown


def _followed(adherence: Adherence, rule: int, at_risk: tuple[int, ...], silos: int) -> Document:
    """Return counts over the silos that disclose them; None if none does."""
    followers, weights = adherence.followers[rule], adherence.weights[rule]
    return {
        "at_risk": list(at_risk[: len(followers)]),
        "followers": [cell.count if cell.silos else None for cell in followers],
        "hidden_in": [silos - cell.silos for cell in followers],
        "weight_edges": list(WEIGHT_EDGES),
        "weight_counts": [[cell.count if cell.silos else None for cell in period] for period in weights],
        "weights_hidden_in": [silos - min(cell.silos for cell in period) for period in weights],
    }
