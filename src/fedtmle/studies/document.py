"""A study's result as plain data: from what the server saw, and from no row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedtmle.algorithms.personalized import Personalized
from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import StudyDetails, study_details
from fedtmle.protocol.outcome import Status
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.result import Result
from fedtmle.runtime.session import Finished
from fedtmle.runtime.silo import LocalOutcome
from fedtmle.studies.describe import describe
from fedtmle.studies.diagnosed import diagnostics_document
from fedtmle.studies.inference import Row, table_rows
from fedtmle.studies.learners import learners_document
from fedtmle.studies.plan import study_of
from fedtmle.studies.result import FORMAT
from fedtmle.studies.silos import Closing, heterogeneity
from fedtmle.studies.versions import versions
from fedtmle.version import __version__


def document(plan: Plan, finished: Finished, result: Result, release: Sequence[str]) -> dict[str, Any]:
    """The whole result as plain data."""
    study = study_of(plan)
    details = study_details(finished.outcome)
    estimates: list[Row] = []
    simultaneous: list[Row] = []
    own: dict[str, list[Row]] = {}
    without: dict[str, list[Row]] = {}
    if result.psi is not None and result.covariance is not None:
        estimates, simultaneous = table_rows(study, details.components, result.psi, result.covariance)
        closing = Closing(
            study=study,
            problem=details.problem,
            components=details.components,
            answers=finished.closing,
            release=release,
        )
        own, without = closing.per_silo(), closing.leave_one_out()
    return {
        "format": FORMAT,
        "version": __version__,
        "versions": versions(),
        "plan": plan.digest.hex(),
        "question": study.target.question,
        "study": describe(study),
        "estimates": [row.to_dict() for row in estimates],
        "simultaneous": [row.to_dict() for row in simultaneous],
        "silos": {name: [row.to_dict() for row in rows] for name, rows in own.items()},
        "without": {name: [row.to_dict() for row in rows] for name, rows in without.items()},
        "heterogeneity": heterogeneity(own),
        "personalized": {
            name: {
                "retired_at": update,
                "n_rows": finished.sizes[name],
                "estimates": _personal(study, details, result.silos.get(name)) if name in release else [],
            }
            for name, update in result.retired_at.items()
        },
        "arms": list(study.target.arms),
        "arm_counts": list(details.arm_counts),
        "observed_counts": list(details.observed_counts),
        "g_floor": details.g_floor,
        "truncated": list(details.overlap.truncated),
        "truncated_hidden": [len(finished.sizes) - count for count in details.overlap.disclosing],
        "effective_sizes": dict(
            zip([c.name for c in details.components], details.overlap.effective_sizes, strict=True)
        ),
        "learners": learners_document(study, details),
        "diagnostics": diagnostics_document(study, finished),
        "warnings": [
            *warnings(estimates, result),
            *unneeded(study, details),
            *unfinished(study, result),
            *coarse(study, result),
            *([] if result.psi is None else undefined(own, release, finished.sizes)),
        ],
        **result.to_dict(),
    }


def unneeded(study: Study, details: StudyDetails) -> list[str]:
    """Models of the study that were not fitted, because nothing called for them."""
    if "missingness" in study.models and "missingness" not in details.nuisances:
        return ["no outcome is missing, so the missingness model was not needed and is left out"]
    return []


def undefined(
    own: Mapping[str, Sequence[Row]], release: Sequence[str], sizes: Mapping[str, int]
) -> list[str]:
    """Which releasing silos have no estimate of their own beside the pooled one."""
    return [
        f"silo '{silo}' has no estimate of its own: an arm or a population is absent from it, or too small"
        for silo in sizes
        if silo in release and silo not in own
    ]


def coarse(study: Study, result: Result) -> list[str]:
    """Where the residual is within the tolerance as computed, but exact sums prove less than that."""
    stated = result.certificate
    if not result.status.is_converged or stated is None:
        return []
    bound, asked, arithmetic = stated.residual_bound, stated.tolerance, stated.arithmetic
    if bound is None or asked is None or arithmetic is None or bound <= asked:
        return []
    low, high = study.target.outcome_bounds
    return [
        f"the equation holds to the tolerance {asked:.2g} as computed, but exact sums certify {bound:.2g} "
        "only: the rounding of a row is relative to the declared bounds, outcome_bounds = "
        f"[{low:g}, {high:g}] and g_bounds. Declare tighter bounds, or a tolerance well above "
        f"{arithmetic:.2g}"
    ]


def unfinished(study: Study, result: Result) -> list[str]:
    """Which silos of a personalised run did not leave, and what would let them."""
    algorithm = study.algorithm
    open_ended = result.status in (Status.UNFINISHED, Status.CANCELLATION)
    if not (isinstance(algorithm, Personalized) and open_ended):
        return []
    still = ", ".join(name for name, update in result.retired_at.items() if update is None)
    rules = {"noise": algorithm.noise, "lattice": algorithm.lattice}
    now = ", ".join(f"{key} = {value:g}" for key, value in rules.items() if value is not None)
    return [
        f"unfinished: {still}. A silo leaves once its own fit is zero, to the last digit unless the "
        f"algorithm says otherwise{f' (now: {now})' if now else ''}. Set noise, e.g. noise = 0.5: a silo "
        "leaves once its EIF mean is within half of its own sampling error; or lattice, a spacing to which "
        "fits are rounded, so that small ones are zero. A silo that disagrees with the others for good "
        "never leaves; its estimate is flagged as unfinished."
    ]


def _personal(study: Study, details: StudyDetails, local: LocalOutcome | None) -> list[dict[str, Any]]:
    """A releasing silo's own rows in a personalised run; none where it is not in this process."""
    if local is None:
        return []
    own = local.estimate
    rows, _ = table_rows(study, details.components, own.psi, own.covariance)
    return [row.to_dict() for row in rows]


def warnings(estimates: Sequence[Row], result: Result) -> list[str]:
    """Where the certificate does not support the interval."""
    found = []
    if not result.status.is_converged:
        found.append(result.status.value)
    if estimates and result.residual is not None:
        smallest = min(row.std_error for row in estimates)
        if result.residual > smallest / math.log(max(result.n, 3)):
            found.append(
                f"the residual {result.residual:.2g} is not small against the standard error "
                f"{smallest:.2g}: the interval is not supported"
            )
    return found
