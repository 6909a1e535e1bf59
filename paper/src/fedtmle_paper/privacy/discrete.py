"""Discrete records: the candidates are enumerated, because a Jacobian in a treatment means nothing.

Candidates a and b, with answers F_a and F_b and continuous parts that move them by A_a u and A_b v, are
indistinguishable iff

    min over ||u||, ||v|| <= rho of ||F_a + A_a u - F_b - A_b v|| <= 2 eta,

since then one transcript lies within eta of both. The risk of phi is half the largest |phi_a - phi_b|
among indistinguishable pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.privacy.audit import require_at_least_zero
from fedtmle_core.types import Array

LARGEST = 1 << 12  # assignments that are enumerated
ITERATIONS = 20_000
GAP = 1e-9


@final
@dataclass(frozen=True, kw_only=True)
class Separation:
    """The least distance of two candidates' answers, from ``lower`` (certified) to ``upper`` (attained)."""

    lower: float
    upper: float


def separation(F_a: Array, F_b: Array, A_a: Array, A_b: Array, *, radius: float) -> Separation:
    """min ||F_a + A_a u - F_b - A_b v|| over the two balls, by accelerated projected gradients.

    For every unit y the value is at least y . (F_a - F_b) - rho ||A_a^T y|| - rho ||A_b^T y||: the duality
    gap says when to stop.
    """
    require_at_least_zero(radius=radius)
    apart = np.asarray(F_a - F_b, dtype=np.float64)
    plain = float(np.linalg.norm(apart))
    if radius == 0 or plain == 0:
        return Separation(lower=plain, upper=plain)
    stacked = np.concatenate([A_a, -A_b], axis=1)
    q = A_a.shape[1]
    step = 1.0 / max(float(np.linalg.norm(stacked, 2)) ** 2, 1e-300)
    z = look = np.zeros(stacked.shape[1])
    pace, lower, upper = 1.0, 0.0, plain
    for _ in range(ITERATIONS):
        ahead = look - step * (stacked.T @ (apart + stacked @ look))
        ahead = np.concatenate([_projected(ahead[:q], radius), _projected(ahead[q:], radius)])
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        look, z, pace = ahead + (pace - 1) / faster * (ahead - z), ahead, faster
        rest = apart + stacked @ z
        distance = float(np.linalg.norm(rest))
        upper = min(upper, distance)
        if distance > 0:
            y = rest / distance
            reach = float(np.linalg.norm(A_a.T @ y)) + float(np.linalg.norm(A_b.T @ y))
            lower = max(lower, float(y @ apart) - radius * reach)
        if upper - lower <= GAP * plain or upper <= 1e-12 * plain:
            break
    return Separation(lower=max(0.0, lower), upper=upper)


def enumeration_risk(
    answers: Array, values: Sequence[float], *, noise: float, moves: Sequence[Array] = (), radius: float = 0.0
) -> float:
    """Half the largest |phi_a - phi_b| among indistinguishable candidates.

    ``answers`` holds F_a of each of K candidates, shape (K, m), ``values`` phi_a; ``moves`` the A_a, (m, q),
    where candidates also have continuous parts within ``radius``. A pair counts as indistinguishable
    unless it is proved apart.
    """
    answers = np.asarray(answers, dtype=np.float64)
    if len(answers) > LARGEST:
        raise InputError(f"answers: expected at most {LARGEST} candidates, not {len(answers)}")
    if len(values) != len(answers) or (moves and len(moves) != len(answers)):
        raise InputError("answers, values, moves: expected one of each per candidate")
    worst = 0.0
    for a, b in itertools.combinations(range(len(answers)), 2):
        stake = abs(float(values[a]) - float(values[b])) / 2
        if stake <= worst:
            continue
        if moves:
            apart = separation(answers[a], answers[b], moves[a], moves[b], radius=radius).lower
        else:
            apart = float(np.linalg.norm(answers[a] - answers[b]))
        if apart <= 2 * noise:
            worst = stake
    return worst


def _projected(x: Array, radius: float) -> Array:
    size = float(np.linalg.norm(x))
    return x if size <= radius else x * (radius / size)
