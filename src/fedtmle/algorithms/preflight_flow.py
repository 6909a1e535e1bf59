"""The flow of a preflight: the treatment model alone, and the histograms of what it predicts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.diagnostics import histograms, named_histograms
from fedtmle.algorithms.outcome import Flow, Outcome, Status
from fedtmle.algorithms.study import Study
from fedtmle.algorithms.study_flow import fit_treatment
from fedtmle.model.problem import Estimate
from fedtmle.model.table import Table
from fedtmle.model.types import Bytes, Codes
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.targets.effects.rows import probability_bins, shown_arms


@final
@dataclass(frozen=True, kw_only=True)
class PreflightFlow(AbstractAlgorithm):
    """Fits a study's treatment model across silos and estimates nothing; ``details`` has the histograms."""

    def flow(self, problem: Any, law: Any, n: int) -> Flow:  # noqa: ARG002 - there is no law
        study: Study = problem
        columns, models, weight_mean = yield from fit_treatment(study, n)
        preparation = Preparation(
            columns=replace(columns, strata=None, strata_levels=()),
            components=(),
            outcome=(),
            treatment=models,
            missingness=(),
            g_floor=0.0,
            weight_mean=weight_mean,
            shares={},
        )

        def binned(table: Table) -> tuple[Bytes, Codes]:
            g, _ = preparation.propensities(table)
            return probability_bins(g[list(shown_arms(len(g)))]), columns.arm(table)

        query, pairs = histograms(binned, len(study.target.arms), n)
        bins = yield query
        return Outcome(
            law=None,
            status=Status.CONVERGED,
            steps=0,
            updates=0,
            residual=None,
            residual_kind="nothing was estimated",
            trajectory=(),
            accepted=(),
            certificate=None,
            estimate=Estimate(psi=np.zeros(0), covariance=np.zeros((0, 0))),
            details=named_histograms(pairs, bins, study.target.arms),
        )
