"""Calibration and rounded gradients by hand: one coordinate, two silos."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import DecodeError
from fedtmle.protocol.coded import (
    CURVATURE_BITS,
    Action,
    CalibrationQuery,
    CurvatureCode,
    Rounded,
    RoundedGradientQuery,
    SiloCurvature,
)
from fedtmle.protocol.codes import BitWriter, decode, encode
from fedtmle.protocol.lattice import LARGEST_EXPONENT, build_lattice, identity

MEAN = ft.Mean()
SIZES = {"a": 3, "b": 1}
ONE, TWO = (SiloCurvature(exponent=-9, entries=(entry,)) for entry in (512, 1024))  # curvatures 1 and 2


@pytest.mark.parametrize(
    ("rule", "norm"),
    [
        (ft.Estimated(factor=1.0), 2.0),
        (ft.Estimated(factor=1.5), 3.0),
        (ft.Estimated(factor=1.0, over="pooled"), 1.25),
        (ft.Certified(), 2.0),
        (0.75, 0.75),
    ],
)
def test_beta_is_the_largest_norm_or_that_of_the_weighted_mean(rule: Any, norm: float) -> None:
    query = CalibrationQuery(
        problem=MEAN, law=MEAN.start(0.0), n=4, delta=Fraction(1, 8), C=identity(1), smoothness=rule
    )
    beta = query.pool({"a": ONE, "b": TWO}, SIZES).beta
    assert norm <= beta <= norm * (1 + 1 / 64)  # rounded up, with what the silos' rounding may have changed


@pytest.mark.parametrize("exponent", [LARGEST_EXPONENT, -LARGEST_EXPONENT, 1 + LARGEST_EXPONENT])
def test_a_curvature_is_within_the_range_of_a_double(exponent: int) -> None:
    out = BitWriter()
    out.gamma((exponent,))
    out.fixed((5,), (1 << CURVATURE_BITS,))
    bits = out.finish()
    if abs(exponent) <= LARGEST_EXPONENT:
        assert decode(CurvatureCode(1), bits) == SiloCurvature(exponent=exponent, entries=(5,))
    else:
        with pytest.raises(DecodeError, match="out of the range"):
            decode(CurvatureCode(1), bits)


def query(*, at_origin: bool) -> RoundedGradientQuery:
    return RoundedGradientQuery(
        problem=MEAN,
        law=MEAN.start(0.0),
        eps=np.zeros(1),
        lattice=build_lattice(delta=Fraction(1), beta=Fraction(1), C=identity(1)),  # h = 1/8
        previous_q=(0,),
        at_origin=at_origin,
        n=4,
        width=None,
    )


@pytest.mark.parametrize(
    ("first", "second", "q"),
    [(4, 0, 3), (0, 4, 1), (2, 0, 2), (0, 2, 0), (6, 0, 4)],  # 1.5, 0.5 and 4.5 are rounded half to even
)
def test_rounded_gradients_are_weighted_by_the_rows(first: int, second: int, q: int) -> None:
    assert query(at_origin=True).pool({"a": (first,), "b": (second,)}, SIZES).q == (q,)


@pytest.mark.parametrize("at_origin", [True, False])
@pytest.mark.parametrize(("q", "is_small"), [(0, True), (6, True), (-6, True), (7, False), (-7, False)])
def test_the_action_follows_from_the_gradient(q: int, is_small: bool, at_origin: bool) -> None:
    asked = query(at_origin=at_origin)
    ends = Action.FINISH if at_origin else Action.ACCEPT
    expected = ends if is_small else Action.STEP  # h |q| against 3/4
    assert asked.action((q,)) is expected
    for action in Action:
        bits = encode(asked.pooled_code, Rounded(q=(q,), action=action))
        if action is expected:
            assert decode(asked.pooled_code, bits) == Rounded(q=(q,), action=action)
        else:
            with pytest.raises(DecodeError, match="does not follow"):
                decode(asked.pooled_code, bits)
