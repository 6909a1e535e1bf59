"""The sandwich against brute-force minimax, and the affine decoder against adversaries."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from fedtmle.errors import InputError
from fedtmle_core.types import Array
from fedtmle_paper.privacy.design import design_modulus
from fedtmle_paper.privacy.disclosure import (
    affine_decoder,
    attribute_risk,
    curvature,
    decided,
    range_error,
    reduced_radius_bound,
    relative_bounds,
    response_smoothness,
    threshold_is_identified,
)
from tests.premise import Premise

CLOSE = 0.9  # the worst error that the search finds, over the decoder's guarantee, for linear responses


class Curved:
    """F(u) = A u + bends, phi(u) = c . u + bends, with H_g and H_phi known exactly: q = 2, d = 1, T queries.

    F_t = a_t . u + (h_t/2) u_1^2 with |h_t| <= H_g; phi = c . u + (k/2) u_2^2, H_phi = |k|.
    """

    def __init__(self, seed: int, T: int, H_g: float, H_phi: float) -> None:
        rng = np.random.default_rng(seed)
        self.A, self.c = rng.normal(size=(T, 2)), rng.normal(size=2)
        self.h = H_g * rng.choice([-1.0, 1.0], size=T)
        self.k = H_phi
        self.T, self.H_g, self.H_phi = T, H_g, H_phi

    def F(self, u: Array) -> Array:
        return u @ self.A.T + 0.5 * u[..., :1] ** 2 * self.h

    def phi(self, u: Array) -> Array:
        return u @ self.c + 0.5 * self.k * u[..., 1] ** 2


def disc(radius: float, count: int) -> Array:
    side = np.linspace(-radius, radius, count)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    edge = np.linspace(0, 2 * math.pi, 4 * count)
    ring = radius * np.stack([np.cos(edge), np.sin(edge)], axis=-1)
    return np.concatenate([grid[np.linalg.norm(grid, axis=1) <= radius], ring])


def brute_force_minimax(problem: Curved, radius: float, noise: float) -> tuple[float, float]:
    """Bounds of the minimax error of a fixed block, from candidates on a grid.

    From below: half the largest |phi - phi'| of two candidates that one answer within noise of both could
    have come from, ||F - F'|| <= 2 noise. From above: half the range of phi, which needs no answer.
    """
    u = disc(radius, 41)
    F, phi = problem.F(u), problem.phi(u)
    close = np.linalg.norm(F[:, None] - F[None], axis=2) <= 2 * noise
    below = 0.5 * float(np.max(np.abs(phi[:, None] - phi[None])[close], initial=0.0))
    return below, float(np.ptp(phi)) / 2


NOISES = (0.05, 0.2, 0.6)
BENDS = ((0.0, 0.0), (0.1, 0.0), (0.1, 0.2))


def test_most_problems_of_the_sandwich_have_the_relative_form() -> None:
    with Premise("the bounds are relative to the modulus", at_least=0.5) as is_relative:
        for seed, noise, (H_g, H_phi) in itertools.product(range(6), NOISES, BENDS):
            problem = Curved(seed, T=1 + seed % 3, H_g=H_g, H_phi=H_phi)
            risk = attribute_risk(
                problem.A, problem.c, radius=0.8, noise=noise, T=problem.T, H_g=H_g, H_phi=H_phi
            )
            is_relative.holds(risk.relative is not None)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("H_g", "H_phi"), BENDS)
def test_the_sandwich_holds_against_brute_force(seed: int, noise: float, H_g: float, H_phi: float) -> None:
    radius = 0.8
    problem = Curved(seed, T=1 + seed % 3, H_g=H_g, H_phi=H_phi)
    risk = attribute_risk(problem.A, problem.c, radius=radius, noise=noise, T=problem.T, H_g=H_g, H_phi=H_phi)
    below, trivial = brute_force_minimax(problem, radius, noise)
    assert below <= risk.upper * (1 + 1e-9)  # no pair is more confusable than the decoder's error allows
    assert risk.lower <= risk.upper
    if problem.T == 1:  # a scalar answer: the minimax error is half the widest confusable pair
        spacing = 2 * radius / 40 * (1 + float(np.linalg.norm(problem.A)) + float(np.linalg.norm(problem.c)))
        assert risk.lower <= below + spacing
    assert risk.lower <= trivial * (1 + 1e-2)
    if H_g == H_phi == 0.0:
        assert risk.lower == pytest.approx(risk.upper)
        assert risk.modulus == pytest.approx(risk.upper)
    if risk.relative is not None:
        low, high = risk.relative
        assert low * risk.modulus <= risk.lower * (1 + 1e-9) + 1e-12
        assert risk.upper <= high * risk.modulus * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_every_decoder_on_a_finite_answer_set_errs_at_least_the_lower_bound(seed: int) -> None:
    """All decoders: of finitely many answers, the best decoder takes the midpoint for each."""
    problem, radius, noise = Curved(seed, T=2, H_g=0.05, H_phi=0.05), 0.7, 0.3
    risk = attribute_risk(problem.A, problem.c, radius=radius, noise=noise, T=2, H_g=0.05, H_phi=0.05)
    u = disc(radius, 31)
    F, phi = problem.F(u), problem.phi(u)
    answers = np.concatenate([problem.F(u[::7]), [[0.0, 0.0]]])
    within = np.linalg.norm(F[:, None] - answers[None], axis=2) <= noise
    widths = [np.ptp(phi[within[:, j]]) / 2 for j in range(len(answers)) if within[:, j].any()]
    # The optimal decoder's worst error is the largest half-width; the theorem's own pair hides at Y = F(x_o).
    assert max(widths) >= risk.lower * 0.93
    assert max(widths) <= risk.upper


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("H_g", "H_phi"), [(0.0, 0.0), (0.2, 0.1)])
def test_no_adversary_beats_the_decoders_guarantee(seed: int, H_g: float, H_phi: float) -> None:
    problem, radius, noise = Curved(seed, T=3, H_g=H_g, H_phi=H_phi), 0.9, 0.15
    decode = affine_decoder(
        problem.A,
        problem.c,
        radius=radius,
        noise=noise,
        T=3,
        H_g=H_g,
        H_phi=H_phi,
        response=problem.F(np.zeros(2)),
    )
    rng = np.random.default_rng(seed)

    def error(z: Array) -> float:
        u, e = z[:2], z[2:]
        u = u * min(1.0, radius / max(float(np.linalg.norm(u)), 1e-300))
        e = e * min(1.0, noise / max(float(np.linalg.norm(e)), 1e-300))
        return -abs(decode(problem.F(u) + e) - float(problem.phi(u)))

    starts = [np.concatenate([rng.normal(size=2), rng.normal(size=3) * noise]) for _ in range(6)]
    worst = max(-minimize(error, z, method="Nelder-Mead", options={"maxiter": 1000}).fun for z in starts)
    assert worst <= decode.error * (1 + 1e-12)
    if H_g == H_phi == 0.0:
        assert worst >= CLOSE * decode.error
        assert decode.error == pytest.approx(design_modulus(problem.A, problem.c, radius=radius, noise=noise))


def test_the_threshold_is_identified_exactly_where_the_error_allows() -> None:
    rng = np.random.default_rng(1)
    A, c = rng.normal(size=(4, 3)), rng.normal(size=3)
    decode = affine_decoder(A, c, radius=1.0, noise=0.1)
    answered = Premise("the decoder decides", at_least=0.4)
    identified = Premise("the error allows a decision", at_least=0.4)
    with answered, identified:
        for _ in range(300):
            u = rng.normal(size=3)
            u = u / max(1.0, float(np.linalg.norm(u)))
            e = rng.normal(size=4)
            e = 0.1 * e / np.linalg.norm(e)
            is_above = decode.above(A @ u + e, 0.2)
            if answered.holds(is_above is not None):
                assert is_above == bool(c @ u > 0.2)
            if identified.holds(threshold_is_identified(float(c @ u), 0.2, decode.error)):
                assert (decode(A @ u + e) > 0.2) == (c @ u > 0.2)
    assert decided(1.0, 0.5, 0.4) is True
    assert decided(0.0, 0.5, 0.4) is False
    assert decided(0.6, 0.5, 0.4) is None


def test_the_range_case_bounds_the_decoder() -> None:
    rng = np.random.default_rng(9)
    A = rng.normal(size=(6, 4))
    c = A.T @ rng.normal(size=6)
    bend = curvature(radius=1.0, T=2, H_g=0.1, H_phi=0.2)
    bound = range_error(A, c, noise=0.05, bend=bend)
    decode = affine_decoder(A, c, radius=1.0, noise=0.05, T=2, H_g=0.1, H_phi=0.2)
    assert bound is not None
    assert decode.error <= bound * (1 + 1e-12)
    assert range_error(np.zeros((1, 4)), c, noise=0.05, bend=bend) is None
    # S.2.5 longhand: sum_j c_j^2/lambda_j = c' (A'A)^-1 c; b_T = sqrt(T) H_g rho^2/2, b_phi = H_phi rho^2/2.
    slope = math.sqrt(c @ np.linalg.inv(A.T @ A) @ c)
    assert bound == pytest.approx((0.05 + math.sqrt(2) * 0.1 / 2) * slope + 0.2 / 2, rel=1e-10)


def test_a_smaller_ball_gives_a_bound_where_the_whole_ball_bends_too_much() -> None:
    problem, radius, noise = Curved(0, T=1, H_g=5.0, H_phi=0.0), 1.0, 0.1
    assert noise < curvature(radius=radius, T=1, H_g=5.0, H_phi=0.0).response
    risk = attribute_risk(problem.A, problem.c, radius=radius, noise=noise, T=1, H_g=5.0)
    below, _ = brute_force_minimax(problem, radius, noise)
    assert 0 < risk.lower <= below * 1.05

    def omega(rho: float, eta: float) -> float:
        return design_modulus(problem.A, problem.c, radius=rho, noise=eta)

    scan = max(
        omega(rho, noise - 2.5 * rho**2)
        for rho in np.linspace(0, math.sqrt(2 * noise / 5.0) * (1 - 1e-9), 401)
    )
    found = reduced_radius_bound(omega, radius=radius, noise=noise, T=1, H_g=5.0, H_phi=0.0)
    assert found == pytest.approx(scan, rel=1e-4)
    assert reduced_radius_bound(omega, radius=radius, noise=0.0, T=1, H_g=5.0, H_phi=0.0) == 0.0


def test_constants() -> None:
    bend = curvature(radius=0.5, T=16, H_g=0.3, H_phi=0.7)
    assert bend.response == pytest.approx(0.3 * 0.25 * 4 / 2)
    assert bend.attribute == pytest.approx(0.7 * 0.25 / 2)
    assert response_smoothness(3.0, 12) == 0.25
    assert relative_bounds(2.0, 1.0, bend) == pytest.approx((1 - 0.15 - 0.04375, 1 + 0.15 + 0.04375))
    assert relative_bounds(0.0, 1.0, bend) is None
    with pytest.raises(InputError, match="T: say how many"):
        attribute_risk(np.eye(2), np.ones(2), radius=1.0, noise=0.1, H_g=1.0)


def test_a_list_of_blocks_is_a_family() -> None:
    rng = np.random.default_rng(3)
    blocks = [rng.normal(size=(2, 4)) for _ in range(3)]
    c = rng.normal(size=4)
    each = [attribute_risk(A, c, radius=1.0, noise=0.2).modulus for A in blocks]
    assert attribute_risk(blocks, c, radius=1.0, noise=0.2).modulus == min(each)


def test_mean_gradients_have_the_stated_smoothness() -> None:
    """H_g = C_obs/N_m: the Jacobian of a mean of sin over records moves no faster, and nearly as fast."""
    rng, N = np.random.default_rng(4), 7
    # g(o) = sin(o), grad g = cos(o), which is 1-Lipschitz: C_obs = 1.
    slopes = []
    for _ in range(2000):
        x = rng.uniform(1.3, 1.8, size=N)
        y = x + 1e-3 * rng.normal(size=N)
        slopes.append(np.linalg.norm((np.cos(x) - np.cos(y)) / N) / np.linalg.norm(x - y))
    assert max(slopes) <= response_smoothness(1.0, N)
    assert max(slopes) >= 0.95 * response_smoothness(1.0, N)
