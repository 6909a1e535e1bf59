"""Every question of a study of times is one that a core answers: of columns that were judged, or named."""

from __future__ import annotations

import pytest

from fedtmle.estimation.diagnostics.times import diagnose_time
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.times import time_flow
from tests.estimation.test_admitted import admitted
from tests.estimation.test_times import STUDIES
from tests.time.studies import split


@pytest.mark.parametrize("name", STUDIES)
def test_every_question_is_admitted(name: str) -> None:
    asked, records = STUDIES[name]
    declared, silos = Declared(asked), split(records, 1 if asked.cluster else 3)
    flow = time_flow(declared, hospitals=len(silos), diagnose=diagnose_time)
    assert admitted(flow, declared, silos) >= 5
