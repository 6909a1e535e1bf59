"""The curvature of a public normaliser along a segment: its bound against the largest, by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.initial.glm import Ridge
from fedtmle.model.submodel import NoNormaliser
from fedtmle_core.types import Array
from fedtmle_paper.density.fluctuation import AbstractFluctuation, ExponentialTilt, LogisticFluctuation
from fedtmle_paper.density.quadrature import DensityNormaliser
from tests.premise import Premise

FLUCTUATIONS: dict[str, AbstractFluctuation] = {
    "logistic": LogisticFluctuation(),
    "tilt": ExponentialTilt(),
}
NODES, GRID = 40, np.linspace(0.0, 1.0, 401)
TINY = 1e-30  # of a complex step


def random_normaliser(rng: np.random.Generator, fluctuation: AbstractFluctuation) -> DensityNormaliser:
    """A law of few atoms whose influence function has mean zero and whose masses may be far apart."""
    d = int(rng.integers(1, 4))
    masses = rng.dirichlet(np.full(NODES, 10 ** rng.uniform(-1, 1)))
    eif = rng.normal(size=(d, NODES)) ** rng.choice([1, 3])
    eif -= (eif @ masses)[:, None]
    return DensityNormaliser(fluctuation=fluctuation, eif=eif, masses=masses, vertices=eif)


def largest_curvature(normaliser: DensityNormaliser, start: Array, step: Array) -> float:
    """The largest A'' on a fine grid: the complex-step derivative of A' = E_q[phi' y], written longhand."""
    y = step @ normaliser.eif
    t = (start @ normaliser.eif)[None, :] + (GRID + 1j * TINY)[:, None] * y
    if isinstance(normaliser.fluctuation, LogisticFluctuation):
        factor, slope = 2 / (1 + np.exp(2 * t)), -2 / (1 + np.exp(-2 * t))
    else:
        low = t.real.min(axis=1, keepdims=True)
        factor, slope = np.exp(low - t), -np.ones_like(t)
    weights = normaliser.masses * factor
    gradient = (weights * slope * y).sum(axis=1) / weights.sum(axis=1)
    return float((gradient.imag / TINY).max())


def check_segments(name: str, draws: int, seed: int) -> Array:
    """The bound over the largest curvature, each with that of the rows at eps = 0 added."""
    rng = np.random.default_rng([seed, len(name)])
    ratios = []
    sharper = Premise("the bound on the segment is below the bound that holds everywhere", at_least=0.9)
    with sharper:
        for _ in range(draws):
            normaliser = random_normaliser(rng, FLUCTUATIONS[name])
            d = len(normaliser.eif)
            scale = np.abs(normaliser.eif).max()
            start = rng.normal(size=d) * rng.choice([0.0, 0.5, 2.0]) / scale
            step = rng.normal(size=d) * 10 ** rng.uniform(-3, 0.3) / scale
            bound = normaliser.segment_curvature(start, step)
            true = largest_curvature(normaliser, start, step)
            rows = float(normaliser.masses @ (step @ normaliser.eif) ** 2)
            assert bound >= true - 1e-13 * rows
            sharper.holds(bound < normaliser.curvature_ceiling(step[None, :]))
            ratios.append((rows + max(bound, 0.0)) / (rows + max(true, 0.0)))
    return np.array(ratios)


@pytest.mark.parametrize("name", FLUCTUATIONS)
def test_the_bound_is_at_least_the_largest_curvature_and_close_to_it(name: str) -> None:
    ratios = check_segments(name, 400, seed=1)
    assert np.median(ratios) < 1.06
    assert ratios.max() < 3.0


@pytest.mark.slow
@pytest.mark.parametrize("name", FLUCTUATIONS)
def test_the_bound_holds_on_ten_thousand_segments(name: str) -> None:
    ratios = check_segments(name, 10_000, seed=2)
    assert np.median(ratios) < 1.06


@pytest.mark.parametrize("normaliser", [NoNormaliser(2), Ridge(0.5, np.array([0.0, 0.0]))])
def test_by_default_it_is_the_bound_that_holds_everywhere(normaliser: NoNormaliser | Ridge) -> None:
    step = np.array([3.0, -1.0])
    expected = float(step @ normaliser.hessian(np.zeros(2)) @ step)
    assert expected - 1e-12 <= normaliser.segment_curvature(np.zeros(2), step) <= expected + 1e-12
