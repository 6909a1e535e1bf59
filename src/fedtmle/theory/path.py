"""A finished coded run (Algorithm 4), followed on the rows, and the constants of the assumptions.

`follow` computes the silos' gradients and the pooled loss query by query. All vectors are in the run's
coordinates: C g for gradients, u with eps = C^T u for fluctuations.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from fedtmle.model.problem import AbstractProblem, Law, Rows
from fedtmle.protocol.lattice import Lattice, floating
from fedtmle.protocol.outcome import Visit
from fedtmle.theory.communication import step_decrease
from fedtmle_core.types import Array, Part

LOSS_ROUNDING = 1e-13  # rounding of a loss difference, in exact comparisons


@dataclass(frozen=True, kw_only=True)
class TargetingPath:
    """The S + K + 1 states of K + 1 submodels over M silos.

    Each is a query, but for the ends of updates by one step: there p^{k+1} is the state that is asked.
    """

    update: tuple[int, ...]  # k of each state
    step: tuple[int, ...]  # t of each state
    queried: tuple[bool, ...]  # whether the silos were asked there: R of them
    u: Array  # (S + K + 1, d): where each state is
    gradient: Array  # (S + K + 1, M, d): each silo's
    loss: Array  # (S + K + 1,): pooled, less that of the initial law
    share: Array  # (M,): N_m/n
    by_step: tuple[float, ...] = ()

    @property
    def pooled(self) -> Array:
        """The pooled gradients, (S + K + 1, d)."""
        return np.asarray(np.einsum("m,rmd->rd", self.share, self.gradient))

    def transitions(self) -> Iterator[tuple[int, bool]]:
        """Yield each state but the last, and whether the next one is in the same submodel (a step)."""
        for r in range(len(self.update) - 1):
            yield r, self.update[r + 1] == self.update[r]

    def origins(self) -> list[int]:
        """Return the state at the origin of each submodel."""
        return [r for r, t in enumerate(self.step) if t == 0]

    def endpoints(self) -> list[int]:
        """Return the accepted state of each update: the last of its submodel, except in the last submodel."""
        return [r for r, is_step in self.transitions() if not is_step]

    def rounded_norms(self, beta: float) -> Array:
        """||g~_r|| over the steps: beta (of the step) times the length, since u moves by -g~/beta."""
        moved = [np.linalg.norm(self.u[r + 1] - self.u[r]) for r, is_step in self.transitions() if is_step]
        return np.array(self.by_step or beta) * np.array(moved)

    def variation(self) -> Array:
        """sum_r ||g_{m,r} - g_{m,r-1}|| over the queries, one per silo, (M,)."""
        asked = self.gradient[list(self.queried)]
        return np.asarray(np.linalg.norm(np.diff(asked, axis=0), axis=2).sum(axis=0))


@dataclass(frozen=True, kw_only=True)
class _PathState:
    update: int
    step: int
    eps: tuple[float, ...]
    queried: bool


def _states(points: Sequence[Visit], accepted: Sequence[Sequence[float]]) -> Iterator[_PathState]:
    """Yield the queries, and the accepted eps that were not asked about, in their order."""
    for point, after in zip_longest(points, points[1:]):
        yield _PathState(update=point.update, step=point.step, eps=point.eps, queried=True)
        ends = after is not None and after.update > point.update
        if ends and tuple(accepted[point.update]) != point.eps:
            end = tuple(accepted[point.update])
            yield _PathState(update=point.update, step=point.step + 1, eps=end, queried=False)


def follow(
    problem: AbstractProblem[Law, Rows],
    law: Law,
    rows: Mapping[str, Rows],
    points: Sequence[Visit],
    accepted: Sequence[Sequence[float]],
    lattice: Lattice,
    by_step: tuple[float, ...] = (),
) -> TargetingPath:
    """Return the path of a run from its initial law, on the silos' validated rows.

    ``by_step`` has the beta of each step where the steps settled it.
    """
    states = list(_states(points, accepted))
    sizes = [problem.count(table) for table in rows.values()]
    n = sum(sizes)
    C, B = floating(lattice.C), floating(lattice.B)
    gradients, losses = [], []
    reached = 0.0  # pooled loss of the current law, less that of the first
    for k in range(len(accepted) + 1):
        submodels = [problem.submodel(law, table) for table in rows.values()]
        normaliser = problem.normaliser(law)
        base = normaliser.value(np.zeros(problem.dim))
        for state in (state for state in states if state.update == k):
            eps = np.array(state.eps)
            sums = [submodel.sums(eps, Part.LOSS | Part.GRADIENT) for submodel in submodels]
            public = normaliser.gradient(eps)
            gradients.append([C @ (each[1:].values(N) + public) for each, N in zip(sums, sizes, strict=True)])
            # Differences from the submodel's origin are exact sums: small decreases keep their digits.
            change = float(sum(each[:1].fractions()[0] for each in sums) / n)
            losses.append(reached + change + normaliser.value(eps) - base)
        if k < len(accepted):
            reached = losses[-1]  # l_{k+1}(0) = l_k(eps^k)
            law = problem.move(law, np.array(accepted[k]))
    return TargetingPath(
        update=tuple(state.update for state in states),
        step=tuple(state.step for state in states),
        queried=tuple(state.queried for state in states),
        u=np.array([B.T @ np.array(state.eps) for state in states]),
        gradient=np.array(gradients),
        loss=np.array(losses),
        share=np.array(sizes) / n,
        by_step=by_step,
    )


class Basis(enum.StrEnum):
    """What a constant rests on; the value is what people read."""

    BOUND = "bound"
    PATH = "estimate along the path"
    ASSUMED = "assumed"


# The basis of a run's smoothness, by the run's own statement (`protocol.outcome.Smoothness`).
SMOOTHNESS_BASIS = {
    "certified": Basis.BOUND,
    "certified along the steps": Basis.PATH,  # for the rows' part, at the first law
    "certified at the start": Basis.PATH,
    "estimated": Basis.PATH,
    "estimated, pooled": Basis.PATH,
    "given": Basis.ASSUMED,
}


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number, what it rests on, and what one must know to use it."""

    name: str
    value: float
    basis: Basis
    note: str = ""


