"""The collision pair: moments, distance, responses, the risk bound and the conditioning bound."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.polynomial import chebyshev

from fedtmle.errors import InputError
from fedtmle_paper.privacy.collision import (
    collision_distance,
    collision_pair,
    conditioning_ceiling,
    distance_floor,
    level_points,
    matching_distance,
    reconstruction_risk,
    response_ceiling,
    risk_radius,
    sharper_reconstruction_risk,
    transcript_ceiling,
)

ORDERS = range(2, 13)
V = np.array([0.6, 0.8])


@pytest.mark.parametrize("s", ORDERS)
def test_moments_below_s_cancel_and_the_next_does_not(s: int) -> None:
    plus, minus = level_points(s, 0.5), level_points(s, -0.5)
    for order in range(s):
        assert abs(np.sum(plus**order) - np.sum(minus**order)) <= 1e-10
    # M_s(1/2) - M_s(-1/2) = s 2^(1-s), from Newton's identity with the constant coefficient alone.
    assert np.sum(plus**s) - np.sum(minus**s) == pytest.approx(s * 2.0 ** (1 - s), rel=1e-8)
    for theta in (0.5, -0.5):
        roots = level_points(s, theta)
        np.testing.assert_allclose(chebyshev.chebval(roots, [0] * s + [1]), theta, atol=1e-11)
        assert (np.diff(roots) < 0).all()


@pytest.mark.parametrize("s", ORDERS)
@pytest.mark.parametrize("a", [1.0, 0.05])
def test_distance_and_response_stay_on_their_sides(s: int, a: float) -> None:
    centre, N = np.array([0.3, -0.2]), 20
    pair = collision_pair(s, radius=a, centre=centre, direction=V)
    assert pair.s == s
    assert np.abs((pair.plus - centre) @ V).max() <= a
    assert pair.distance == pytest.approx(matching_distance(pair.plus, pair.minus), rel=1e-9)
    assert pair.distance >= distance_floor(s, a)
    assert pair.distance == collision_distance(s, a)
    # g(o) = cos(w z), z = o . v: its s-th derivative along v is at most w^s.
    for w, shift in itertools.product((0.5, 1.0, 3.0), (0.0, 0.7)):
        answer = [np.cos(w * (x @ V) + shift).sum() / N for x in (pair.plus, pair.minus)]
        assert abs(answer[0] - answer[1]) <= response_ceiling(s, a, smoothness=w**s, n_rows=N) + 1e-15


@pytest.mark.parametrize("s", range(2, 8))
def test_the_response_bound_is_attained_by_the_monomial(s: int) -> None:
    """g(z) = z^s/s! has s-th derivative one; its answers differ by the bound, as M_s does by s 2^(1-s)."""
    pair = collision_pair(s, radius=0.9, centre=np.zeros(1), direction=np.ones(1))
    moved = (pair.plus**s).sum() / math.factorial(s) - (pair.minus**s).sum() / math.factorial(s)
    assert moved / 5 == pytest.approx(response_ceiling(s, 0.9, smoothness=1.0, n_rows=5), rel=1e-9)


@pytest.mark.parametrize("s", [2, 3, 5, 8])
@pytest.mark.parametrize("noise", [1e-8, 1e-4, 10.0])
def test_the_risk_bound_is_half_of_a_pair_that_the_noise_hides(s: int, noise: float) -> None:
    given: dict[str, Any] = {"radius": 0.5, "noise": noise, "smoothness": 2.0, "n_rows": 30, "T": 9}
    a = risk_radius(s, **given)
    assert transcript_ceiling(s, a, smoothness=2.0, n_rows=30, T=9) <= noise * (1 + 1e-12)
    risk = reconstruction_risk(s, **given)
    assert risk == pytest.approx(a / (6 * s))
    assert risk <= sharper_reconstruction_risk(s, **given) == pytest.approx(collision_distance(s, a) / 2)
    # Longhand, eq. (reconstruction-risk).
    inner = 2**s * 30 * math.factorial(s - 1) * noise / (2.0 * math.sqrt(9))
    assert risk == pytest.approx(min(0.5, inner ** (1 / s)) / (6 * s))


def test_the_bound_is_vacuous_without_noise_and_the_radius_where_nothing_bends() -> None:
    given: dict[str, Any] = {"radius": 0.5, "n_rows": 9, "T": 4}
    assert reconstruction_risk(3, noise=0.0, smoothness=1.0, **given) == 0.0
    assert reconstruction_risk(3, noise=0.0, smoothness=0.0, **given) == 0.5 / 18


@pytest.mark.parametrize("s", [2, 3, 4, 6])
@pytest.mark.parametrize("a", [0.3, 0.05])
def test_conditioning_is_no_better_than_its_bound(s: int, a: float) -> None:
    rng, N = np.random.default_rng(s), 12
    u = np.sort(rng.uniform(-1, 1, size=s))
    frequencies = (0.4, 0.9, 1.5, 2.0)
    A = np.stack([-w * np.sin(w * a * u + 0.3 * w) / N for w in frequencies])
    least = np.linalg.svd(np.concatenate([A, np.zeros((s, s))]), compute_uv=False)[-1]
    bound = conditioning_ceiling(s, a, smoothness=max(frequencies) ** s, n_rows=N, T=len(frequencies))
    assert least <= bound + 1e-16


@pytest.mark.parametrize("T", [40, 200])
def test_the_conditioning_bound_is_nearly_attained(T: int) -> None:
    """s = 2, records at -a and a: steep linear queries leave one direction, T quadratic ones see it.

    gamma(z) = C z^2/2 has gamma' = C z, so |A w| = C a sqrt(2 T)/N at w = (1, -1)/sqrt(2): the bound.
    """
    a, C, N = 0.3, 1.7, 12
    linear = np.full((1, 2), 1e3) / N
    quadratic = np.tile(C * np.array([-a, a]) / N, (T, 1))
    least = np.linalg.svd(np.concatenate([linear, quadratic]), compute_uv=False)[-1]
    bound = conditioning_ceiling(2, a, smoothness=C, n_rows=N, T=T + 1)
    assert 0.98 * bound <= least <= bound


@pytest.mark.parametrize("s", ORDERS)
def test_bounds_are_the_papers_fractions(s: int) -> None:
    """Squares of eq:collision-jacobian in exact fractions, and the left half of eq:collision-pair."""
    a, C, N, T = Fraction(1, 4), Fraction(3, 2), 12, 5
    square = C**2 * s * T * a ** (2 * s - 2) / (N**2 * Fraction(math.factorial(s - 1)) ** 2)
    ours = conditioning_ceiling(s, float(a), smoothness=float(C), n_rows=N, T=T)
    assert ours**2 == pytest.approx(float(square), rel=1e-12)
    assert distance_floor(s, 0.25) == pytest.approx(float(a * Fraction(1, 3 * s)), rel=1e-14)
    # The exact distance is 2.196 floors at s = 2 and approaches pi floors from below.
    assert 2.19 < collision_distance(s, 0.25) / distance_floor(s, 0.25) < math.pi
    # One query moves by twice what the midpoint transcript needs.
    one = response_ceiling(s, 0.25, smoothness=1.5, n_rows=N)
    assert transcript_ceiling(s, 0.25, smoothness=1.5, n_rows=N, T=4) == pytest.approx(one, rel=1e-14)


def test_matching_is_the_best_over_all_permutations() -> None:
    rng = np.random.default_rng(7)
    for s in (1, 2, 3, 4, 5):
        x, y = rng.normal(size=(s, 2)), rng.normal(size=(s, 2))
        best = min(
            max(np.linalg.norm(x[j] - y[k]) for j, k in enumerate(order))
            for order in itertools.permutations(range(s))
        )
        assert matching_distance(x, y) == pytest.approx(best)


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="s: expected"):
        collision_pair(1, radius=1.0, centre=np.zeros(1), direction=np.ones(1))
    with pytest.raises(InputError, match="direction"):
        collision_pair(2, radius=1.0, centre=np.zeros(2), direction=np.ones(2))
    with pytest.raises(InputError, match="n_rows"):
        reconstruction_risk(5, radius=1.0, noise=0.1, smoothness=1.0, n_rows=4, T=1)
