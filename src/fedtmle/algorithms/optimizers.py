"""Inner optimisers of FedTMLE-G: how eps^k is found in the fixed current submodel.

Each is a sub-flow that every party runs on the broadcast pooled sums, so no eps is ever sent.
All of its arithmetic is in a fixed order, without BLAS: two parties never hold different eps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from fedtmle.algorithms.base import Run, require_budget, require_positive
from fedtmle.errors import InputError, NumericalError
from fedtmle.model.linear import newton_direction
from fedtmle.protocol.query import Flow, Law, Model
from fedtmle_core.exact import query_shifts
from fedtmle_core.types import Array, IntArray, Part, unpack

PUBLIC_RESOLUTION = 2.0**-44  # error of log Z by quadrature; smaller decreases are lost in it
PARTITION_STREAM = 2**62  # the generator's stream of the fixed partition; no step of a run has this number


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The results of the EIF check that opens an outer iteration; its gradient is the first inner one."""

    law: Law
    update: int
    gradient: Array
    hessian: Array | None
    goal: float  # stop the inner solve at this gradient norm


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Where an inner solve stopped; eps is 0 if no step decreased the loss."""

    eps: Array
    steps: int
    hessian: Array | None = None  # there, where the optimiser knows it


class AbstractOptimizer(ABC):
    """An inner optimiser: what it needs at the origin, and its steps."""

    @property
    @abstractmethod
    def stop(self) -> float:
        """Stop the inner solve when its gradient norm is below this fraction of r^k."""

    @property
    def draws_batches(self) -> bool:
        """Whether it asks for sums over batches of the pooled rows."""
        return False

    @abstractmethod
    def needs_hessian(self, run: Run[Model], law: Law) -> bool:
        """Return whether the EIF check at the origin must ask for the pooled Hessian as well."""

    @abstractmethod
    def minimise(self, run: Run[Model], origin: Origin) -> Flow[Inner]:
        """Take the steps of one inner solve from eps = 0; return where it stopped."""


@dataclass(frozen=True, kw_only=True)
class _Iterate:
    """A point of a line search and what is known there."""

    eps: Array
    loss: float
    gradient: Array
    hessian: Array | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Backtracking:
    """Step sizes that are halved until the loss falls enough.

    Every trial is a pooled query and counts as a round.

    Parameters
    ----------
    first
        The first step. By default 1/lambda_max of the curvature at the first origin.
    armijo
        The share of the predicted decrease that must be reached.
    grow
        The factor by which the last step is enlarged before it is tried.
    max_halvings
        The most halvings of one step.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Backtracking().grow
    2.0
    """

    first: float | None = None
    armijo: float = 1e-4
    grow: float = 2.0
    max_halvings: int = 50

    def __post_init__(self) -> None:
        require_positive(first=self.first, armijo=self.armijo, grow=self.grow)
        require_budget(max_halvings=self.max_halvings)
        if self.armijo >= 0.5:
            raise InputError(f"armijo: expected a number below 1/2, not {self.armijo}")


@final
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Step sizes eta_{k,t} as Algorithm 2 has them: update k takes the T_k steps of row k.

    Parameters
    ----------
    steps
        One row of step sizes per update. The last row stands for all later updates.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Schedule(steps=((0.5, 0.5), (0.25,))).of(7)
    (0.25,)
    """

    steps: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        # Tuples, so that a schedule is a hashable value whatever it was built from.
        object.__setattr__(self, "steps", tuple(tuple(map(float, row)) for row in self.steps))
        if not self.steps or not all(self.steps):
            raise InputError("steps: expected at least one update with at least one step each")
        for row in self.steps:
            for step in row:
                require_positive(steps=step)

    def of(self, update: int) -> tuple[float, ...]:
        """Return the T_k step sizes of an update."""
        return self.steps[min(update, len(self.steps) - 1)]


