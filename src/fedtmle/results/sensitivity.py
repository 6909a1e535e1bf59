"""What an estimate rests on: few records, the bound of propensity scores, or the absence of a confounder.

The E-value of a risk ratio RR >= 1 is RR + sqrt(RR (RR - 1)): a confounder that is associated with both
treatment and outcome by risk ratios of at least this size could explain the estimate away, a weaker one could
not (VanderWeele and Ding 2017). Other measures are converted to a risk ratio first.

The bias from an omitted variable is at most S C_Y C_A (Chernozhukov et al. 2022, "Long story short"),

    S^2 = E[(Y - Q)^2] E[alpha^2],   C_Y^2 = the share of the residual outcome variance that it explains,
    C_A^2 = R / (1 - R), R the share of the variance of alpha (the weights H) that it adds,

so that a variable with both shares at r could move the estimate by S r / sqrt(1 - r). The robustness value is
the r at which this is the distance to "no effect" (Cinelli and Hazlett 2020): with f the distance over S,
(sqrt(f^4 + 4 f^2) - f^2) / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from fedtmle.errors import InputError
from fedtmle.layout import Document
from fedtmle.programs.flow import Details, StudyDetails
from fedtmle.programs.regimes import RegimeDetails
from fedtmle.programs.study import Study
from fedtmle.programs.time import TimeDetails
from fedtmle.results.inference import summaries, table_rows
from fedtmle.targets.diagnostics import Balance
from fedtmle.targets.effects.components import InStratum, Static
from fedtmle.targets.effects.estimands import Summary
from fedtmle_core.types import Array

# How far an estimate rests on few records, or on the bound of its propensity scores: stated thresholds.

TRUNCATED_SHARE = 0.05  # warn if a larger share of the records has a score below its bound
EFFECTIVE_SHARE = 0.25  # warn if the effective sample size is a smaller share of the records
FEWEST_EFFECTIVE = 20.0  # warn if it is smaller, where the number of records is not known
LARGEST_SHARE = 0.1  # warn if one record may carry more of the weight
THRESHOLDS = {
    "truncated_share": TRUNCATED_SHARE,
    "effective_share": EFFECTIVE_SHARE,
    "fewest_effective": FEWEST_EFFECTIVE,
    "largest_share": LARGEST_SHARE,
}


@dataclass(frozen=True, kw_only=True)
class Support:
    """The weights behind one component's mean.

    ``records`` is the number of records with a weight, or None if it is not known. ``largest_share`` is an
    upper bound on one record's share of the weight.
    """

    name: str
    effective: float
    records: int | None = None
    largest_share: float | None = None


def supports(study: Study, details: Details) -> list[Support]:
    """Return the weights behind each component's mean, or behind each regime for times to an event."""
    sizes = zip(details.groups, details.overlap.effective_sizes, strict=True)
    if not isinstance(details, StudyDetails):
        return [Support(name=name, effective=size) for name, size in sizes]
    found = []
    for (name, size), component, share in zip(
        sizes, details.components, details.overlap.largest_shares, strict=True
    ):
        records = None
        if isinstance(component.regime, Static) and not isinstance(component.population, InStratum):
            records = details.observed_counts[study.target.arms.index(component.regime.arm)]
        found.append(Support(name=name, effective=size, records=records, largest_share=share))
    return found


def overlap_warnings(study: Study, details: Details, n: int) -> list[str]:
    """Return a warning for each threshold that is crossed; empty if overlap is good."""
    if study.target.treatment is None and "missingness" not in details.nuisances:
        return []
    warnings = []
    for arm, count in zip(study.target.arms, details.overlap.truncated, strict=False):
        if count > TRUNCATED_SHARE * n:
            warnings.append(
                f"poor overlap: the propensity score of arm '{arm}' is below its bound {details.g_floor:.3g} "
                f"in {count:,} of {n:,} records ({count / n:.0%}, warned above {TRUNCATED_SHARE:.0%}); the "
                "estimate depends on the bound. See the estimates under other bounds, restrict the cohort, "
                "or ask for ATO"
            )
    for support in supports(study, details):
        warnings += _support_warnings(support)
    return warnings


