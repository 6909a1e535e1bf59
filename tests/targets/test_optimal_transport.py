"""Optimal transport against longhand numpy: other quadratures, complex steps, the density written out."""

import itertools
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fedtmle.errors import DataError, InputError, NumericalError
from fedtmle_core.types import Part, unpack
from fedtmle_paper import benchmark
from fedtmle_paper.density import start as start_module
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport

LOGISTIC, TILT = LogisticFluctuation(), ExponentialTilt()
HISTORY = [(0.024, -0.02, -0.016), (-0.012, 0.008, 0.02)]
DGPS = [benchmark.gaussian_mixture, benchmark.curved_mixture]


# Longhand: S.3 in plain numpy. Nothing here comes from the package.


def grid(axes, weights):
    nodes = np.stack(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1)
    return nodes, np.prod(np.stack(np.meshgrid(*weights, indexing="ij")).reshape(len(axes), -1), axis=0)


def box(pilot):
    sd = len(pilot) ** (-1 / (pilot.shape[1] + 4)) * pilot.std(axis=0, ddof=1)
    return pilot.min(axis=0) - 8.5 * sd, pilot.max(axis=0) + 8.5 * sd


def fine_trapezoid(pilot, h=0.06):
    axes = [np.arange(low + 0.013, high, h) for low, high in zip(*box(pilot), strict=True)]
    return start_masses(pilot, *grid(axes, [np.full(len(axis), h) for axis in axes]))


def legendre_panels(pilot, points=14):
    x, w = np.polynomial.legendre.leggauss(points)
    axes, weights = [], []
    for low, high in zip(*box(pilot), strict=True):
        edges = np.linspace(low, high, math.ceil(high - low) + 1)
        half = 0.5 * np.diff(edges)[:, None]
        axes.append((edges[:-1, None] + half * (x + 1)).ravel())
        weights.append((half * w).ravel())
    return start_masses(pilot, *grid(axes, weights))


def start_masses(pilot, nodes, weights):
    return nodes, longhand_start(pilot, nodes) * weights


def longhand_start(pilot, points):
    """p^0 at points (q, N): the Gaussian kernel density with Scott's covariance."""
    n, q = pilot.shape
    S = n ** (-2 / (q + 4)) * np.atleast_2d(np.cov(pilot.T))
    inverse = np.linalg.inv(S)
    density = np.zeros(points.shape[1])
    for row in pilot:
        apart = points - row[:, None]
        density += np.exp(-0.5 * np.einsum("in,ij,jn->n", apart, inverse, apart))
    return density / (n * math.sqrt((2 * math.pi) ** q * np.linalg.det(S)))


def longhand_shares(problem, points, theta):
    z = np.array(problem.destinations)
    cost = 0.5 * ((points[None] - z[:, :, None]) ** 2).sum(axis=1)
    logits = (np.append(theta, 0.0)[:, None] - cost) / problem.regularisation
    e = np.exp(logits - logits.real.max(axis=0))
    return e / e.sum(axis=0)


def longhand_psi(problem, points, masses):
    """theta and H; masses may be complex, for complex steps."""
    d = len(problem.destinations) - 1
    c = np.array(problem.capacities)[:d]
    theta = np.zeros(d, dtype=masses.dtype)
    for iteration in range(200):
        s = longhand_shares(problem, points, theta)[:d]
        H = np.diag((s * masses).sum(axis=1)) - (s * masses) @ s.T
        step = -problem.regularisation * np.linalg.solve(H, (s * masses).sum(axis=1) - c)
        size = np.abs(step).max()
        theta = theta + step / max(1.0, size)
        if size < 1e-14 and iteration > 3:
            break
    return theta, H


def longhand_eif(problem, points, theta, H):
    d = len(theta)
    excess = longhand_shares(problem, points, theta)[:d] - np.array(problem.capacities)[:d, None]
    return -problem.regularisation * np.linalg.solve(H, excess)


def factor(fluctuation, t):
    return 2 / (1 + np.exp(2 * t)) if fluctuation == LOGISTIC else np.exp(-t)


