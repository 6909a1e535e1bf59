"""Stochastic gradient descent: pooled batches that every party draws by the same public rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from fedtmle.algorithms.base import Run, require_budget, require_positive
from fedtmle.algorithms.optimizers import AbstractOptimizer, Inner, Origin
from fedtmle.errors import InputError
from fedtmle.model.types import IntArray, Part
from fedtmle.protocol.query import Flow

PARTITION = 2**62  # the generator's stream that no step of a run has


@final
@dataclass(frozen=True, kw_only=True)
class StochasticGradientDescent(AbstractOptimizer):
    """SGD on pooled batches drawn by a public seeded rule, each cut to every silo.

    A fixed number of ``steps`` per submodel. "fixed" ``batches`` are the n // batch parts of one
    seeded partition of the pooled rows, taken in turn over the whole run. "fresh" ones are drawn
    anew at each step, with or without ``replace``ment: sums over batches that overlap tell single
    rows by subtraction, so a silo with a policy answers fixed ones alone.
    """

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

    def needs_hessian(self, run: Run[Any], law: Any) -> bool:  # noqa: ARG002 - never
        return False

    def draw(self, n: int, update: int, step: int) -> IntArray:
        """The pooled batch of one step, sorted: row numbers in 0..n-1, every occurrence kept."""
        if self.batch > n and not self.replace:
            raise InputError(f"batch: {self.batch} rows cannot be drawn from {n} without replacement")
        if self.batches == "fixed":
            parts = np.array_split(self._generator(PARTITION).permutation(n), n // self.batch)
            return np.sort(parts[(update * self.steps + step) % len(parts)])
        rng = self._generator((update << 32) + step)
        if self.replace:
            return np.sort(rng.integers(0, n, size=self.batch))
        return np.sort(rng.permutation(n)[: self.batch])

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, stream]))

    def minimise(self, run: Run[Any], origin: Origin) -> Flow[Inner]:
        eps = np.zeros(run.problem.dim)
        for t in range(self.steps):
            batch = self.draw(run.n, origin.update, t)
            sums = yield from run.ask(origin.law, eps, Part.GRADIENT, batch=batch)
            mean = sums.values(len(batch)) + run.problem.normaliser(origin.law).gradient(eps)
            # Full-data gradients are not seen between EIF checks, so no norm is recorded.
            run.record(update=origin.update, step=t + 1, eps=eps, gradient_norm=None)
            eps = eps - self.step * mean
        return Inner(eps=eps, steps=self.steps)
