"""A tiny campaign, run once for all tests of this folder."""

from __future__ import annotations

import pytest

from fedtmle.reproduce.campaign import cells, run_cell
from fedtmle.reproduce.scenario import Scale
from fedtmle.reproduce.study import Study

TINY = Scale(n=400, pilot=120, clients=(2, 3), reference_clients=3, tolerance=1e-3, coded_tolerance=0.1)


@pytest.fixture(scope="session")
def tiny() -> Study:
    return Study([run for cell in cells([4], TINY.clients, TINY) for run in run_cell(cell)])
