"""Leverages against their definition: the largest share of a person over combinations, found by search."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedtmle.model.leverage import (
    LEAST_RESIDUAL,
    Look,
    PersonRows,
    Pieces,
    RowSpace,
    deviations,
    largest_leverage,
    spread,
)
from fedtmle_core.types import Array, Family
from tests.premise import Premise


def whole(rows: Array) -> Pieces:
    return lambda: [PersonRows(rows)]


def leverages(rows: Array, rounding: Array | None = None) -> Array:
    return RowSpace.own(whole(rows), rounding=rounding).leverages(PersonRows(rows))


def searched(rows: Array, person: int, noise: Array) -> float:
    """The largest (a . t_i)^2 / (sum_k (a . t_k)^2 + sum_j a_j^2 noise_j), by ascent from several starts."""

    def negative(a: Array) -> float:
        told = a @ rows
        return -float(told[person] ** 2 / (told @ told + (a * a) @ noise))

    rng = np.random.default_rng(1)
    starts = [rows[:, person], *rng.normal(size=(4, len(rows)))]
    return max(-float(minimize(negative, a, method="BFGS", options={"gtol": 1e-10}).fun) for a in starts)


@pytest.mark.parametrize("power", [3, 6, 9, 11])
def test_small_directions_are_those_of_an_orthogonal_factorisation(power: int) -> None:
    rng = np.random.default_rng(power)
    rows = rng.normal(size=(4, 200))
    rows[3] = rows[0] - rows[1] + 10.0**-power * rng.standard_t(3, 200)
    q, _ = np.linalg.qr(rows.T)
    assert leverages(rows) == pytest.approx((q * q).sum(axis=1), abs=1e-2 if power > 9 else 1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_leverage_is_the_largest_share_over_all_combinations(seed: int, is_rounded: bool) -> None:
    rng = np.random.default_rng(seed)
    p, n = int(rng.integers(1, 5)), int(rng.integers(6, 40))
    rows = rng.normal(size=(p, n)) * np.exp(rng.normal(size=(p, 1)))
    spacing = np.exp(rng.normal(size=p)) if is_rounded else np.zeros(p)
    found = leverages(rows, spacing)
    for person in rng.integers(0, n, 3):
        assert found[person] == pytest.approx(searched(rows, person, spacing**2 / 12), rel=1e-6)


def test_the_leverage_of_a_group_is_one_over_its_size() -> None:
    groups = np.repeat(np.arange(4), [1, 3, 10, 46])
    rows = (groups == np.arange(4)[:, None]).astype(float)
    assert leverages(rows) == pytest.approx(1.0 / np.array([1, 3, 10, 46])[groups])


@pytest.mark.parametrize(
    "columns",
    [
        lambda one, w: [np.ones_like(w), 1 - one],  # a complement
        lambda one, w: [w, w + 1e-9 * one],  # nearly equal columns
        lambda _, w: [np.ones_like(w), 1 + 1 / (1 + (1e6 * (w - w[7])) ** 2)],  # a spike at a value
        lambda one, w: [w, w**2, 3 * w + w**2 + one],  # nearly dependent columns
        lambda one, w: [1e100 * one + 1e-100 * w],  # one record dominates
    ],
)
def test_combinations_that_are_one_person_have_leverage_one(columns) -> None:
    w = np.random.default_rng(3).normal(size=60)
    one = (np.arange(60) == 7).astype(float)
    found = leverages(np.stack(columns(one, w)))
    assert found[7] == pytest.approx(1.0, abs=1e-4)
    assert np.delete(found, 7).max() < 0.8


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_leverages_do_not_depend_on_coordinates_or_on_repeated_columns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, n = int(rng.integers(1, 6)), int(rng.integers(3, 50))
    rows = rng.normal(size=(p, n))
    mixed = np.concatenate(
        [rng.normal(size=(p, p)) @ rows * 10.0 ** rng.integers(-6, 7), np.zeros((1, n)), rows]
    )
    found = leverages(rows)
    assert leverages(mixed) == pytest.approx(found, abs=1e-6)
    assert found.sum() == pytest.approx(min(p, n))  # the trace of the projection is the rank
    assert found.max() <= 1 + 1e-9


def test_rounding_hides_whoever_is_small_beside_the_grid() -> None:
    rows = np.eye(3)[:, :1]  # one person behind one number
    for spacing, share in ((0.0, 1.0), (math.sqrt(12.0), 0.5), (12.0, 1 / 13)):
        assert leverages(rows, np.array([spacing, 0.0, 0.0]))[0] == pytest.approx(share)


def test_the_errors_that_a_grid_allows_contain_the_ellipsoid_that_is_counted() -> None:
    """Along any combination the grid's errors reach at least as far as the standard deviation counted."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        spacing, a = np.exp(rng.normal(size=4)), rng.normal(size=4)
        reach = float(np.abs(a) @ spacing) / 2
        assert reach >= math.sqrt(float((a * spacing) @ (a * spacing)) / 12)