def longhand_trajectory(problem, pilot, rule, history, rows):
    """Psi(p^k) for k = 0..K, log Z_k for k < K, and p^K at the rows, from nodes and masses of p^0."""
    nodes, masses = rule
    at_rows = longhand_start(pilot, rows)
    psis: list[Any] = []
    log_zs: list[Any] = []
    for eps in [*history, None]:
        theta, H = longhand_psi(problem, nodes, masses)
        psis.append(theta)
        if eps is None:
            return psis, log_zs, at_rows
        tilted = masses * factor(problem.fluctuation, np.array(eps) @ longhand_eif(problem, nodes, theta, H))
        z = tilted.sum()
        at_rows = (
            at_rows * factor(problem.fluctuation, np.array(eps) @ longhand_eif(problem, rows, theta, H)) / z
        )
        masses = tilted / z
        log_zs.append(math.log(z))
    raise AssertionError


def trajectory(problem, law, history):
    laws = [law]
    for eps in history:
        laws.append(problem.move(laws[-1], np.array(eps)))
    return laws


@pytest.fixture(scope="module", params=DGPS)
def pilot(request):
    return request.param(80, np.random.default_rng(8))


@pytest.fixture(scope="module")
def rules(pilot):
    return {"trapezoid": fine_trapezoid(pilot), "legendre": legendre_panels(pilot)}


@pytest.fixture(scope="module")
def rows():
    return benchmark.gaussian_mixture(60, np.random.default_rng(9))


# Law, Psi, normalisers and losses.


@pytest.mark.parametrize("fluctuation", [LOGISTIC, TILT])
@pytest.mark.parametrize("quadrature", ["trapezoid", "legendre"])
def test_the_whole_trajectory_against_another_quadrature(pilot, rules, rows, fluctuation, quadrature):
    problem = OptimalTransport(fluctuation=fluctuation)
    laws = trajectory(problem, problem.start(pilot), HISTORY)
    psis, log_zs, density = longhand_trajectory(problem, pilot, rules[quadrature], HISTORY, rows.T)
    for law, psi in zip(laws, psis, strict=True):
        np.testing.assert_allclose(law.psi, psi, rtol=0, atol=1e-10)
    np.testing.assert_allclose([step.log_z for step in laws[-1].steps], log_zs, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        problem.losses(laws[-1], problem.read(rows)), -np.log(density), rtol=0, atol=1e-10
    )
    assert min(map(abs, log_zs)) > 1e-5  # else the comparison of log Z would be empty
    assert np.abs(psis[0] - psis[-1]).max() > 0.1


GENERAL = [
    (
        {"destinations": [(-2.0, 0.0), (1.0, 1.5), (2.0, -1.0)], "capacities": (0.5, 0.3, 0.2)},
        2,
        (0.05, -0.02),
    ),
    (
        {"destinations": [(-1.0,), (0.5,), (2.0,)], "capacities": (0.2, 0.5, 0.3), "regularisation": 0.6},
        1,
        (0.1, 0.05),
    ),
    ({"destinations": [(-1.5,), (1.0,)], "capacities": (0.7, 0.3), "regularisation": 2.5}, 1, (0.08,)),
    ({"destinations": [(-1.0,), (1.0,)], "capacities": (0.4, 0.6), "regularisation": 0.2}, 1, (0.1,)),
    (
        {
            "destinations": [(-1.0, 0.0, 0.5), (1.0, 0.5, -0.5)],
            "capacities": (0.4, 0.6),
            "regularisation": 1.3,
            "spacing": 0.4,
            "fluctuation": TILT,
        },
        3,
        (0.1,),
    ),
]


