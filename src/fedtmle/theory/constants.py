"""The constants of the assumptions, from a run whose rows are at hand, each with what it rests on."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from fedtmle.theory.path import TargetingPath


class Basis(enum.StrEnum):
    """What a constant rests on; the value is what people read."""

    BOUND = "bound"
    PATH = "estimate along the path"
    ASSUMED = "assumed"


# How a run's own statement about its smoothness reads here (`protocol.outcome.Smoothness`).
SMOOTHNESS_BASIS = {
    "certified": Basis.BOUND,
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
    """The basis of a bound computed from several constants."""
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
    """Whether every step decreased the loss by ||g~||^2/(6 beta), as it must if beta is valid there."""
    steps = [r for r, is_step in path.transitions() if is_step]
    decreases = np.array([path.loss[r] - path.loss[r + 1] for r in steps])
    return bool((decreases >= path.rounded_norms(beta) ** 2 / (6 * beta) - slack).all())


def _slope(path: TargetingPath, a: int, b: int, distance: float) -> float:
    if distance == 0:
        return math.inf
    return float(np.linalg.norm(path.gradient[b] - path.gradient[a], axis=1).max()) / distance