@final
@dataclass(frozen=True, kw_only=True)
class GradientDescent(AbstractOptimizer):
    """Gradient descent on all records.

    Parameters
    ----------
    step
        The step size: a number, a `Schedule`, or `Backtracking`.
    max_steps
        The most steps of one inner solve. A schedule has its own.
    stop
        An inner solve ends when the gradient is at most this fraction of the residual at its origin.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.GradientDescent(step=0.5).max_steps
    1000
    """

    step: float | Schedule | Backtracking = Backtracking()
    max_steps: int = 1000
    stop: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.step, Backtracking | Schedule):
            require_positive(step=self.step)
        require_positive(stop=self.stop)
        require_budget(max_steps=self.max_steps)

    def needs_hessian(self, run: Run[Model], law: Law) -> bool:
        return (
            isinstance(self.step, Backtracking)
            and self.step.first is None
            and run.problem.curvature(law) is None
        )

    def minimise(self, run: Run[Model], origin: Origin) -> Flow[Inner]:
        if isinstance(self.step, Backtracking):
            return (yield from self._search(run, origin, self.step))
        if isinstance(self.step, Schedule):
            return (yield from self._scheduled(run, origin, self.step.of(origin.update)))
        return (yield from self._fixed(run, origin, self.step))

    def _fixed(self, run: Run[Model], origin: Origin, step: float) -> Flow[Inner]:
        eps, gradient = np.zeros(run.problem.dim), origin.gradient
        for t in range(1, self.max_steps + 1):
            eps = eps - step * gradient
            if t == self.max_steps:
                return Inner(eps=eps, steps=t)
            sums = yield from run.ask(origin.law, eps, Part.GRADIENT)
            gradient = run.pooled_gradient(sums, origin.law, eps)
            norm = run.norm(gradient)
            run.record(update=origin.update, step=t, eps=eps, gradient_norm=norm)
            if norm <= origin.goal:
                return Inner(eps=eps, steps=t)
        return Inner(eps=eps, steps=0)

    def _scheduled(self, run: Run[Model], origin: Origin, steps: tuple[float, ...]) -> Flow[Inner]:
        eps, gradient = np.zeros(run.problem.dim), origin.gradient
        for t, step in enumerate(steps, start=1):
            eps = eps - step * gradient
            if t < len(steps):  # the next update's EIF check evaluates the last point
                sums = yield from run.ask(origin.law, eps, Part.GRADIENT)
                gradient = run.pooled_gradient(sums, origin.law, eps)
                run.record(update=origin.update, step=t, eps=eps, gradient_norm=run.norm(gradient))
        return Inner(eps=eps, steps=len(steps))

    def _search(self, run: Run[Model], origin: Origin, rule: Backtracking) -> Flow[Inner]:
        state = _Iterate(eps=np.zeros(run.problem.dim), loss=0.0, gradient=origin.gradient)
        length = rule.first or 1.0 / _largest_eigenvalue(run, origin)
        for t in range(1, self.max_steps + 1):
            trial = yield from _line_search(
                run, origin, state, -state.gradient, length, rule, Part.LOSS | Part.GRADIENT, t
            )
            if trial is None:
                return Inner(eps=state.eps, steps=t - 1)
            taken = run.norm(trial.eps - state.eps) / run.norm(state.gradient)
            state, length = trial, rule.grow * taken
            if run.norm(state.gradient) <= origin.goal:
                return Inner(eps=state.eps, steps=t)
        return Inner(eps=state.eps, steps=self.max_steps)


@final
@dataclass(frozen=True, kw_only=True)
class Newton(AbstractOptimizer):
    """Newton's method on pooled sums. A query discloses the Hessian too: d(d+1)/2 more numbers.

    Parameters
    ----------
    max_steps
        The most steps of one inner solve.
    stop
        An inner solve ends when the gradient is at most this fraction of the residual at its origin.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Newton().max_steps
    50
    """

    max_steps: int = 50
    stop: float = 1e-3

    def __post_init__(self) -> None:
        require_positive(stop=self.stop)
        require_budget(max_steps=self.max_steps)

    def needs_hessian(self, run: Run[Model], law: Law) -> bool:
        return True

    def minimise(self, run: Run[Model], origin: Origin) -> Flow[Inner]:
        parts = Part.LOSS | Part.GRADIENT | Part.HESSIAN
        rule = Backtracking(first=1.0)
        state = _Iterate(
            eps=np.zeros(run.problem.dim), loss=0.0, gradient=origin.gradient, hessian=origin.hessian
        )
        for t in range(1, self.max_steps + 1):
            if state.hessian is None:
                raise AssertionError("the origin check of a Newton solve brings the Hessian")
            direction = newton_direction(state.hessian, state.gradient)
            trial = yield from _line_search(run, origin, state, direction, 1.0, rule, parts, t)
            if trial is None:
                return Inner(eps=state.eps, steps=t - 1, hessian=state.hessian)
            state = trial
            if run.norm(state.gradient) <= origin.goal:
                return Inner(eps=state.eps, steps=t, hessian=state.hessian)
        return Inner(eps=state.eps, steps=self.max_steps, hessian=state.hessian)