def _support_warnings(support: Support) -> list[str]:
    name, effective, records = support.name, support.effective, support.records
    if records is None:
        if effective < FEWEST_EFFECTIVE:
            return [
                f"poor overlap: {name} rests on an effective sample size of {effective:,.1f} (warned below "
                f"{FEWEST_EFFECTIVE:g})"
            ]
        return []
    if effective < EFFECTIVE_SHARE * records:
        return [
            f"poor overlap: the weights for {name} make {records:,} records count as {effective:,.1f} "
            f"({effective / records:.0%}, warned below {EFFECTIVE_SHARE:.0%})"
        ]
    if (support.largest_share or 0.0) > LARGEST_SHARE and effective < 0.5 * records:
        return [
            f"poor overlap: one record may carry up to {support.largest_share:.0%} of the weight for {name} "
            f"(warned above {LARGEST_SHARE:.0%})"
        ]
    return []


def overlap_document(study: Study, details: Details, n: int) -> Document:
    """Return the thresholds, and what they are compared with."""
    return {
        "is_poor": bool(overlap_warnings(study, details, n)),
        "thresholds": dict(THRESHOLDS),
        "truncated_share": [count / n for count in details.overlap.truncated],
        "components": [
            {
                "name": support.name,
                "effective": support.effective,
                "records": support.records,
                "largest_share": support.largest_share,
            }
            for support in supports(study, details)
        ],
    }


def ladder_document(study: Study, details: Details) -> list[Document]:
    """Return the one-step estimates under other bounds on the propensity score, in rising order.

    Empty if covariates are imputed, because the estimates would be those of one imputed data set.
    """
    if not isinstance(details, StudyDetails) or details.diagnostics is None or details.imputed:
        return []
    rungs: list[Document] = []
    for rung in details.diagnostics.ladder:
        if not rung.has_error:
            continue
        low = study.outcome_bounds[0] * np.array(details.problem.combination).sum(axis=1)[: len(rung.mean)]
        psi, covariance = rung.estimate(low)
        rows, _ = table_rows(study, details.components[: len(psi)], psi, covariance)
        people: Document = {"people": list(rung.people)} if rung.people else {}
        rungs.append({"bound": rung.bound, "estimates": [row.to_dict() for row in rows], **people})
    return rungs


def balance_document(study: Study, details: Details, silos: int) -> Document | None:
    """Return the covariates by arm, and their standardised differences before and after weighting.

    For treatment over time, these are the covariates and arms in period 1, or all records if there are no
    arms.
    """
    lines, counts = None, details.arm_counts
    if isinstance(details, StudyDetails) and details.diagnostics is not None:
        lines = details.diagnostics.balance
    elif isinstance(details, TimeDetails | RegimeDetails):
        lines = details.balance
    if isinstance(details, RegimeDetails):
        counts = details.tally.arms or details.tally.at_risk[:1]
    if lines is None:
        return None
    reference, *arms = study.target.arms or ("all",)
    return {
        "reference": reference,
        "arms": arms,
        "counts": list(counts),
        "is_complete": all(line.silos == silos for line in lines),
        "covariates": [_line(line, study, silos) for line in lines],
    }


def _line(line: Balance, study: Study, silos: int) -> Document:
    covariate = line.covariate
    declared = study.variables.get(covariate.name)  # None for an indicator of a missing value
    words = study.variables.words(covariate.name) if declared else {}
    is_share = covariate.level is not None or declared is None or declared.kind == "binary"
    return {
        "name": covariate.name,
        "level": covariate.level,
        "label": (declared.label if declared else "") or covariate.name,
        "level_label": None if covariate.level is None else words.get(covariate.level) or covariate.level,
        "unit": (declared.unit if declared else "") or None,
        "hidden_in": silos - line.silos,
        "means": _numbers(line.means),
        "sds": None if is_share else _numbers(line.sds),
        "weighted_means": _numbers(line.weighted_means),
        "differences": _numbers(line.differences[1:]),
        "weighted_differences": _numbers(line.weighted_differences[1:]),
    }


def _numbers(values: tuple[float, ...]) -> list[float | None]:
    return [value if value == value else None for value in values]  # noqa: PLR0124 - NaN becomes None


