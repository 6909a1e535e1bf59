"""The density ring: kernel start, quadrature, exact node sums, fluctuations and their normalisers."""

import math
import pickle
import threading
from typing import Any

import numpy as np
import pytest
from scipy.stats import gaussian_kde

from fedtmle.errors import InputError, NumericalError
from fedtmle_paper.density import quadrature as sums
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation, diameter
from fedtmle_paper.density.quadrature import DensityNormaliser, Memo
from fedtmle_paper.density.start import kernel_density

FLUCTUATIONS = [LogisticFluctuation(), ExponentialTilt()]


def cloud(n, q, seed=0):
    rng = np.random.default_rng(seed)
    mixing = np.eye(q) + 0.4 * rng.standard_normal((q, q))
    return rng.standard_normal((n, q)) @ mixing.T + 2.0 * rng.integers(0, 2, (n, 1))


# The kernel density.


@pytest.mark.parametrize(("n", "q"), [(60, 1), (200, 2), (50, 3), (3, 2)])
def test_log_density_is_that_of_scipy(n, q):
    pilot = cloud(n, q)
    points = cloud(40, q, seed=1)
    ours = kernel_density(pilot).log_density(np.ascontiguousarray(points.T))
    theirs = gaussian_kde(pilot.T, bw_method=lambda kde: kde.n ** (-1.0 / (kde.d + 4))).logpdf(points.T)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_kernel_covariance_is_the_papers():
    pilot = cloud(2000, 2)
    expected = 2000 ** (-1 / 3) * np.cov(pilot.T)
    np.testing.assert_allclose(kernel_density(pilot).covariance, expected, rtol=1e-13)


def test_far_points_have_a_finite_log_density():
    value = kernel_density(cloud(20, 2)).log_density(np.array([[1e3], [-1e3]]))
    assert np.isfinite(value).all()
    assert value[0] < -1e4


def test_starts_are_equal_by_their_pilot_and_survive_a_copy():
    pilot = cloud(20, 2)
    start = kernel_density(pilot)
    assert start == kernel_density(pilot.tolist())
    assert start != kernel_density(pilot + 1e-9)
    assert hash(start) == hash(pickle.loads(pickle.dumps(start)))  # noqa: S301 - our own bytes
    pilot[0] = 7.0  # the caller's array is not ours
    assert not (start.pilot[0] == 7.0).any()
    with pytest.raises(ValueError, match="read-only"):
        start.pilot[0, 0] = 1.0


@pytest.mark.parametrize(
    "pilot",
    [
        np.array([[1.25, 2.0], [np.nan, 0.0], [0.0, 1.0], [3.0, 1.0]]),
        np.array([[1.25, 2.0], [np.inf, 0.0], [0.0, 1.0], [3.0, 1.0]]),
        np.arange(6.0),
        np.zeros((2, 3, 4)),
        np.zeros((5, 0)),
        np.array([[1.25, 2.0], [0.0, 1.0]]),
        np.array([[1.25, 2.5], [0.0, 0.0], [2.0, 4.0], [3.0, 6.0]]),
        np.array([[1.25, 2.5], [1.25, 0.0], [1.25, 4.0], [1.25, 6.0]]),
        [["a", "b"], ["1.25", "d"], ["e", "f"]],
        [[1.25, 2.0], [3.0]],
    ],
)
def test_a_bad_pilot_is_named_and_not_quoted(pilot):
    with pytest.raises(InputError, match=r"^pilot: ") as caught:
        kernel_density(pilot)
    assert "1.25" not in str(caught.value)


# The quadrature rule.


def test_the_rule_is_the_trapezoid_of_the_density_and_is_kept():
    start = kernel_density(cloud(100, 2))
    rule = start.quadrature((0.15, 0.12))
    assert start.quadrature((0.15, 0.12)) is rule
    density = np.exp(start.log_density(rule.nodes))
    np.testing.assert_allclose(rule.masses, density * 0.15 * 0.12, rtol=1e-12)
    assert abs(math.fsum(rule.masses) - 1.0) < 1e-15
    steps = (rule.nodes - rule.nodes.min(axis=1, keepdims=True)) / np.array([[0.15], [0.12]])
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-9)


