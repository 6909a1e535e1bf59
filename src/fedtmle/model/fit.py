"""The exact local fit of FedTMLE-L: the minimiser of one silo's loss over a public ball,

    l_m(eps) = (1/N_m) sum_i L(p^k(eps))(O_i),   ||eps|| <= radius.

The method is trust-region Newton. It solves the d x d subproblem exactly, so it escapes saddle points and
handles the hard case, and it can fit nonconvex density fluctuations. All tolerances follow from the grid of
the sums. Where the loss cannot resolve the predicted decrease, a step is accepted if it decreases the
gradient. A fit ends at ||g|| <= 8 sqrt(d) C_row 2^-51, since the sum of each coordinate has an error of at
most C_row 2^-51.

A convex loss has one basin. For other losses the method also descends from those of a fixed set of public
points where the loss is lower, and keeps the lowest minimum; of equal ones, the nearest to zero. This is a
search, not a proof of a global minimum. Zero is selected whenever zero is a minimiser (assumption
local-regularity).

`FirstOrderFits` uses gradients alone (L-BFGS). A fit may stop at a declared gradient norm;
`fedtmle.theory.personalized.inexact_bound` says what that costs.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import numpy as np

from fedtmle.errors import ContributionError, InputError, NumericalError
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel, NoNormaliser
from fedtmle_core.exact import layout
from fedtmle_core.types import Array, Part, unpack

ALL_PARTS = Part.LOSS | Part.GRADIENT | Part.HESSIAN
STEPS = 200
START_FRACTIONS = (0.75, 0.375, 0.125)  # start points along +-e_j, as shares of the radius
ON_SPHERE = 1 - 2.0**-40
NORMALISER_ROUNDING = 2.0**-46  # a sum over some 10^4 quadrature nodes, relative to Z


MEMORY = 10  # pairs that L-BFGS keeps
FIRST_ORDER_STEPS = 1000
ARMIJO = 1e-4


@dataclass(frozen=True, kw_only=True)
class _Solver:
    """``gradient`` is the norm at which a fit stops; None stops at the resolution of the exact sums."""

    gradient: float | None = None

    def __post_init__(self) -> None:
        if self.gradient is not None and not 0 < self.gradient < np.inf:
            raise InputError(f"solver: gradient must be a finite number above zero, got {self.gradient}")


@final
@dataclass(frozen=True, kw_only=True)
class NewtonFits(_Solver):
    """Local fits by Newton's method with a trust region.

    Parameters
    ----------
    gradient
        The gradient norm at which a fit stops. None stops at the resolution of the exact sums.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.LocalAverage(solver=ft.NewtonFits(gradient=1e-8)).solver
    NewtonFits(gradient=1e-08)
    """


@final
@dataclass(frozen=True, kw_only=True)
class FirstOrderFits(_Solver):
    """Local fits by L-BFGS, from losses and gradients alone.

    Parameters
    ----------
    gradient
        The gradient norm at which a fit stops. None stops at the resolution of the exact sums.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.LocalAverage(solver=ft.FirstOrderFits()).solver
    FirstOrderFits(gradient=None)
    """


LocalSolver = NewtonFits | FirstOrderFits
EXACT_NEWTON = NewtonFits()


class FitStatus(enum.Enum):
    """How a local fit ended; the value is the sentence that people read."""

    MINIMUM = "a minimum inside the ball, to the resolution of the exact sums"
    BOUNDARY = "the fit lies on the edge of the ball; the data may have no finite fit"
    STALLED = "no step improves the fit, though its gradient is above the sums' resolution"


@final
@dataclass(frozen=True, kw_only=True)
class LocalMinimum:
    """The local fit eps-hat_m and how exact it is.

    ``gradient_norm`` is ||grad l_m(eps)||, on the boundary without its inward normal part;
    ``decrease`` is l_m(0) - l_m(eps), at least zero; ``curvature`` the Hessian's least eigenvalue, not a
    number if the solver sees gradients alone.
    """

    eps: Array
    gradient_norm: float
    decrease: float
    curvature: float
    status: FitStatus
    iterations: int


def fit_local(
    submodel: AbstractSubmodel,
    normaliser: AbstractNormaliser,
    *,
    dim: int,
    radius: float,
    zero_floor: float = 0.0,
    exhaustive: bool = False,
    solver: LocalSolver = EXACT_NEWTON,
) -> LocalMinimum:
    """Return the selected minimiser of l_m over the ball, eps of shape (dim,).

    ``exhaustive`` descends from every public start, not only from those below the first minimum.
    Zero counts as stationary if ||grad l_m(0)|| is at most the sums' resolution, ``zero_floor`` or the
    gradient norm at which the ``solver`` stops.
    """
    objective = _Objective(submodel, normaliser, normaliser.value(np.zeros(dim)), solver)
    origin = objective.evaluate(np.zeros(dim))
    if _norm(origin.gradient) <= max(zero_floor, origin.stop) and origin.spectrum()[0][0] >= 0:
        # Whatever a step could still gain at zero is unresolved, or declared negligible.
        _, slack = _step(origin, radius, radius)
        ends = [_End(origin, converged=True, steps=0, slack=slack)]
    else:
        ends = [_descend(objective, origin, radius)]
    if not isinstance(normaliser, NoNormaliser):  # the rows' own losses are convex
        # A public point below the minimum just found lies in a lower basin: descend from it too.
        points = (
            eps for eps in _public_starts(dim, radius) if exhaustive or objective.is_below(eps, ends[0].point)
        )
        starts = (objective.attempt(eps) for eps in points)
        ends += [_descend(objective, start, radius) for start in starts if start is not None]
    best = _select(ends)
    return LocalMinimum(
        eps=best.point.eps,
        gradient_norm=best.point.residual(radius),
        decrease=max(0.0, -best.point.loss),
        curvature=float(np.linalg.eigvalsh(best.point.hessian)[0])
        if isinstance(solver, NewtonFits)
        else np.nan,
        status=_status(best, radius),
        iterations=sum(end.steps for end in ends),
    )


@dataclass(frozen=True)
class _Point:
    """The loss l_m and its derivatives at eps, with their resolutions."""

    objective: _Objective
    eps: Array
    loss: float  # l_m(eps) - l_m(0)
    gradient: Array
    noise: float
    floor: float
    curvature: tuple[Array, float] | None = None  # the Hessian and its resolution, if asked for at once

    @property
    def stop(self) -> float:
        """The gradient norm at which a fit ends."""
        return max(self.floor, self.objective.solver.gradient or 0.0)

    @cached_property
    def _second(self) -> tuple[Array, float]:
        return self.curvature or self.objective.second(self.eps)

    @property
    def hessian(self) -> Array:
        return self._second[0]

    @property
    def flat(self) -> float:
        return self._second[1]

    def residual(self, radius: float) -> float:
        """Return ||g||, or ||g + mu eps|| with the multiplier mu >= 0 if ||eps|| <= radius is active."""
        if _norm(self.eps) < ON_SPHERE * radius:
            return _norm(self.gradient)
        mu = max(0.0, -float(self.gradient @ self.eps) / float(self.eps @ self.eps))
        return _norm(self.gradient + mu * self.eps)

    def spectrum(self) -> tuple[Array, Array]:
        """Return eigenvalues and eigenvectors of the Hessian; unresolved eigenvalues are set to zero."""
        values, vectors = np.linalg.eigh(self.hessian)
        return np.where(np.abs(values) <= self.flat, 0.0, values), vectors


@dataclass(frozen=True)
class _Objective:
    """The loss l_m of one silo's rows, public part included."""

    submodel: AbstractSubmodel
    normaliser: AbstractNormaliser
    base: float  # A(0)
    solver: LocalSolver

    def evaluate(self, eps: Array) -> _Point:
        """Return the point, with its Hessian in the same pass if the solver is Newton's."""
        d, second_order = len(eps), isinstance(self.solver, NewtonFits)
        parts = ALL_PARTS if second_order else Part.LOSS | Part.GRADIENT
        sums = self.submodel.sums(eps, parts)
        mean = sums.values(self.submodel.n_rows)
        _, gradient, second = layout(d, ALL_PARTS)
        resolution = [2.0 ** -(shift + 1) for shift in sums.shifts]  # half a unit, for a mean
        value = self.normaliser.value(eps)
        public = 0.0 if isinstance(self.normaliser, NoNormaliser) else NORMALISER_ROUNDING
        return _Point(
            objective=self,
            eps=eps,
            loss=float(mean[0]) + (value - self.base),
            gradient=mean[gradient] + self.normaliser.gradient(eps),
            noise=8 * resolution[0] + public * max(1.0, abs(value)) if eps.any() else 0.0,
            floor=8 * d**0.5 * max(resolution[gradient]),
            curvature=self._curvature(eps, mean[second], resolution[second]) if second_order else None,
        )

    def second(self, eps: Array) -> tuple[Array, float]:
        """Return the Hessian at eps and its resolution, by a pass of its own."""
        sums = self.submodel.sums(eps, Part.HESSIAN)
        resolution = [2.0 ** -(shift + 1) for shift in sums.shifts]
        return self._curvature(eps, sums.values(self.submodel.n_rows), resolution)

    def _curvature(self, eps: Array, packed: Array, resolution: list[float]) -> tuple[Array, float]:
        d = len(eps)
        hessian = unpack(packed, d) + self.normaliser.hessian(eps)
        return hessian, 8 * d * max(resolution) + 2.0**-46 * _norm(hessian)

    def is_below(self, eps: Array, point: _Point) -> bool:
        """Return whether l_m(eps) is lower than at ``point``; the pass over the rows sums the loss only."""
        try:
            rows = float(self.submodel.sums(eps, Part.LOSS).values(self.submodel.n_rows)[0])
            return rows + self.normaliser.value(eps) - self.base < point.loss - point.noise
        except (ContributionError, NumericalError):
            return False

    def attempt(self, eps: Array) -> _Point | None:
        """Return l_m at eps, or None if it is not finite or a row exceeds the bound of the exact sums."""
        try:
            point = self.evaluate(eps)
        except (ContributionError, NumericalError):
            return None
        finite = np.isfinite(point.loss) and np.isfinite(point.gradient).all()
        curved = point.curvature is None or np.isfinite(point.hessian).all()
        return point if finite and curved else None


