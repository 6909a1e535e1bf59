"""Studies that ran once for all tests of diagnostics."""

from __future__ import annotations

import pytest

from fedtmle.demo import IHDP, ihdp_silos
from tests.effects.studies import finish
from tests.estimation.diagnostics.supplied import supplied
from tests.narrow import targeted


@pytest.fixture(scope="package")
def demonstration():
    """The demonstration in eight silos that hide nothing: study, outcome, and rows as supplied columns."""
    finished, tables = finish(IHDP, ihdp_silos())
    return IHDP, targeted(finished), supplied(finished, tables)
