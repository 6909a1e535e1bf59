"""Attacks from transcripts alone, the floor on omega, and the criterion for discrete records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.base import TargetingProgram
from fedtmle.errors import InputError
from fedtmle.privacy.audit import (
    Compressed,
    DisclosureLimit,
    LimitedAttribute,
    at_centre,
    coordinate_moduli,
    direction_modulus,
)
from fedtmle.protocol.plan import Plan, roster
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.certificate import overhear
from fedtmle.runtime.rows import LocalRows
from fedtmle_core.types import Array, Part
from fedtmle_paper.privacy.attacks import LinearAttack, linear_attack
from fedtmle_paper.privacy.design import design_modulus
from fedtmle_paper.privacy.disclosure import ColumnMean, Coordinate, Linear, Smooth
from fedtmle_paper.privacy.discrete import enumeration_risk, separation
from fedtmle_paper.two_arm import TwoArm

N = 48


def two_arm_rows(seed: int, n: int = N) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "outcome": rng.uniform(-5, 5, size=n),
        "treatment": (rng.random(n) < 0.5).astype(float),
        "Q1": rng.normal(size=n),
        "Q0": rng.normal(size=n),
        "g": rng.uniform(0.3, 0.7, size=n),
    }


def plan_of(problem: TwoArm, algorithm: Any, silos: Mapping[str, object]) -> Plan:
    return Plan(
        program=TargetingProgram(problem=problem, law=problem.start(), algorithm=algorithm),
        roster=roster(list(silos)),
    )


def attack(optimizer: Any) -> tuple[LinearAttack, Array]:
    """The server's attack on the outcomes of one silo whose design it knows; its guess is the middle, 0."""
    problem = TwoArm(outcome_bounds=(-10.0, 10.0), weight_ceiling=16.0)
    silos = {"a": two_arm_rows(1), "b": two_arm_rows(2)}
    algorithm = ft.Gradient(optimizer=optimizer, tolerance=1e-3, max_updates=1)
    result = ft.solve(problem, problem.start(), silos, algorithm)
    heard = overhear(plan_of(problem, algorithm, silos), result.transcript, "a")
    guess = problem.read({**silos["a"], "outcome": np.zeros(N)})
    local = LocalRows("server", guess, N, None)
    local.place(0)
    return linear_attack(heard, local, guess, "outcome"), silos["a"]["outcome"]


def test_full_batches_tell_two_functionals_and_fresh_batches_tell_every_outcome() -> None:
    full, y = attack(ft.GradientDescent(step=1e-3, max_steps=60))
    fresh, _ = attack(ft.StochasticGradientDescent(batch=12, batches="fresh", step=1e-3, steps=60))
    fixed, _ = attack(ft.StochasticGradientDescent(batch=12, step=1e-3, steps=60))
    assert full.rank == 2  # sixty gradients, two arms
    assert fresh.rank == N
    assert full.rank < fixed.rank < fresh.rank  # a partition tells two functionals of each of its parts
    wrong_full, wrong_fresh = np.abs(full.column() - y), np.abs(fresh.column() - y)
    assert wrong_fresh.max() <= 1e-6
    assert np.median(wrong_full) >= 1.0  # of a range of 20
    assert np.count_nonzero(wrong_full < 1e-2) <= 3


def test_the_attack_holds_the_derivatives_of_what_was_sent() -> None:
    """Of the first gradients: a TMLE's clever covariate is A/g or (1 - A)/(1 - g), and the sums are means."""
    found, y = attack(ft.GradientDescent(step=1e-3, max_steps=1))
    rows = two_arm_rows(1)
    a, g = rows["treatment"], rows["g"]
    clever = np.stack([a / g, (1 - a) / (1 - g)])
    lines = found.A[:2] * N
    order = np.argsort(lines @ a)  # the arm without treated records first
    np.testing.assert_allclose(np.abs(lines[order]), clever[::-1], rtol=1e-12)
    np.testing.assert_allclose(found.A @ y, found.gap, atol=1e-9)


def test_the_affine_decoder_recovers_what_full_batches_see() -> None:
    found, y = attack(ft.GradientDescent(step=1e-3, max_steps=60))
    c = found.A[0] / np.linalg.norm(found.A[0])  # the first arm's weighted sum of outcomes
    decode = found.decoder(c, radius=10 * np.sqrt(N), noise=1e-9)
    assert abs(decode(found.gap) - c @ y) <= decode.error <= 1e-4
    one = np.eye(N)[0]
    alone = found.decoder(one, radius=10 * np.sqrt(N), noise=1e-9)
    assert alone.error >= 10.0  # one record's outcome stays as open as it was


def test_the_rank_one_attacker_who_knows_the_others_reads_the_last_outcome() -> None:
    found, y = attack(ft.GradientDescent(step=1e-3, max_steps=5))
    rest = found.gap - found.A[:, 1:] @ y[1:]
    a = found.A[:, 0]
    assert float(a @ rest / (a @ a)) == pytest.approx(y[0], abs=1e-8)


# The floor.