@dataclass(frozen=True)
class _End:
    """Where a descent ended; ``slack`` is a loss difference below which it ties with another."""

    point: _Point
    converged: bool
    steps: int
    slack: float = 0.0


def _descend(objective: _Objective, start: _Point, radius: float) -> _End:
    """Descend from a start by the solver's method."""
    if isinstance(objective.solver, NewtonFits):
        return _newton(objective, start, radius)
    end = _lbfgs(objective, start, radius)
    if end.converged:
        return end
    # At the edge of the ball, or stalled: second-order steps decide which.
    rest = _newton(objective, end.point, radius)
    return replace(rest, steps=end.steps + rest.steps)


def _lbfgs(objective: _Objective, start: _Point, radius: float) -> _End:
    """Limited-memory BFGS with backtracking, inside the ball."""
    point = start
    memory: deque[tuple[Array, Array]] = deque(maxlen=MEMORY)  # changes of eps and of the gradient
    for steps in range(FIRST_ORDER_STEPS):
        if _norm(point.gradient) <= point.stop:
            return _End(point, True, steps)
        direction = -_inverse_hessian_times(point.gradient, memory)
        slope = float(point.gradient @ direction)
        if slope >= 0:  # rounding has spoilt the memory
            memory.clear()
            direction, slope = -point.gradient, -float(point.gradient @ point.gradient)
        length = 1.0
        while True:
            eps = point.eps + length * direction
            if length * _norm(direction) < 2.0**-80 * radius:
                return _End(point, False, steps)
            trial = objective.attempt(eps) if _norm(eps) < ON_SPHERE * radius else None
            if trial is not None and _accepts(point, trial, -10 * ARMIJO * length * slope, radius):
                break
            length /= 2
        change, turn = trial.eps - point.eps, trial.gradient - point.gradient
        if float(change @ turn) > 2.0**-40 * _norm(change) * _norm(turn):
            memory.append((change, turn))
        point = trial
    return _End(point, False, FIRST_ORDER_STEPS)


