"""FedTMLE-G in finite precision with differential coding (Algorithm 4), and the steps that it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, final

import numpy as np

from fedtmle.algorithms.base import (
    AbstractAlgorithm,
    Run,
    Tolerance,
    arithmetic_error,
    close,
    require_budget,
    require_positive,
    require_tolerance,
    settle_tolerance,
    tolerance_scales,
)
from fedtmle.errors import InputError
from fedtmle.model.linear import congruence, dot, operator_norm_squared, symmetric_norm
from fedtmle.model.submodel import AbstractNormaliser
from fedtmle.protocol.coded import (
    Action,
    CalibrationQuery,
    Certified,
    Estimated,
    Rounded,
    RoundedGradientQuery,
    SmoothnessRule,
)
from fedtmle.protocol.codes import gamma_length
from fedtmle.protocol.lattice import (
    Lattice,
    Matrix,
    build_lattice,
    floating,
    identity,
    root_up,
    significant,
    whitener,
    working_tolerance,
)
from fedtmle.protocol.outcome import Certificate, Smoothness, Status, Targeted
from fedtmle.protocol.query import Flow, JointQuery, Law, MomentsQuery, Problem
from fedtmle.protocol.sums import norm
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array

# Steps that learn the curvature from the gradients seen so far (Anderson's method).
#
# Where the covariates of the fluctuation move with the law, the curvature at the start is a poor guide
# further on, and gradient steps converge slowly. The changes that earlier steps made to the gradient show how
# it responds to steps. Every party has seen them, so that nothing more is asked.

RESOLVED = 1e-4  # a change with less than this share of its own direction is left out
GROWTH = 2.0  # the memory is dropped once the gradient is this many times the smallest one


@final
@dataclass(kw_only=True)
class Secant:
    """The steps s_j taken so far, and the changes y_j of the gradient that they made, the last one first.

    Steps are in units in which the gradient step from q is -q. The part of q in the span of the y_j is undone
    by the same combination of the s_j, and from the rest a gradient step is taken:

        minimise |q - Y a|,   step = -(q - Y a) - S a.
    """

    steps: list[Array] = field(default_factory=list)
    changes: list[Array] = field(default_factory=list)
    before: Array | None = None
    smallest: float = float("inf")

    def step(self, gradient: Sequence[int]) -> tuple[int, ...]:
        """Return the step from a point with this gradient, in integers."""
        q = np.array(gradient, dtype=np.float64)
        size = norm(q)
        if self.before is not None:
            self.changes.insert(0, q - self.before)
        if size > GROWTH * self.smallest:
            self.steps, self.changes = [], []
        self.smallest = min(self.smallest, size)
        self.before = q
        rest, undone = q, np.zeros(len(q))
        directions: list[tuple[Array, Array]] = []  # orthonormal changes, and the steps that make them
        for change, taken in zip(self.changes[: len(q)], self.steps, strict=False):
            y, s = change, taken
            for e, t in directions:
                share = dot(e.tolist(), y.tolist())
                y, s = y - share * e, s - share * t
            length = norm(y)
            if not length > RESOLVED * norm(change):
                continue
            e, t = y / length, s / length
            directions.append((e, t))
            share = dot(e.tolist(), rest.tolist())
            rest, undone = rest - share * e, undone - share * t
        return tuple(round(entry) for entry in (undone - rest).tolist())

    def take(self, step: Sequence[int]) -> None:
        """Remember the step that is taken from the last point."""
        self.steps.insert(0, np.array(step, dtype=np.float64))


History = list[tuple[tuple[int, ...], tuple[float, ...]]]  # beta u^k/h in integers, and eps^k


@final
@dataclass(frozen=True, kw_only=True)
class Coded(AbstractAlgorithm):
    """Algorithm 4: rounded gradients, coded as differences, with a certificate.

    With ``inner`` "step" the law is re-centred after every gradient step, so that every query checks the
    equation and R = S + 1. "adaptive" is the paper's own: steps in one submodel until its gradient is
    small, then a new origin, R = S + K + 1. The first needs fewer rounds, the second a shorter history.
    "secant" is "step" with a memory: the differences of the gradients seen so far correct the direction
    (`algorithms.coded`). "auto" is adaptive where the check at a new origin cannot fail (the fluctuation of
    a regression), so that the closing sums are asked in the same round. Elsewhere it is "step" if the law
    knows its curvature, and "secant" if only the rows do, as for times to an event.

    Parameters
    ----------
    tolerance
        The residual at which the run ends: the norm of the pooled mean of the efficient influence function.
        A number, which is the paper's delta, or a rule that sets it from the standard errors ("practical");
        in a study, that of each mean from its own.
    coordinates
        "whitened" by the curvature, or "raw".
    smoothness
        `Estimated`, `Certified`, or beta itself as a number, in the run's coordinates.
    inner
        "auto", "step", "secant" or "adaptive".
    max_rounds
        The most rounds.
    fixed_width
        If given, J: absolute integers in [-J, J] are sent instead of differences. The iterates are the
        same.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> silos = {"a": [1.0, 2.0], "b": [6.0]}
    >>> result = ft.solve(problem, problem.start(5.0), silos, ft.Coded(tolerance=1e-6))
    >>> result.residual <= 1e-6
    True
    """

    rounds_sums = True

    tolerance: Tolerance = "practical"
    coordinates: Literal["raw", "whitened"] = "whitened"
    smoothness: SmoothnessRule = Estimated(factor=1.0, over="pooled")
    inner: Literal["auto", "step", "secant", "adaptive"] = "auto"
    max_rounds: int = 10_000
    fixed_width: int | None = None

    def __post_init__(self) -> None:
        require_tolerance(self.tolerance)
        require_budget(max_rounds=self.max_rounds)
        if self.coordinates not in ("raw", "whitened"):
            raise InputError(f"coordinates: expected 'raw' or 'whitened', not {self.coordinates!r}")
        if isinstance(self.smoothness, int | float):
            require_positive(smoothness=self.smoothness)
        if self.inner not in ("auto", "step", "secant", "adaptive"):
            raise InputError(f"inner: expected 'auto', 'step', 'secant' or 'adaptive', not {self.inner!r}")
        if self.inner == "secant" and self.follows_segments:
            raise InputError(
                "inner: 'secant' takes no gradient steps, along which smoothness could be certified; "
                "choose 'step', or Certified() without along='segments'"
            )
        if self.fixed_width is not None and self.fixed_width < 1:
            raise InputError(f"fixed_width: expected an integer of at least 1, not {self.fixed_width}")

    @property
    def adds_integers(self) -> bool:
        """Whether all pooled values are sums: false if beta is the largest of the silos' own curvatures."""
        return isinstance(self.smoothness, int | float) or self.smoothness.over == "pooled"

    def flow(self, problem: Problem, law: Law, n: int) -> Flow[Targeted]:
        run = Run(problem, n)
        tolerance, lattice = yield from self.calibrate(run, law)
        return (yield from self.descend(run, law, lattice, tolerance, [], (0,) * lattice.dim))

    def calibrate(self, run: Run[Problem], law: Law) -> Flow[tuple[float, Lattice]]:
        """Settle the tolerance and the lattice of a run that starts at ``law``.

        A rule sets the tolerance of each coordinate by its own standard error, if these are pooled and the
        coordinates whitened; the norm of these tolerances is returned.
        """
        problem = run.problem
        tolerance = yield from settle_tolerance(run, law, self.tolerance)
        rule = self.tolerance if isinstance(self.tolerance, str) else None
        delta = working_tolerance(tolerance, arithmetic_error(problem, law), rule)
        C = self._public_coordinates(problem, law)
        beta = self._public_smoothness(problem, law, C)
        if C is not None and beta is not None:
            known = None if rule is None or self.coordinates == "raw" else problem.calibration(law)
            scales = () if known is None else tolerance_scales(known.errors)
            lattice = build_lattice(delta=delta, beta=beta, C=C, scales=scales)
            if scales:
                tolerance *= math.sqrt(math.fsum(scale * scale for scale in scales))
                run.tolerance = tolerance
        else:
            lattice = yield CalibrationQuery(
                problem=problem, law=law, n=run.n, delta=delta, C=C, smoothness=self.smoothness
            )
        return tolerance, lattice

    def descend(
        self,
        run: Run[Problem],
        law: Law,
        lattice: Lattice,
        tolerance: float,
        history: History,
        q: tuple[int, ...],
    ) -> Flow[Targeted]:
        """Take rounded gradient steps from ``law`` after ``history``; q is the last broadcast."""
        zero = (0,) * lattice.dim
        steps, t, n_steps = zero, 0, len(history)
        rows_part = lattice.beta
        secant = Secant() if self.is_secant(run.problem, law) else None
        while True:
            eps = lattice.eps(steps)
            query = RoundedGradientQuery(
                problem=run.problem,
                law=law,
                eps=eps,
                lattice=lattice,
                previous_q=q,
                at_origin=t == 0,
                n=run.n,
                width=self.fixed_width,
                tolerance=tolerance,
            )
            rounded: Rounded
            closing: Sums | None = None
            if t == 0 and history and run.problem.displacement(law) is not None:
                # The gradient here is the one just accepted, so that this round is the last.
                rounded, closing = yield JointQuery(
                    (query, MomentsQuery(problem=run.problem, law=law, n=run.n))
                )
            else:
                rounded = yield query
            q = rounded.q
            run.record(
                update=len(history), step=t, eps=eps, gradient_norm=root_up(lattice.raw_norm_squared(q))
            )
            if rounded.action is Action.FINISH:
                status = Status.CONVERGED
                break
            if run.rounds >= self.max_rounds:
                status = Status.ROUND_BUDGET
                if t and run.problem.displacement(law) is not None and run.problem.admits(law, eps):
                    # The gradient at eps is that at the origin of the law moved there.
                    law, t = run.problem.move(law, eps), 0
                    history.append((steps, tuple(map(float, eps))))
                    if rounded.action is Action.ACCEPT:
                        status = Status.CONVERGED
                break
            if rounded.action is Action.STEP:  # eps^{k,t+1} = eps^{k,t} - g~/beta
                before, lattice = lattice, self._raised(run, law, lattice, eps, q, n_steps, rows_part)
                factor = int(lattice.beta / before.beta)  # every eps so far is on the finer lattice too
                steps = tuple(factor * a for a in steps)
                history[:] = [(tuple(factor * a for a in own), accepted) for own, accepted in history]
                secant = (
                    secant if secant is None or factor == 1 else Secant()
                )  # a secant is in units of beta, which changed
                change = _change(run.problem, law, lattice, q, secant)
                steps = tuple(a + b for a, b in zip(steps, change, strict=True))
                t, n_steps = t + 1, n_steps + 1
            if rounded.action is Action.ACCEPT or not self.is_adaptive(run.problem, law):
                # p^{k+1} = p^k(eps^k); the integer memories are kept
                eps = lattice.eps(steps)
                law = run.problem.move(law, eps)
                history.append((steps, tuple(map(float, eps))))
                steps, t = zero, 0
        return (yield from self.finish(run, law, lattice, tolerance, q, history, t, status, n_steps, closing))

    def finish(
        self,
        run: Run[Problem],
        law: Law,
        lattice: Lattice,
        tolerance: float,
        q: tuple[int, ...],
        history: History,
        t: int = 0,
        status: Status = Status.CONVERGED,
        n_steps: int | None = None,
        closing: Sums | None = None,
    ) -> Flow[Targeted]:
        """Close a run at ``law``, whose last rounded gradient is q at step t of the current submodel.

        ``closing`` are the closing sums, if they were asked already.
        """
        arithmetic = arithmetic_error(run.problem, law)
        # Away from an origin the last gradient says nothing about the EIF mean at the returned law.
        bound = lattice.certificate(q) + arithmetic if t == 0 else float("inf")
        bounds = tuple(each + arithmetic for each in lattice.coordinate_certificates(q)) if t == 0 else None
        if closing is None:
            estimate = yield from close(run, law)
        else:
            estimate = run.problem.finish(law, closing, run.n)
        return Targeted(
            problem=run.problem,
            law=law,
            status=status,
            steps=len(history) if n_steps is None else n_steps,
            updates=len(history),
            residual=bound,
            residual_kind="certified bound",
            trajectory=tuple(run.visits),
            accepted=tuple(eps for _, eps in history),
            certificate=Certificate(
                tolerance=tolerance,
                residual_bound=bound,
                arithmetic=arithmetic,
                residual_bounds=bounds,
                smoothness=Smoothness(
                    value=float(lattice.beta),
                    basis=self._basis(run.problem),
                    by_step=tuple(run.step_smoothness),
                ),
                lattice=lattice,
                coordinates=self.coordinates,
                history_bits=_history_bits([steps for steps, _ in history])
                + (lattice.smoothness_bits if self.follows_segments else 0),
            ),
            estimate=estimate,
        )

    def is_adaptive(self, problem: Problem, law: Law) -> bool:
        """Return whether steps are taken in one submodel until its gradient is small."""
        if self.inner == "auto":
            return problem.displacement(law) is not None
        return self.inner == "adaptive"

    def is_secant(self, problem: Problem, law: Law) -> bool:
        """Return whether earlier gradients correct the direction of a step."""
        if self.inner != "auto":
            return self.inner == "secant"
        unknown = problem.displacement(law) is None and problem.curvature(law) is None
        return unknown and not self.follows_segments

    @property
    def follows_segments(self) -> bool:
        """Whether beta bounds the curvature along the steps taken, not everywhere."""
        return isinstance(self.smoothness, Certified) and self.smoothness.along == "segments"

    def _public_coordinates(self, problem: Problem, law: Law) -> Matrix | None:
        """Return C if it needs no data (raw, or whitened by a curvature that the law knows), else None."""
        if self.coordinates == "raw":
            return identity(problem.dim)
        curvature, known = problem.curvature(law), problem.calibration(law)
        if curvature is None and known is not None:
            curvature = np.array(known.curvature)
        return None if curvature is None else whitener(curvature)

    def _public_smoothness(self, problem: Problem, law: Law, C: Matrix | None) -> Fraction | None:
        """Return beta if it needs no data: it is given, or a multiple of a pooled curvature that all know."""
        if isinstance(self.smoothness, int | float):
            return significant(self.smoothness, up=True)
        known = problem.calibration(law)
        if (
            C is None
            or known is None
            or isinstance(self.smoothness, Certified)  # the curvature at the origin is no bound
            or self.smoothness.over != "pooled"
        ):
            return None
        root = floating(C)
        largest = symmetric_norm(congruence(root, np.array(known.curvature)))
        spread = operator_norm_squared(root) * known.rounding
        return significant(self.smoothness.factor * (largest + spread), up=True)

    def _raised(
        self,
        run: Run[Problem],
        law: Law,
        lattice: Lattice,
        eps: Array,
        q: tuple[int, ...],
        n_steps: int,
        rows_part: Fraction,
    ) -> Lattice:
        """Return the lattice with the beta of the step from eps by the gradient h q, doubled if need be.

        Along segments, beta bounds the normaliser's curvature there. Else it is that of the first law, and if
        the gradient fell by less than the square root of 1/2 since the law before, it is held against the
        curvature of this law: at twice beta steps no longer descend, and near that they multiply what
        rounding leaves of the gradient.
        """
        if self.follows_segments:
            normaliser = run.problem.normaliser(law)
            if n_steps == 0:
                lattice = first_smoothness(normaliser, eps, lattice, q)
            else:
                lattice = sufficient_smoothness(normaliser, eps, lattice, q, rows_part)
            run.step_smoothness.append(float(lattice.beta))
            return lattice
        norms = [visit.gradient_norm or 0.0 for visit in run.visits if visit.step == 0][-2:]
        if run.problem.curvature_is_fixed or len(norms) < 2 or 2 * norms[1] ** 2 <= norms[0] ** 2:
            return lattice
        curvature = None if isinstance(self.smoothness, int | float) else run.problem.curvature(law)
        if curvature is None:
            return lattice
        largest, beta = symmetric_norm(congruence(floating(lattice.C), curvature)), lattice.beta
        while 2 * largest > 3 * float(beta):
            beta *= 2
        return replace(lattice, beta=beta)

    def _basis(self, problem: Problem) -> str:
        if isinstance(self.smoothness, Certified):
            if problem.curvature_is_fixed:
                return "certified"
            return "certified along the steps" if self.follows_segments else "certified at the start"
        if isinstance(self.smoothness, Estimated):
            return "estimated, pooled" if self.smoothness.over == "pooled" else "estimated"
        return "given"


