"""A finished run of Algorithm 4, followed on the rows at hand: silo gradients and losses query by query.

All vectors are in the run's coordinates: C g for gradients, u with eps = C^T u for fluctuations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from fedtmle.model.types import Array, Part
from fedtmle.protocol.lattice import Lattice, floating
from fedtmle.protocol.outcome import Visit
from fedtmle.protocol.query import Problem


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

    @property
    def pooled(self) -> Array:
        """The pooled gradients, (S + K + 1, d)."""
        return np.asarray(np.einsum("m,rmd->rd", self.share, self.gradient))

    def transitions(self) -> Iterator[tuple[int, bool]]:
        """Each state but the last, with whether the next is in the same submodel (a step) or a new one."""
        for r in range(len(self.update) - 1):
            yield r, self.update[r + 1] == self.update[r]

    def origins(self) -> list[int]:
        """The state at the origin of each submodel."""
        return [r for r, t in enumerate(self.step) if t == 0]

    def endpoints(self) -> list[int]:
        """The accepted state of each update: the last of its submodel, but for the last submodel."""
        return [r for r, is_step in self.transitions() if not is_step]

    def rounded_norms(self, beta: float) -> Array:
        """||g~_r|| over the steps: beta times the length of each, since u moves by -g~/beta."""
        moved = [np.linalg.norm(self.u[r + 1] - self.u[r]) for r, is_step in self.transitions() if is_step]
        return beta * np.array(moved)

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
    """The queries, and the accepted eps that were not asked about, in their order."""
    for point, after in zip_longest(points, points[1:]):
        yield _PathState(update=point.update, step=point.step, eps=point.eps, queried=True)
        ends = after is not None and after.update > point.update
        if ends and tuple(accepted[point.update]) != point.eps:
            end = tuple(accepted[point.update])
            yield _PathState(update=point.update, step=point.step + 1, eps=end, queried=False)


def follow(
    problem: Problem,
    law: Any,
    rows: Mapping[str, Any],
    points: Sequence[Visit],
    accepted: Sequence[Sequence[float]],
    lattice: Lattice,
) -> TargetingPath:
    """The path of a run from its initial law, on the silos' validated rows."""
    states = list(_states(points, accepted))
    sizes = [problem.count(own) for own in rows.values()]
    n = sum(sizes)
    C, B = floating(lattice.C), floating(lattice.B)
    gradients, losses = [], []
    reached = 0.0  # pooled loss of the current law, less that of the first
    for k in range(len(accepted) + 1):
        submodels = [problem.submodel(law, own) for own in rows.values()]
        normaliser = problem.normaliser(law)
        base = normaliser.value(np.zeros(problem.dim))
        for state in (state for state in states if state.update == k):
            eps = np.array(state.eps)
            sums = [submodel.sums(eps, Part.LOSS | Part.GRADIENT) for submodel in submodels]
            public = normaliser.gradient(eps)
            gradients.append([C @ (own[1:].values(N) + public) for own, N in zip(sums, sizes, strict=True)])
            # Differences from the submodel's origin are exact sums: small decreases keep their digits.
            change = float(sum(own[:1].fractions()[0] for own in sums) / n)
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
    )