def _inverse_hessian_times(gradient: Array, memory: deque[tuple[Array, Array]]) -> Array:
    """The two-loop recursion; without memory a step of length one."""
    if not memory:
        return gradient / max(1.0, _norm(gradient))
    q, weights = gradient.copy(), []
    for change, turn in reversed(memory):
        weights.append(float(change @ q) / float(change @ turn))
        q = q - weights[-1] * turn
    change, turn = memory[-1]
    q = q * (float(change @ turn) / float(turn @ turn))
    for (change, turn), weight in zip(memory, reversed(weights), strict=True):
        q = q + (weight - float(turn @ q) / float(change @ turn)) * change
    return q


def _newton(objective: _Objective, start: _Point, radius: float) -> _End:
    """Trust-region Newton from a start, to a second-order point at the sums' resolution."""
    point, reach = start, radius
    for steps in range(STEPS):
        eps, predicted = _step(point, reach, radius)
        length = _norm(eps - point.eps)
        # A separated fit has tiny gradients and long steps: it has not settled.
        settled = length <= 2.0**-10 * _norm(point.eps) + 2.0**-30 * radius
        if settled and point.residual(radius) <= point.stop:
            return _End(_outward(objective, point, radius), True, steps)
        if length < 2.0**-80 * radius:
            return _End(point, False, steps)
        trial = objective.attempt(eps)
        if trial is None or not _accepts(point, trial, predicted, radius):
            reach = length / 4
            continue
        if length >= 0.99 * reach:
            reach = min(2 * reach, 2 * radius)
        point = trial
    return _End(point, False, STEPS)


def _accepts(point: _Point, trial: _Point, predicted: float, radius: float) -> bool:
    """Return whether a step gains enough of its predicted decrease or, if unresolved, a smaller gradient."""
    decrease, noise = point.loss - trial.loss, point.noise + trial.noise
    if predicted > noise:
        return decrease >= 0.1 * predicted
    return decrease >= -noise and trial.residual(radius) < point.residual(radius)


