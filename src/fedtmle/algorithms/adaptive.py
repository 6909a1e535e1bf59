"""Adaptive switching between local fits and coded gradients: the paper's future work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

from fedtmle.algorithms.base import (
    AbstractAlgorithm,
    Run,
    Tolerance,
    require_budget,
    require_positive,
)
from fedtmle.algorithms.coded import Coded, History
from fedtmle.model.fit import EXACT_NEWTON, LocalSolver
from fedtmle.protocol.coded import Certified, Estimated, SmoothnessRule
from fedtmle.protocol.lattice import root_up
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.query import Flow, Law, Problem
from fedtmle.protocol.switching import Choice, Switched, SwitchQuery


@final
@dataclass(frozen=True, kw_only=True)
class Adaptive(AbstractAlgorithm):
    """Local rounds while they pay, then Algorithm 4.

    In a local round every silo sends its gradient and its own fit. The average of the fits is taken if it
    is sure to decrease the pooled loss by ``cost`` times what a gradient step is sure to; otherwise a
    gradient step is taken, and `Coded` goes on. With ``cost`` of at least one, every round decreases the
    loss by at least ||g~||^2/(6 beta), so the bound on R of Algorithm 4 with one step per update holds.

    Parameters
    ----------
    tolerance
        The residual at which the run ends: the norm of the pooled mean of the efficient influence function.
        A number, or a rule that sets it from the standard errors ("practical").
    coordinates
        "whitened" by the curvature, or "raw".
    smoothness
        As in `Coded`, over silos: beta must bound every silo's curvature.
    cost
        The cost of a local round relative to a gradient round.
    max_rounds
        The most rounds.
    radius
        The radius of the public ball in which silos search their fits.
    solver
        How silos fit: `NewtonFits` or `FirstOrderFits`.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> result = ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, ft.Adaptive())
    >>> result.status.name
    'CONVERGED'
    """

    tolerance: Tolerance = "practical"
    coordinates: Literal["raw", "whitened"] = "whitened"
    smoothness: SmoothnessRule = Estimated()
    cost: float = 1.0
    max_rounds: int = 10_000
    radius: float = 64.0
    solver: LocalSolver = EXACT_NEWTON

    def __post_init__(self) -> None:
        require_positive(cost=self.cost, radius=self.radius)
        require_budget(max_rounds=self.max_rounds)
        self.coded  # noqa: B018 - checks the rest

    @property
    def adds_integers(self) -> bool:
        return False  # the choice needs the lengths of the silos' own gradients

    @property
    def coded(self) -> Coded:
        """The algorithm that goes on after the last local round."""
        return Coded(
            tolerance=self.tolerance,
            coordinates=self.coordinates,
            smoothness=(
                replace(self.smoothness, along="everywhere")
                if isinstance(self.smoothness, Certified)
                else self.smoothness
            ),
            inner="step",
            max_rounds=self.max_rounds,
        )

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted]:
        run = Run(problem, n)
        tolerance, lattice = yield from self.coded.calibrate(run, law)
        history: History = []
        zero = (0,) * lattice.dim
        while run.rounds < self.max_rounds:
            switched: Switched = yield SwitchQuery(
                problem=problem,
                law=law,
                lattice=lattice,
                n=n,
                cost=self.cost,
                radius=self.radius,
                solver=self.solver,
                tolerance=tolerance,
            )
            run.record(
                update=len(history),
                step=0,
                eps=lattice.eps(zero),
                gradient_norm=root_up(lattice.raw_norm_squared(switched.q)),
            )
            if switched.choice is Choice.FINISH:
                return (yield from self.coded.finish(run, law, lattice, tolerance, switched.q, history))
            steps = switched.steps or tuple(-entry for entry in switched.q)
            eps = lattice.eps(steps)
            if switched.choice is Choice.LOCAL and not problem.admits(law, eps):
                # The average left the admissible set, which is the same test at every party: go by gradients.
                steps = tuple(-entry for entry in switched.q)
                eps = lattice.eps(steps)
            law = problem.move(law, eps)
            history.append((steps, tuple(map(float, eps))))
            if switched.choice is Choice.GRADIENT:
                break
        return (yield from self.coded.descend(run, law, lattice, tolerance, history, switched.q))
