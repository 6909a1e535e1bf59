"""Steps that learn the curvature from the gradients seen so far (Anderson's method).

Where the covariates of the fluctuation move with the law, the curvature at the start is a poor guide further
on, and gradient steps converge slowly. The changes that earlier steps made to the gradient show how it
responds to steps. Every party has seen them, so that nothing more is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np

from fedtmle.model.linear import dot
from fedtmle.model.types import Array
from fedtmle.protocol.sums import norm

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
