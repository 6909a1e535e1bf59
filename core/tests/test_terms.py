"""The language: every value lies in the public interval, and a graph has one form as bytes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from graphs import DICTIONARY, LEAVES, TERMS, sheet
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle_core import graph, kernels
from fedtmle_core.errors import DecodeError, InputError
from fedtmle_core.evaluate import Workspace
from fedtmle_core.leaves import BSpline, Fold, Known, Level, Log, Number, Power, Root, Spline
from fedtmle_core.terms import ONE, ZERO, Apply, ByCluster, Constant, Pick, Softmax, Sum, Term, product, total

SHEET = sheet(200)


def interval(term: Term) -> tuple[float, float]:
    return graph.intervals([term], DICTIONARY)[term]


def values(term: Term) -> np.ndarray:
    return Workspace(SHEET).columns([term])[0]


@given(TERMS)
@settings(max_examples=300, deadline=None)
def test_no_value_leaves_its_public_interval(term: Term) -> None:
    try:
        low, high = interval(term)
    except InputError:
        return  # it has no finite bound, and no core answers it
    column = values(term)
    assert np.isfinite(column).all()
    assert low <= column.min()
    assert column.max() <= high


def test_most_random_terms_have_a_bound() -> None:
    found = []

    @given(TERMS)
    @settings(max_examples=100, deadline=None, database=None)
    def look(term: Term) -> None:
        try:
            found.append(math.isfinite(interval(term)[1]))
        except InputError:
            found.append(False)

    look()
    assert np.mean(found) > 0.9


def test_intervals_are_attained_by_the_ends_of_the_dictionary() -> None:
    """An interval that is far too wide would cost digits: these are the least possible."""
    assert interval(Number("x", 3)) == (-0.375, 0.625)
    assert interval(Power("x", 3, 2)) == pytest.approx((0.0, 0.390625))
    low, high = interval(product(Number("x", 3), Number("x", 3)))
    assert low == 0.0
    assert high == pytest.approx(0.390625)
    assert interval(Apply("inverse", Level("a", 1), 0.25)) == pytest.approx((1.0, 4.0))
    assert interval(Apply("clip", Number("x", 3), -0.1, 0.2)) == (-0.1, 0.2)
    assert interval(ByCluster("ward", Level("a", 1))) == (0.0, 40.0)
    assert interval(1.0 - Level("a", 1)) == (0.0, 1.0)
    assert interval(product(Level("a", 1), 1.0 - Level("a", 1))) == (0.0, 1.0)


def test_an_interval_covers_the_rounding_of_summands_that_cancel() -> None:
    large = 1e7 / 3.0
    term = total([ONE, Number("x", 3), ONE], [large, 1.0, -large])
    low, high = interval(term)
    assert low < -0.375 - 1e-11
    assert high > 0.625 + 1e-11


def test_a_square_of_a_number_that_changes_sign_reaches_down_to_zero() -> None:
    """The ends of the range alone would say from 0.14 on, and a value of 0 would leave it."""
    assert interval(Power("x", 3, 2))[0] == 0.0


UNBOUNDED = (
    Apply("logit", Level("a", 1)),
    Apply("log", Number("x", 3)),
    Apply("inverse", Number("x", 3)),
    Apply("exp", Sum((Number("x", 3),), (1e6,))),
    Apply("clip", ONE, 2.0, 1.0),
    Apply("sine", ONE),
    Log("x"),
    Root("x"),
    Power("x", 3, 4),
    Power("x", 3, 1),
    Spline("x", 3, (0.0, 1.0), 0),
    Spline("x", 3, (0.0, 2.0, 1.0), 0),
    Spline("x", 3, (0.0, 1.0, 2.0), 1),
    BSpline("x", (0.0,), -1.0, 5.0, 3, 0),
    BSpline("x", (0.0,), -3.0, 5.0, 3, 5),
    BSpline("x", (0.0,), -3.0, 5.0, 9, 0),
    Level("a", 3),
    Level("x", 0),
    Known("a"),
    Known("x", is_level=True),
    Number("nobody", 0),
    Fold(1, 0, "", 0),
    Fold(5, 0, "", 5),
    Fold(5, 0, "x", 0),
    ByCluster("a", ONE),
    Pick("a", (ONE, ONE)),
    Softmax((ONE,), 1),
    Sum((ONE, ONE), (1.0,)),
    Sum((ONE,), (1.7e308,)) + Sum((ONE,), (1.7e308,)),
)


@pytest.mark.parametrize("term", UNBOUNDED, ids=lambda term: type(term).__name__)
def test_what_has_no_bound_or_no_variable_is_refused(term: Term) -> None:
    with pytest.raises(InputError):
        interval(term)


def test_values_are_those_of_numpy() -> None:
    x, a, m = SHEET.numbers["x"], SHEET.levels["a"], SHEET.numbers["m"]
    known = ~np.isnan(m)
    scaled = np.where(known, m / 16.0, 0.0)
    X, M, A = Number("x", 3), Number("m", 4), Level("a", 1)
    np.testing.assert_allclose(values(2.0 * X - M + 1.0), x / 4.0 - scaled + 1.0, rtol=1e-15)
    np.testing.assert_array_equal(values(A * Known("m")), (a == 1) & known)
    np.testing.assert_allclose(values(Apply("expit", X)), 1.0 / (1.0 + np.exp(-x / 8.0)), rtol=1e-14)
    np.testing.assert_allclose(values(Pick("a", (ZERO, X, -X))), np.choose(a, [0 * x, x / 8, -x / 8]))
    s = SHEET.levels["s"]
    np.testing.assert_array_equal(values(Pick("s", (ONE, 2.0 * ONE))), np.where(s < 0, 0.0, s + 1.0))
    logits = np.stack([x / 8.0, 0.0 * x])
    expected = np.exp(logits[0]) / np.exp(logits).sum(axis=0)
    np.testing.assert_allclose(values(Softmax((X, ZERO), 0)), expected, rtol=1e-14)
    np.testing.assert_allclose(values(Log("age")), np.log(SHEET.numbers["age"]), rtol=1e-15)
    np.testing.assert_array_equal(values(Root("age")), np.sqrt(SHEET.numbers["age"]))
    ward = SHEET.clusters["ward"]
    sums = values(ByCluster("ward", A))
    assert sums.sum() == (a == 1).sum()
    for mark in np.unique(ward):
        assert sums[ward == mark][0] == ((a == 1) & (ward == mark)).sum()
        assert not sums[ward == mark][1:].any()


def test_folds_are_of_nearly_equal_size_and_keep_clusters_together() -> None:
    folds = np.stack([values(Fold(5, 7, "", k)) for k in range(5)])
    assert (folds.sum(axis=0) == 1.0).all()
    assert np.ptp(folds.sum(axis=1)) <= 1
    by_ward = np.stack([values(Fold(3, 7, "ward", k)) for k in range(3)])
    for mark in np.unique(SHEET.clusters["ward"]):
        assert len(np.unique(by_ward[:, SHEET.clusters["ward"] == mark], axis=1).T) == 1


def test_formulas_leave_out_ones_and_zeros() -> None:
    X = Number("x", 3)
    assert X * ONE == X
    assert X + 0.0 * X == X
    assert product(X, ZERO) == ZERO
    assert total([]) == ZERO
    assert 1.0 * X == X
    assert X * 1.0 == X
    assert product() == ONE
    assert X - X != ZERO  # nothing is computed at writing


@given(st.lists(TERMS, min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_graph_is_read_back_from_its_bytes(roots: list[Term]) -> None:
    data = msgspec.msgpack.encode(graph.encode(roots))
    nodes, places = msgspec.msgpack.decode(data)
    assert graph.decode([tuple(node) for node in nodes], places) == roots


def test_parts_are_listed_once_and_before_what_is_made_of_them() -> None:
    X = Number("x", 3)
    squared = product(X, X)
    nodes, roots = graph.encode([squared + X, squared])
    assert [kind for kind, _, _ in nodes] == ["Number", "Product", "Sum"]
    assert roots == [2, 1]


def test_a_deep_graph_is_no_danger() -> None:
    term: Term = Number("x", 3)
    for _ in range(20_000):
        term = Apply("expit", term)
    assert len(graph.ordered([term])) == 20_001
    assert graph.decode(*graph.encode([term])) == [term]


BROKEN: tuple[tuple[list[Any], list[int]], ...] = (
    ([("Number", ["x", 3], [])], [1]),
    ([("Number", ["x"], [])], [0]),
    ([("Number", ["x", 3, 4], [])], [0]),
    ([("Number", ["x", 3.0], [])], [0]),
    ([("Number", ["x", True], [])], [0]),
    ([("Number", [3, 3], [])], [0]),
    ([("Known", ["x", 1], [])], [0]),
    ([("Python", ["x"], [])], [0]),
    ([("Kept", [], [0])], [0]),
    ([("Kept", [], [])], [0]),
    ([("Constant", [1], [])], [0]),
    ([("Constant", [1.0], []), ("Constant", [1.0], [])], [1]),
    ([("Constant", [1.0], []), ("Number", ["x", 3], [0])], [1]),
    ([("Constant", [1.0], []), ("Sum", ["1.0"], [0])], [1]),
    ([("Constant", [1.0], []), ("Sum", [[1]], [0])], [1]),
    ([("Constant", [1.0], []), ("Constant", [2.0], [])], [1]),  # the first is of no use
)


@pytest.mark.parametrize("content", BROKEN)
def test_what_is_not_in_the_language_or_in_its_one_form_is_refused(
    content: tuple[list[Any], list[int]],
) -> None:
    with pytest.raises(DecodeError):
        graph.decode(*content)


def test_a_parameter_that_is_not_finite_has_no_form() -> None:
    with pytest.raises(InputError):
        Constant(math.nan).digest  # noqa: B018 - computed when it is asked for


@pytest.mark.parametrize("term", LEAVES)
def test_blocks_of_people_do_not_change_a_value(term: Term, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(term)
    monkeypatch.setattr("fedtmle_core.evaluate.LEAST_BLOCK", 7)
    monkeypatch.setattr("fedtmle_core.evaluate.BLOCK_NUMBERS", 7)
    without = Workspace(sheet(200))
    if not SHEET.clusters:
        pytest.fail("the sheet has clusters")
    np.testing.assert_array_equal(without.columns([term])[0], whole)


def test_both_backends_give_the_same_bits() -> None:
    terms = [Apply("expit", Number("x", 3)), Apply("exp", Number("x", 3)), Softmax((Number("x", 3), ZERO), 1)]
    with kernels.using_backend("numpy"):
        plain = Workspace(SHEET).columns(terms)
    for one, other in zip(plain, Workspace(SHEET).columns(terms), strict=True):
        np.testing.assert_array_equal(one, other)