Measure = Literal["RR", "OR", "HR", "SMD"]
LOG_RR_PER_SD = 0.91  # log RR of one standard deviation (VanderWeele 2017), as in Chinn's conversion of d


@dataclass(frozen=True, kw_only=True)
class EValue:
    """The E-values of an estimate and of the limit of its interval that is nearer to "no effect"."""

    estimate: float
    interval: float | None


def e_value(
    estimate: float,
    conf_low: float | None = None,
    conf_high: float | None = None,
    *,
    measure: Measure = "RR",
    rare: bool = False,
) -> EValue:
    """Return the E-value of an estimate, and of its confidence interval if that is given.

    The E-value is the least strength of association, on the scale of risk ratios, that an unmeasured
    confounder would need with both treatment and outcome to explain the estimate away (VanderWeele and
    Ding, 2017). That of an interval that holds "no effect" is 1.

    Parameters
    ----------
    estimate
        The estimate.
    conf_low
        The lower limit of its interval.
    conf_high
        The upper limit of its interval.
    measure
        "RR" (a risk or rate ratio), "OR", "HR" or "SMD" (a difference of means in standard deviations,
        which becomes exp(0.91 SMD)).
    rare
        Whether the outcome is rare (below 15 %), so that odds and hazard ratios are about risk ratios.
        Otherwise OR becomes sqrt(OR), and HR (1 - 0.5^sqrt(HR)) / (1 - 0.5^sqrt(1/HR)).

    Returns
    -------
    EValue
        The E-value of the estimate, and that of its interval or None.

    Raises
    ------
    InputError
        The measure is unknown, or the numbers do not fit it or each other.

    Examples
    --------
    >>> ft.e_value(2.0).estimate
    3.414213562373095
    """
    if measure not in ("RR", "OR", "HR", "SMD"):
        raise InputError(f"measure: expected 'RR', 'OR', 'HR' or 'SMD', not {measure!r}")
    given = [value for value in (estimate, conf_low, conf_high) if value is not None]
    if not all(math.isfinite(value) for value in given) or (measure != "SMD" and min(given) < 0):
        raise InputError("estimate, conf_low, conf_high: expected finite numbers, ratios of at least 0")
    if given != [estimate] and not (conf_low or estimate) <= estimate <= (conf_high or estimate):
        raise InputError("conf_low, conf_high: expected an interval around the estimate")
    ratio = risk_ratio(estimate, measure, rare=rare)
    limit = conf_low if ratio >= 1 else conf_high
    if limit is None:
        return EValue(estimate=_of_ratio(ratio), interval=None)
    nearer = risk_ratio(limit, measure, rare=rare)
    crosses = nearer <= 1 if ratio >= 1 else nearer >= 1
    return EValue(estimate=_of_ratio(ratio), interval=1.0 if crosses else _of_ratio(nearer))


def risk_ratio(value: float, measure: Measure, *, rare: bool = False) -> float:
    """Return the risk ratio that approximates a measure of effect."""
    if measure == "SMD":
        return math.exp(LOG_RR_PER_SD * value)
    if measure == "RR" or rare or value == 0:
        return value
    if measure == "OR":
        return math.sqrt(value)
    return (1 - math.pow(0.5, math.sqrt(value))) / (1 - math.pow(0.5, math.sqrt(1 / value)))


def _of_ratio(ratio: float) -> float:
    above = ratio if ratio >= 1 else math.inf if ratio == 0 else 1 / ratio
    return above + math.sqrt(above * (above - 1)) if math.isfinite(above) else math.inf


def robustness_value(distance: float, scale: float) -> float:
    """Return the share r with ``scale`` r / sqrt(1 - r) = ``distance``; 0 if ``distance`` is not positive."""
    if distance <= 0:
        return 0.0
    f = distance / scale if scale > 0 else math.inf
    # (sqrt(f^4 + 4 f^2) - f^2) / 2, written so that it keeps its digits for large f.
    return 2.0 / (1.0 + math.sqrt(1.0 + 4.0 / (f * f))) if math.isfinite(f) else 1.0