@final
@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(AbstractOptimizer):
    """Stochastic gradient descent on pooled batches, which every party draws by the same public seed.

    "fixed" batches are the parts of one seeded partition of the pooled records, taken in turn. "fresh" ones
    are drawn anew at each step: sums over batches that overlap disclose single records by subtraction, so a
    guarded silo refuses them unless its owner's ``fresh_batches`` allows them, as long as no combination of
    all their sums rests on fewer than ``min_people``.

    Parameters
    ----------
    batch
        The number of records in a batch.
    step
        The step size.
    steps
        The number of steps per submodel.
    batches
        "fixed" or "fresh".
    replace
        Whether fresh batches are drawn with replacement.
    seed
        The public seed.
    stop
        If positive, an inner solve ends at this fraction of the residual at its origin.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.StochasticGradientDescent(batch=32, step=0.1).batches
    'fixed'
    """

    draws_batches = True

    batch: int
    step: float
    steps: int = 100
    batches: Literal["fixed", "fresh"] = "fixed"
    replace: bool = False
    seed: int = 0
    stop: float = 0.0

    def __post_init__(self) -> None:
        require_positive(batch=self.batch, step=self.step, steps=self.steps)
        require_budget(batch=self.batch, steps=self.steps, seed=self.seed)
        if self.batches not in ("fixed", "fresh"):
            raise InputError(f"batches: expected 'fixed' or 'fresh', not {self.batches!r}")
        if self.replace and self.batches == "fixed":
            raise InputError("replace: a fixed partition has no replacement; give batches='fresh'")

    def needs_hessian(self, run: Run[Model], law: Law) -> bool:
        return False

    def draw(self, n: int, update: int, step: int) -> IntArray:
        """Return the pooled batch of one step: row numbers in 0..n-1, sorted, with repetitions."""
        if self.batch > n and not self.replace:
            raise InputError(f"batch: {self.batch} rows cannot be drawn from {n} without replacement")
        if self.batches == "fixed":
            parts = np.array_split(self._generator(PARTITION_STREAM).permutation(n), n // self.batch)
            return np.sort(parts[(update * self.steps + step) % len(parts)])
        rng = self._generator((update << 32) + step)
        if self.replace:
            return np.sort(rng.integers(0, n, size=self.batch))
        return np.sort(rng.permutation(n)[: self.batch])

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, stream]))

    def minimise(self, run: Run[Model], origin: Origin) -> Flow[Inner]:
        eps = np.zeros(run.problem.dim)
        for t in range(self.steps):
            batch = self.draw(run.n, origin.update, t)
            sums = yield from run.ask(origin.law, eps, Part.GRADIENT, batch=batch)
            mean = sums.values(len(batch)) + run.problem.normaliser(origin.law).gradient(eps)
            # Full-data gradients are not seen between EIF checks, so no norm is recorded.
            run.record(update=origin.update, step=t + 1, eps=eps, gradient_norm=None)
            eps = eps - self.step * mean
        return Inner(eps=eps, steps=self.steps)


def _line_search(
    run: Run[Model],
    origin: Origin,
    state: _Iterate,
    direction: Array,
    length: float,
    rule: Backtracking,
    parts: Part,
    step: int,
) -> Flow[_Iterate | None]:
    """Return the first acceptable point along ``direction``, halving its length, or None if there is none."""
    problem, law = run.problem, origin.law
    slope = math.fsum(float(g) * float(p) for g, p in zip(state.gradient, direction, strict=True))
    for _ in range(rule.max_halvings + 1):
        eps = state.eps + length * direction
        if not problem.admits(law, eps):
            length *= 0.5
            continue
        sums = yield from run.ask(law, eps, parts)
        loss = float(sums.values(run.n)[0]) + problem.normaliser(law).value(eps)
        if not math.isfinite(loss):
            raise NumericalError("the pooled loss is not finite; the law may have left the model")
        gradient = run.pooled_gradient(sums[1 : 1 + problem.dim], law, eps)
        run.record(
            update=origin.update, step=step, eps=eps, gradient_norm=run.norm(gradient), loss_change=loss
        )
        if _acceptable(run, law, state, gradient, loss, direction, length, slope, eps, rule):
            hessian = None
            if Part.HESSIAN in parts:
                hessian = unpack(sums[1 + problem.dim :].values(run.n), problem.dim)
                hessian = hessian + problem.normaliser(law).hessian(eps)
            return _Iterate(eps=eps, loss=loss, gradient=gradient, hessian=hessian)
        length *= 0.5
    return None


def _acceptable(
    run: Run[Model],
    law: Law,
    state: _Iterate,
    gradient: Array,
    loss: float,
    direction: Array,
    length: float,
    slope: float,
    eps: Array,
    rule: Backtracking,
) -> bool:
    """Return whether a trial passes Armijo's test.

    Below the resolution of the sums, the directional derivative decides instead (approximate Wolfe).
    """
    if loss <= state.loss + rule.armijo * length * slope:
        return True
    (shift,) = query_shifts(run.problem.row_bound(law), eps, Part.LOSS)
    resolution = 2.0**-shift + (PUBLIC_RESOLUTION if run.problem.accuracy(law) > 0 else 0.0)
    end_slope = math.fsum(float(g) * float(p) for g, p in zip(gradient, direction, strict=True))
    return loss <= state.loss + resolution and end_slope <= (2 * rule.armijo - 1) * slope


def _largest_eigenvalue(run: Run[Model], origin: Origin) -> float:
    """Return Gershgorin's upper bound of the curvature's largest eigenvalue, the same at every party."""
    curvature = run.problem.curvature(origin.law) if origin.hessian is None else origin.hessian
    if curvature is None:
        raise AssertionError("the origin check brings the Hessian where the law knows no curvature")
    bound = max(math.fsum(abs(float(entry)) for entry in row) for row in curvature)
    return bound if bound > 0 else 1.0
