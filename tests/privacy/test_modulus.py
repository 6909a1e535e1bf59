"""The three forms of the design modulus, against each other and against solvers that know none of them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from fedtmle.errors import InputError
from fedtmle.privacy.audit import BUFFER, Compressed
from fedtmle_core.types import Array
from fedtmle_paper.privacy.design import design_modulus, kernel_floor, modulus_forms, range_slope
from fedtmle_paper.privacy.family import design_infimum

NOISES = (0.0, 1e-6, 0.03, 0.3, 2.0, 50.0)
SHAPES = ((1, 1), (3, 5), (7, 4), (12, 12), (30, 6))


def blocks() -> list[tuple[str, Array, Array]]:
    """Random blocks, rank-deficient ones, zero ones, and attributes inside, outside and astride the range."""
    rng = np.random.default_rng(5)
    found = []
    for m, q in SHAPES:
        A, c = rng.normal(size=(m, q)), rng.normal(size=q)
        found.append((f"random {m}x{q}", A, c))
        low = rng.normal(size=(m, 1)) @ rng.normal(size=(1, q))
        found.append((f"rank 1 {m}x{q}", low, c))
        found.append((f"rank 1, c in its range {m}x{q}", low, low.T @ rng.normal(size=m)))
        found.append((f"scaled {m}x{q}", A * np.logspace(0, -7, m)[:, None], c))
        found.append((f"repeated rows {m}x{q}", np.concatenate([A, A, 0 * A]), c))
    found.append(("zero", np.zeros((4, 3)), np.array([1.0, 2.0, -1.0])))
    found.append(("no attribute", rng.normal(size=(4, 3)), np.zeros(3)))
    return found


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("name", "A", "c"), blocks(), ids=lambda v: v if isinstance(v, str) else "")
def test_primal_dual_and_spectral_agree(name: str, A: Array, c: Array, noise: float) -> None:
    radius = 1.7
    forms = modulus_forms(A, c, radius=radius, noise=noise)
    scale = 1e-8 * max(1.0, float(np.linalg.norm(c)))
    assert abs(forms.primal - forms.dual) <= scale, name
    assert abs(forms.spectral - forms.dual) <= scale, name
    assert design_modulus(A, c, radius=radius, noise=noise) == forms.spectral
    # The points are what they claim: u is feasible, w costs what the dual says, both straight from A.
    assert np.linalg.norm(forms.direction) <= radius * (1 + 1e-12)
    assert np.linalg.norm(A @ forms.direction) <= noise * (1 + 1e-9) + 1e-12
    cost = radius * np.linalg.norm(c - A.T @ forms.weights) + noise * np.linalg.norm(forms.weights)
    assert cost == pytest.approx(forms.dual, abs=scale)


def test_against_general_solvers() -> None:
    """SLSQP on the primal, a scan of lambda on the spectral form: neither uses the multiplier's equation."""
    rng = np.random.default_rng(8)
    for m, q, noise in itertools.product((2, 4), (2, 3, 5), (0.1, 0.7)):
        A, c, radius = rng.normal(size=(m, q)), rng.normal(size=q), 0.9
        value = design_modulus(A, c, radius=radius, noise=noise)
        found = minimize(
            lambda u, c=c: -c @ u,
            rng.normal(size=q) * 0.01,
            constraints=[
                {"type": "ineq", "fun": lambda u, radius=radius: radius**2 - u @ u},
                {"type": "ineq", "fun": lambda u, A=A, noise=noise: noise**2 - (A @ u) @ (A @ u)},
            ],
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert -found.fun == pytest.approx(value, rel=1e-6)
        lam = np.concatenate([[0.0], np.logspace(-6, 8, 20_001)])
        gram = A.T @ A
        scan = min(
            (radius**2 + x * noise**2) * c @ np.linalg.solve(np.eye(q) + x * gram, c) for x in lam[::20]
        )
        assert math.sqrt(scan) >= value * (1 - 1e-12)
        assert math.sqrt(scan) == pytest.approx(value, rel=1e-4)


def test_limits() -> None:
    rng = np.random.default_rng(2)
    A, c = rng.normal(size=(3, 6)), rng.normal(size=6)
    null = np.linalg.svd(A)[2][3:]
    assert design_modulus(A, c, radius=2.0, noise=0.0) == pytest.approx(2 * np.linalg.norm(null @ c))
    assert kernel_floor(A, c, radius=2.0) == pytest.approx(2 * np.linalg.norm(null @ c))
    assert design_modulus(A, c, radius=2.0, noise=1e9) == pytest.approx(2 * np.linalg.norm(c))
    inside = A.T @ rng.normal(size=3)
    slope = range_slope(A, inside)
    assert slope == pytest.approx(np.linalg.norm(np.linalg.pinv(A).T @ inside))
    assert design_modulus(A, inside, radius=2.0, noise=1e-4) == pytest.approx(1e-4 * slope)
    assert range_slope(A, c) is None


def test_it_grows_with_radius_and_noise_and_falls_with_queries() -> None:
    rng = np.random.default_rng(3)
    A, B, c = rng.normal(size=(2, 5)), rng.normal(size=(2, 5)), rng.normal(size=5)
    at = {n: design_modulus(A, c, radius=1.0, noise=n) for n in (0.0, 0.1, 0.2, 1.0)}
    assert list(at.values()) == sorted(at.values())
    assert design_modulus(np.concatenate([A, B]), c, radius=1.0, noise=0.2) <= at[0.2]
    assert design_modulus(A, c, radius=2.0, noise=0.2) >= at[0.2]


@pytest.mark.parametrize(
    ("A", "c", "radius", "noise", "named"),
    [
        (np.zeros((2, 3)), np.zeros(2), 1.0, 0.0, "A, c"),
        (np.full((1, 1), np.nan), np.ones(1), 1.0, 0.0, "A, c"),
        (np.zeros((1, 1)), np.ones(1), -1.0, 0.0, "radius"),
        (np.zeros((1, 1)), np.ones(1), 1.0, math.inf, "noise"),
    ],
)
def test_bad_input_is_named(A: Array, c: Array, radius: float, noise: float, named: str) -> None:
    with pytest.raises(InputError, match=named):
        design_modulus(A, c, radius=radius, noise=noise)


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_the_infimum_of_a_small_family_is_that_of_all_its_blocks(noise: float) -> None:
    rng = np.random.default_rng(4)
    queries, c = [rng.normal(size=(1, 4)) for _ in range(5)], rng.normal(size=4)
    found = design_infimum(queries, c, T=3, radius=1.0, noise=noise)
    every: dict[tuple[int, ...], float] = {
        block: design_modulus(np.concatenate([queries[k] for k in block]), c, radius=1.0, noise=noise)
        for block in itertools.combinations_with_replacement(range(5), 3)
    }
    assert found.exact
    assert found.value == pytest.approx(min(every.values()))
    assert every[found.chosen] == pytest.approx(found.value)


@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0])
def test_the_gap_of_a_large_family_is_certified_and_small(
    noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(6)
    queries, c = [rng.normal(size=(2, 5)) for _ in range(7)], rng.normal(size=5)
    exact = design_infimum(queries, c, T=3, radius=1.0, noise=noise)
    monkeypatch.setattr("fedtmle_paper.privacy.family.EXHAUSTIVE", 0)
    found = design_infimum(queries, c, T=3, radius=1.0, noise=noise)
    assert exact.exact
    assert not found.exact
    assert found.lower <= exact.value <= found.value * (1 + 1e-12)
    assert found.value == pytest.approx(exact.value, rel=0.02)
    large = design_infimum(queries, c, T=12, radius=1.0, noise=noise)
    assert large.gap <= 0.02 * large.value  # with many repetitions integers are nearly real numbers


def test_rows_within_the_span_are_not_factorised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated queries cost two thin products: no factorisation is as long as the table."""
    columns, rng, lengths = 5_000, np.random.default_rng(3), []
    base = rng.normal(size=(7, columns))
    block = Compressed(columns)
    block.add(rng.normal(size=(BUFFER, 7)) @ base)
    factorise = np.linalg.qr

    def counted(matrix: Array, **options: Any) -> Any:
        lengths.append(len(matrix))
        return factorise(matrix, **options)

    monkeypatch.setattr(np.linalg, "qr", counted)
    block.add(rng.normal(size=(BUFFER, 7)) @ base)
    assert lengths
    assert columns not in lengths
    singular, right = block.basis()
    assert len(singular) == 7
    block.add(rng.normal(size=(BUFFER, columns)))  # new directions are found as before
    assert columns in lengths
    assert np.abs(right @ right.T - np.eye(7)).max() < 1e-12
