"""The numbers beside the sentences: formulas against differences of losses, settings on invented runs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from fedtmle_paper.benchmark import client_sizes
from fedtmle_paper.reproduce import reasons
from fedtmle_paper.reproduce.checks import expected_excess, uniform_excess_formula
from fedtmle_paper.reproduce.scenario import Dgp, Method, Partition, Profile, Scenario, build
from fedtmle_paper.reproduce.sentences import SENTENCES

from .conftest import TINY
from .test_sentences import SCALE, invented, steady


@pytest.mark.parametrize("partition", list(Partition))
def test_the_excess_formula_agrees_with_differences_of_losses(partition: Partition) -> None:
    """Gradients and curvature of mean losses along the submodel, by central differences, without its sums."""
    scenario = Scenario(seed=6, dgp=Dgp.GAUSSIAN, partition=partition, clients=3, scale=TINY)
    data = build(scenario)
    problem, d, step = data.problem, data.problem.dim, 1e-3

    def loss(rows: np.ndarray, eps: np.ndarray) -> float:
        return float(np.mean(problem.losses(problem.move(data.law, eps), problem.read(rows))))

    axes = step * np.eye(d)
    gradients = {
        name: np.array([loss(rows, e) - loss(rows, -e) for e in axes]) / (2 * step)
        for name, rows in data.silos.items()
    }
    n, M = len(data.rows), len(data.silos)
    Delta = sum((1 / M - len(data.silos[name]) / n) * g for name, g in gradients.items())
    V = np.array(
        [
            [
                sum(s * t * loss(data.rows, s * e + t * f) for s in (1, -1) for t in (1, -1)) / (4 * step**2)
                for f in axes
            ]
            for e in axes
        ]
    )
    assert uniform_excess_formula(scenario) == pytest.approx(Delta @ np.linalg.solve(V, Delta) / 2, rel=1e-3)


def test_the_random_part_is_the_mean_of_the_formula_over_random_partitions() -> None:
    """Its factor sum_m (1/M - N_m/n)^2/N_m in fractions, and the mean over the means of random groups."""
    scenario = Scenario(seed=1, dgp=Dgp.CURVED, partition=Partition.RANDOM, clients=3, scale=SCALE)
    sizes = [int(N) for N in client_sizes(SCALE.n, 3)]
    factor = sum((Fraction(1, 3) - Fraction(N, SCALE.n)) ** 2 / N for N in sizes)
    assert expected_excess(scenario) == pytest.approx(1.5 * float(factor), rel=1e-12)
    rng = np.random.default_rng(3)
    X = rng.standard_normal((20_000, 3, SCALE.n))  # D of all rows, with covariance I, in 20,000 partitions
    weights = np.repeat([1 / 3 - N / SCALE.n for N in sizes], sizes) / np.repeat(sizes, sizes)
    assert sum(sizes) == SCALE.n
    excess = 0.5 * ((X @ weights) ** 2).sum(axis=1)
    assert expected_excess(scenario) == pytest.approx(excess.mean(), rel=0.03)  # 0.6 % standard error


def test_settings_state_the_rounds_and_the_time_of_a_fit() -> None:
    views = {Profile.A: invented(steady, lambda method: 1.0 if method is Method.GRADIENT else 0.3)}
    assert reasons.INNER.numbers(views) == "G's rounds per update: A 3"
    assert reasons.FITS.numbers(views) == "slowest silo's compute in a round of L: A 300 ms"
    random = reasons.RANDOM.numbers(views)
    cell = Scenario(seed=1, dgp=Dgp.GAUSSIAN, partition=Partition.RANDOM, clients=3, scale=SCALE)
    parts = [expected_excess(replace(cell, clients=M)) for M in SCALE.clients]
    assert f"at M = 2, 3: {parts[0]:.2e}, {parts[1]:.2e}" in random
    spatial = replace(cell, dgp=Dgp.CURVED, partition=Partition.SPATIAL)
    assert f"curved, spatial: {uniform_excess_formula(replace(spatial, clients=2)):.2e}" in random
    excess = uniform_excess_formula(spatial)
    assert f"curved, spatial {excess:.3g}" in reasons.EXCESS.numbers(views)  # the decrease is one there


def test_every_reason_belongs_to_a_sentence() -> None:
    used = {reason for sentence in SENTENCES for reason in sentence.decided_by}
    assert used == {value for value in vars(reasons).values() if isinstance(value, reasons.Reason)}
