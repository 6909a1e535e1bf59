"""Curves of one person: cumulative incidences from hazards, and the clever covariates of their functionals.

Causes are ordered within a period: q_l(t) is the hazard of cause l among those at risk in t who have no event
of a cause before l in it. So lambda_l = q_l prod_{m<l} (1 - q_m), hazards add up to at most 1, and

    F_j(t) = sum_{s<=t} S(s-1) lambda_j(s),   S(t) = prod_{s<=t} prod_l (1 - q_l(s)),   S + sum_j F_j = 1.

A functional sum_{j,t} L_j(t) F_j(t) pays A_l(t) = sum_{s>=t} L_l(s) for an event of cause l in period t. Its
expected payment to someone who has none of the causes up to l in t, nor any event before, is

    v_l(t) = v_0(t+1) for the last cause,   v_{l-1}(t) = q_l(t) A_l(t) + (1 - q_l(t)) v_l(t),

so that v_0(1) is the functional itself, and its EIF given the covariates is

    sum_t 1(at risk in t) / (g G(t-)) sum_l c_l(t) 1(no cause before l) [dN_l(t) - q_l(t)],  c_l = A_l - v_l.

This is the usual h_l = 1(l = j) - [F_j(tau) - F_j(t)]/S(t), written for q instead of lambda; there is no
division by a survival that may be nearly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.model.types import Array


@final
@dataclass(frozen=True, kw_only=True)
class Functional:
    """A linear functional of the cumulative incidences: ``weights[j][t]`` is that of F_{j+1}(t+1)."""

    name: str
    weights: tuple[tuple[float, ...], ...]

    @property
    def horizon(self) -> int:
        """The last period that matters."""
        return max(t + 1 for row in self.weights for t, weight in enumerate(row) if weight)


def payments(functionals: tuple[Functional, ...], periods: int) -> Array:
    """Return A_l(t) of each functional, shape (functionals, causes, periods)."""
    weights = np.array([[row[:periods] for row in each.weights] for each in functionals])
    return np.ascontiguousarray(np.cumsum(weights[:, :, ::-1], axis=2)[:, :, ::-1])


def reach(functionals: tuple[Functional, ...], periods: int) -> float:
    """Return a bound of every |c_l(t)| and of every |v_l(t)|: payments and 0 enclose them."""
    paid = payments(functionals, periods)
    return float(max(paid.max(), 0.0) - min(paid.min(), 0.0))


def covariates(paid: Array, q: Array) -> tuple[Array, Array]:
    """Return c_l(t), shape (functionals, causes, periods, N), and v_0(1), shape (functionals, N).

    ``q`` has shape (causes, periods, N).
    """
    causes, periods, n = q.shape
    value = np.zeros((len(paid), n))
    c = np.empty((len(paid), causes, periods, n))
    for t in reversed(range(periods)):
        for cause in reversed(range(causes)):
            here = c[:, cause, t]
            np.subtract(paid[:, cause, t, None], value, out=here)
            value += q[cause, t] * here
    return c, value


def plug_in(paid: Array, q: Array) -> Array:
    """Return v_0(1), shape (functionals, N), without the covariates."""
    value = np.zeros((len(paid), q.shape[2]))
    for t in reversed(range(q.shape[1])):
        for cause in reversed(range(len(q))):
            value += q[cause, t] * (paid[:, cause, t, None] - value)
    return value