def test_the_pooled_matrix_takes_the_place_of_the_own_one() -> None:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(3, 400))
    own = PersonRows(rows[:, :20])
    C = rng.normal(size=(3, 3))
    told = C @ rows @ rows.T @ C.T
    space = RowSpace.pooled(C, told, 0.0, lambda: [own])
    assert space.leverages(own) == pytest.approx(leverages(rows)[:20])
    assert largest_leverage(lambda: [own], space=space) < largest_leverage(lambda: [own]) / 5


def test_what_rounding_may_hide_does_not_count_for_the_pooled_matrix() -> None:
    """Whatever symmetric error within the bound was made, no leverage is stated too small."""
    rng = np.random.default_rng(6)
    for _ in range(50):
        rows, C = rng.normal(size=(3, 100)) * [[1.0], [0.3], [2.0]], rng.normal(size=(3, 3))
        own, true = PersonRows(rows[:, :10]), C @ rows @ rows.T @ C.T
        wrong = rng.normal(size=(3, 3))
        wrong = (wrong + wrong.T) / np.linalg.norm(wrong + wrong.T, 2)
        error = 0.5 * float(np.linalg.eigvalsh(true)[0])
        stated = RowSpace.pooled(C, true + error * wrong, error, list).leverages(own)
        assert (stated >= leverages(rows)[:10] * (1 - 1e-9)).all()


def test_along_directions_that_are_lost_in_rounding_the_own_rows_judge() -> None:
    """The mean of the two bounds of S: the leverage of the only one with a column is at most doubled."""
    rows = np.zeros((2, 30))
    rows[0], rows[1, 4] = 1.0, 1.0
    own = PersonRows(rows)
    found = RowSpace.pooled(np.eye(2), np.diag([300.0, 0.5]), 1.0, lambda: [own]).leverages(own)
    assert found[4] > 1.0
    assert np.delete(found, 4).max() == pytest.approx(2 / (299 + 29), rel=1e-2)


def test_rows_of_one_person_count_together() -> None:
    rng = np.random.default_rng(2)
    rows, counts = rng.normal(size=(2, 12)), np.array([3, 0, 5, 4])
    each = leverages(rows)
    found = RowSpace.own(whole(rows)).leverages(PersonRows(rows, counts))
    assert found == pytest.approx([each[:3].sum(), 0.0, each[3:8].sum(), each[8:].sum()])


@pytest.mark.parametrize("size", [1, 7, 100, 5000])
def test_pieces_give_what_the_whole_gives(size: int) -> None:
    rows = np.random.default_rng(9).normal(size=(4, 1000))
    rows[3, 17] = 40.0

    def pieces() -> Iterator[PersonRows]:
        return (PersonRows(rows[:, start : start + size]) for start in range(0, 1000, size))

    assert largest_leverage(pieces) == pytest.approx(leverages(rows).max())
    assert largest_leverage(lambda: []) == 0.0


early = Premise("a bound from the first rows suffices", at_least=0.3)


@early
@given(seed=st.integers(0, 2**32 - 1), enough=st.sampled_from([0.02, 0.1, 0.33]))
@settings(max_examples=80, deadline=None)
def test_an_early_bound_is_never_below_the_largest_leverage(seed: int, enough: float) -> None:
    rng = np.random.default_rng(seed)
    rows = np.clip(rng.normal(size=(int(rng.integers(1, 4)), 20_000)), -4, 4)
    rows[:, rng.integers(20_000)] = 4.0 * float(rng.choice([0.1, 1.0]))
    read = []

    def pieces() -> Iterator[PersonRows]:
        for start in range(0, 20_000, 1000):
            read.append(start)
            yield PersonRows(rows[:, start : start + 1000])

    found = largest_leverage(pieces, bounds=np.full(len(rows), 4.0), enough=enough)
    assert found >= leverages(rows).max() * (1 - 1e-9)
    if early.holds(len(read) < 20):
        assert found <= enough


