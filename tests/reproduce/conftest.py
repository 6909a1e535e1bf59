"""A tiny campaign, run once for all tests of this folder."""

from __future__ import annotations

import pytest

from fedtmle_paper.reproduce.campaign import Campaign
from fedtmle_paper.reproduce.measure import run_scenario, scenarios
from fedtmle_paper.reproduce.scenario import Scale

TINY = Scale(n=400, pilot=60, clients=(2, 3), reference_clients=3, tolerance=1e-3, coded_tolerance=0.1)


@pytest.fixture(scope="session")
def tiny() -> Campaign:
    return Campaign(
        [run for scenario in scenarios([4], TINY.clients, TINY) for run in run_scenario(scenario)]
    )