def test_the_query_that_would_cross_the_floor_is_named() -> None:
    problem = ft.Mean(bounds=(0.0, 1.0))
    rows = problem.read(np.full(5, 0.5))
    local = LocalRows("centre", rows, 5, None)
    mean = LimitedAttribute(name="mean", gradient=np.full(5, 0.2), radius=0.5 * np.sqrt(5))
    one = LimitedAttribute(name="first", gradient=np.eye(5)[0], radius=0.5 * np.sqrt(5))
    query = SumsQuery(problem=problem, law=problem.start(0.5), eps=np.zeros(1), parts=Part.GRADIENT, n=5)

    def floor(*attributes: LimitedAttribute, noise: float, at: float = 0.1) -> DisclosureLimit:
        jacobian = at_centre(local, rows, "outcome")
        return DisclosureLimit(
            attributes=attributes, smallest_omega=at, noise=noise, records=5, jacobian=jacobian
        )

    assert floor(mean, noise=0.0).meter().omega()["mean"] == pytest.approx(0.5)
    assert floor(mean, noise=0.0).meter().admit(query) == "mean"
    assert floor(one, noise=0.0).meter().admit(query) is None
    # omega = eta after one answer, eta/sqrt(k) after k repeats: the floor stops the repeats.
    meter = floor(one, mean, noise=0.15).meter()
    assert [meter.admit(query) for _ in range(3)] == [None, None, "mean"]
    with pytest.raises(InputError, match="attributes"):
        floor(noise=0.1)


# Discrete records.


def test_separation_is_the_distance_of_two_discs_images() -> None:
    rng = np.random.default_rng(3)
    for _ in range(6):
        F_a, F_b = rng.normal(size=3), rng.normal(size=3)
        A_a, A_b = rng.normal(size=(3, 2)) * 0.4, rng.normal(size=(3, 2)) * 0.4
        found = separation(F_a, F_b, A_a, A_b, radius=0.7)
        assert found.lower <= found.upper * (1 + 1e-12)
        assert found.upper - found.lower <= 1e-6
        angles = np.linspace(0, 2 * np.pi, 61)
        disc = np.concatenate(
            [r * np.stack([np.cos(angles), np.sin(angles)], axis=1) for r in np.linspace(0, 0.7, 9)]
        )
        brute = np.linalg.norm((F_a + disc @ A_a.T)[:, None] - (F_b + disc @ A_b.T)[None], axis=2).min()
        assert found.upper <= brute + 1e-9
        assert found.upper >= brute - 0.05


def test_enumeration_counts_only_pairs_that_noise_can_hide() -> None:
    answers = np.array([[0.0, 0.0], [0.3, 0.0], [0.0, 5.0]])
    assert enumeration_risk(answers, [0.0, 1.0, 7.0], noise=0.1) == 0.0
    assert enumeration_risk(answers, [0.0, 1.0, 7.0], noise=0.15) == 0.5
    assert enumeration_risk(answers, [0.0, 1.0, 7.0], noise=2.6) == 3.5
    moves = [np.array([[0.0], [1.0]])] * 3
    assert enumeration_risk(answers, [0.0, 1.0, 7.0], noise=0.0, moves=moves, radius=2.5) == 3.5
    assert enumeration_risk(answers, [0.0, 1.0, 7.0], noise=0.0, moves=moves, radius=2.4) == 0.0
    with pytest.raises(InputError, match="4096"):
        enumeration_risk(np.zeros((4097, 1)), [0.0] * 4097, noise=0.0)


def test_a_compressed_block_has_the_moduli_of_the_whole() -> None:
    rng = np.random.default_rng(4)
    base = rng.normal(size=(5, 30)) * np.logspace(0, -4, 5)[:, None]
    A = np.concatenate([rng.normal(size=(40, 5)) @ base, base, np.zeros((3, 30)), base[:1] * 1e3])
    block = Compressed(30)
    for rows in np.array_split(A, 9):
        block.add(rows)
    c = rng.normal(size=30)
    for noise in (0.0, 1e-4, 0.1):
        whole = design_modulus(A, c, radius=2.0, noise=noise)
        assert direction_modulus(block, c, radius=2.0, noise=noise) == pytest.approx(whole, rel=1e-7)
        each = coordinate_moduli(block, radius=2.0, noise=noise, chunk=7)
        for j in (0, 13, 29):
            assert each[j] == pytest.approx(
                design_modulus(A, np.eye(30)[j], radius=2.0, noise=noise), rel=1e-7
            )


def test_attributes_have_the_gradients_they_say() -> None:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(4, 3))
    attributes = [
        Coordinate(record=2, column=1),
        ColumnMean(column=0),
        Linear(weights=rng.normal(size=(4, 3))),
        Smooth(function=lambda x: float(np.sin(x).sum()), slope=np.cos, H_phi=1.0),
    ]
    for attribute, (i, j) in itertools.product(attributes, itertools.product(range(4), range(3))):
        step = np.zeros((4, 3))
        step[i, j] = 1e-5
        numeric = (attribute.value(x + step) - attribute.value(x - step)) / 2e-5
        assert attribute.gradient(x).reshape(4, 3)[i, j] == pytest.approx(numeric, abs=1e-8)
    y = x + 0.1 * rng.normal(size=x.shape)
    for attribute in attributes:
        moved = np.linalg.norm(attribute.gradient(x) - attribute.gradient(y))
        assert moved <= attribute.bend * np.linalg.norm(x - y) + 1e-15
    with pytest.raises(InputError, match="weights"):
        Linear(weights=np.zeros((1, 1))).gradient(x)
