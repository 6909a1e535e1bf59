"""Running a study in one process."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedtmle import __version__
from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import StudyDetails, StudyFlow
from fedtmle.data import load_all
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import POOLED_SILO
from fedtmle.model.table import Factor, Table
from fedtmle.protocol.plan import Member, Plan, roster
from fedtmle.protocol.tables import sort_levels
from fedtmle.runtime.certificate import certify
from fedtmle.runtime.embedded import run_embedded
from fedtmle.runtime.result import Result
from fedtmle.runtime.session import Finished, Progress
from fedtmle.runtime.silo import LocalOutcome, Silo
from fedtmle.solver import assemble
from fedtmle.studies.describe import describe, in_words
from fedtmle.studies.inference import Row, table_rows
from fedtmle.studies.result import FORMAT, StudyResult
from fedtmle.studies.schema import schema_of
from fedtmle.studies.silos import Closing, heterogeneity


def run(
    study: Study,
    silos: Mapping[str, object],
    *,
    threads: int = 1,
    progress: Progress | None = None,
    release: Sequence[str] = (),
) -> StudyResult:
    """Runs ``study`` over ``silos``: name -> data frame, mapping of columns, or path.

    ``release`` names the silos that consent to having their own estimate shown.
    """
    if not silos:
        raise InputError("silos: expected a mapping of at least one name to data")
    unknown = sorted(set(release) - set(silos))
    if unknown:
        raise InputError(f"release: there is no silo {' or '.join(map(repr, unknown))}")
    tables = load_all(silos, schema_of(study))
    if study.algorithm.pools_rows:
        tables = {"pooled": pool_tables(list(tables.values()), study.cluster)}
    plan = study_plan(study, roster(list(tables)))
    parties = [Silo(name, plan, table) for name, table in tables.items()]
    finished = run_embedded(plan, parties, threads=threads, progress=progress)
    problem = finished.outcome.problem
    certificate = certify(problem, problem.start(), study.algorithm, finished)
    result = assemble(problem, finished, None, certificate, {silo.name: silo.local for silo in parties})
    return StudyResult(document=document(plan, finished, result, release), run=result)


def study_plan(study: Study, silos: tuple[Member, ...], expires: datetime.date | None = None) -> Plan:
    """The plan that every party of a study derives from the study and the roster."""
    return Plan(subject=study, law=None, algorithm=StudyFlow(), roster=silos, expires=expires)


def pool_tables(tables: Sequence[Table], cluster: str | None = None) -> Table:
    """All rows in one table, for the centralised comparator; factors by the union of their levels.

    Clusters and folds stay within silos, as they are when the rows do.
    """
    silo = np.repeat(np.arange(len(tables)), [table.n_rows for table in tables])
    factors = {POOLED_SILO: Factor(silo, tuple(map(str, range(len(tables)))))}
    for name in tables[0].factors:
        own = [table.factors[name] for table in tables]
        if name == cluster:
            levels = tuple(f"{m}:{level}" for m, factor in enumerate(own) for level in factor.levels)
            first = np.cumsum([0, *(len(factor.levels) for factor in own)])
            codes = [factor.codes + start for factor, start in zip(own, first, strict=False)]
        else:
            levels = sort_levels({level for factor in own for level in factor.levels})
            codes = [factor.recode(levels) for factor in own]
        factors[name] = Factor(np.concatenate(codes), levels)
    return Table(
        n_rows=sum(table.n_rows for table in tables),
        numeric={name: np.concatenate([t.numeric[name] for t in tables]) for name in tables[0].numeric},
        factors=factors,
    )


def document(plan: Plan, finished: Finished, result: Result, release: Sequence[str]) -> dict[str, Any]:
    """The whole result as plain data."""
    study: Study = plan.subject
    details: StudyDetails = finished.outcome.details
    described = describe(study)
    estimates: list[Row] = []
    simultaneous: list[Row] = []
    own: dict[str, list[Row]] = {}
    without: dict[str, list[Row]] = {}
    if result.psi is not None and result.covariance is not None:
        estimates, simultaneous = table_rows(study, details.components, result.psi, result.covariance)
        closing = Closing(
            study=study,
            problem=finished.outcome.problem,
            components=details.components,
            answers=finished.closing,
            release=release,
        )
        own, without = closing.per_silo(), closing.leave_one_out()
    return {
        "format": FORMAT,
        "version": __version__,
        "plan": plan.digest.hex(),
        "question": in_words(described["target"]),
        "study": described,
        "estimates": [row.to_dict() for row in estimates],
        "simultaneous": [row.to_dict() for row in simultaneous],
        "silos": {name: [row.to_dict() for row in rows] for name, rows in own.items()},
        "without": {name: [row.to_dict() for row in rows] for name, rows in without.items()},
        "heterogeneity": heterogeneity(own),
        "personalized": {
            name: {
                "retired_at": local.retired_at,
                "n_rows": local.n_rows,
                "estimates": _personal(study, details, local) if name in release else [],
            }
            for name, local in result.silos.items()
        },
        "arms": list(study.target.arms),
        "arm_counts": list(details.arm_counts),
        "observed_counts": list(details.observed_counts),
        "g_floor": details.g_floor,
        "truncated": list(details.truncated),
        "effective_sizes": dict(
            zip([c.name for c in details.components], details.effective_sizes, strict=True)
        ),
        "warnings": [*warnings(estimates, result), *undefined(own, release, finished.sizes)],
        **result.to_dict(),
    }


def undefined(
    own: Mapping[str, Sequence[Row]], release: Sequence[str], sizes: Mapping[str, int]
) -> list[str]:
    """Which releasing silos have no estimate of their own."""
    return [
        f"silo '{silo}' has no estimate of its own: an arm or a population is absent from it, or too small"
        for silo in sizes
        if silo in release and silo not in own
    ]


def _personal(study: Study, details: StudyDetails, local: LocalOutcome) -> list[dict[str, Any]]:
    """A releasing silo's own rows in a personalised run."""
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
