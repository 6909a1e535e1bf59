"""What the guard decides by a few rows, and by what it saw before, is what all rows at every point say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from fedtmle.model.submodel import LOOK_ROWS, GeneralisedLinear, NoNormaliser
from fedtmle.protocol.guard import Guard, RefusalError
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle_core import kernels
from fedtmle_core.types import Array, Family, IntArray, Part, RowBound
from tests.premise import Premise

ROUNDING = 1e-7


@dataclass(frozen=True, eq=False)
class Drawn:
    """A regression whose laws are displacements of one submodel, and its rows written out."""

    family: Family
    X: Array
    offset: Array
    y: Array
    w: Array | None
    design_names = None  # no other model shares its columns
    known_people = ()
    judged_together = None

    def submodel(self, law: Array, rows: None) -> GeneralisedLinear:  # noqa: ARG002 - it has them
        bound = RowBound(gradient=60, curvature=60)
        offset = self.offset + law @ self.X
        return GeneralisedLinear(family=self.family, X=self.X, offset=offset, y=self.y, w=self.w, bound=bound)

    def normaliser(self, law: Array) -> NoNormaliser:  # noqa: ARG002 - zero at every law
        return NoNormaliser(len(self.X))

    def row_bound(self, law: Array) -> RowBound:  # noqa: ARG002 - one for all
        return RowBound(gradient=60, curvature=60)

    def displacement(self, law: Array) -> Array:
        return law

    def deviation(self, residuals: Array) -> Array:
        """By block of rows: 68 % of the residuals are within, and it is at most their root mean square."""
        found = np.full(len(residuals), 1 / 16)
        for start in range(0, len(residuals), LOOK_ROWS):
            block = slice(start, start + LOOK_ROWS)
            counted = residuals[block] if self.w is None else residuals[block][self.w[block] != 0]
            if len(counted):
                within = np.sort(counted)[int(0.6827 * (len(counted) - 1))]
                found[block] = max(1 / 16, min(within, np.sqrt(np.mean(counted**2))))
        return found

    def told(self, eps: Array) -> Array:
        """w s X of every row, longhand."""
        eta = self.offset + eps @ self.X
        mean = 1 / (1 + np.exp(-eta))
        s = {
            Family.LINEAR: np.ones_like(eta),
            Family.GAUSSIAN: np.maximum(np.abs(eta - self.y), self.deviation(np.abs(eta - self.y))),
            Family.LOGISTIC: np.maximum(np.abs(mean - self.y), np.sqrt(mean * (1 - mean))),
            Family.POISSON: np.maximum(np.abs(np.exp(eta) - self.y), 1 / 16),
        }[self.family]
        return np.asarray(self.X * s * (1.0 if self.w is None else self.w))


def draw(rng: np.random.Generator) -> Drawn:
    """Heavy tails, rare columns, large rows at the end, rows without weight, outcomes that are all 0."""
    n, d = int(rng.choice([3, 30, 500, 5_000, 20_000])), int(rng.integers(1, 5))
    X = np.clip(rng.normal(size=(d, n)) * np.exp(rng.choice([0, 1, 2]) * rng.normal(size=(d, n))), -50, 50)
    if rng.random() < 0.6:
        X[rng.integers(d)] *= rng.random(n) < rng.choice([0, 0.0003, 0.01, 0.3])
    if rng.random() < 0.4:
        X = X[:, np.argsort(np.abs(X[0]))]
    return Drawn(
        family=Family(int(rng.integers(4))),
        X=np.ascontiguousarray(X),
        offset=rng.choice([0, 1]) * rng.normal(size=n),
        y=(rng.random(n) < rng.choice([0, 0.001, 0.5])).astype(float),
        w=rng.exponential(size=n) * (rng.random(n) < 0.7) if rng.random() < 0.4 else None,
    )


def draw_policy(rng: np.random.Generator) -> Policy:
    return dataclasses.replace(
        UNGUARDED,
        min_people=float(rng.choice([0, 1.2, 3, 20, 300])),
        min_support=int(rng.choice([0, 5, 50])),
    )


def margin(policy: Policy, told: Array) -> float:
    """By the definition, over all rows: how far the largest leverage is below what is allowed, 0 if equal."""
    people = np.count_nonzero(told, axis=1)
    if ((people > 0) & (people < policy.min_support)).any():
        return -1.0
    if not policy.min_people:
        return 1.0
    size = np.linalg.norm(told, axis=1)
    unit = told[size > 0] / size[size > 0, None]
    largest = float(np.einsum("ij,ji->i", np.linalg.pinv(unit), unit).max(initial=0.0))
    return 1.0 - largest * policy.min_people


def decisions(seed: int) -> Counter[tuple[bool, bool]]:
    """(allowed, refused) of each point of a walk: near and far, at two laws, of all rows and of batches."""
    rng = np.random.default_rng(seed)
    drawn, policy = draw(rng), draw_policy(rng)
    d, n = drawn.X.shape
    guard, rows = Guard(policy), LocalRows("a", None, n, None)
    rows.place(0)
    laws, eps = (np.zeros(d), 0.1 * rng.normal(size=d)), np.zeros(d)
    found: Counter[tuple[bool, bool]] = Counter()
    for _ in range(12):
        eps = eps + rng.choice([0, 1e-3, 0.03, 0.5]) * rng.normal(size=d)
        law = laws[rng.integers(2)]
        batch: IntArray | None = np.sort(rng.permutation(n)[: 1 + n // 3]) if rng.random() < 0.25 else None
        chosen = slice(None) if batch is None else batch
        query = SumsQuery(problem=cast(Any, drawn), law=law, eps=eps, parts=Part.GRADIENT, n=n, batch=batch)
        refused = False
        try:
            guard.examine(query, rows)
        except RefusalError:
            refused = True
        left = margin(policy, drawn.told(eps + law)[:, chosen])
        if is_clear.holds(abs(left) > ROUNDING):
            found[left > 0, refused] += 1
    return found


is_clear = Premise("the leverage is not the one that is just allowed", at_least=0.9)


@is_clear
def hold(seeds: range) -> None:
    found: Counter[tuple[bool, bool]] = Counter()
    for seed in seeds:
        own = decisions(seed)
        assert not own[True, True], f"seed {seed}: refused what is allowed"
        assert not own[False, False], f"seed {seed}: admitted what is not allowed"
        found += own
    assert min(found[True, False], found[False, True]) > len(seeds)


@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_the_guard_decides_as_all_rows_say(backend: str) -> None:
    with kernels.using_backend(backend):
        hold(range(250))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["numba", "numpy"])
def test_the_guard_decides_as_all_rows_say_in_many_more(backend: str) -> None:
    with kernels.using_backend(backend):
        hold(range(250, 10_000))
