"""Long rows of people: sums are those of all rows, and what the guard sees is by person."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.submodels import GroupedLinear, LongRows
from fedtmle_core.types import Array, Family, Part, RowBound

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


def test_rows_of_one_residual_are_judged_together() -> None:
    """Two means of the same periods, of which one person alone is in one: their difference is that person."""
    people = 8
    person, period, mean = (a.ravel() for a in np.indices((people, 2, 2)))
    weight = 1.0 + person % 3
    here = ~((person == 5) & (mean == 1))  # person 5 follows the first rule alone
    X = np.where(mean == np.arange(2)[:, None], -1.0, 0.0)
    design = GeneralisedLinear(family=Family.LOGISTIC, X=X[:, here], w=weight[here], bound=BOUND)
    counts = np.bincount(person[here], minlength=people)
    for groups, largest in ((None, 0.5), ((2 * person + period)[here], 1.0)):
        piece = LongRows(design, counts, groups)
        submodel = GroupedLinear(
            people=people,
            dim=2,
            family=Family.LOGISTIC,
            bound=BOUND,
            over=lambda work, piece=piece: iter([work(piece)]),
            has_groups=groups is not None,
        )
        look = submodel.look(np.zeros(2))
        assert (look.largest > 0.99) is (largest == 1.0)
        rows = next(iter(submodel.disclosed_rows(np.zeros(2))))
        assert rows.counts is not None
        assert rows.counts.sum() == rows.rows.shape[1]
        assert (look.family is None) is (groups is not None)  # a move of eps scales groups by several factors


def test_public_responses_cancel() -> None:
    """Pairs of rows with the responses 0 and 1 that are equal in all people but one."""
    people, rng = 9, np.random.default_rng(2)
    X = np.repeat(rng.normal(size=(2, people)), 2, axis=1)
    X[1, 7] += 0.5  # the second row of person 3
    y = np.tile([0.0, 1.0], people)
    design = GeneralisedLinear(family=Family.LOGISTIC, X=X, y=y, bound=BOUND)
    piece = LongRows(design, np.full(people, 2))
    eps = np.array([0.3, -0.2])
    largest = {}
    for are_public in (False, True):
        submodel = GroupedLinear(
            people=people,
            dim=2,
            family=Family.LOGISTIC,
            bound=BOUND,
            over=lambda work: iter([work(piece)]),
            are_public=are_public,
        )
        largest[are_public] = submodel.look(np.zeros(2)).largest
        if are_public:
            (rows,) = submodel.disclosed_rows(eps)
            assert np.allclose(rows.rows.sum(axis=1), submodel.sums(eps, Part.GRADIENT).values(), atol=1e-9)
            hessian = GroupedLinear.look(submodel, eps, Part.HESSIAN)
            assert hessian.family is Family.LOGISTIC
    assert largest[False] < 0.7
    assert largest[True] == pytest.approx(1.0)
