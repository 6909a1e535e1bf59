"""What a round told every party of the residual: for those who watch a run, not for the run itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm, Run, Tolerance, settle_tolerance
from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.gradient import Central, Gradient
from fedtmle.algorithms.local import LocalAverage
from fedtmle.algorithms.outcome import Query
from fedtmle.algorithms.study import Study
from fedtmle.model.types import Part
from fedtmle.protocol.coded import RoundedGradientQuery
from fedtmle.protocol.fits import FitQuery
from fedtmle.protocol.lattice import root_up
from fedtmle.protocol.query import Phase
from fedtmle.protocol.sums import MomentsQuery, SumsQuery


class Learned:
    """The tolerance as it is settled, and the norm of the pooled gradient where a round tells it."""

    def __init__(self, problem: Any, algorithm: AbstractAlgorithm) -> None:
        targeting = problem.algorithm if isinstance(problem, Study) else algorithm
        self._rule: Tolerance | None = None  # Personalized has none: no party knows a pooled residual
        if isinstance(targeting, Coded | Gradient | Central | LocalAverage):
            self._rule = targeting.tolerance
        self.tolerance = None if isinstance(self._rule, str) else self._rule

    def hear(self, query: Query, pooled: Any) -> float | None:
        """The norm at the queried point, in raw coordinates; None if the round was about something else."""
        if isinstance(query, MomentsQuery) and query.phase is Phase.CALIBRATION and self._rule is not None:
            self._settle(query, pooled)
        if query.phase is not Phase.TARGETING:
            return None
        if isinstance(query, RoundedGradientQuery):
            return root_up(query.lattice.raw_norm_squared(pooled.q))
        if isinstance(query, SumsQuery) and Part.GRADIENT in query.parts and query.batch is None:
            run = Run(query.problem, query.n)
            first = 1 if Part.LOSS in query.parts else 0
            sums = pooled[first : first + query.problem.dim]
            return run.norm(run.pooled_gradient(sums, query.law, query.eps))
        if isinstance(query, FitQuery) and not query.retiring:  # the EIF sums of all silos come with the fits
            run = Run(query.problem, query.n)
            return run.norm(run.pooled_gradient(pooled.origin, query.law, np.zeros(query.dim)))
        return None

    def _settle(self, query: MomentsQuery, pooled: Any) -> None:
        """The flow's own rule, on the same broadcast."""
        rule = settle_tolerance(Run(query.problem, query.n), query.law, self._rule or 0.0)
        next(rule)
        try:
            rule.send(pooled)
        except StopIteration as stop:
            self.tolerance = stop.value