@pytest.mark.parametrize(("n", "q"), [(60, 1), (100, 2), (4, 2)])
def test_less_than_1e_15_of_the_mass_is_left_out(n, q):
    start = kernel_density(cloud(n, q))
    h = start.spacing(0.15, (1.0,) * q)
    rule = start.quadrature(h)
    # The same lattice, wide beyond the rule's reach, without the kept nodes.
    axes = []
    for j in range(q):
        low, high = rule.nodes[j].min(), rule.nodes[j].max()
        axes.append(low + h[j] * np.arange(-40, round((high - low) / h[j]) + 41))
    lattice = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(q, -1)

    def key(points):
        return [tuple(row) for row in np.rint((points.T - rule.nodes.min(axis=1)) / h).astype(int)]

    kept = set(key(rule.nodes))
    left = np.array([k not in kept for k in key(lattice)])
    kde = gaussian_kde(start.pilot.T, bw_method=lambda kde: kde.n ** (-1.0 / (kde.d + 4)))
    assert left.sum() + len(kept) == lattice.shape[1]
    assert 0 < kde(lattice[:, left]).sum() * math.prod(h) < 1e-15


def test_moments_of_the_rule_are_the_mixtures():
    start = kernel_density(cloud(150, 3))
    rule = start.quadrature(start.spacing(0.6, (math.inf,) * 3))
    mean = (rule.nodes * rule.masses).sum(axis=1)
    second = (rule.nodes[:, None] * rule.nodes[None] * rule.masses).sum(axis=2)
    pilot = start.pilot
    np.testing.assert_allclose(mean, pilot.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(second, pilot.T @ pilot / 150 + start.covariance, atol=1e-11)


@pytest.mark.parametrize("strip", [math.pi / 4, 0.2, 3.0])
def test_the_spacing_resolves_narrow_correlated_kernels_and_narrow_strips(strip):
    # E[logistic'(x)], poles at +-i pi/w, against Gauss-Legendre panels in the rotated frame where it is easy.
    rng = np.random.default_rng(5)
    z = rng.standard_normal((30, 2))
    pilot = np.stack([z[:, 0], 0.97 * z[:, 0] + 0.15 * z[:, 1]], axis=1)
    start = kernel_density(pilot)
    h = start.spacing(10.0, (strip, math.inf))
    w = math.pi / strip
    rule = start.quadrature(h)
    ours = (rule.masses / (2 + 2 * np.cosh(w * rule.nodes[0]))).sum()
    # o_1 alone is a one-dimensional mixture with the marginal kernel variance.
    sd = math.sqrt(start.covariance[0, 0])
    x, gauss = np.polynomial.legendre.leggauss(40)
    edges = np.arange(pilot[:, 0].min() - 10 * sd, pilot[:, 0].max() + 10.1 * sd, 0.25 * min(sd, strip))
    nodes = (edges[:-1, None] + 0.5 * (x + 1) * np.diff(edges)[:, None]).ravel()
    weights = (0.5 * gauss * np.diff(edges)[:, None]).ravel()
    density = np.exp(-0.5 * ((nodes[:, None] - pilot[:, 0]) / sd) ** 2).mean(axis=1) / (
        sd * math.sqrt(2 * math.pi)
    )
    exact = (weights * density / (2 + 2 * np.cosh(w * nodes))).sum()
    assert abs(ours - exact) < 1e-11
    # Half as fine would not do: the rule is not wastefully fine either.
    coarse = start.quadrature(tuple(2 * step for step in h))
    assert abs((coarse.masses / (2 + 2 * np.cosh(w * coarse.nodes[0]))).sum() - exact) > 1e-11


def test_a_ceiling_on_the_spacing_is_kept_and_too_many_nodes_are_refused():
    start = kernel_density(cloud(20, 2))
    assert start.spacing(0.01, (1.0, 1.0)) == (0.01, 0.01)
    with pytest.raises(InputError, match=r"^spacing: "):
        start.quadrature((1e-3, 1e-3))


# Exact node sums.


def test_expectations_do_not_depend_on_the_order_of_nodes():
    rng = np.random.default_rng(2)
    columns = rng.uniform(-3, 3, (3, 5000))
    masses, log_total = sums.reweight(rng.random(5000), rng.standard_normal(5000))
    order = rng.permutation(5000)
    assert (
        sums.expectation(masses, columns, 2) == sums.expectation(masses[order], columns[:, order], 2)
    ).all()
    assert (
        sums.second_moment(masses, columns, 2) == sums.second_moment(masses[order], columns[:, order], 2)
    ).all()
    np.testing.assert_allclose(
        sums.expectation(masses, columns, 2), [math.fsum(masses * c) for c in columns], atol=1e-15
    )
    np.testing.assert_allclose(
        sums.second_moment(masses, columns, 2), (columns * masses) @ columns.T, atol=1e-14
    )
    again, log_again = sums.reweight(masses[order], np.zeros(5000))
    assert abs(log_again) < 3e-16
    assert math.isfinite(log_total)
    np.testing.assert_allclose(again, masses[order], rtol=1e-15)


@pytest.mark.parametrize("scale", [1.0, 30.0, 400.0])
def test_reweight_holds_its_digits_when_the_largest_factor_sits_on_a_negligible_node(scale):
    x = np.linspace(-1, 1, 4001)
    masses, _ = sums.reweight(np.exp(-40 * (x + 1)), np.zeros(4001))
    weights, log_total = sums.reweight(masses, scale * x)
    logs = np.log(masses) + scale * x
    expected = logs.max() + math.log(math.fsum(np.exp(logs - logs.max())))
    assert abs(log_total - expected) < 1e-13 * max(1.0, abs(expected))
    np.testing.assert_allclose(weights, np.exp(logs - expected), rtol=1e-11, atol=1e-200)


@pytest.mark.parametrize("logs", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf], [-1e4, 0.0]])
def test_masses_that_are_no_density_are_an_error(logs):
    with pytest.raises(NumericalError, match="density"), np.errstate(invalid="ignore"):
        sums.reweight(np.array([1.0, 0.0]), np.array(logs))


