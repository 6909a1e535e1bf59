"""The exact local fit against scipy, brute force, and cases built to break it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedtmle.errors import ContributionError, NumericalError
from fedtmle.model.fit import START_FRACTIONS, FitStatus, LocalMinimum, _ball_minimiser, fit_local
from fedtmle.model.leverage import Look, PersonRows, RowSpace
from fedtmle.model.submodel import AbstractNormaliser, AbstractSubmodel, GeneralisedLinear, NoNormaliser
from fedtmle_core.exact import Sums, query_shifts
from fedtmle_core.types import Array, Family, IntArray, Part, RowBound
from tests.narrow import array
from tests.premise import Premise

BOUND = RowBound(gradient=4, curvature=5)
FLOOR = 8 * 2.0 ** (BOUND.gradient - 51)  # times sqrt(d)


@dataclass(frozen=True)
class Formula(AbstractNormaliser):
    """A normaliser from three formulas, so that a test writes its objective longhand."""

    f: Callable[[Array], float]
    g: Callable[[Array], Array]
    h: Callable[[Array], Array]

    def value(self, eps: Array) -> float:
        return float(self.f(eps))

    def gradient(self, eps: Array) -> Array:
        return np.asarray(self.g(eps), dtype=float)

    def hessian(self, eps: Array) -> Array:
        return np.asarray(self.h(eps), dtype=float)

    def curvature_ceiling(self, C: Array) -> float:  # noqa: ARG002 - the interface's argument
        return math.inf


@dataclass(frozen=True)
class Silent(AbstractSubmodel):
    """Rows that say nothing: the objective is the normaliser alone."""

    dim: int

    @property
    def n_rows(self) -> int:
        return 3

    def take(self, rows: IntArray) -> Silent:
        raise NotImplementedError("rows that say nothing are not drawn")

    def sums(self, eps: Array, parts: Part) -> Sums:
        shifts = query_shifts(BOUND, eps, parts)
        return Sums((0,) * len(shifts), shifts)

    def disclosed_rows(self, eps: Array, part: Part = Part.GRADIENT) -> Iterator[PersonRows]:
        raise NotImplementedError("rows that say nothing are not examined")

    def look(
        self, eps: Array, part: Part = Part.GRADIENT, *, enough: float = 0.0, space: RowSpace | None = None
    ) -> Look:
        raise NotImplementedError("rows that say nothing are not examined")

    def column_people(self, enough: int | None = None) -> IntArray:
        raise NotImplementedError("rows that say nothing are not examined")

    def curvature_ceiling(self) -> Array:
        return np.zeros((self.dim, self.dim))


def surface(f, g, h, dim: int, radius: float, *, exhaustive: bool = True, **options: Any) -> LocalMinimum:
    normaliser = Formula(f, g, h)
    return fit_local(Silent(dim), normaliser, dim=dim, radius=radius, exhaustive=exhaustive, **options)


def logistic(seed: int, n: int = 200, d: int = 2) -> GeneralisedLinear:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-3, 3, (d, n))
    offset = rng.normal(size=n)
    y = (rng.random(n) < 1 / (1 + np.exp(-offset - 0.7 * X[0]))).astype(float)
    return GeneralisedLinear(family=Family.LOGISTIC, X=X, offset=offset, y=y, bound=BOUND)


def logistic_loss(model: GeneralisedLinear, eps: Array) -> float:
    eta = model.offset + eps @ array(model.X)
    base = np.logaddexp(0, model.offset) - model.y * model.offset
    return float(np.mean(np.logaddexp(0, eta) - model.y * eta - base))


# Convex losses.


@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_logistic_fit_is_scipys_minimum(seed, d):
    model = logistic(seed, d=d)
    fit = fit_local(model, NoNormaliser(d), dim=d, radius=30.0)

    def gradient(eps):
        return (
            array(model.X) @ (1 / (1 + np.exp(-model.offset - eps @ array(model.X))) - model.y) / model.n_rows
        )

    reference = minimize(
        lambda eps: logistic_loss(model, eps), np.zeros(d), jac=gradient, options={"gtol": 1e-9}
    )
    assert fit.status is FitStatus.MINIMUM
    assert fit.gradient_norm <= FLOOR * d**0.5
    assert np.linalg.norm(gradient(fit.eps)) <= 3 * FLOOR * d**0.5
    np.testing.assert_allclose(fit.eps, reference.x, atol=1e-7)
    assert fit.decrease == pytest.approx(-logistic_loss(model, fit.eps), abs=1e-13)
    eta = model.offset + fit.eps @ array(model.X)
    weight = 1 / (2 + np.exp(eta) + np.exp(-eta))
    X = array(model.X)
    hessian = (X * weight) @ X.T / model.n_rows
    assert fit.curvature == pytest.approx(np.linalg.eigvalsh(hessian)[0], rel=1e-9)
    assert fit.iterations <= 12


def test_gaussian_fit_is_least_squares():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(-1, 1, (3, 50)), rng.uniform(-1, 1, 50)
    model = GeneralisedLinear(family=Family.GAUSSIAN, X=X, y=y, bound=BOUND)
    fit = fit_local(model, NoNormaliser(3), dim=3, radius=10.0)
    np.testing.assert_allclose(fit.eps, np.linalg.lstsq(X.T, y, rcond=None)[0], rtol=1e-12)
    assert fit.status is FitStatus.MINIMUM
    assert fit.iterations <= 2


def test_gaussian_fit_beyond_the_ball_is_the_constrained_minimum():
    rng = np.random.default_rng(1)
    X, y = rng.uniform(-1, 1, (3, 50)), rng.uniform(-1, 1, 50)
    model = GeneralisedLinear(family=Family.GAUSSIAN, X=X, y=y, bound=BOUND)
    radius = 0.5 * float(np.linalg.norm(np.linalg.lstsq(X.T, y, rcond=None)[0]))
    fit = fit_local(model, NoNormaliser(3), dim=3, radius=radius)
    reference = minimize(
        lambda eps: 0.5 * np.mean((eps @ X - y) ** 2),
        np.zeros(3),
        method="SLSQP",
        options={"ftol": 1e-15},
        constraints={"type": "ineq", "fun": lambda eps: radius**2 - eps @ eps},
    )
    assert fit.status is FitStatus.BOUNDARY
    np.testing.assert_allclose(fit.eps, reference.x, atol=1e-6)
    assert fit.gradient_norm <= FLOOR * 3**0.5  # stationary on the sphere, not only feasible
    assert fit.iterations <= 3


def test_logistic_fit_beyond_the_ball_is_the_constrained_minimum():
    model = logistic(3)
    radius = 0.3 * float(np.linalg.norm(fit_local(model, NoNormaliser(2), dim=2, radius=30.0).eps))
    fit = fit_local(model, NoNormaliser(2), dim=2, radius=radius)
    circle = [radius * np.array([math.cos(t), math.sin(t)]) for t in np.linspace(0, 2 * math.pi, 20001)]
    lowest = min(circle, key=lambda eps: logistic_loss(model, eps))
    assert fit.status is FitStatus.BOUNDARY
    np.testing.assert_allclose(fit.eps, lowest, atol=radius * 5e-4)
    assert fit.gradient_norm <= FLOOR * 2**0.5
    assert fit.iterations <= 8  # Newton's on the sphere, not a projected gradient's


# Outcomes without a finite fit, and directions without information.


@pytest.mark.parametrize("radius", [3.0, 20.0, 64.0, 5000.0])
@pytest.mark.parametrize(
    "bound",
    [
        RowBound(gradient=2, curvature=2),
        RowBound(gradient=13, curvature=23),
        RowBound(gradient=8, curvature=0),  # the gradient vanishes long before the curvature does
    ],
)
def test_separated_outcomes_reach_the_boundary(radius, bound):
    x = np.linspace(0.5, 2.0, 40) * np.where(np.arange(40) % 2, 1.0, -1.0)
    model = GeneralisedLinear(family=Family.LOGISTIC, X=x[None], y=(x > 0).astype(float), bound=bound)
    fit = fit_local(model, NoNormaliser(1), dim=1, radius=radius)
    assert fit.status is FitStatus.BOUNDARY
    np.testing.assert_allclose(fit.eps, [radius], rtol=1e-9)


def test_one_separated_arm_leaves_the_other_arm_fitted():
    x = np.repeat([[1.0], [2.0]], 30, axis=1) * np.array([[1.0] * 15 + [0.0] * 15, [0.0] * 15 + [1.0] * 15])
    y = np.array([1.0] * 15 + [1.0] * 5 + [0.0] * 10)
    model = GeneralisedLinear(family=Family.LOGISTIC, X=x, y=y, bound=BOUND)
    fit = fit_local(model, NoNormaliser(2), dim=2, radius=64.0)
    assert fit.status is FitStatus.BOUNDARY
    assert fit.eps[0] > 63
    assert fit.eps[1] == pytest.approx(math.log(0.5) / 2, abs=1e-9)  # logit(1/3) / x


def test_direction_without_information_stays_at_zero():
    X = np.array([[1.0, -2.0, 1.5, 0.5], [0.0, 0.0, 0.0, 0.0]])
    model = GeneralisedLinear(family=Family.GAUSSIAN, X=X, y=np.array([1.0, 0.0, 2.0, 1.0]), bound=BOUND)
    fit = fit_local(model, NoNormaliser(2), dim=2, radius=10.0)
    assert fit.status is FitStatus.MINIMUM
    assert fit.eps[1] == 0
    assert fit.eps[0] == pytest.approx((X[0] @ model.y) / (X[0] @ X[0]), rel=1e-13)


def test_collinear_columns_give_the_minimum_of_least_norm():
    rng = np.random.default_rng(2)
    x = rng.uniform(-1, 1, 60)
    X = np.stack([x, 0.3 * x])
    y = (rng.random(60) < 0.5 + 0.3 * x).astype(float)
    fit = fit_local(
        GeneralisedLinear(family=Family.LOGISTIC, X=X, y=y, bound=BOUND), NoNormaliser(2), dim=2, radius=50.0
    )
    assert fit.status is FitStatus.MINIMUM
    assert fit.eps[1] == pytest.approx(0.3 * fit.eps[0], rel=1e-9)


def test_a_row_beyond_the_bound_at_zero_is_an_error():
    model = GeneralisedLinear(
        family=Family.GAUSSIAN, X=np.ones((1, 2)), y=np.array([0.0, 100.0]), bound=BOUND
    )
    with pytest.raises(ContributionError):
        fit_local(model, NoNormaliser(1), dim=1, radius=1.0)


def test_trials_beyond_the_bound_are_avoided():
    y = np.array([0.0, 0.0, 12.0])  # the first Newton step overshoots: e^eta leaves the bound
    model = GeneralisedLinear(
        family=Family.POISSON, X=np.ones((1, 3)), offset=np.full(3, -1.5), y=y, bound=BOUND
    )
    fit = fit_local(model, NoNormaliser(1), dim=1, radius=60.0)
    assert fit.status is FitStatus.MINIMUM
    assert fit.eps[0] == pytest.approx(math.log(4.0) + 1.5, abs=1e-12)


# Selection of zero.


def test_zero_is_selected_exactly_when_it_is_the_minimum():
    X = np.array([[1.0, 1.0, -1.0, -1.0], [1.0, -1.0, 1.0, -1.0]])
    model = GeneralisedLinear(
        family=Family.LOGISTIC, X=np.tile(X, 2), y=np.repeat([0.0, 1.0], 4), bound=BOUND
    )
    fit = fit_local(model, NoNormaliser(2), dim=2, radius=10.0)
    assert not fit.eps.any()
    assert (fit.decrease, fit.iterations, fit.status) == (0.0, 0, FitStatus.MINIMUM)


@pytest.mark.parametrize(("shift", "selected"), [(0.9e-6, True), (1.1e-6, False)])
def test_zero_floor_is_a_threshold_on_the_gradient(shift, selected):
    y = np.full(5, shift)
    model = GeneralisedLinear(family=Family.GAUSSIAN, X=np.ones((1, 5)), y=y, bound=BOUND)
    fit = fit_local(model, NoNormaliser(1), dim=1, radius=10.0, zero_floor=1e-6)
    assert (not fit.eps.any()) is selected
    if not selected:
        assert fit.eps[0] == pytest.approx(shift, rel=1e-8)


def test_zero_floor_holds_where_starts_compete():
    # A convex surface behind a normaliser: descents from other starts end at -1e-5, and lower.
    fit = surface(
        lambda e: 1e-5 * e[0] + 0.5 * e @ e, lambda e: e + 1e-5, lambda _: np.eye(1), 1, 4.0, zero_floor=1e-4
    )
    assert not fit.eps.any()


def double_well(e: Array) -> float:
    """Minima at +-1 along the first axis, a saddle at the origin."""
    return float(0.25 * e[0] ** 4 - 0.5 * e[0] ** 2 + 0.5 * np.sum(e[1:] ** 2))


def double_well_gradient(e: Array) -> Array:
    return np.concatenate([[e[0] ** 3 - e[0]], e[1:]])


def double_well_hessian(e: Array) -> Array:
    return np.diag([3 * e[0] ** 2 - 1, *np.ones(len(e) - 1)])


@pytest.mark.parametrize("dim", [1, 2, 3])
@pytest.mark.parametrize("angle", [0.0, 0.6])
def test_saddle_at_the_origin_is_left(dim, angle):
    turn = np.eye(dim)
    if dim > 1:
        turn[:2, :2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    fit = surface(
        lambda e: double_well(turn @ e),
        lambda e: turn.T @ double_well_gradient(turn @ e),
        lambda e: turn.T @ double_well_hessian(turn @ e) @ turn,
        dim,
        8.0,
        zero_floor=1.0,  # generous: the gradient is zero, only the curvature speaks
    )
    assert fit.status is FitStatus.MINIMUM
    assert fit.decrease == pytest.approx(0.25, abs=1e-12)
    np.testing.assert_allclose(np.abs(turn @ fit.eps), np.eye(dim)[0], atol=1e-12)
    assert fit.curvature == pytest.approx(1.0 if dim > 1 else 2.0, rel=1e-9)


def test_saddle_is_left_without_help_from_other_starts(monkeypatch):
    monkeypatch.setattr("fedtmle.model.fit.START_FRACTIONS", ())
    fit = surface(double_well, double_well_gradient, double_well_hessian, 2, 8.0)
    assert abs(fit.eps[0]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("turn", [1.0, -1.0])
def test_a_curved_valley_is_followed_to_its_end(turn, monkeypatch):
    monkeypatch.setattr("fedtmle.model.fit.START_FRACTIONS", ())
    fit = surface(  # Rosenbrock's, from (-1.2, 1) to (1, 1) in his coordinates
        lambda e: 100 * (turn * e[1] + 1 - (e[0] - 1.2) ** 2) ** 2 + (2.2 - e[0]) ** 2,
        lambda e: np.array(
            [
                -400 * (turn * e[1] + 1 - (e[0] - 1.2) ** 2) * (e[0] - 1.2) - 2 * (2.2 - e[0]),
                200 * turn * (turn * e[1] + 1 - (e[0] - 1.2) ** 2),
            ]
        ),
        lambda e: np.array(
            [
                [1200 * (e[0] - 1.2) ** 2 - 400 * (turn * e[1] + 1) + 2, -400 * turn * (e[0] - 1.2)],
                [-400 * turn * (e[0] - 1.2), 200.0],
            ]
        ),
        2,
        8.0,
    )
    np.testing.assert_allclose(fit.eps, [2.2, 0.0], atol=1e-12)
    assert fit.status is FitStatus.MINIMUM
    assert fit.iterations <= 40


def triple_well(depth: float) -> tuple[Callable, Callable, Callable]:
    """e^2 (e^2 - 1)^2 - depth e^4: equal minima at 0 and near +-1 if depth = 0, deeper outer ones if > 0."""
    return (
        lambda e: float(e[0] ** 2 * (e[0] ** 2 - 1) ** 2 - depth * e[0] ** 4),
        lambda e: np.array([6 * e[0] ** 5 - (8 + 4 * depth) * e[0] ** 3 + 2 * e[0]]),
        lambda e: np.array([[30 * e[0] ** 4 - (24 + 12 * depth) * e[0] ** 2 + 2]]),
    )


def test_ties_go_to_zero_and_deeper_minima_win():
    assert not surface(*triple_well(0.0), 1, 2.0).eps.any()
    assert not surface(*triple_well(-0.1), 1, 2.0).eps.any()
    deeper = surface(*triple_well(0.1), 1, 2.0)
    assert abs(deeper.eps[0]) > 0.9
    assert deeper.decrease > 0.09
    assert deeper.status is FitStatus.MINIMUM


# Nonconvex surfaces against brute force.


def waves(rng: np.random.Generator, dim: int, terms: int = 3):
    """A bowl with cosine ripples: several basins inside the ball."""
    k, phase = rng.normal(size=(terms, dim)) * 1.2, rng.uniform(0, 6, terms)
    height = rng.uniform(0.2, 0.6, terms)
    return (
        lambda e: float(0.05 * e @ e + height @ np.cos(k @ e + phase)),
        lambda e: 0.1 * e - (height * np.sin(k @ e + phase)) @ k,
        lambda e: 0.1 * np.eye(dim) - (k.T * (height * np.cos(k @ e + phase))) @ k,
    )


def ball(radius: float, dim: int, points: int) -> list[Array]:
    """A brute-force grid of the ball."""
    axis = np.linspace(-radius, radius, points)
    return [e for e in map(np.array, itertools.product(axis, repeat=dim)) if e @ e <= radius**2]


def ball_of(seed: int) -> float:
    """A radius: every third ball is so small that the minimum is often on its edge."""
    return 4.0 if seed % 3 else 0.8


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("dim", [1, 2])
def test_nonconvex_fit_is_the_brute_force_minimum(seed, dim):
    rng = np.random.default_rng([seed, dim])
    f, g, h = waves(rng, dim)
    radius = ball_of(seed)
    fit = surface(f, g, h, dim, radius)
    assert f(fit.eps) <= min(map(f, ball(radius, dim, 2001 if dim == 1 else 81))) + 1e-9
    assert fit.decrease == pytest.approx(f(np.zeros(dim)) - f(fit.eps), abs=1e-12)
    assert fit.status is (
        FitStatus.BOUNDARY if np.linalg.norm(fit.eps) > radius - 1e-9 else FitStatus.MINIMUM
    )
    if fit.status is FitStatus.MINIMUM:
        assert fit.gradient_norm <= FLOOR * dim**0.5
        assert fit.curvature > 0


def test_both_endings_of_a_nonconvex_fit_occur():
    in_the_ball = Premise("the minimum is inside the ball", at_least=0.5)
    on_the_edge = Premise("the minimum is on the edge of the ball", at_least=0.1)
    with in_the_ball, on_the_edge:
        for seed, dim in itertools.product(range(30), (1, 2)):
            f, g, h = waves(np.random.default_rng([seed, dim]), dim)
            fit = surface(f, g, h, dim, ball_of(seed))
            in_the_ball.holds(fit.status is FitStatus.MINIMUM)
            on_the_edge.holds(fit.status is FitStatus.BOUNDARY)


@pytest.mark.parametrize("seed", range(10))
def test_the_quick_search_is_never_above_any_public_point(seed):
    f, g, h = waves(np.random.default_rng([seed, 2]), 2)
    fit = surface(f, g, h, 2, 4.0, exhaustive=False)
    reach = [sign * 4.0 * fraction for fraction in START_FRACTIONS for sign in (1, -1)]
    public = [length * axis for axis in np.eye(2) for length in reach]
    assert f(fit.eps) <= min(map(f, [np.zeros(2), *public]))
    assert f(fit.eps) >= f(surface(f, g, h, 2, 4.0).eps) - 1e-12
    assert fit.gradient_norm <= FLOOR * 2**0.5


def test_the_quick_search_leaves_a_basin_that_a_public_point_undercuts():
    # Zero is a minimum, but 0.75 of the radius lies in a lower basin.
    fit = surface(
        lambda e: float(-np.exp(-2 * (e[0] - 3) ** 2) - 0.2 * np.exp(-2 * e[0] ** 2)),
        lambda e: 4 * (e - 3) * np.exp(-2 * (e - 3) ** 2) + 0.8 * e * np.exp(-2 * e**2),
        lambda e: np.diag(
            (4 - 16 * (e - 3) ** 2) * np.exp(-2 * (e - 3) ** 2) + (0.8 - 3.2 * e**2) * np.exp(-2 * e**2)
        ),
        1,
        4.0,
        exhaustive=False,
        zero_floor=1e-3,
    )
    assert fit.eps[0] == pytest.approx(3.0, abs=1e-6)
    assert fit.status is FitStatus.MINIMUM


@pytest.mark.parametrize("seed", range(10))
def test_rows_and_nonconvex_normaliser_together(seed):
    rng = np.random.default_rng(seed)
    model = logistic(seed, n=30)
    f, g, h = waves(rng, 2)
    fit = fit_local(model, Formula(f, g, h), dim=2, radius=4.0, exhaustive=True)
    lowest = min(logistic_loss(model, e) + f(e) - f(np.zeros(2)) for e in ball(4.0, 2, 41))
    assert -fit.decrease <= lowest + 1e-9


def test_points_outside_the_density_model_are_avoided():
    def fence(e):
        if e[0] > 1.2:
            raise NumericalError("not a density")
        return double_well(e)

    fit = surface(fence, double_well_gradient, double_well_hessian, 1, 8.0)
    assert fit.status is FitStatus.MINIMUM
    assert abs(fit.eps[0]) == pytest.approx(1.0, abs=1e-12)


def test_a_gradient_that_is_not_the_losss_stalls_and_says_so():
    fit = surface(lambda e: float(e @ e), lambda e: -2 * e - 1.0, lambda _: 2 * np.eye(1), 1, 1.0)
    assert fit.status is FitStatus.STALLED
    assert fit.gradient_norm > 0.1


# The subproblem.


def model_value(b, H, p):
    return b @ p + 0.5 * p @ H @ p


def ball_minimiser(b, H, radius):
    values, vectors = np.linalg.eigh(H)
    return _ball_minimiser(b, values, vectors, radius, 0.0)


@pytest.mark.parametrize("b", [(0.0, 0.0), (0.0, 0.3), (1e-18, 0.3), (-1e-300, 0.0)])
def test_hard_case_uses_the_negative_direction(b):
    H = np.diag([-1.0, 2.0])
    p = ball_minimiser(np.array(b), H, 1.5)
    assert np.linalg.norm(p) == pytest.approx(1.5, rel=1e-12)
    p1 = -b[1] / 3.0  # (H + 1) p = -b on the other axis
    assert p[1] == pytest.approx(p1, abs=1e-12)
    assert abs(p[0]) == pytest.approx(math.sqrt(1.5**2 - p1**2), rel=1e-12)


is_interior = Premise("the minimiser is inside the ball", at_least=0.15)


@is_interior
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([1e-8, 1.0, 1e6]))
def test_subproblem_satisfies_the_optimality_conditions(seed, d, scale):
    rng = np.random.default_rng(seed)
    H = rng.normal(size=(d, d))
    H = scale * (H @ H.T if rng.random() < 0.5 else H + H.T)
    b = rng.normal(size=d) * rng.choice([1e-12, 1.0, 1e3])
    radius = float(rng.choice([1e-3, 1.0, 50.0]))
    p = ball_minimiser(b, H, radius)
    assert np.linalg.norm(p) <= radius * (1 + 1e-12)
    nu = max(0.0, -float(p @ (H @ p + b)) / max(float(p @ p), 1e-300))
    size = np.linalg.norm(b) + (np.linalg.norm(H) + nu) * np.linalg.norm(p)
    assert np.linalg.norm(H @ p + b + nu * p) <= 1e-8 * size
    assert np.linalg.eigvalsh(H)[0] + nu >= -1e-8 * np.linalg.norm(H)
    if is_interior.holds(np.linalg.norm(p) < radius * (1 - 1e-9)):
        assert nu <= 1e-8 * np.linalg.norm(H)
    sample = rng.normal(size=(200, d))
    sample *= radius * rng.random((200, 1)) / np.linalg.norm(sample, axis=1, keepdims=True)
    lowest = min(model_value(b, H, q) for q in sample)
    assert model_value(b, H, p) <= lowest + 1e-12 * size * radius
