"""Overlap before a study runs: its treatment model, fitted across silos, and what it predicts in each arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedtmle.algorithms.preflight_flow import PreflightProgram, propensity_histograms
from fedtmle.algorithms.study import Study
from fedtmle.errors import FedTMLEError
from fedtmle.model.table import Table
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studies.diagnosed import histogram_document
from fedtmle.studies.table1 import Characteristics, complete


@dataclass(frozen=True, kw_only=True)
class FittedOverlap:
    """Histograms of P(arm | W) by arm (`diagnosed.histogram_document`), or why there are none."""

    histograms: tuple[dict[str, Any], ...] = ()
    problem: str | None = None
    n_rows: int = 0  # with treatment and covariates: those of the model


def fitted_overlap(
    study: Study, what: Characteristics, tables: Mapping[str, Table], policies: Mapping[str, Policy]
) -> FittedOverlap | None:
    """By the rounds of the study itself; a model that cannot be fitted is told, not raised."""
    if study.target.treatment is None:
        return None
    kept = {}
    for name, table in tables.items():
        rows = np.flatnonzero(complete(what, table))
        if len(rows):
            kept[name] = table if len(rows) == table.n_rows else table.take(rows)
    if not kept:
        return FittedOverlap(problem="no record has both its treatment and its covariates")
    plan = Plan(program=PreflightProgram(study=study), roster=roster(list(kept)))
    silos = [Silo(name, plan, table, keeper=Keeper(policy=policies[name])) for name, table in kept.items()]
    try:
        finished = run_embedded(plan, silos)
    except FedTMLEError as error:
        return FittedOverlap(problem=str(error))
    return FittedOverlap(
        histograms=tuple(
            histogram_document(each, len(kept)) for each in propensity_histograms(finished.outcome)
        ),
        n_rows=sum(finished.sizes.values()),
    )
