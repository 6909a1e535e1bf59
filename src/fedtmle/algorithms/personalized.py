"""FedTMLE-LR (Algorithm 5): local averaging in which silos retire with their own estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np

from fedtmle.algorithms.base import (
    AbstractAlgorithm,
    Run,
    require_budget,
    require_positive,
)
from fedtmle.algorithms.local import FAILED_FITS, check_weights, stagnation
from fedtmle.errors import InputError
from fedtmle.protocol.fits import FitAverage, FitQuery, RetirementRule, Weighting
from fedtmle.protocol.outcome import Personalised, Status
from fedtmle.protocol.query import Flow, Problem


@final
@dataclass(frozen=True, kw_only=True)
class Personalized(AbstractAlgorithm):
    """Algorithm 5: a silo whose exact fit is zero freezes its law and estimate, and leaves.

    With continuous data a fit is never exactly zero in floating point, so two named rules may
    be added: ``lattice`` rounds fits to a public lattice of that spacing; ``noise`` retires a
    silo whose EIF mean is within that fraction of its own sampling noise. ``radius`` and
    ``exhaustive`` are as in `LocalAverage`.
    """

    weights: Weighting | str = Weighting.SIZE
    max_updates: int = 100
    radius: float = 64.0
    exhaustive: bool = False
    lattice: float | None = None
    noise: float | None = None

    def __post_init__(self) -> None:
        require_positive(radius=self.radius, lattice=self.lattice, noise=self.noise)
        require_budget(max_updates=self.max_updates)
        check_weights(self.weights)
        if not isinstance(self.weights, str):
            raise InputError("weights: expected 'size' or 'uniform', eq. (retirement-weights)")

    def flow(self, problem: Problem, law: Any, n: int) -> Flow[Personalised]:
        run = Run(problem, n)
        accepted: list[tuple[float, ...]] = []
        while True:
            average: FitAverage = yield FitQuery(
                problem=problem,
                law=law,
                n=n,
                update=len(accepted),
                radius=self.radius,
                exhaustive=self.exhaustive,
                weights=Weighting(self.weights),
                rule=RetirementRule(lattice=self.lattice, noise=self.noise),
                retiring=True,
            )
            # Only the silos still in the run were asked, so no pooled residual can be stated.
            run.record(update=len(accepted), step=0, eps=np.zeros(problem.dim), gradient_norm=None)
            status = self._status(run, law, average, len(accepted))
            if status is not None:
                break
            law = problem.move(law, average.eps)
            accepted.append(tuple(map(float, average.eps)))
        return Personalised(
            problem=problem,
            law=law,
            status=status,
            steps=0,
            updates=len(accepted),
            trajectory=tuple(run.visits),
            accepted=tuple(accepted),
        )

    def _status(self, run: Run[Problem], law: Any, average: FitAverage, updates: int) -> Status | None:
        if average.worst in FAILED_FITS:
            return FAILED_FITS[average.worst]
        if average.fitting == 0:
            return Status.ALL_RETIRED
        if updates == self.max_updates:
            return Status.UNFINISHED
        return stagnation(run, law, average, None)
