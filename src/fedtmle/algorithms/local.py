"""Local fits in the common submodel, averaged; and adaptive switching between them and coded gradients.

FedTMLE-L (Algorithm 3, `LocalAverage`) averages the fits of all silos until the pooled EIF equation holds. In
FedTMLE-LR (Algorithm 5, `Personalized`) a silo whose fit is zero retires with an estimate of its own. It goes
on answering, with zeros, so that under masks nobody learns who retired. The paper leaves `Adaptive` to future
work: in each round the parties take the average of the fits or a gradient step, whichever is certain to
decrease the loss more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, final

import numpy as np

from fedtmle.algorithms.base import (
    AbstractAlgorithm,
    Run,
    Tolerance,
    conclude,
    power_below,
    require_budget,
    require_positive,
    require_tolerance,
    settle_tolerance,
)
from fedtmle.algorithms.coded import Coded, History
from fedtmle.errors import InputError
from fedtmle.model.fit import EXACT_NEWTON, LocalSolver
from fedtmle.protocol.coded import Certified, Estimated, SmoothnessRule
from fedtmle.protocol.fits import (
    Choice,
    FitAverage,
    FitCountQuery,
    FitCounts,
    FitOutcome,
    FitQuery,
    RetirementRule,
    Switched,
    SwitchQuery,
    Weighting,
)
from fedtmle.protocol.lattice import root_up
from fedtmle.protocol.outcome import ActiveSilos, Personalised, Status, Targeted
from fedtmle.protocol.query import Flow, Law, Problem
from fedtmle_core.types import Part

FINEST = 2.0**-48  # the finest lattice of messages: with the default radius, 56 bits a number
FAILED_FITS = {FitOutcome.BOUNDARY: Status.BOUNDARY_FIT, FitOutcome.STALLED: Status.STALLED_FIT}


@final
@dataclass(frozen=True, kw_only=True)
class LocalAverage(AbstractAlgorithm):
    """Algorithm 3 (FedTMLE-L): each silo fits its own fluctuation, and the fits are averaged.

    Parameters
    ----------
    tolerance
        The residual at which the run ends: the norm of the pooled mean of the efficient influence function.
        A number, or a rule that sets it from the standard errors ("practical").
    weights
        "size" (N_m/n), "uniform" (1/M), or one number per silo.
    max_updates
        The most updates.
    radius
        The radius of the public ball in which silos search their fits.
    exhaustive
        Whether silos descend from more public starting points, where the loss is not convex.
    progress_tolerance
        If given, the run ends when an update is no longer than this. That is stagnation, never convergence.
    solver
        How silos fit: `NewtonFits` or `FirstOrderFits`.
    lattice
        Fits and averages travel as integers of a lattice. "fine" is 2^-10 of the tolerance, rounded down to
        a power of two; a number is its spacing; None sends doubles.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> result = ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, ft.LocalAverage())
    >>> round(float(result.psi[0]), 6)
    3.0
    """

    fits_locally = True

    tolerance: Tolerance = "practical"
    weights: Weighting | str | Mapping[str, float] = Weighting.SIZE
    max_updates: int = 100
    radius: float = 64.0
    exhaustive: bool = False
    progress_tolerance: float | None = None
    solver: LocalSolver = EXACT_NEWTON
    lattice: float | Literal["fine"] | None = "fine"

    def __post_init__(self) -> None:
        require_tolerance(self.tolerance, zero=True)
        require_positive(radius=self.radius, progress_tolerance=self.progress_tolerance)
        if self.lattice != "fine":
            require_spacing(self.lattice, self.radius)
        require_budget(max_updates=self.max_updates)
        check_weights(self.weights)

    @property
    def adds_integers(self) -> bool:
        """Whether fits are on a lattice, with weights that every silo can compute itself."""
        return self.lattice is not None and isinstance(self.weights, str)

    @property
    def silo_weights(self) -> Mapping[str, float] | None:
        return None if isinstance(self.weights, str) else self.weights

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted]:
        run = Run(problem, n)
        tolerance = yield from settle_tolerance(run, law, self.tolerance)
        rule = RetirementRule(lattice=self._spacing(tolerance))
        accepted: list[tuple[float, ...]] = []
        origin = np.zeros(problem.dim)
        while True:
            average: FitAverage | None = None
            if len(accepted) < self.max_updates:
                average = yield FitQuery(
                    problem=problem,
                    law=law,
                    n=n,
                    update=len(accepted),
                    radius=self.radius,
                    exhaustive=self.exhaustive,
                    weights=named_weights(self.weights),
                    rule=rule,
                    retiring=False,
                    tolerance=tolerance,
                    solver=self.solver,
                )
            if average is not None and average.origin is not None:
                sums = average.origin
            else:  # at k = K only the EIF evaluation is needed
                sums = yield from run.ask(law, origin, Part.GRADIENT)
            residual = run.norm(run.pooled_gradient(sums, law, origin))
            run.record(update=len(accepted), step=0, eps=origin, gradient_norm=residual)
            status = self._status(run, law, average, residual, tolerance)
            if status is not None or average is None:
                break
            law = problem.move(law, average.eps)
            accepted.append(tuple(map(float, average.eps)))
        return (
            yield from conclude(
                run,
                law,
                status=status or Status.UPDATE_BUDGET,
                residual=residual,
                tolerance=tolerance,
                accepted=accepted,
                steps=0,
            )
        )

    def _spacing(self, tolerance: float) -> float | None:
        """Return the spacing of the messages' lattice, None for doubles."""
        if self.lattice != "fine":
            return self.lattice
        return max(FINEST, power_below(2.0**-10 * tolerance)) if tolerance else FINEST

    def _status(
        self, run: Run[Problem], law: Law, average: FitAverage | None, residual: float, tolerance: float
    ) -> Status | None:
        """Return why the run ends here, or None if it goes on or has used up its updates."""
        if residual <= tolerance:
            return Status.CONVERGED
        if average is None:
            return None
        if average.worst in FAILED_FITS:
            return FAILED_FITS[average.worst]
        return stagnation(run, law, average, self.progress_tolerance)


