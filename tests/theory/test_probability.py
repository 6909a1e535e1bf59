"""Probabilistic bounds by exact tails and by frequency, fixed seeds: holding, and near enough to bite."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedtmle.theory import statistical
from fedtmle_paper import lemmas as lem


def two_point_tail(n: int, share: float, G: float, x: float, envelope: float, variance: float) -> float:
    """P{|(P_n - P_0) f| > t}, exactly, for f = 2G with probability ``share`` and -2G otherwise.

    The centred f then has range 4G: the proof's |X| <= 4G is attained. ``envelope`` and ``variance``
    stand for 4/3 and 2 in t.
    """
    v = 16 * G**2 * share * (1 - share)
    t = math.sqrt(variance * v * x / n) + envelope * G * x / n
    reach = t * n / (4 * G)  # in successes beyond n share
    upper = stats.binom.sf(math.floor(n * share + reach + 1e-12), n, share)
    lower = stats.binom.cdf(math.ceil(n * share - reach - 1e-12) - 1, n, share)
    return float(upper + lower)


GRID = list(itertools.product((50, 400, 20_000), (1e-4, 1e-3, 0.02, 0.3, 0.5), (0.5, 2.0, 8.0, 30.0)))


def test_fixed_code_bernstein_bound_holds_exactly() -> None:
    for n, share, x in GRID:
        realised = two_point_tail(n, share, 1.3, x, float(statistical.ENVELOPE), statistical.VARIANCE)
        assert realised <= lem.fixed_code_tail(x), (n, share, x)


@pytest.mark.parametrize(("envelope", "variance"), [(2 / 3, 2), (4 / 3, 1)])
def test_no_smaller_bernstein_constant_holds(envelope: float, variance: float) -> None:
    """Halving either constant breaks the bound somewhere on the grid: the test above can fail."""
    cases = [*GRID, *itertools.product((20_000,), (0.001, 0.0015, 0.003), (20.0, 30.0, 40.0))]
    assert any(
        two_point_tail(n, share, 1.3, x, envelope, variance) > lem.fixed_code_tail(x) for n, share, x in cases
    )


def test_deviation_is_what_the_tails_above_use() -> None:
    n, share, G, x = 400, 0.02, 1.3, 8.0
    v = 16 * G**2 * share * (1 - share)
    assert lem.fixed_code_deviation(v, G, x, n) == math.sqrt(2 * v * x / n) + 4 / 3 * G * x / n


def test_simultaneous_bound_over_a_family_of_codes_by_frequency() -> None:
    """512 functions, the worst picked after seeing the sample, as an adaptive history would: misses <= xi."""
    rng = np.random.default_rng(20)
    d, n, G, xi, codes = 2, 200, 1.0, 0.2, 512
    length = math.log2(codes)  # equal codes: the Kraft sum is one
    atoms = rng.uniform(-2 * G, 2 * G, size=(codes, d, 16))  # f_w,j on a law of 16 atoms, uniform
    centred = atoms - atoms.mean(axis=2, keepdims=True)
    x = statistical.code_allowance(length, d, xi)
    distance = np.sqrt((atoms**2).mean(axis=2).sum(axis=1))
    bound = np.array([statistical.process_bound(d, n, G, x, float(r)) for r in distance])
    misses = 0
    for _ in range(400):
        counts = rng.multinomial(n, np.full(16, 1 / 16))
        deviation = np.linalg.norm(centred @ counts / n, axis=1)
        misses += bool((deviation > bound).any())
    assert misses / 400 <= xi


def rademacher_tail(N_m: int, N_j: int, t: float) -> float:
    """P(|mean_m f - mean_j f| > t) for f = +-1 with equal chances, exactly."""
    a = stats.binom(N_m, 0.5).pmf(np.arange(N_m + 1))
    b = stats.binom(N_j, 0.5).pmf(np.arange(N_j + 1))
    means = 2 * np.arange(N_m + 1)[:, None] / N_m - 2 * np.arange(N_j + 1)[None, :] / N_j
    return float((a[:, None] * b)[np.abs(means) > t + 1e-12].sum())


def test_hoeffding_tail_of_two_silos_holds_exactly_and_no_faster_decay_does() -> None:
    broken = False
    for N_m, N_j in ((5, 9), (40, 7), (60, 80)):
        for t in np.linspace(0.05, 1.5, 30):
            realised = rademacher_tail(N_m, N_j, t)
            assert realised <= lem.mean_difference_tail(t, N_m, N_j)
            broken |= realised > 2 * math.exp(-(t**2) / (1 / N_m + 1 / N_j))  # 2 s replaced by s
    assert broken


def test_the_level_of_the_fixed_code_bound() -> None:
    """At x = log(2/xi) one code misses with probability xi, and the allowance of H = 0, d = 1 is that x."""
    for xi in (0.01, 0.2, 0.5):
        x = math.log(2 / xi)
        assert lem.fixed_code_tail(x) == pytest.approx(xi, rel=1e-14)
        assert statistical.code_allowance(0.0, 1, xi) == pytest.approx(x, rel=1e-14)


def test_zeta_spends_xi_on_the_union() -> None:
    """Half of zeta sqrt(s) is exceeded by one function with probability xi/(2 M^2 N), exactly as S.2.6 needs.

    The union over M(M-1) ordered pairs and N functions is then below xi/2, for gradients and Hessians each.
    """
    for xi, M, cover, N_m, N_j in ((0.3, 3, 400, 15, 40), (0.05, 2, 1, 7, 7), (0.01, 40, 10**6, 900, 3)):
        level = lem.derivative_bound(1.0, lem.zeta(xi, M, math.log(cover)), N_m, N_j) / 2
        tail = lem.mean_difference_tail(level, N_m, N_j)
        assert tail == pytest.approx(xi / (2 * M**2 * cover), rel=1e-9)
        assert M * (M - 1) * cover * tail <= xi / 2


def test_cross_silo_derivatives_by_frequency() -> None:
    """lem:local-derivatives for a finite family, common law: misses <= xi over 300 partitions of fresh rows.

    At each of 16 states a row's gradient is G_1 times a random sign and its Hessian beta times another, the
    most spread that |f| <= 1 allows; a finite family is its own cover, so half of zeta is not needed.
    """
    rng = np.random.default_rng(21)
    xi, sizes, states = 0.3, (15, 40, 25), 16
    zeta = lem.zeta(xi, len(sizes), math.log(states))
    scales = {"gradient": 1.7, "hessian": 0.6}  # G_1 and beta
    misses = 0
    worst = dict.fromkeys(scales, 0.0)
    for _ in range(300):
        missed = False
        for part, scale in scales.items():
            means = [scale * rng.choice([-1.0, 1.0], size=(N, states)).mean(axis=0) for N in sizes]
            for m, j in itertools.combinations(range(3), 2):
                gap = float(np.abs(means[m] - means[j]).max())
                bound = lem.derivative_bound(scale, zeta, sizes[m], sizes[j])
                worst[part] = max(worst[part], gap / bound)
                missed |= gap > bound
        misses += missed
    assert misses / 300 <= xi
    assert all(0.45 < ratio <= 1 for ratio in worst.values()), worst  # half of the bound is nearly attained