def _change(
    problem: Problem, law: Law, lattice: Lattice, q: tuple[int, ...], secant: Secant | None
) -> tuple[int, ...]:
    """Return the step after the gradient q: that of the secant if there is one and the law admits it."""
    plain = tuple(-entry for entry in q)
    if secant is None:
        return plain
    corrected = secant.step(q)
    change = corrected if problem.admits(law, lattice.eps(corrected)) else plain
    secant.take(change)
    return change


def first_smoothness(
    normaliser: AbstractNormaliser, eps: Array, lattice: Lattice, q: tuple[int, ...]
) -> Lattice:
    """Return the lattice with the beta of the run's first step, from eps with the rounded gradient h q.

    ``lattice.beta`` bounds the rows' curvature. With it alone, plus that of A at eps, the step would be at
    least as long; the largest curvature of A on that longer segment bounds it on the step.
    """
    origin = curvature_along(normaliser, eps, lattice, q, length=Fraction(0))
    longest = replace(lattice, beta=significant(float(lattice.beta) + origin, up=True))
    along = curvature_along(normaliser, eps, longest, q)
    return replace(lattice, beta=significant(float(lattice.beta) + along, up=True))


def sufficient_smoothness(
    normaliser: AbstractNormaliser,
    eps: Array,
    lattice: Lattice,
    q: tuple[int, ...],
    rows_part: Fraction,
) -> Lattice:
    """Return the lattice with beta doubled until it bounds the curvature along the step from eps.

    Doubling keeps every eps that was reached on the lattice. It ends, because the curvature of A has a bound
    that holds everywhere.
    """
    while rows_part + Fraction(curvature_along(normaliser, eps, lattice, q)) > lattice.beta:
        lattice = replace(lattice, beta=2 * lattice.beta)
    return lattice


def curvature_along(
    normaliser: AbstractNormaliser,
    eps: Array,
    lattice: Lattice,
    q: tuple[int, ...],
    length: Fraction = Fraction(1),
) -> float:
    """Return a bound on the curvature of A per unit length of u, on the step from eps by -h q/beta.

    ``length`` 0 takes the point eps alone. A part of A that is concave is not subtracted from the rows'.
    """
    step = lattice.eps(tuple(-entry for entry in q))
    squared = float((lattice.h / lattice.beta) ** 2 * sum(entry * entry for entry in q))
    if length == 0:
        hessian = normaliser.hessian(eps)
        bound = float(congruence(step[None, :], hessian)[0, 0])
    else:
        bound = normaliser.segment_curvature(eps, step)
    return max(0.0, bound / squared * (1.0 + 2.0**-30))


def _history_bits(history: list[tuple[int, ...]]) -> int:
    """Return H_K - H_init: gamma code of K + 1, then the K d signed integers beta eps^k / h."""
    count = 2 * (len(history) + 1).bit_length() - 1
    return count + sum(gamma_length(a) for steps in history for a in steps)
