"""Scores of several records a person: longhand, the same bits everywhere, and no sum where nothing is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from graphs import sheet
from test_blocks import FAMILIES, PLAN, A, X, answered, question, rows

from fedtmle_core import kernels
from fedtmle_core.blocks import Layer, Score
from fedtmle_core.evaluate import Workspace
from fedtmle_core.leaves import Between, Known, Level
from fedtmle_core.records import Records
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, ZERO, Constant, Kept, Term
from fedtmle_core.types import Array, Family, Part

PERIODS = 3
AT = (0.1, -0.7, 0.3, 0.2, -0.4, 0.5, -0.1)
C = Level("a", 2)


def in_period(t: int) -> Layer:
    """A record of a period: covariates, its number, an indicator of each, and one with a covariate."""
    now = [ONE if s == t else ZERO for s in range(PERIODS)]
    X_now = (ONE, X, Constant(t + 1.0), now[1], A if t == 1 else ZERO, now[2], A)
    factors = (1.0, 0.5, 0.25, 1.0, 1.0, 2.0, float(t))
    at_risk = Between("x", t - 3.0, None)
    return Layer(X=X_now, factors=factors, offset=0.25 * X if t else None, y=C, w=at_risk if t else None)


LAYERS = tuple(map(in_period, range(PERIODS)))


def scores(layers: tuple[Layer, ...], family: Family = Family.LOGISTIC) -> list[Score]:
    return [Score(family=family, layers=layers, at=AT, part=part) for part in (Part.GRADIENT, Part.HESSIAN)]


def longhand(family: Family, people: Sheet) -> tuple[Array, Array]:
    """Return the gradient and the Hessian, record by record."""
    gradient, hessian = np.zeros(len(AT)), np.zeros((len(AT), len(AT)))
    for layer in LAYERS:
        given: list[Term] = [ZERO if layer.offset is None else layer.offset, C]
        offset, y, w = rows((*given, ONE if layer.w is None else layer.w), people)
        D = rows(layer.X, people) * np.array(layer.factors)[:, None]
        if family is Family.LINEAR:
            slope, bend = np.ones(people.n), np.zeros(people.n)
        else:
            mean_of, bend_of = FAMILIES[family]
            mean = mean_of(offset + np.array(AT) @ D)
            slope, bend = mean - y, bend_of(mean)
        gradient += D @ (w * slope)
        hessian += (D * w * bend) @ D.T
    return gradient, hessian[np.triu_indices(len(AT))]


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("n", [1, 700])
def test_records_with_the_same_columns_are_added_up(family: Family, n: int) -> None:
    people = sheet(n)
    for found, expected in zip(
        answered(question(*scores(LAYERS, family)), people), longhand(family, people), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)


def test_each_person_is_rounded_once() -> None:
    """The twin: the sums over records in their order, times the column, rounded to the grid."""
    people, block = sheet(300), scores(LAYERS)[0]
    plan = question(block)
    (shift, *_) = block.shifts(plan.intervals(PLAN))
    z = 0.1 + -0.7 * (0.5 * rows((X,), people)[0])
    total = np.zeros(people.n)
    a, c = rows((A, C), people)
    for t, layer in enumerate(LAYERS):
        eta = 0.25 * rows((X,), people)[0] if t else np.zeros(people.n)
        eta = eta + z
        eta = eta + (0.25 * (t + 1.0)) * (AT[2] * np.ones(people.n))
        if t == 1:
            eta = eta + (AT[3] + AT[4] * a)
        elif t == 2:
            eta = eta + 2.0 * (AT[5] * np.ones(people.n))
        eta = eta + float(t) * (AT[6] * a) if t else eta
        slope = kernels.expit(eta) - c
        total = total + (slope if layer.w is None else slope * rows((layer.w,), people)[0])
    x = rows((X,), people)[0] * 0.5
    units = Workspace(people).answer(plan, PLAN)
    for j, column in enumerate((np.ones(people.n), x)):
        assert units[j] == sum(map(int, np.rint(total * 2.0**shift * column).tolist()))


def test_records_are_the_same_bits_in_any_partition_and_on_both_backends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    people, asked = sheet(500), question(*scores(LAYERS))
    without = Sheet(n=500, numbers=people.numbers, levels=people.levels)
    expected = Workspace(without).answer(asked, PLAN)
    with kernels.using_backend("numpy"):
        assert Workspace(without).answer(asked, PLAN) == expected
    parts = [
        Workspace(without.part(slice(start, stop))).answer(asked, PLAN)
        for start, stop in itertools.pairwise((0, 1, 130, 499, 500))
    ]
    assert tuple(map(sum, zip(*parts, strict=True))) == expected
    monkeypatch.setattr("fedtmle_core.evaluate.LARGEST_BLOCK", 64)
    assert Workspace(without).answer(asked, PLAN) == expected


def test_records_that_differ_in_a_column_are_summed_one_after_another() -> None:
    """The same numbers under another name are other columns: the sums agree but for rounding."""
    people, named = sheet(400), Kept(X)
    layers = tuple(
        Layer(
            X=(layer.X[0], named, *layer.X[2:]),
            factors=layer.factors,
            offset=layer.offset,
            y=layer.y,
            w=layer.w,
        )
        if t == 1
        else layer
        for t, layer in enumerate(LAYERS)
    )
    blocks = scores(layers)
    assert Records.of(blocks[0]) is None
    assert Records.of(scores(LAYERS)[0]) is not None
    shared, apart = answered(question(*scores(LAYERS)), people), answered(question(*blocks), people)
    for one, other in zip(shared, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-9)
    losses = [
        answered(question(Score(family=Family.LOGISTIC, layers=each, at=AT, part=Part.LOSS)), people)[0]
        for each in (LAYERS, layers)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-12)


@pytest.mark.parametrize("part", [Part.LOSS, Part.GRADIENT, Part.HESSIAN])
def test_a_column_of_zeros_is_left_out(part: Part) -> None:
    """A column that is 0 for everybody, which only its values tell, has the same sums on a coarser grid."""
    people, nobody = sheet(300), Between("x", 90.0, None)
    found = [
        answered(
            question(
                Score(
                    family=Family.LOGISTIC,
                    layers=(Layer(X=(X, zero, A), y=C), Layer(X=(Kept(X), zero, zero), w=Known("m"))),
                    at=(0.3, 0.2, -0.4),
                    part=part,
                )
            ),
            people,
        )[0]
        for zero in (nobody, ZERO)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_records_without_a_column_have_no_sums() -> None:
    layers = (Layer(X=(ZERO, ZERO), y=A), Layer(X=(ZERO, ONE), factors=(1.0, 0.0)))
    asked = question(Score(family=Family.LOGISTIC, layers=layers, at=(0.5, 0.5)))
    assert set(Workspace(sheet(20)).answer(asked, PLAN)) == {0}
    asked = question(Score(family=Family.LOGISTIC, layers=layers[:1], at=(0.5, 0.5), part=Part.HESSIAN))
    assert set(Workspace(sheet(20)).answer(asked, PLAN)) == {0}
