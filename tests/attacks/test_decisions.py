"""What the guard decides by a few rows, and by what it saw before, is what all rows at every point say."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from fedtmle.model import kernels
from fedtmle.model.families import Family
from fedtmle.model.submodel import GeneralisedLinear, NoNormaliser
from fedtmle.model.types import Array, IntArray, Part, RowBound, exponent
from fedtmle.protocol.guard import Guard, Policy, RefusalError
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.rows import LocalRows
from tests.premise import Premise

ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Drawn:
    """A regression whose laws are displacements of one submodel, and its rows written out."""

    family: Family
    X: Array
    offset: Array
    y: Array
    w: Array | None
    gradient: int = 0

    def submodel(self, law: Array, rows: None) -> GeneralisedLinear:  # noqa: ARG002 - it has them
        bound = RowBound(gradient=self.gradient, curvature=60)
        offset = self.offset + law @ self.X
        return GeneralisedLinear(family=self.family, X=self.X, offset=offset, y=self.y, w=self.w, bound=bound)

    def normaliser(self, law: Array) -> NoNormaliser:  # noqa: ARG002 - zero at every law
        return NoNormaliser(len(self.X))

    def row_bound(self, law: Array) -> RowBound:  # noqa: ARG002 - one for all
        return RowBound(gradient=self.gradient, curvature=60)

    def displacement(self, law: Array) -> Array:
        return law

    def contributions(self, eps: Array) -> tuple[Array, Array]:
        """|c| and w |X| of every row, longhand."""
        eta = self.offset + eps @ self.X
        slope = {
            Family.LINEAR: np.ones_like(eta),
            Family.GAUSSIAN: eta - self.y,
            Family.LOGISTIC: 1 / (1 + np.exp(-eta)) - self.y,
            Family.POISSON: np.exp(eta) - self.y,
        }[self.family]
        reach = np.abs(self.X) * (1.0 if self.w is None else self.w)
        return reach * np.abs(slope), reach


def draw(rng: np.random.Generator) -> Drawn:
    """Heavy tails, rare columns, large rows at the end, rows without weight, outcomes that are all 0."""
    n, d = int(rng.choice([3, 30, 500, 5_000, 20_000])), int(rng.integers(1, 5))
    X = np.clip(rng.normal(size=(d, n)) * np.exp(rng.choice([0, 1, 2]) * rng.normal(size=(d, n))), -50, 50)
    if rng.random() < 0.6:
        X[rng.integers(d)] *= rng.random(n) < rng.choice([0, 0.0003, 0.01, 0.3])
    if rng.random() < 0.4:
        X = X[:, np.argsort(np.abs(X[0]))]
    drawn = Drawn(
        family=Family(int(rng.integers(4))),
        X=np.ascontiguousarray(X),
        offset=rng.choice([0, 1]) * rng.normal(size=n),
        y=(rng.random(n) < rng.choice([0, 0.001, 0.5])).astype(float),
        w=rng.exponential(size=n) * (rng.random(n) < 0.7) if rng.random() < 0.4 else None,
    )
    largest = float(drawn.contributions(np.zeros(d))[0].max())
    return dataclasses.replace(drawn, gradient=exponent(largest * rng.choice([1.01, 8, 1000]) + 1e-9))


def draw_policy(rng: np.random.Generator) -> Policy:
    return dataclasses.replace(
        Policy.unguarded(),
        max_share=float(rng.choice([0.65, 0.2, 0.02, 0.001])),
        min_effective=float(rng.choice([0, 2, 20, 300])),
        min_support=int(rng.choice([0, 5, 50])),
    )


def is_allowed(policy: Policy, sizes: Array, reach: Array) -> bool:
    """By the definition, over all rows."""
    total = sizes.sum(axis=1)
    told = total > 0
    share = (sizes.max(axis=1)[told] / total[told]).max(initial=0.0)
    effective = (total[told] ** 2 / (sizes * sizes).sum(axis=1)[told]).min(initial=math.inf)
    support = min(filter(None, np.count_nonzero(reach, axis=1).tolist()), default=math.inf)
    return bool(
        share <= policy.max_share * (1 + ROUNDING)
        and effective >= policy.min_effective * (1 - ROUNDING)
        and support >= policy.min_support
    )


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
        sizes, reach = drawn.contributions(eps + law)
        if not is_bounded.holds((sizes <= 2.0**drawn.gradient).all()):
            continue  # the exact sums would refuse it
        chosen = slice(None) if batch is None else batch
        query = SumsQuery(problem=cast(Any, drawn), law=law, eps=eps, parts=Part.GRADIENT, n=n, batch=batch)
        refused = False
        try:
            guard.examine(query, rows)
        except RefusalError:
            refused = True
        found[is_allowed(policy, sizes[:, chosen], reach[:, chosen]), refused] += 1
    return found


is_bounded = Premise("every contribution is within the public bound", at_least=0.6)


@is_bounded
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