def _step(point: _Point, reach: float, radius: float) -> tuple[Array, float]:
    """Return the next eps, p away, and its predicted decrease -m(p), m(p) = g.p + p.Hp/2, ||p|| <= reach."""
    values, vectors = point.spectrum()
    hessian = (vectors * values) @ vectors.T
    eps, gradient = point.eps, point.gradient

    def decrease(target: Array) -> float:
        p = target - eps
        return -float(gradient @ p + 0.5 * p @ hessian @ p)

    free = eps + _ball_minimiser(gradient, values, vectors, reach, point.floor)
    if _norm(free) <= radius / ON_SPHERE:
        free = _project(free, radius)
        return free, decrease(free)
    # The step leaves the ball. The model's minimiser over the whole ball is Newton's step on the sphere.
    # While that is out of reach, project the step: if short enough, it is a projected gradient step.
    sphere = _ball_minimiser(gradient - hessian @ eps, values, vectors, radius, point.floor)
    target = sphere if _norm(sphere - eps) <= reach else _project(free, radius)
    return target, decrease(target)


def _ball_minimiser(linear: Array, values: Array, vectors: Array, radius: float, floor: float) -> Array:
    """Return the exact minimiser of b.p + p.Hp/2 over ||p|| <= radius, for H = V diag(values) V'.

    p = -(H + nu)^+ b with the multiplier nu. We solve for s = nu + min(values), which avoids cancellation.
    """
    b = vectors.T @ linear
    b = np.where((values == 0) & (np.abs(b) <= floor), 0.0, b)  # unresolved along a flat direction: stay
    gaps = values - values[0]
    lowest = max(0.0, float(values[0]))  # nu >= 0 and H + nu >= 0
    s = max(lowest, float(np.max(np.abs(b) / radius - gaps)))  # a lower bound of the solution
    p = -_ratio(b, gaps + s)
    if s == lowest and _norm(p) <= radius:
        if values[0] < 0:  # hard case: go on along the most negative curvature
            orientation = vectors[np.argmax(np.abs(vectors[:, 0])), 0]
            p[0] = np.copysign((radius**2 - float(p @ p)) ** 0.5, orientation)
        return vectors @ p
    for _ in range(100):  # Newton on 1/radius - 1/||p(s)||, monotone from the left
        norm = _norm(p)
        if norm <= radius * (1 + 2.0**-44):
            break
        s += norm**2 / float(np.sum(_ratio(p**2, gaps + s))) * (norm / radius - 1)
        p = -_ratio(b, gaps + s)
    return _project(vectors @ p, radius)


def _ratio(a: Array, b: Array) -> Array:
    """Return a / b, and zero where a is zero."""
    return np.divide(a, b, out=np.zeros_like(a), where=a != 0)


def _outward(objective: _Objective, point: _Point, radius: float) -> _Point:
    """Return the point on the edge of the ball, if the fit moved outward along a direction that became flat.

    Separated outcomes do this: the loss decreases for ever, by less than the sums resolve.
    """
    values, vectors = point.spectrum()
    flat = vectors[:, values == 0]
    u = flat @ (flat.T @ point.eps)
    if _norm(u) <= 2.0**-10 * _norm(point.eps):
        return point
    rest = point.eps - u
    edge = rest + u * max(1.0, (max(0.0, radius**2 - float(rest @ rest))) ** 0.5 / _norm(u))
    trial = objective.attempt(_project(edge, radius))
    return point if trial is None or trial.loss > point.loss + point.noise + trial.noise else trial


def _select(ends: list[_End]) -> _End:
    """Return the end of the lowest loss; of tied ones a minimum before a stall, then the nearest to zero."""
    lowest = min(ends, key=lambda end: end.point.loss)
    level = lowest.point.loss + lowest.point.noise
    tied = [end for end in ends if end.point.loss <= level + end.point.noise + end.slack]
    return min(tied, key=lambda end: (not end.converged, _norm(end.point.eps)))


def _status(end: _End, radius: float) -> FitStatus:
    if _norm(end.point.eps) >= ON_SPHERE * radius:
        return FitStatus.BOUNDARY
    return FitStatus.MINIMUM if end.converged else FitStatus.STALLED


def _public_starts(dim: int, radius: float) -> Iterator[Array]:
    for fraction in START_FRACTIONS:
        for axis in np.eye(dim):
            yield fraction * radius * axis
            yield -fraction * radius * axis


def _project(eps: Array, radius: float) -> Array:
    norm = _norm(eps)
    return eps if norm <= radius else eps * (radius / norm)


def _norm(vector: Array) -> float:
    return float(np.linalg.norm(vector))
