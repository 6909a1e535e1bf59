"""FedTMLE-G (Algorithm 2), its centralised comparator (Algorithm 1), and the one-step estimate.

The one-step estimate takes no step at all: it is the plug-in at the initial law plus the mean of its EIF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.algorithms.base import (
    AbstractAlgorithm,
    Run,
    Tolerance,
    arithmetic_error,
    conclude,
    require_budget,
    require_tolerance,
    settle_tolerance,
)
from fedtmle.algorithms.local import LocalAverage
from fedtmle.algorithms.optimizers import AbstractOptimizer, GradientDescent, Origin
from fedtmle.protocol.outcome import Certificate, Status, Targeted
from fedtmle.protocol.query import Flow, Law, MomentsQuery, Problem
from fedtmle_core.types import Part, unpack


@final
@dataclass(frozen=True, kw_only=True)
class Gradient(AbstractAlgorithm):
    """Algorithm 2 (FedTMLE-G): pooled gradients, an inner optimiser, and a check of the equation per update.

    Parameters
    ----------
    tolerance
        The residual at which the run ends: the norm of the pooled mean of the efficient influence function.
        A number, or a rule that sets it from the standard errors ("practical").
    optimizer
        `GradientDescent`, `Newton` or `StochasticGradientDescent`.
    max_updates
        The most updates.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> algorithm = ft.Gradient(optimizer=ft.Newton())
    >>> float(ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, algorithm).psi[0])
    3.0
    """

    tolerance: Tolerance = "practical"
    optimizer: AbstractOptimizer = GradientDescent()
    max_updates: int = 100

    def __post_init__(self) -> None:
        require_tolerance(self.tolerance, zero=True)
        require_budget(max_updates=self.max_updates)

    @property
    def adds_integers(self) -> bool:
        """Whether no batches are drawn: they need row numbers in the pooled order, unknown under masks."""
        return not self.optimizer.draws_batches

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted]:
        run = Run(problem, n)
        tolerance = yield from settle_tolerance(run, law, self.tolerance)
        origin_eps = np.zeros(problem.dim)
        accepted: list[tuple[float, ...]] = []
        steps = 0
        status = Status.UPDATE_BUDGET
        while True:
            with_hessian = self.optimizer.needs_hessian(run, law)
            parts = Part.GRADIENT | Part.HESSIAN if with_hessian else Part.GRADIENT
            sums = yield from run.ask(law, origin_eps, parts)
            gradient = run.pooled_gradient(sums[: problem.dim], law, origin_eps)
            residual = run.norm(gradient)  # r^k = ||P_n D(p^k)||
            run.record(update=len(accepted), step=0, eps=origin_eps, gradient_norm=residual)
            if residual <= tolerance:
                status = Status.CONVERGED
            if residual <= tolerance or len(accepted) == self.max_updates:
                break
            hessian = None
            if with_hessian:
                rows = unpack(sums[problem.dim :].values(n), problem.dim)
                hessian = rows + problem.normaliser(law).hessian(origin_eps)
            origin = Origin(
                law=law,
                update=len(accepted),
                gradient=gradient,
                hessian=hessian,
                goal=max(self.optimizer.stop * residual, 0.5 * tolerance),
            )
            inner = yield from self.optimizer.minimise(run, origin)
            steps += inner.steps
            if not inner.eps.any():
                status = Status.NO_DESCENT
                break
            law = problem.move(law, inner.eps)
            accepted.append(tuple(map(float, inner.eps)))
        return (
            yield from conclude(
                run,
                law,
                status=status,
                residual=residual,
                tolerance=tolerance,
                accepted=accepted,
                steps=steps,
            )
        )


@final
@dataclass(frozen=True, kw_only=True)
class Exact:
    """An exact inner solve: the minimum of the loss, to the accuracy of the sums.

    Parameters
    ----------
    radius
        The radius of the ball in which it is searched.
    exhaustive
        Whether to descend from more public starting points, where the loss is not convex.

    Examples
    --------
    >>> ft.Exact().radius
    64.0
    """

    radius: float = 64.0
    exhaustive: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Central(AbstractAlgorithm):
    """Algorithm 1: targeting on the pooled records. The comparator that a federation replaces.

    Parameters
    ----------
    tolerance
        The residual at which the run ends: the norm of the pooled mean of the efficient influence function.
        A number, or a rule that sets it from the standard errors ("practical").
    optimizer
        The inner optimiser, or `Exact`.
    max_updates
        The most updates.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> float(ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, ft.Central()).psi[0])
    3.0
    """

    pools_rows = True

    tolerance: Tolerance = "practical"
    optimizer: AbstractOptimizer | Exact = Exact()
    max_updates: int = 100

    def __post_init__(self) -> None:
        self._flow_of()

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted]:
        return self._flow_of().flow(problem, law, n)

    def _flow_of(self) -> LocalAverage | Gradient:
        if isinstance(self.optimizer, Exact):  # one silo's average of fits is its fit
            return LocalAverage(
                tolerance=self.tolerance,
                max_updates=self.max_updates,
                radius=self.optimizer.radius,
                exhaustive=self.optimizer.exhaustive,
                lattice=None,  # nothing is sent
            )
        return Gradient(tolerance=self.tolerance, optimizer=self.optimizer, max_updates=self.max_updates)


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

    rounds_sums = True
    fluctuates = False

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
