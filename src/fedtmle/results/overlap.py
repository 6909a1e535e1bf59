"""How far an estimate rests on few records, or on the bound of its propensity scores: stated thresholds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedtmle.layout import Document
from fedtmle.programs.flow import Details, StudyDetails
from fedtmle.programs.regimes import RegimeDetails
from fedtmle.programs.study import Study
from fedtmle.programs.time import TimeDetails
from fedtmle.results.inference import table_rows
from fedtmle.targets.effects.balance import Balance
from fedtmle.targets.effects.components import InStratum, Static

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
        rungs.append({"bound": rung.bound, "estimates": [row.to_dict() for row in rows]})
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