# Fluctuations and normalisers, against longhand formulas in complex arithmetic.


def longhand_factor(fluctuation, t):
    return 2 / (1 + np.exp(2 * t)) if isinstance(fluctuation, LogisticFluctuation) else np.exp(-t)


def finite_law(seed, d=3, nodes=60):
    """A centred D on a finite law, within the hull of a simplex."""
    rng = np.random.default_rng(seed)
    corners = 4.0 * rng.standard_normal((d, d + 1))
    inside = rng.dirichlet(np.full(d + 1, 0.4), nodes).T
    masses, _ = sums.reweight(rng.dirichlet(np.ones(nodes)), np.zeros(nodes))
    eif = corners @ inside
    centre = eif @ masses
    return eif - centre[:, None], masses, corners - centre[:, None]


def normaliser(fluctuation, seed):
    eif, masses, vertices = finite_law(seed)
    return DensityNormaliser(fluctuation=fluctuation, eif=eif, masses=masses, vertices=vertices)


@pytest.mark.parametrize("fluctuation", FLUCTUATIONS)
@pytest.mark.parametrize("size", [0.0, 0.05, 0.5, 3.0])
def test_normaliser_against_complex_steps(fluctuation, size):
    A = normaliser(fluctuation, 3)
    eps = size * np.array([0.6, -0.5, 0.4])

    def value(e):
        return np.log((A.masses * longhand_factor(fluctuation, (e[:, None] * A.eif).sum(axis=0))).sum())

    def gradient(e):
        return np.array([value(e + 1e-30j * unit).imag / 1e-30 for unit in np.eye(3)])

    assert abs(A.value(eps) - value(eps)) < 1e-13
    np.testing.assert_allclose(A.gradient(eps), gradient(eps), atol=1e-12)
    stencil = {-3: -1 / 60, -2: 3 / 20, -1: -3 / 4, 1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
    h = 1e-3
    columns = [sum(c * gradient(eps + k * h * unit) for k, c in stencil.items()) / h for unit in np.eye(3)]
    np.testing.assert_allclose(A.hessian(eps), np.array(columns), atol=1e-8)


@pytest.mark.parametrize("fluctuation", FLUCTUATIONS)
def test_at_the_origin(fluctuation):
    A = normaliser(fluctuation, 4)
    covariance = (A.eif * A.masses) @ A.eif.T
    assert abs(A.value(np.zeros(3))) < 3e-16
    np.testing.assert_allclose(A.gradient(np.zeros(3)), 0.0, atol=1e-14)
    # phi'' + phi'^2 is exactly zero for the logistic: its rows carry all the curvature.
    expected = np.zeros((3, 3)) if fluctuation == LogisticFluctuation() else covariance
    np.testing.assert_allclose(
        A.hessian(np.zeros(3)), expected, atol=1e-13 * (fluctuation == ExponentialTilt()) + 1e-28
    )


@pytest.mark.parametrize("fluctuation", FLUCTUATIONS)
def test_row_parts_agree_with_the_factor(fluctuation):
    t = np.array([-30.0, -2.0, -1e-6, 0.0, 1e-6, 0.7, 30.0])
    np.testing.assert_allclose(fluctuation.log_factor(t), np.log(longhand_factor(fluctuation, t)), atol=1e-13)
    slope = [np.log(longhand_factor(fluctuation, complex(x, 1e-30))).imag / 1e-30 for x in t]
    np.testing.assert_allclose(fluctuation.slope(t), slope, atol=1e-13)
    h = 1e-3
    curvature = (fluctuation.slope(t + h) - fluctuation.slope(t - h)) / (2 * h)
    np.testing.assert_allclose(
        fluctuation.curvature_and_slope_squared(t), curvature + np.array(slope) ** 2, atol=1e-5
    )
    assert (np.abs(fluctuation.slope(t)) <= 2).all()
    assert (np.abs(fluctuation.curvature_and_slope_squared(t)) <= 4).all()


@pytest.mark.parametrize("fluctuation", FLUCTUATIONS)
def test_the_curvature_ceiling_holds_at_every_eps(fluctuation):
    rng = np.random.default_rng(6)
    largest = 0.0
    for seed in range(150):
        d = 1 + seed % 3
        eif, masses, vertices = finite_law(seed, d=d, nodes=int(rng.integers(2, 30)))
        A = DensityNormaliser(fluctuation=fluctuation, eif=eif, masses=masses, vertices=vertices)
        for size in (0.0, 0.03, 0.1, 0.3, 1.0, 10.0):
            for C in (np.eye(d), rng.standard_normal((d, d))):
                spectrum = np.linalg.eigvalsh(C @ A.hessian(size * rng.standard_normal(d)) @ C.T)
                largest = max(largest, float(np.abs(spectrum).max()) / A.curvature_ceiling(C))
    assert 0.05 < largest <= 1.0


def test_the_tilts_ceiling_is_attained_by_two_far_points():
    ends = np.array([[-3.0, 3.0], [4.0, -4.0]])
    A = DensityNormaliser(fluctuation=ExponentialTilt(), eif=ends, masses=np.array([0.5, 0.5]), vertices=ends)
    assert diameter(ends) == 10.0
    assert np.linalg.eigvalsh(A.hessian(np.zeros(2))).max() == pytest.approx(
        A.curvature_ceiling(np.eye(2)), rel=1e-8
    )


def test_the_logistic_ceiling_is_attained_in_the_limit():
    # Nearly all of p just beyond the hyperplane eps . D = 0, at s near 1 and with x = +-1; a rare point
    # behind it centres D. Then q is p on those two points, and the variance of 2 s x is 4 = diam^2.
    edge, behind = 1e-8, 0.1
    eif = np.array([[-1.0, 1.0, 0.0], [edge, edge, -behind]])
    rare = edge / (edge + behind)
    masses = np.array([(1 - rare) / 2, (1 - rare) / 2, rare])
    A = DensityNormaliser(fluctuation=LogisticFluctuation(), eif=eif, masses=masses, vertices=eif)
    np.testing.assert_allclose(eif @ masses, 0.0, atol=1e-20)
    largest = np.abs(np.linalg.eigvalsh(A.hessian(np.array([0.0, 3.0 / edge])))).max()
    assert 0.95 < largest / A.curvature_ceiling(np.eye(2)) <= 1.0


# The memory that silos of one process share.


def test_memo_is_bounded_keeps_what_is_used_and_computes_once_among_threads():
    memo: Memo[Any] = Memo(2)
    calls = []

    def compute(key):
        calls.append(key)
        return object()

    first = memo.get("a", lambda: compute("a"))
    memo.get("b", lambda: compute("b"))
    assert memo.get("a", lambda: compute("a")) is first
    memo.get("c", lambda: compute("c"))  # "b" is the one to forget
    assert memo.get("a", lambda: compute("a")) is first
    assert calls == ["a", "b", "c"]
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.append(memo.get("d", lambda: compute("d")))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1
    assert calls.count("d") == 1
