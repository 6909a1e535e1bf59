"""How strong an unmeasured confounder would have to be: E-values, and a bound on omitted-variable bias.

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
from fedtmle.model.types import Array
from fedtmle.programs.flow import Details, StudyDetails
from fedtmle.programs.study import Study
from fedtmle.results.inference import summaries
from fedtmle.targets.effects.estimands import Summary

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