@final
@dataclass(frozen=True, kw_only=True)
class Personalized(AbstractAlgorithm):
    """Algorithm 5 (FedTMLE-LR): a silo whose fit is zero keeps its law and estimate, and leaves.

    Two rules let a silo leave earlier: ``gap`` and ``noise``. Without them a silo leaves only if its own
    fit is exactly zero at the common law, as where silos are of different populations; silos of one
    population tend to stay until ``max_updates``.

    Parameters
    ----------
    weights
        "size" (N_m/n) or "uniform" (1/M).
    max_updates
        The most updates.
    radius
        The radius of the public ball in which silos search their fits.
    exhaustive
        Whether silos descend from more public starting points, where the loss is not convex.
    lattice
        The spacing of the lattice on which fits travel as integers. A fit that rounds to zero is zero. None
        sends doubles, which are never exactly zero for continuous data.
    min_active
        The fewest silos whose fits are averaged. With more than 1, each update begins with a round in which
        the silos count how many of them still fit; if they are too few, all stop. Under masks it is at least
        two more than the ``colluders`` of the plan.
    noise
        A silo leaves when its EIF mean is within this fraction of its own sampling noise.
    gap
        A silo leaves when its own fit would lower its mean loss by no more than this.
    solver
        How silos fit: `NewtonFits` or `FirstOrderFits`.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> result = ft.solve(problem, problem.start(5.0), {"a": [1.0, 2.0], "b": [6.0]}, ft.Personalized())
    >>> result.status.name, sorted(result.silos)
    ('CANCELLATION', ['a', 'b'])
    """

    fits_locally = True

    weights: Weighting | str = Weighting.SIZE
    max_updates: int = 100
    radius: float = 64.0
    exhaustive: bool = False
    lattice: float | None = 2.0**-40
    min_active: int = 1
    noise: float | None = None
    gap: float | None = None
    solver: LocalSolver = EXACT_NEWTON

    def __post_init__(self) -> None:
        require_positive(radius=self.radius, noise=self.noise, gap=self.gap)
        require_spacing(self.lattice, self.radius)
        require_budget(max_updates=self.max_updates)
        check_weights(self.weights)
        if not isinstance(self.weights, str):
            raise InputError("weights: expected 'size' or 'uniform', eq. (retirement-weights)")
        if isinstance(self.min_active, bool) or not isinstance(self.min_active, int) or self.min_active < 1:
            raise InputError(f"min_active: expected an integer of at least 1, not {self.min_active!r}")

    @property
    def adds_integers(self) -> bool:
        """Whether fits are on a lattice: a silo that has retired adds zeros."""
        return self.lattice is not None

    @property
    def fewest_active(self) -> int:
        return self.min_active

    def with_fewest_active(self, fewest: int) -> Self:
        return replace(self, min_active=fewest)

    @property
    def rule(self) -> RetirementRule:
        """When a silo's fit counts as zero."""
        return RetirementRule(lattice=self.lattice, noise=self.noise, gap=self.gap)

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Personalised]:
        run = Run(problem, n)
        accepted: list[tuple[float, ...]] = []
        active: list[ActiveSilos] = []
        while True:
            fits = FitQuery(
                problem=problem,
                law=law,
                n=n,
                update=len(accepted),
                radius=self.radius,
                exhaustive=self.exhaustive,
                weights=Weighting(self.weights),
                rule=self.rule,
                retiring=True,
                solver=self.solver,
            )
            # Each silo has a law of its own, so no pooled residual can be stated.
            run.record(update=len(accepted), step=0, eps=np.zeros(problem.dim), gradient_norm=None)
            if self.min_active > 1:
                counts: FitCounts = yield FitCountQuery(fits=fits)
                status = self._ended(counts.worst, counts.fitting, len(accepted))
                if status is not None:
                    active.append(ActiveSilos(silos=counts.fitting))
                    break
            average: FitAverage = yield fits
            active.append(ActiveSilos(silos=average.fitting, people=average.people))
            status = self._ended(average.worst, average.fitting, len(accepted))
            status = status or stagnation(run, law, average, None)
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
            active=tuple(active),
        )

    def _ended(self, worst: FitOutcome, fitting: int, updates: int) -> Status | None:
        """Return why the run ends before another update, or None if it goes on."""
        if worst in FAILED_FITS:
            return FAILED_FITS[worst]
        if fitting == 0:
            return Status.ALL_RETIRED
        if updates == self.max_updates:
            return Status.UNFINISHED
        return Status.FEW_ACTIVE if fitting < self.min_active else None


