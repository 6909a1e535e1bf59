"""The further parts of the document of a study of time to an event, and of one of treatment over time.

The first has the grid, curves and numbers at risk; the second has periods, adherence and weights.
"""

from __future__ import annotations

import math

import numpy as np

from fedtmle.layout import Document
from fedtmle.programs.regimes import Adherence, RegimeDetails
from fedtmle.programs.study import Study
from fedtmle.programs.time import AtRisk, TimeDetails
from fedtmle.results.inference import imputed_rows, mean_intervals, symmetric, table_rows
from fedtmle.runtime.result import Result
from fedtmle.targets.diagnostics import WEIGHT_EDGES
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.time.estimands import AbstractTimeEffect


def time_document(study: Study, details: TimeDetails, result: Result, silos: int) -> Document:
    """Return the grid, the counts of events, the curve of each arm, and the numbers at risk."""
    target = study.target
    if not isinstance(target, AbstractTimeEffect):
        raise TypeError("this study is not of time to an event")
    return {
        "grid": {
            "edges": list(target.edges),
            "horizons": list(target.horizons),
            "causes": list(target.causes),
            "measure": type(target).__name__,
            "subperiods": target.subperiods,
        },
        "finer_grid": None if result.psi is None else _finer_grid(study, target, details, result),
        "event_counts": [list(counts) for counts in details.event_counts],
        "events_hidden_in": [silos - by for by in details.disclosing_events],
        "curves": [] if result.psi is None else _curves(study, target, details, result),
        "at_risk": None if details.at_risk is None else _at_risk(details.at_risk, silos),
    }


def _finer_grid(
    study: Study, target: AbstractTimeEffect, details: TimeDetails, result: Result
) -> Document | None:
    """Return the estimates on a finer grid, compared with the study's own; None if the study asks for none.

    ``difference`` is the distance from the study's own estimate in standard errors, on the log scale for
    ratios.
    """
    finer, psi, covariance = details.finer, result.psi, result.covariance
    if finer is None or psi is None or covariance is None:
        return None
    shown: list[Document] = []
    if finer.estimate is not None:
        if details.imputed:
            own, _, _ = imputed_rows(study, details.components, details.imputed, result.n)
            rows, _, _ = imputed_rows(study, details.components, finer.imputed, result.n)
        else:
            own, _ = table_rows(study, details.components, psi, covariance)
            rows, _ = table_rows(study, details.components, finer.estimate.psi, finer.estimate.covariance)
        for row, like in zip(rows, own, strict=True):
            (there, _), (here, variance) = symmetric(row), symmetric(like)
            shown.append({**row.to_dict(), "difference": (there - here) / math.sqrt(variance)})
    return {
        "subperiods": finer.subperiods,
        "periods": len(target.edges) * finer.subperiods,
        "estimates": shown,
        "reason": finer.reason,
    }


def _curves(study: Study, target: AbstractTimeEffect, details: TimeDetails, result: Result) -> list[Document]:
    """Return each arm's measure by horizon, one curve for each population, arm and cause.

    Bands hold for all horizons of all curves at once. Bands of risks and survival are clipped to [0, 1].
    """
    psi, covariance = result.psi, result.covariance
    if psi is None or covariance is None:
        return []
    found = mean_intervals(study, covariance, details.imputed, result.n)
    error, pointwise, band = found.std_error, found.pointwise, found.simultaneous
    low, high = (-math.inf, math.inf) if target.is_area else (0.0, 1.0)

    def within(values: list[float]) -> list[float]:
        return [min(max(value, low), high) for value in values]

    curves: list[Document] = []
    horizons, at = target.horizons, 0
    for group in details.regimes:
        for cause in target.shown_causes:
            place = range(at, at := at + len(horizons))
            values = [target.value_of(float(psi[r]), h) for r, h in zip(place, horizons, strict=True)]
            errors = [float(error[r]) for r in place]
            inner = [float(pointwise[r] * error[r]) for r in place]
            outer = [float(band[r] * error[r]) for r in place]
            curves.append(
                {
                    "arm": group.regime.label,
                    "population": group.population.label,
                    "cause": None if cause < 0 else target.causes[cause],
                    "horizons": list(horizons),
                    "times": [target.edges[h - 1] for h in horizons],
                    "estimate": values,
                    "std_error": errors,
                    "conf_low": within([v - e for v, e in zip(values, inner, strict=True)]),
                    "conf_high": within([v + e for v, e in zip(values, inner, strict=True)]),
                    "band_low": within([v - e for v, e in zip(values, outer, strict=True)]),
                    "band_high": within([v + e for v, e in zip(values, outer, strict=True)]),
                }
            )
    return curves


def _at_risk(shown: AtRisk, silos: int) -> Document:
    """Return people at risk per arm and period, over the silos that disclose them; None if none does."""
    return {
        "periods": list(shown.periods),
        "counts": [
            [count if by else None for count, by in zip(counts, disclosing, strict=True)]
            for counts, disclosing in zip(shown.counts, shown.silos, strict=True)
        ],
        "hidden_in": [[silos - by for by in disclosing] for disclosing in shown.silos],
    }


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
