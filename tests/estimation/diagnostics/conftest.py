"""Studies that ran once for all tests of diagnostics."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.demo import IHDP, ihdp_silos
from tests.estimation.diagnostics.supplied import pooled


@pytest.fixture(scope="package")
def demonstration():
    """The demonstration, with nothing hidden: study, outcome, and the rows of its eight silos."""
    silos = list(ihdp_silos().values())
    data = {name: np.concatenate([silo[name] for silo in silos]) for name in silos[0]}
    ends = np.cumsum([len(silo["site"]) for silo in silos])
    return pooled(IHDP, data, np.split(np.arange(ends[-1]), ends[:-1]))
