"""Long rows of people: sums are those of all rows, and what the guard sees is by person."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.families import Family
from fedtmle.model.grouped import GroupedLinear, LongRows
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.types import Array, Part, RowBound

BOUND = RowBound(gradient=6, curvature=6)
COUNTS = np.array([3, 0, 2, 5, 1, 4])
PEOPLE = np.repeat(np.arange(len(COUNTS)), COUNTS)


def rows(seed: int = 0) -> GeneralisedLinear:
    rng = np.random.default_rng(seed)
    n = int(COUNTS.sum())
    X = rng.normal(size=(3, n))
    X[2, PEOPLE < 4] = 0.0  # of the last coordinate, only two people
    return GeneralisedLinear(
        family=Family.LOGISTIC,
        X=X,
        offset=rng.normal(size=n),
        y=rng.integers(0, 2, n).astype(float),
        w=rng.uniform(0.5, 2.0, n),
        bound=BOUND,
    )


def grouped(whole: GeneralisedLinear) -> GroupedLinear:
    """Return the same rows in two pieces: the first three people, and the others."""
    cut = int(COUNTS[:3].sum())
    pieces = [
        LongRows(whole.take(np.arange(cut)), COUNTS[:3]),
        LongRows(whole.take(np.arange(cut, len(PEOPLE))), COUNTS[3:]),
    ]
    return GroupedLinear(
        people=len(COUNTS), dim=3, family=Family.LOGISTIC, bound=BOUND, over=lambda work: map(work, pieces)
    )


def contributions(whole: GeneralisedLinear, eps: Array) -> Array:
    """Return each person's part of the gradient, longhand, shape (d, people)."""
    assert whole.offset is not None
    assert whole.y is not None
    assert whole.w is not None
    X = np.asarray(whole.X)
    slope = whole.w * (1 / (1 + np.exp(-(whole.offset + eps @ X))) - whole.y)
    return np.stack([np.bincount(PEOPLE, weights=row, minlength=len(COUNTS)) for row in slope * X])


def test_sums_are_those_of_all_rows() -> None:
    whole, eps = rows(), np.array([0.1, -0.2, 0.3])
    parts = Part.LOSS | Part.GRADIENT | Part.HESSIAN
    assert grouped(whole).sums(eps, parts) == whole.sums(eps, parts)
    ceiling = grouped(whole).curvature_ceiling() * len(COUNTS)
    assert ceiling == pytest.approx(whole.curvature_ceiling() * len(PEOPLE))


def test_the_guard_sees_people() -> None:
    whole, eps = rows(), np.array([0.1, -0.2, 0.3])
    seen, by_person = grouped(whole).concentration(eps), np.abs(contributions(whole, eps))
    assert seen.share == pytest.approx((by_person.max(axis=1) / by_person.sum(axis=1)).max())
    effective = by_person.sum(axis=1) ** 2 / (by_person**2).sum(axis=1)
    assert seen.effective == pytest.approx(effective.min())
    assert seen.support == 2  # the people in the last coordinate, not their five rows
    assert whole.concentration(eps).support == 5
    assert grouped(whole).fewest_joint() == 2


def test_no_share_exceeds_the_limit_within_the_radius() -> None:
    """Where the radius says that no person can have more than a share, none has."""
    whole, limit, checked = rows(3), 0.95, 0
    start = np.zeros(3)
    seen = grouped(whole).concentration(start)
    radius = seen.radius(limit)
    for move in np.random.default_rng(1).normal(0, 0.015, size=(200, 3)):
        if seen.distance(move) <= radius:
            checked += 1
            by_person = np.abs(contributions(whole, start + move))
            assert (by_person.max(axis=1) / by_person.sum(axis=1)).max() <= limit
    assert checked >= 50


def test_batches_are_refused() -> None:
    with pytest.raises(ft.InputError, match="choose one that draws no rows"):
        grouped(rows()).take(np.array([0]))