def sensitivity_document(study: Study, details: Details, psi: Array, covariance: Array) -> list[Document]:
    """Return E-value and robustness value of every comparison; None where they are not defined.

    Times to an event have none: use `e_value` of the risk or hazard ratio.
    """
    if not isinstance(details, StudyDetails):
        return []
    z = NormalDist().inv_cdf(0.5 + study.confidence / 2)
    rows: list[Document] = []
    for summary in summaries(study, details.components, psi):
        if summary.scale.null is None:
            continue
        comparison = _Comparison(study, details, summary, psi, covariance, z)
        rows.append({"estimand": summary.name, **comparison.e_values(), **comparison.robustness()})
    return rows


@dataclass(frozen=True)
class _Comparison:
    """One arm's mean against another's."""

    study: Study
    details: StudyDetails
    summary: Summary
    psi: Array
    covariance: Array
    z: float

    def _pair(self) -> tuple[int, int] | None:
        """Return the components that are compared; None where only their difference was targeted."""
        if self.study.submodel == "contrast":
            return None
        return int(np.argmax(self.summary.gradient)), int(np.argmin(self.summary.gradient))

    def _difference(self) -> tuple[float, float]:
        """Return the difference of the two means and its standard error."""
        pair = self._pair()
        if pair is None:
            return float(self.psi[0]), math.sqrt(float(self.covariance[0, 0]))
        gradient = np.zeros(len(self.psi))
        gradient[pair[0]], gradient[pair[1]] = 1.0, -1.0
        return float(gradient @ self.psi), math.sqrt(float(gradient @ self.covariance @ gradient))

    def e_values(self) -> Document:
        """Return the E-values, the risk ratio that they are computed from, and its origin in words."""
        converted = self._risk_ratio()
        if converted is None:
            return {"e_value": None, "e_value_interval": None, "risk_ratio": None, "conversion": None}
        (ratio, low, high), conversion = converted
        values = e_value(ratio, low, high)
        return {
            "e_value": _finite(values.estimate),
            "e_value_interval": None if values.interval is None else _finite(values.interval),
            "risk_ratio": [ratio, low, high],
            "conversion": conversion,
        }

    def _risk_ratio(self) -> tuple[tuple[float, float, float], str] | None:
        pair, response = self._pair(), self.study.response
        if response in ("binary", "count") and pair is not None and min(self.psi[list(pair)]) > 0:
            one, zero = (float(self.psi[r]) for r in pair)
            gradient = np.zeros(len(self.psi))
            gradient[pair[0]], gradient[pair[1]] = 1 / one, -1 / zero
            error = math.sqrt(float(gradient @ self.covariance @ gradient))
            log = math.log(one / zero)
            limits = [math.exp(log + k * self.z * error) for k in (0, -1, 1)]
            return (limits[0], limits[1], limits[2]), "the ratio of the arms' means"
        fit = None if self.details.diagnostics is None else self.details.diagnostics.fit
        if response != "continuous" or fit is None or not fit.variance > 0:
            return None
        low, high = self.study.outcome_bounds
        sd = (high - low) * math.sqrt(fit.variance)
        difference, error = self._difference()
        limits = [risk_ratio((difference + k * self.z * error) / sd, "SMD") for k in (0, -1, 1)]
        return (limits[0], limits[1], limits[2]), "exp(0.91 d), d the difference in standard deviations"

    def robustness(self) -> Document:
        """Return the robustness values of the difference of means and of its interval, and the scale S."""
        fit = None if self.details.diagnostics is None else self.details.diagnostics.fit
        squares = self._squared_weight()
        if fit is None or squares is None or self.study.weights is not None:
            return {"robustness_value": None, "robustness_value_interval": None, "bias_scale": None}
        low, high = self.study.outcome_bounds
        scale = (high - low) * math.sqrt(fit.residual_variance[1] * squares)
        difference, error = self._difference()
        distance = abs(difference)
        return {
            "robustness_value": robustness_value(distance, scale),
            "robustness_value_interval": robustness_value(distance - self.z * error, scale),
            "bias_scale": scale,
        }

    def _squared_weight(self) -> float | None:
        """Return E[alpha^2] of the difference, the sum over its two arms: at most one arm's H is nonzero."""
        means = self.details.overlap.mean_squares
        pair = self._pair()
        if pair is not None:
            return means[pair[0]] + means[pair[1]]
        return sum(means) if len(means) == 2 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