def weakest(*constants: Constant) -> Basis:
    """Return the basis of a bound computed from several constants."""
    order = list(Basis)
    return max((constant.basis for constant in constants), key=order.index, default=Basis.BOUND)


def realised_smoothness(path: TargetingPath) -> Constant:
    """max ||g_m(u) - g_m(v)||/||u - v|| over consecutive queries and over (origin, accepted): ass:smooth."""
    pairs = [(r, r + 1) for r, is_step in path.transitions() if is_step]
    pairs += list(zip(path.origins(), path.endpoints(), strict=False))
    return Constant(
        name="beta, realised",
        value=max(
            (_slope(path, a, b, float(np.linalg.norm(path.u[b] - path.u[a]))) for a, b in pairs), default=0.0
        ),
        basis=Basis.PATH,
        note="largest slope of a silo's gradient over the queries made",
    )


def recentering(path: TargetingPath) -> Constant:
    """max ||D-bar_m(p^{k+1}) - D-bar_m(p^k)||/||eps^k|| over silos and updates: ass:recentering.

    The proof uses no other pairs, so this value, though an estimate of kappa, is enough for this run.
    """
    origins = path.origins()
    slopes = [
        _slope(path, a, b, float(np.linalg.norm(path.u[end])))
        for a, b, end in zip(origins, origins[1:], path.endpoints(), strict=False)
    ]
    return Constant(name="kappa", value=max(slopes, default=0.0), basis=Basis.PATH)


def loss_budget(path: TargetingPath) -> Constant:
    """Delta = l_0(0) - min of the loss over the laws traversed: eq:loss-budget, its traversed version."""
    return Constant(
        name="Delta",
        value=max(0.0, -float(path.loss.min())),
        basis=Basis.BOUND,
        note="over the laws traversed; a run without the rows needs two counted loss messages",
    )


def first_gradient(path: TargetingPath) -> Constant:
    """G = max_m ||grad l_{m,0}(0)||_inf, as it was: ass:recentering."""
    return Constant(name="G", value=float(np.abs(path.gradient[0]).max()), basis=Basis.BOUND)


def step_decreases_hold(path: TargetingPath, beta: float, slack: float) -> bool:
    """Return whether every step decreased the loss by ||g~||^2/(6 beta), which a valid beta implies."""
    steps = [r for r, is_step in path.transitions() if is_step]
    decreases = (path.loss[r] - path.loss[r + 1] for r in steps)
    return all(
        decrease >= step_decrease(float(norm), beta) - slack
        for decrease, norm in zip(decreases, path.rounded_norms(beta), strict=True)
    )


def _slope(path: TargetingPath, a: int, b: int, distance: float) -> float:
    if distance == 0:
        return math.inf
    return float(np.linalg.norm(path.gradient[b] - path.gradient[a], axis=1).max()) / distance