@pytest.mark.parametrize(("options", "q", "eps"), GENERAL)
def test_other_dimensions_capacities_and_regularisations(options, q, eps):
    problem = OptimalTransport(**options)
    rng = np.random.default_rng(3)
    pilot = rng.standard_normal((25, q)) * np.linspace(1.0, 1.4, q) + 0.3
    rows = rng.standard_normal((10, q))
    laws = trajectory(problem, problem.start(pilot), [eps, eps])
    h = {1: 0.01, 2: 0.06, 3: 0.3}[q]
    psis, log_zs, density = longhand_trajectory(problem, pilot, fine_trapezoid(pilot, h), [eps, eps], rows.T)
    assert problem.dim == len(options["destinations"]) - 1
    assert problem.names == tuple(f"theta_{j + 1}" for j in range(problem.dim))
    for law, psi in zip(laws, psis, strict=True):
        np.testing.assert_allclose(law.psi, psi, rtol=0, atol=1e-10)
    np.testing.assert_allclose([step.log_z for step in laws[-1].steps], log_zs, rtol=0, atol=1e-10)
    np.testing.assert_allclose(
        problem.losses(laws[-1], problem.read(rows)), -np.log(density), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("fluctuation", [LOGISTIC, TILT])
def test_d_is_centred_under_the_law_and_the_curvature_is_its_covariance(pilot, fluctuation):
    problem = OptimalTransport(fluctuation=fluctuation)
    for law in trajectory(problem, problem.start(pilot), HISTORY):
        assert abs(math.fsum(law.masses) - 1) < 1e-14
        assert max(abs(math.fsum(law.masses * column)) for column in law.eif) < 1e-12
        np.testing.assert_allclose(problem.curvature(law), (law.eif * law.masses) @ law.eif.T, rtol=1e-12)


# The influence function.


@pytest.mark.parametrize("options", [{}, *(options for options, _, _ in GENERAL)])
def test_eif_is_the_complex_step_derivative_of_psi(options):
    problem = OptimalTransport(**options)
    rng = np.random.default_rng(4)
    nodes = 1.5 * rng.standard_normal((problem.columns, 60))
    masses = rng.dirichlet(np.ones(60))
    functional = problem.functional(nodes, masses, None)
    np.testing.assert_allclose(functional.psi, longhand_psi(problem, nodes, masses)[0], atol=1e-12)
    D = functional.eif(nodes)
    for _ in range(4):
        score = rng.standard_normal(60)
        score -= masses @ score
        psi, _ = longhand_psi(problem, nodes, masses * (1 + 1e-30j * score))
        np.testing.assert_allclose((D * masses) @ score, psi.imag / 1e-30, rtol=1e-10, atol=1e-10)


def test_psi_does_not_depend_on_the_order_of_nodes_nor_much_on_the_warm_start(pilot):
    problem = OptimalTransport()
    law = problem.start(pilot)
    order = np.random.default_rng(0).permutation(law.masses.size)
    nodes = np.ascontiguousarray(law.rule.nodes[:, order])
    shuffled = problem.functional(nodes, law.masses[order], None)
    assert isinstance(law.functional, type(shuffled))
    assert (shuffled.psi == law.psi).all()
    assert (shuffled.gain == law.functional.gain).all()
    far = problem.functional(
        nodes, law.masses[order], problem.move(law, np.array([0.02, 0.0, 0.0])).functional
    )
    np.testing.assert_allclose(far.psi, law.psi, atol=1e-13)


@pytest.mark.parametrize("fluctuation", [LOGISTIC, TILT])
def test_the_score_identity_row_by_row(pilot, rows, fluctuation):
    """grad of -log p(eps)(o) at eps = 0 is D(o), eq. (local-score)."""
    problem = OptimalTransport(fluctuation=fluctuation)
    law = problem.move(problem.start(pilot), np.array(HISTORY[0]))
    D = problem.eif(law, problem.read(rows), law.psi)
    public = problem.normaliser(law).gradient(np.zeros(3))
    assert np.abs(public).max() < 1e-12
    for row, expected in zip(rows, D, strict=True):
        sums = problem.submodel(law, problem.read(row[None])).sums(np.zeros(3), Part.GRADIENT)
        np.testing.assert_allclose(sums.values() + public, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fluctuation", [LOGISTIC, TILT])
def test_the_submodels_loss_is_that_of_the_moved_law(pilot, rows, fluctuation):
    problem = OptimalTransport(fluctuation=fluctuation)
    law = problem.move(problem.start(pilot), np.array(HISTORY[0]))
    eps, points = np.array(HISTORY[1]), problem.read(rows)
    moved = problem.losses(problem.move(law, eps), points) - problem.losses(law, points)
    part = problem.submodel(law, points).sums(eps, Part.LOSS).values(len(rows))[0]
    assert part + problem.normaliser(law).value(eps) == pytest.approx(moved.mean(), abs=1e-12)


# Bounds and accuracy.


@pytest.mark.parametrize("fluctuation", [LOGISTIC, TILT])
def test_bounds_hold_far_away_and_are_nearly_attained_there(pilot, fluctuation):
    problem = OptimalTransport(fluctuation=fluctuation)
    law = problem.start(pilot)
    turn = np.linspace(0, 2 * np.pi, 400)
    far = problem.read(
        np.concatenate([r * np.stack([np.cos(turn), np.sin(turn)], axis=1) for r in (1, 5, 60)])
    )
    D = problem.eif(law, far, law.psi)
    vertices = law.functional.vertices
    np.testing.assert_allclose(np.abs(D).max(axis=0), np.abs(vertices).max(axis=1), rtol=1e-6)
    # Every D is a convex combination of the vertices.
    shares = np.linalg.solve(np.vstack([vertices, np.ones(4)]), np.vstack([D.T, np.ones(len(D))]))
    assert shares.min() > -1e-12
    bound = problem.row_bound(law)
    multiple = 2.0 if fluctuation == LOGISTIC else 1.0
    largest = multiple * np.abs(D).max()
    assert largest <= 2.0**bound.gradient <= 2 * largest * 1.001
    direction = np.array([3.0, -2.0, 1.0])
    submodel = problem.submodel(law, far)
    for eps in (0 * direction, direction, -direction):
        submodel.sums(eps, Part.LOSS | Part.GRADIENT | Part.HESSIAN)  # no ContributionError
    sums = problem.moments(law, far)
    assert sums.shifts == problem.moment_shifts(law)


def test_the_curvature_ceiling_holds_on_the_benchmark(pilot):
    rng = np.random.default_rng(1)
    for fluctuation in (LOGISTIC, TILT):
        problem = OptimalTransport(fluctuation=fluctuation)
        A = problem.normaliser(problem.start(pilot))
        ceiling = A.curvature_ceiling(np.eye(3))
        for size in np.geomspace(1e-4, 3.0, 25):
            assert np.abs(np.linalg.eigvalsh(A.hessian(size * rng.standard_normal(3)))).max() <= ceiling


@pytest.mark.parametrize("case", list(itertools.product([12.0, 18.0, None], [0.25, 4.0])))
def test_accuracy_is_honest_on_coarse_and_on_proper_rules(pilot, rules, rows, monkeypatch, case):
    decay, size = case
    problem = OptimalTransport(spacing=0.15 if decay is None else 1.0)
    if decay is not None:
        monkeypatch.setattr(start_module, "DECAY", decay)
    history = size * np.array(HISTORY)
    law = trajectory(problem, problem.start(pilot), history)[-1]
    psis, log_zs, _ = longhand_trajectory(problem, pilot, rules["legendre"], history, rows.T)
    error = max(
        np.abs(law.psi - psis[-1]).max(),
        np.abs(np.array([step.log_z for step in law.steps]) - log_zs).max(),
    )
    assert error <= problem.accuracy(law)
    if decay is not None:
        assert problem.accuracy(law) <= 1e4 * error
    elif size == 0.25:
        assert problem.accuracy(law) <= 2e-10


@pytest.mark.parametrize("fluctuation", [LOGISTIC, TILT])
def test_the_accuracy_of_the_normaliser_bounds_its_error_away_from_zero(fluctuation):
    # The poles of a logistic fluctuation come nearer as eps grows: there eta of the law, which is about
    # eps = 0, is no bound. The tilt has no poles.
    beyond_eta = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        pilot, destinations = rng.normal(size=(30, 1)), rng.normal(size=(3, 1)) * 2
        parts = {"destinations": destinations, "capacities": (0.3, 0.3, 0.4), "fluctuation": fluctuation}
        problem, finer = OptimalTransport(**parts), OptimalTransport(**parts, spacing=0.15 / 8)
        law, fine = problem.start(pilot), finer.start(pilot)
        A, exact = problem.normaliser(law), finer.normaliser(fine)
        assert problem.accuracy_at(law, np.zeros(2)) == problem.accuracy(law)
        for size in (0.05, 0.5, 2.0, 8.0):
            direction = rng.normal(size=2)
            eps = direction * size / (np.abs(direction).sum() * law.reach)
            error = np.abs(A.gradient(eps) - exact.gradient(eps)).max()
            assert error <= problem.accuracy_at(law, eps) + finer.accuracy_at(fine, eps)
            beyond_eta += error > problem.accuracy(law)
    assert beyond_eta >= 12 if fluctuation == LOGISTIC else beyond_eta <= 2


# Laws as values.


def test_laws_are_values_shared_within_a_process(pilot):
    problem = OptimalTransport()
    law, again = problem.start(pilot), OptimalTransport().start(pilot)
    eps = np.array(HISTORY[0])
    with ThreadPoolExecutor(8) as pool:
        moved = list(pool.map(lambda _: problem.move(law, eps), range(16)))
    assert len(set(map(id, moved))) == 1
    other = problem.move(again, eps)
    assert other is not moved[0]
    assert other == moved[0]
    assert hash(other) == hash(moved[0])
    assert (other.psi == moved[0].psi).all()
    assert other.history == (HISTORY[0],)
    assert other != law
    assert pickle.loads(pickle.dumps(other)) == other  # noqa: S301 - our own bytes
    # The same start and eps under another problem is another law.
    tilted = OptimalTransport(fluctuation=TILT).move(law, eps)
    assert np.abs(tilted.psi - moved[0].psi).max() > 1e-4
    assert "pilot" not in repr(other)
    for shared in (other.psi, other.masses, other.eif, law.psi):
        with pytest.raises(ValueError, match="read-only"):
            shared[...] = 0.0


def test_eps_zero_changes_nothing(pilot):
    problem = OptimalTransport()
    law = problem.start(pilot)
    moved = problem.move(law, np.zeros(3))
    assert abs(moved.steps[0].log_z) < 3e-16
    np.testing.assert_allclose(moved.psi, law.psi, rtol=0, atol=1e-14)


@pytest.mark.parametrize("eps", [[math.nan, 0, 0], [math.inf, 0, 0], [0.0, 0.0], 0.0])
def test_inadmissible_eps(pilot, eps):
    problem = OptimalTransport()
    law = problem.start(pilot)
    assert not problem.admits(law, np.array(eps))
    with pytest.raises(NumericalError, match=r"^eps: "):
        problem.move(law, np.array(eps))
    assert problem.admits(law, np.array([1e3, 0, 0]))


# The estimate, and the endpoint.


def test_targeting_arrives_at_the_direct_solution():
    rng = np.random.default_rng(11)
    problem = OptimalTransport()
    data = benchmark.gaussian_mixture(3000, rng)
    law, points = problem.start(benchmark.gaussian_mixture(150, rng)), problem.read(data)
    parts = Part.GRADIENT | Part.HESSIAN
    for _ in range(20):
        submodel, A = problem.submodel(law, points), problem.normaliser(law)
        eps = np.zeros(3)
        for _ in range(6):
            mean = submodel.sums(eps, parts).values(3000)
            eps = eps - np.linalg.solve(unpack(mean[3:], 3) + A.hessian(eps), mean[:3] + A.gradient(eps))
        law = problem.move(law, eps)
    D = problem.eif(law, points, law.psi)
    assert np.abs(D.mean(axis=0)).max() < 1e-8
    estimate = problem.finish(law, problem.moments(law, points), 3000)
    np.testing.assert_allclose(estimate.psi, problem.direct(data), rtol=0, atol=1e-8)
    # The M-estimator's sandwich at the direct solution, longhand: H over the rows, not over the law.
    logits = (
        estimate.psi @ np.eye(3, 4) - ((data[:, None, :] - np.array(problem.destinations)) ** 2).sum(2) / 2
    )
    s = np.exp(logits - logits.max(axis=1, keepdims=True))
    s = (s / s.sum(axis=1, keepdims=True))[:, :3]
    bread = np.linalg.inv(np.diag(s.mean(axis=0)) - s.T @ s / 3000)
    np.testing.assert_allclose(estimate.covariance, bread @ np.cov(s.T) @ bread / 3000, rtol=1e-9)
    np.testing.assert_allclose(
        estimate.covariance, estimate.correction @ np.cov(D.T) @ estimate.correction.T / 3000, rtol=1e-9
    )


@pytest.mark.parametrize("options", [{}, *(options for options, _, _ in GENERAL)])
def test_direct_solves_the_first_order_equation(options):
    problem = OptimalTransport(**options)
    data = 1.4 * np.random.default_rng(2).standard_normal((2500, problem.columns)) + 0.4
    theta = problem.direct(data)
    shares = longhand_shares(problem, data.T, theta).mean(axis=1)
    np.testing.assert_allclose(shares, problem.capacities, rtol=0, atol=1e-13)


def test_direct_survives_far_destinations_and_one_row():
    far = OptimalTransport(destinations=[(-20.0, 0.0), (0.0, 25.0), (30.0, 1.0)], capacities=[0.2, 0.3, 0.5])
    data = np.random.default_rng(2).standard_normal((500, 2)) * 3
    shares = longhand_shares(far, data.T, far.direct(data)).mean(axis=1)
    np.testing.assert_allclose(shares, far.capacities, atol=1e-12)
    one = longhand_shares(far, data[:1].T, far.direct(data[:1]))[:, 0]
    np.testing.assert_allclose(one, far.capacities, atol=1e-12)


def test_a_small_regularisation_is_solved_to_rounding():
    problem = OptimalTransport(regularisation=0.01)
    data = np.random.default_rng(2).standard_normal((4000, 2)) * 2
    shares = longhand_shares(problem, data.T, problem.direct(data)).mean(axis=1)
    np.testing.assert_allclose(shares, problem.capacities, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("far", "capacities"), [(1e3, (0.5, 0.5)), (500.0, (0.3, 0.7))])
def test_an_allocation_too_hard_for_doubles_is_an_error(far, capacities):
    # First H = 0, with no influence function; then a root some 5e5 away, where Newton gives up.
    problem = OptimalTransport(destinations=[(-far,), (far,)], capacities=capacities)
    with pytest.raises(NumericalError, match=r"^psi: "):
        problem.direct([[-far], [far]])


def test_newton_survives_a_start_beyond_the_curved_region():
    # From theta = 0 the full step overshoots: H is small where nearly all the mass is at one destination.
    problem = OptimalTransport(destinations=[(0.0,), (6.0,)], capacities=(0.5, 0.5), regularisation=0.5)
    nodes = np.concatenate([np.linspace(-1, 1, 50), np.linspace(1.5, 2.6, 50)])[None]
    functional = problem.functional(nodes, np.full(100, 0.01), None)
    shares = longhand_shares(problem, nodes, functional.psi).mean(axis=1)
    np.testing.assert_allclose(shares, (0.5, 0.5), rtol=0, atol=1e-13)


# Inputs.


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros(3), "shape"),
        (np.zeros((4, 3)), "shape"),
        (np.zeros((2, 2, 2)), "shape"),
        (np.zeros((0, 2)), "no rows"),
        ([[7.25, math.nan]], "missing or infinite"),
        ([[7.25, -math.inf]], "missing or infinite"),
        ([["7.25", "x"]], "numbers"),
        ([[7.25, 1.0], [2.0]], "numbers"),
    ],
)
def test_bad_rows(rows, message):
    with pytest.raises(DataError, match=message) as caught:
        OptimalTransport().read(rows)
    assert "7.25" not in str(caught.value)


