"""Blocks: sums of several submodels of the same rows, each with coordinates of its own."""

from __future__ import annotations

import numpy as np

from fedtmle.model.submodel import GeneralisedLinear
from fedtmle.model.submodels import Blocks
from fedtmle_core.types import Family, Part, RowBound, unpack

ALL = Part.LOSS | Part.GRADIENT | Part.HESSIAN
PLACES = ((2, 0), (1,), (4, 3, 5))


def blocks(n: int = 70, seed: int = 0) -> Blocks:
    rng = np.random.default_rng(seed)
    y, w = rng.uniform(size=n), rng.uniform(0.5, 2.0, size=n)
    return Blocks(
        blocks=tuple(
            GeneralisedLinear(
                family=Family.LOGISTIC,
                X=rng.uniform(-1, 1, size=(len(place), n)),
                offset=rng.normal(size=n),
                y=y,
                w=w,
                bound=RowBound(gradient=1, curvature=0),
            )
            for place in PLACES
        ),
        places=PLACES,
    )


def test_sums_are_those_of_the_blocks() -> None:
    whole = blocks()
    eps = np.random.default_rng(1).normal(size=6)
    sums = whole.sums(eps, ALL).values()
    hessian, loss = np.zeros((6, 6)), 0.0
    for block, place in zip(whole.blocks, PLACES, strict=True):
        own, d = block.sums(eps[list(place)], ALL).values(), len(place)
        loss += own[0]
        np.testing.assert_allclose(sums[1:7][list(place)], own[1 : 1 + d], atol=1e-12)
        hessian[np.ix_(place, place)] = unpack(own[1 + d :], d)
    np.testing.assert_allclose(sums[0], loss, atol=1e-11)
    np.testing.assert_allclose(unpack(sums[7:], 6), hessian, atol=1e-11)


def test_a_partition_changes_no_integer() -> None:
    whole = blocks()
    eps = np.random.default_rng(2).normal(size=6)
    first, second = whole.take(np.arange(20)), whole.take(np.arange(20, 70))
    assert first.sums(eps, ALL) + second.sums(eps, ALL) == whole.sums(eps, ALL)


def test_bounds_and_leverages_are_those_of_the_blocks() -> None:
    whole = blocks()
    eps = np.random.default_rng(3).normal(size=6)
    ceiling = whole.curvature_ceiling()
    np.testing.assert_allclose(0.25 * unpack(whole.gram().values(70), 6), ceiling, atol=1e-12)
    (told,) = (piece.rows for piece in whole.disclosed_rows(eps))
    for block, place in zip(whole.blocks, PLACES, strict=True):
        at = list(place)
        np.testing.assert_allclose(ceiling[np.ix_(at, at)], block.curvature_ceiling(), atol=1e-12)
        (own,) = (piece.rows for piece in block.disclosed_rows(eps[at]))
        np.testing.assert_array_equal(told[at], own)
        np.testing.assert_array_equal(whole.column_people()[at], block.column_people())
        assert (np.abs(own).max(axis=1) <= whole.row_bounds(eps)[at]).all()
    hat = np.diag(np.linalg.pinv(told) @ told)  # all blocks are told at once, of the same people
    np.testing.assert_allclose(whole.look(eps).largest, hat.max())
