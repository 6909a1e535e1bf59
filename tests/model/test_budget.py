"""Accounting of differential privacy, against dp-accounting and by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fedtmle.errors import InputError
from fedtmle.model.budget import Privacy, epsilon_of, rho_of


@pytest.mark.parametrize("epsilon", [0.05, 0.5, 1.0, 2.0, 4.0, 20.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_rho_is_the_largest_for_the_stated_budget(epsilon: float, delta: float) -> None:
    rho = rho_of(epsilon, delta)
    assert 0 <= epsilon - epsilon_of(float(rho), delta) < 1e-10
    assert epsilon_of(float(rho) * (1 + 1e-9), delta) > epsilon


@pytest.mark.parametrize("rho", [1e-4, 0.0244, 0.31, 3.3])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_epsilon_is_the_minimum_over_orders(rho: float, delta: float) -> None:
    """The conversion of Canonne, Kamath and Steinke, minimised over a fine grid around its minimum."""
    centre = 0.5 * math.log(-math.log(delta) / rho)
    excess = np.exp(np.linspace(centre - 2, centre + 2, 400_001))
    orders = 1 + excess
    values = rho * orders + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / excess
    assert abs(epsilon_of(rho, delta) - values.min()) < 1e-9


@pytest.mark.parametrize(("rho", "delta"), [(1e-4, 1e-6), (0.0244, 1e-6), (0.31, 1e-10), (3.3, 1e-3)])
def test_epsilon_is_that_of_dp_accounting(rho: float, delta: float) -> None:
    accountant = pytest.importorskip("dp_accounting.rdp.rdp_privacy_accountant")
    centre = 0.5 * math.log(-math.log(delta) / rho)
    orders = 1 + np.exp(np.linspace(centre - 2, centre + 2, 200_001))
    theirs, _ = accountant.compute_epsilon(orders, rho * orders, delta)
    assert abs(epsilon_of(rho, delta) - theirs) < 1e-9


def test_the_budget_is_spent_in_parts() -> None:
    privacy = Privacy(epsilon=1.0)
    parts = [privacy.part(share) for share in (privacy.gram, privacy.gradients, privacy.closing)]
    assert privacy.rho - Fraction(1, 10**12) < sum(parts) <= privacy.rho
    assert abs(float(privacy.rho) - 0.0244) < 1e-4  # as (1, 1e-6) gives by the conversion


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon: expected a number from 0.01 to 20"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": 1.0, "delta": 0.1}, "delta: expected"),
        ({"epsilon": 1.0, "colluders": -1}, "colluders: expected"),
        ({"epsilon": 1.0, "closing": 0.9}, "add up to 1"),
        ({"epsilon": 1.0, "server": "mine"}, "server: expected"),
    ],
)
def test_bad_budgets_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Privacy(**changes)  # type: ignore[arg-type]  # of a wrong type or value