def test_rows_become_contiguous_columns_and_can_be_pooled():
    problem = OptimalTransport()
    data = np.arange(12.0).reshape(6, 2)
    parts = [problem.read(data[:2]), problem.read(data[2:].tolist())]
    pooled = problem.concatenate(parts)
    assert [problem.count(part) for part in parts] == [2, 4]
    assert parts[0].flags.c_contiguous
    assert (pooled == data.T).all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"capacities": (0.5, 0.5)}, "capacities"),
        ({"capacities": (0.3, 0.3, 0.3, 0.2)}, "capacities"),
        ({"capacities": (0.5, 0.5, 0.0, 0.0)}, "capacities"),
        ({"capacities": (0.5, 0.5, 0.5, -0.5)}, "capacities"),
        ({"capacities": (math.nan,) * 4}, "capacities"),
        ({"destinations": [(0.0, 0.0)], "capacities": (1.0,)}, "destinations"),
        ({"destinations": [(0.0,), (0.0, 1.0)], "capacities": (0.5, 0.5)}, "destinations"),
        ({"destinations": [(0.0, 1.0), (0.0, 1.0)], "capacities": (0.5, 0.5)}, "destinations"),
        ({"destinations": [(0.0, 1.0), (0.0, math.inf)], "capacities": (0.5, 0.5)}, "destinations"),
        ({"destinations": [0.0, 1.0], "capacities": (0.5, 0.5)}, "destinations"),
        ({"regularisation": 0.0}, "regularisation"),
        ({"regularisation": math.nan}, "regularisation"),
        ({"spacing": -1.0}, "spacing"),
    ],
)
def test_bad_problems(options, name):
    with pytest.raises(InputError, match=rf"^{name}: "):
        OptimalTransport(**options)


def test_a_pilot_of_another_dimension():
    with pytest.raises(InputError, match=r"^pilot: expected 2 column"):
        OptimalTransport().start(np.random.default_rng(0).standard_normal((50, 3)))


def test_problems_are_values():
    assert OptimalTransport() == OptimalTransport(
        destinations=np.array(OptimalTransport().destinations).tolist()
    )
    assert len({OptimalTransport(), OptimalTransport(fluctuation=TILT), OptimalTransport(spacing=0.1)}) == 3