def test_an_early_bound_is_that_of_the_rows_read_so_far() -> None:
    """Zeros that follow add nothing to S: the bound is the largest leverage itself."""
    rows = np.zeros((1, 8192))
    rows[0, :2048] = 4.0

    def pieces() -> Iterator[PersonRows]:
        return (PersonRows(rows[:, start : start + 2048]) for start in range(0, 8192, 2048))

    found = largest_leverage(pieces, bounds=np.array([4.0]), enough=1 / 2000)
    assert found == pytest.approx(1 / 2048)


def test_a_bound_by_rows_is_not_taken_for_people_with_several() -> None:
    rows, counts = np.ones((1, 4096)), np.array([1000, *[1] * 3096])
    found = largest_leverage(lambda: [PersonRows(rows, counts)], bounds=np.ones(1), enough=0.1)
    assert found == pytest.approx(1000 / 4096)


@pytest.mark.parametrize("seed", range(20))
def test_no_row_within_bounds_has_more_than_the_bound_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    space, bounds = RowSpace.own(whole(rng.normal(size=(3, 30)))), np.exp(rng.normal(size=3))
    corners = bounds[:, None] * np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1)
    inside = bounds[:, None] * rng.uniform(-1, 1, (3, 500))
    largest = max(space.leverages(PersonRows(rows)).max() for rows in (corners, inside))
    assert largest <= space.largest_within(bounds) <= 9 * largest


@pytest.mark.parametrize("family", Family)
def test_deviations_are_those_of_the_slope(family: Family) -> None:
    eta = np.linspace(-6, 6, 25)
    found = deviations(family, eta, (eta > 1).astype(float))
    if family is Family.LOGISTIC:
        mean = 1 / (1 + np.exp(-eta))
        assert found == pytest.approx(np.maximum(np.sqrt(mean * (1 - mean)), np.abs(mean - (eta > 1))))
    elif family is Family.LINEAR:
        assert found == pytest.approx(1.0)
    elif family is Family.GAUSSIAN:
        residuals = np.abs(eta - (eta > 1))
        least = min(np.sort(residuals)[16], np.sqrt(np.mean(residuals**2)))  # 68 % of 25 are within the first
        assert found == pytest.approx(np.maximum(residuals, least))
    else:
        assert found == pytest.approx(np.maximum(np.abs(np.exp(eta) - (eta > 1)), LEAST_RESIDUAL))


def test_the_spread_of_residuals_is_their_standard_deviation_and_never_more() -> None:
    rng = np.random.default_rng(4)
    for draw, ratio in (
        (rng.standard_normal, 1.0),
        (lambda n: rng.choice([-1.0, 1.0], n), 1.0),
        (lambda n: rng.uniform(-1, 1, n), 1.0),
        (lambda n: rng.standard_t(3, n), 0.7),
        (lambda n: np.where(rng.random(n) < 0.9, 0.0, 1.0), 0.0),
    ):
        residuals = np.abs(draw(20_000))
        deviation = math.sqrt(np.mean(residuals**2))
        assert spread(residuals) <= deviation * (1 + 1e-12)
        assert spread(residuals) == pytest.approx(ratio * deviation, abs=0.05 * deviation)
    assert spread(np.empty(0)) == 0.0
    assert spread(np.array([3.0])) == 3.0
    few = np.append(np.full(20, 0.01), np.full(6, 5.0))  # who stand out do not hide each other
    assert spread(few) == 0.01


def test_the_spread_moves_no_further_than_the_residuals() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        residuals = np.abs(rng.standard_normal(int(rng.integers(1, 40)))) * np.exp(rng.normal())
        move = rng.uniform(-0.3, 0.3, len(residuals))
        assert abs(spread(np.abs(residuals + move)) - spread(residuals)) <= np.abs(move).max() * (1 + 1e-12)


def test_rows_without_weight_do_not_count_in_the_spread() -> None:
    y, w = np.append(np.full(10, 0.2), np.full(90, 0.9)), np.append(np.ones(10), np.zeros(90))
    assert deviations(Family.GAUSSIAN, np.zeros(100), y, w=w)[0] == pytest.approx(0.2)
    assert deviations(Family.GAUSSIAN, np.zeros(100), y)[0] == pytest.approx(0.75, abs=0.2)


