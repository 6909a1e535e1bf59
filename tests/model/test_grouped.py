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
    X, w = np.asarray(whole.X), np.asarray(whole.w)
    mean = 1 / (1 + np.exp(-(whole.offset + eps @ X)))
    told = w * np.maximum(np.sqrt(mean * (1 - mean)), np.abs(mean - whole.y)) * X
    each = np.diag(np.linalg.pinv(told) @ told)  # the diagonal of the projection on the rows
    by_person = np.bincount(PEOPLE, weights=each, minlength=len(COUNTS))
    look = grouped(whole).look(eps)
    assert look.largest == pytest.approx(by_person.max())
    assert look.largest > whole.look(eps).largest
    assert look.columns == pytest.approx(np.abs(X).max(axis=1))
    assert grouped(whole).column_people().min() == 2  # the people in the last coordinate, not their five rows
    assert whole.column_people().min() == 5


def test_batches_are_refused() -> None:
    with pytest.raises(ft.InputError, match="choose one that draws no rows"):
        grouped(rows()).take(np.array([0]))
