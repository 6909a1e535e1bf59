"""Single inequalities on instances that nearly attain them, so that no smaller constant passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from fedtmle.protocol.codes import gamma_length
from fedtmle.protocol.lattice import divide
from fedtmle.theory import communication as c
from fedtmle.theory import personalized as p
from fedtmle.theory import statistical as s
from fedtmle_paper import lemmas as lem


def nearly(realised: float, bound: float, ratio: float = 0.95) -> bool:
    """realised <= bound, and not by much."""
    return ratio * bound <= realised <= bound * (1 + 1e-12)


@dataclass
class Descent:
    """Algorithm 4 on scripted quadratics: two silos, curvature beta I, the worst rounding each time.

    Every submodel's origin has the same gradient, whose rounding overshoots by almost h in every
    coordinate; one step later the endpoint is accepted. After S submodels the gradient is zero.
    """

    d: int = 64
    h: float = 1.0
    beta: float = 2.0
    S: int = 12
    sizes: tuple[int, int] = (51, 49)

    def __post_init__(self) -> None:
        self.delta = 4 * self.h * math.sqrt(self.d)
        self.energy = self.loss = self.length = self.integers = 0.0
        self.variation = np.zeros(2)
        self.rounds = 0
        n = sum(self.sizes)
        target = np.full(self.d, 3)
        target[0] = 4  # ||q|| just above 3 sqrt(d): action 00
        # z_1 = target and z_2 = target - 1, each just above half a unit below.
        local = [self.h * (target - 0.5 + 1e-9), self.h * (target - 1.5 + 1e-9)]
        before: list[np.ndarray] | None = None
        for _ in range(self.S):
            z = [np.rint(g / self.h).astype(int) for g in local]
            q = self._pool(z, n)
            assert self.h * np.linalg.norm(q) > 0.75 * self.delta
            g = sum(N / n * own for N, own in zip(self.sizes, local, strict=True))
            step = -self.h * q / self.beta
            self.loss += float(g @ step) + 0.5 * self.beta * float(step @ step)
            self.energy += float(np.sum((self.h * q) ** 2))
            self.length += float(np.linalg.norm(step))
            self.integers += float(np.abs(q).sum())
            ends = [own + self.beta * step for own in local]
            if before is not None:
                self.variation += [np.linalg.norm(a - b) for a, b in zip(local, before, strict=True)]
            self.variation += [np.linalg.norm(b - a) for a, b in zip(local, ends, strict=True)]
            q_end = self._pool([np.rint(own / self.h).astype(int) for own in ends], n)
            assert self.h * np.linalg.norm(q_end) <= 0.75 * self.delta  # accepted
            before = ends
            self.rounds += 2
        self.rounds += 1  # the origin of the last submodel, where the gradient is zero

    def _pool(self, z: list[np.ndarray], n: int) -> np.ndarray:
        return np.array(
            [
                divide(int(sum(N * v for N, v in zip(self.sizes, column, strict=True))), n)
                for column in zip(*z, strict=True)
            ]
        )


@pytest.fixture(scope="module")
def descent() -> Descent:
    return Descent()


def test_descent_energy_steps_rounds_and_path_length(descent: Descent) -> None:
    beta, delta, S, Delta = descent.beta, descent.delta, descent.S, -descent.loss
    assert nearly(lem.step_decrease_floor(delta, beta), Delta / S)
    assert nearly(c.step_decrease(math.sqrt(descent.energy / S), beta), Delta / S)
    assert nearly(
        lem.rounded_step_decrease(math.sqrt(descent.energy / S), beta, descent.h, descent.d), Delta / S
    )
    assert nearly(descent.energy, c.energy_bound(beta, Delta))
    assert nearly(S, c.step_bound(beta, Delta, delta))
    assert nearly(descent.rounds, c.round_bound(beta, Delta, delta))
    assert descent.rounds == lem.rounds(S, S)
    assert nearly(descent.length, lem.path_length_bound(beta, Delta, S))
    assert nearly(descent.length, lem.path_length_ceiling(Delta, delta))
    assert nearly(descent.integers, lem.history_sum_bound(descent.d, beta, Delta, S, descent.h))


def test_variation_summary(descent: Descent) -> None:
    bound = c.variation_bound(descent.beta, 0.0, -descent.loss, descent.S)
    assert nearly(float(descent.variation.max()), bound, 0.9)  # its last re-centring is missing


def test_variation_within_and_across() -> None:
    beta, kappa, g = 3.0, 0.7, np.array([0.6, -0.8])
    rounded = 1.25 * g
    eps = -rounded / beta
    end = g + beta * eps
    assert nearly(float(np.linalg.norm(end - g)), lem.variation_within(float(np.linalg.norm(rounded))), 0.999)
    size = float(np.linalg.norm(eps))
    recentred = g + kappa * size * rounded / np.linalg.norm(rounded)  # D moves against the inner change
    assert nearly(float(np.linalg.norm(recentred - end)), lem.variation_across(beta, kappa, size), 0.999)


def test_residual_bound_of_section_2_3() -> None:
    beta, eps, end = 2.5, 0.3, 0.1
    assert nearly(end + beta * eps, c.residual_bound(beta, eps, end), 0.999)  # l(x) = beta x^2/2 - (...) x


def test_rounding_bound_is_nearly_attained(descent: Descent) -> None:
    d, h = descent.d, descent.h
    error = np.full(d, h * (0.51 * 0.5 + 0.49 * 0.5 + 0.49))  # half a unit at each silo, 0.49 at the server
    assert nearly(float(np.linalg.norm(error)), lem.rounding_bound(h, d))
    low, high = lem.spacing_range(descent.delta, d)
    assert high == descent.h == 2 * low


@pytest.mark.parametrize("k", [30, 60])
def test_code_lengths(k: int) -> None:
    a = -(2**k)  # iota(a) = 2^(k+1): the longest code for its size
    assert nearly(gamma_length(a), lem.code_length_bound([a]), 0.99)
    assert c.fixed_width_bits(2.0**k, 1.0) == k + 2


@pytest.mark.parametrize("M", [1, 5])
def test_bits_of_first_and_later_messages(M: int) -> None:
    """d = 1, every difference -2^k: both links pay the longest codes, and flags are two bits a link."""
    k, R, h = 40, 7, 0.5
    G = (2**k) * h
    first = M * (2 * gamma_length(-(2**k)) + 2)
    assert nearly(first, lem.first_message_bits(M, 1, G, h))
    variation = (R - 1) * 2**k * h
    up = M * (R - 1) * gamma_length(-(2**k))
    assert nearly(up, lem.upload_bits(M, 1, R, h, variation))
    assert nearly(up, lem.broadcast_bits(M, 1, R, h, variation))
    total = first + 2 * up + 2 * M * (R - 1)
    assert nearly(total, c.bits_at_spacing(M, 1, R, G, h, variation))


def test_no_later_bits_in_a_run_of_one_round() -> None:
    assert lem.upload_bits(3, 2, 1, 0.1, 1.0) == lem.broadcast_bits(3, 2, 1, 0.1, 1.0) == 0
    assert c.bits_at_spacing(3, 2, 1, 4.0, 0.1, 0.0) == lem.first_message_bits(3, 2, 4.0, 0.1)
    assert c.pathwise_bit_bound(3, 2, 1, 0, 1.0, 1.0, 0.0, 4.0, 0.1) >= lem.first_message_bits(3, 2, 4.0, 0.1)


@pytest.mark.parametrize("seed", range(20))
def test_the_chain_of_bit_bounds_is_ordered(seed: int) -> None:
    """path <= plan <= universal, for S and R as large as their own bounds allow."""
    rng = np.random.default_rng(seed)
    beta, Delta, G = np.exp(rng.normal(size=3))
    kappa, delta = float(np.exp(2 * rng.normal())), float(np.exp(rng.normal() - 3))
    M, d = int(rng.integers(1, 20)), int(rng.integers(1, 9))
    R = int(c.round_bound(beta, Delta, delta))
    S = min(int(c.step_bound(beta, Delta, delta)), R - 1)
    path = c.pathwise_bit_bound(M, d, R, S, beta, kappa, Delta, G, delta)
    plan = c.planned_bit_bound(M, d, beta, kappa, Delta, G, delta)
    universal = c.universal_bit_bound(M, d, beta, kappa, Delta, G, delta)
    assert path <= plan <= universal


def test_history_code_length() -> None:
    K, d, k = 7, 3, 50  # K + 1 a power of two, integers the longest for their size
    history = [[-(2**k)] * d] * K
    total = K * d * 2**k
    realised = s.history_bits(history)
    assert nearly(realised, lem.history_bits_bound(K, d, total), 0.99)
    u = total * 1.0 / (64 * d)  # beta Delta/delta^2 at which 64 d beta Delta/delta^2 is the total
    assert lem.history_sum_ceiling(d, 1.0, u, 1.0) == pytest.approx(total)
    assert realised <= lem.history_bits_rate(K, d, 1.0, u, 1.0) <= s.history_bits_ceiling(K, d, 1.0, u, 1.0)
    assert s.history_bits([]) == lem.history_bits_bound(0, d, 0) == lem.history_bits_rate(0, d, 1, 1, 1) == 1
    assert s.history_bits_ceiling(0, d, 1.0, 1.0, 1.0) == 1  # H_0 = H_init + 1


def test_quadratics_attain_the_averaging_and_gap_bounds() -> None:
    rng = np.random.default_rng(5)
    beta, alpha = 1.7, np.array([0.2, 0.3, 0.1])
    fits = rng.normal(size=(3, 4))
    average = alpha @ fits / alpha.sum()
    error = sum(a * beta / 2 * np.sum((average - fit) ** 2) for a, fit in zip(alpha, fits, strict=True))
    assert nearly(float(error), p.quadratic_bound(beta, p.disagreement(2, alpha.tolist(), fits)), 1 - 1e-12)
    g = rng.normal(size=4)
    assert nearly(p.gap_floor(beta, float(np.linalg.norm(g))), float(g @ g) / (2 * beta), 1 - 1e-12)


def test_lattice_retirement_is_attained_at_a_corner_of_the_box() -> None:
    beta, d, spacing = 2.0, 5, 0.1
    fit = np.full(d, spacing / 2)  # rounds to zero, half to even
    assert not np.rint(fit / spacing).any()
    assert nearly(beta / 2 * float(fit @ fit), p.lattice_gap_bound(beta, d, spacing), 1 - 1e-12)
    assert nearly(beta * float(np.linalg.norm(fit)), lem.lattice_score_bound(beta, d, spacing), 1 - 1e-12)
    # The update lies within a box around the average of the fits: half a spacing, and 1/32 for its own
    # lattice.
    alpha, fits = np.array([0.25, 0.25]), np.array([[0.05] * d, [2.05] * d])
    V_2 = p.disagreement(2, alpha.tolist(), fits)
    corner = alpha @ fits / 0.5 + spacing / 2 + spacing / 32
    error = sum(a * beta / 2 * np.sum((corner - fit) ** 2) for a, fit in zip(alpha, fits, strict=True))
    bound = p.lattice_quadratic_bound(beta, V_2, d, spacing, 0.5)
    assert nearly(float(error), bound, 1 - 1e-12)


def test_quadratics_attain_the_gains_of_rounding_and_of_inexact_fits() -> None:
    """Quadratics l_m = beta |x - c_m|^2/2: every inequality behind the gains is an equality in some case."""
    rng = np.random.default_rng(9)
    beta, d, spacing = 2.0, 3, 0.3
    alpha = np.array([0.3, 0.3])
    fits = np.array([[-1.0] * d, [1.0] * d])
    V_2 = p.disagreement(2, alpha.tolist(), fits)
    # Rounding: the gradient of sum alpha_m l_m at the average is zero for equal curvatures, so only the
    # square.
    offset = np.full(d, 17 / 32 * spacing)
    gain = 0.6 * beta / 2 * float(offset @ offset)
    assert gain <= p.lattice_fourth_order(beta, V_2, d, spacing, 0.6)
    assert nearly(gain, p.lattice_fourth_order(beta, 0.0, d, spacing, 0.6), 1 - 1e-12)
    # Inexact fits: l_m(average) - l_m(fit_m) = g_m . u_m + beta |u_m|^2/2, with g_m along u_m of length tau.
    average = alpha @ fits / 0.6
    tau = 0.7
    error = sum(
        a * (tau * np.linalg.norm(average - f) + beta / 2 * np.sum((average - f) ** 2))
        for a, f in zip(alpha, fits, strict=True)
    )
    assert nearly(float(error), p.quadratic_bound(beta, V_2) + p.inexact_bound(tau, 0.6, V_2), 1 - 1e-12)
    # Unequal distances leave room, never the other way.
    for _ in range(50):
        some, mass = rng.normal(size=(4, d)), rng.dirichlet(np.ones(4))
        middle = mass @ some
        loss = float(mass @ (tau * np.linalg.norm(middle - some, axis=1)))
        assert loss <= p.inexact_bound(tau, 1.0, p.disagreement(2, mass.tolist(), some))
    # Retirement: |g| = c sqrt(d v) and curvature mu leave exactly |g|^2/(2 mu).
    assert p.noise_gap_bound(0.5, d, 0.04, 2.0) == pytest.approx(0.25 * d * 0.04 / 4)
    assert p.noise_gap_bound(0.5, d, 0.04, 0.0) == math.inf
    assert p.tolerance_gap_bound(0.2, 0.1) == 0.2


def test_quadratics_with_population_gaps_attain_half_of_the_bound() -> None:
    """Two silos, l_m = x^2/2 - c_m x: gradients differ by B_g = |c_1 - c_2| everywhere, and so do fits.

    Averaging forfeits V_2/2 = B_g^2/8; the bound (2/3) B_g sqrt(a V_2/2) is 1.89 times that.
    """
    for gap in (0.1, 3.0):
        fits = np.array([[0.0], [gap]])
        V_2, V_4 = (p.disagreement(order, [0.5, 0.5], fits) for order in (2, 4))
        error = V_2 / 2
        bound = p.population_bound(gap, 0.0, 1.0, V_2, V_4)
        assert error <= bound
        assert bound == pytest.approx(2 / 3 * gap * math.sqrt(V_2 / 2))
        assert error / bound == pytest.approx(0.5303, abs=1e-3)
        # Hessians that differ by B_H add sqrt(a V_4/2)/6 of it.
        more = p.population_bound(gap, 2.0, 1.0, V_2, V_4) - bound
        assert more == pytest.approx(2.0 / 6 * math.sqrt(V_4 / 2))


def test_diameter_form_is_nearly_attained_by_a_simplex() -> None:
    alpha, fits = np.full(40, 0.02), np.eye(40)
    for order in (2, 4):
        realised = p.disagreement(order, alpha.tolist(), fits) / alpha.sum()
        assert nearly(realised, lem.disagreement_from_diameter(order, math.sqrt(2)))
    a = float(alpha.sum())
    chi, V_2, V_4 = (
        p.chi(alpha.tolist(), [50] * 40),
        *(p.disagreement(r, alpha.tolist(), fits) for r in (2, 4)),
    )
    by_moments = p.fourth_order_bound(2.0, 3.0, 0.5, 4.0, chi, V_2, V_4) / a
    assert nearly(by_moments, lem.diameter_bound(2.0, 3.0, 0.5, 4.0, chi / a, math.sqrt(2)))


def test_imbalance_is_one_for_equal_sizes_only() -> None:
    assert lem.imbalance([30, 30, 30]) == pytest.approx(1.0, abs=1e-15)
    assert lem.imbalance([10, 30]) > 1
    sizes, M, n = [10, 30, 200], 5, 400
    uniform = lem.chi_uniform(sizes, M) / (len(sizes) / M)
    by_size = lem.chi_size(len(sizes), n) / (sum(sizes) / n)
    assert uniform / by_size == pytest.approx(lem.imbalance(sizes), rel=1e-14)


def test_fourth_order_bound_covers_two_wells_without_any_sampling_term() -> None:
    """Both silos have l(x) = c (x^2 - 1)^2, fits -1 and +1: averaging forfeits c, and beta_4 = 24 c."""
    c_, fits = 0.3, np.array([[-1.0], [1.0]])
    V_2, V_4 = (p.disagreement(order, [0.5, 0.5], fits) for order in (2, 4))
    bound = p.fourth_order_bound(1.0, 1.0, 24 * c_, 0.0, 0.0, V_2, V_4)
    assert c_ <= bound <= 6 * c_