def test_a_record_that_dominates_by_its_outcome_is_seen() -> None:
    y = np.append(np.full(99, 0.01), 0.95)
    for family, eta in ((Family.LOGISTIC, -4.5), (Family.GAUSSIAN, 0.01)):
        s = deviations(family, np.full(100, eta), y)
        assert leverages(s[None, :])[99] > 0.4
    one_event = (y > 0.5).astype(float)
    fitted = deviations(Family.LOGISTIC, np.full(100, -np.log(99)), one_event)
    assert leverages(fitted[None, :])[99] == pytest.approx(0.5, abs=0.01)  # as many are expected as there are
    steered = deviations(Family.LOGISTIC, np.full(100, -9.0), one_event)
    assert leverages(steered[None, :])[99] > 0.98


moved = Premise("the look covers the move", at_least=0.6)


@moved
@given(
    seed=st.integers(0, 2**32 - 1),
    family=st.sampled_from([Family.LINEAR, Family.GAUSSIAN, Family.LOGISTIC]),
    fraction=st.sampled_from([0.0, 0.5, 1 - 1e-9]),
    is_binary=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_within_the_radius_no_leverage_exceeds_what_is_allowed(
    seed: int, family: Family, fraction: float, is_binary: bool
) -> None:
    rng = np.random.default_rng(seed)
    d, n = int(rng.integers(1, 4)), int(rng.integers(5, 60))
    X = rng.normal(size=(d, n)) * np.exp(rng.normal(size=(d, n)) * rng.choice([0.0, 1.0]))
    y = (rng.random(n) < 0.3).astype(float) if is_binary else rng.random(n)

    def largest(eps: Array) -> float:
        return float(leverages(deviations(family, eps @ X, y) * X).max())

    here, direction = rng.normal(size=(2, d))
    look = Look(largest=largest(here), columns=np.abs(X).max(axis=1), family=family)
    allowed = look.largest * float(rng.choice([1.0, 1.2, 2.0]))
    radius = look.radius(allowed)
    move = direction * (fraction * min(radius, 10.0) / look.distance(direction))
    if moved.holds(look.distance(move) <= radius):
        assert largest(here + move) <= allowed * (1 + 1e-9)
    assert look.radius(look.largest * 0.99) == -1.0


def test_a_move_along_which_the_bound_is_attained() -> None:
    """All predictions but one become certain, and that one less so: the leverage grows as the bound says."""
    offset, X = np.append(np.full(20_000, 8.0), -8.0), np.ones((1, 20_001))
    y = np.append(np.ones(20_000), 0.0)

    def person(at: float) -> float:
        return float(leverages(deviations(Family.LOGISTIC, offset + at * X[0], y)[None, :])[20_000])

    growth = person(0.25) / person(0.0)
    assert math.exp(2 * 0.25) * 0.98 < growth <= math.exp(2 * 0.25)
    look = Look(largest=person(0.0), columns=np.ones(1), family=Family.LOGISTIC)
    allowed = person(0.0) * math.exp(0.5)
    assert look.radius(allowed) == pytest.approx(0.25)
    assert person(1.1 * look.radius(allowed)) > allowed


def test_a_move_along_which_the_bound_of_a_squared_loss_is_nearly_attained() -> None:
    """The residuals of all but one fall to the least that counts, and that one's grows.

    Most rows have small residuals and are zero in the column, so that the spread stays below the least.
    """
    n, allowed_growth = 20_000, 1.05
    look = Look(largest=1.0, columns=np.ones(1), family=Family.GAUSSIAN)
    radius = look.radius(allowed_growth)

    X = np.append(np.ones(n), np.append(1.0, np.zeros(3 * n)))

    def person(at: float, reach: float) -> float:
        y = np.append(np.full(n, LEAST_RESIDUAL + reach), np.append(-LEAST_RESIDUAL, np.zeros(3 * n)))
        return float(leverages((deviations(Family.GAUSSIAN, np.full(4 * n + 1, at), y) * X)[None, :])[n])

    assert person(radius, radius) <= allowed_growth * person(0.0, radius)
    far = 1.1 * radius
    assert person(far, far) > allowed_growth * person(0.0, far)


def test_a_distance_adds_up_the_moves_of_all_columns_without_their_signs() -> None:
    look = Look(largest=0.1, columns=np.array([1.0, 2.0]), family=Family.LOGISTIC)
    assert look.distance([-1.0, 1.0]) == 3.0