def stagnation(
    run: Run[Problem], law: Law, average: FitAverage, progress_tolerance: float | None
) -> Status | None:
    """Return why the average cannot be taken as an update, or None if it can."""
    if not run.problem.admits(law, average.eps):
        return Status.INFEASIBLE
    if not average.eps.any():
        return Status.CANCELLATION
    if progress_tolerance is not None and run.norm(average.eps) <= progress_tolerance:
        return Status.NO_PROGRESS
    return None


def require_spacing(spacing: float | None, radius: float) -> None:
    """Check the spacing of a lattice of fits: above zero, at most the radius, and not absurdly fine."""
    require_positive(lattice=spacing)
    if spacing is not None and not radius * 2.0**-60 <= spacing <= radius:
        raise InputError(f"lattice: expected a spacing from 2^-60 of the radius to the radius, not {spacing}")


def check_weights(weights: Weighting | str | Mapping[str, float]) -> None:
    """Check that weights are a known name, or nonnegative numbers that sum to one."""
    if isinstance(weights, str):
        if weights not in set(Weighting):
            raise InputError(f"weights: expected 'size', 'uniform' or a number per silo, not {weights!r}")
        return
    values = list(weights.values())
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise InputError("weights: each silo's weight must be a number of at least 0")
    if not math.isclose(math.fsum(values), 1.0, abs_tol=1e-12):
        raise InputError(f"weights: must sum to 1, not {math.fsum(values):g}")


def named_weights(weights: Weighting | str | Mapping[str, float]) -> Weighting | Mapping[str, float]:
    """Return the weights with a name as its `Weighting`."""
    return Weighting(weights) if isinstance(weights, str) else weights


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

    adds_integers = False  # the choice needs the lengths of the silos' own gradients

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
