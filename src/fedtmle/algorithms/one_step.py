"""The one-step estimate: the plug-in at the initial law plus the mean of its EIF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from fedtmle.algorithms.base import AbstractAlgorithm, Run, arithmetic_error
from fedtmle.protocol.outcome import Certificate, Status, Targeted
from fedtmle.protocol.query import Flow, Law, MomentsQuery, Problem


@final
@dataclass(frozen=True, kw_only=True)
class OneStep(AbstractAlgorithm):
    """The one-step estimate Psi(p^0) + P_n D(p^0) from the closing sums alone, without targeting.

    It has the first-order properties of a TMLE, but is no plug-in: an estimated mean may leave the range of
    the outcome. For treatment effects it is the augmented inverse-probability-weighted (AIPW) estimate.

    Examples
    --------
    >>> from dataclasses import replace
    >>> ft.run(replace(study, algorithm=ft.OneStep()), silos).run.status.name
    'ONE_STEP'
    """

    @property
    def rounds_sums(self) -> bool:
        return True

    @property
    def fluctuates(self) -> bool:
        return False

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted]:
        run = Run(problem, n)
        query = MomentsQuery(problem=problem, law=law, n=n, one_step=True)
        estimate = query.estimate((yield query))
        arithmetic = arithmetic_error(problem, law)
        return Targeted(
            problem=problem,
            law=law,
            status=Status.ONE_STEP,
            steps=0,
            updates=0,
            residual=arithmetic,
            residual_kind="computed",
            trajectory=tuple(run.visits),
            accepted=(),
            certificate=Certificate(tolerance=arithmetic, residual_bound=arithmetic, arithmetic=arithmetic),
            estimate=estimate,
        )
