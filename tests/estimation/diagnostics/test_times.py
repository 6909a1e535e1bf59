"""The diagnostics of times to an event over questions are those of the package where nothing is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.estimation.diagnostics.times import diagnose_time
from fedtmle.estimation.flow import run_open
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.times import time_flow
from tests.effects.studies import finish
from tests.estimation.over_questions import plan_of, sheets_of
from tests.estimation.test_times import ENTERED, ONE, STUDIES, TIGHT
from tests.narrow import targeted
from tests.time.law import study
from tests.time.studies import split


def within_periods(records):
    """Times that end within periods, not only with them."""
    return records.assign(t=records.t - np.random.default_rng(4).uniform(0.0, 0.9, len(records)))


NUMBERED = ft.Variables({**ENTERED, "t": {"kind": "number", "range": (0, 6)}})  # of one cause
HALVES = study(ft.RMST, target={"subperiods": 2}, variables=NUMBERED, **TIGHT)
CASES = {**STUDIES, "within periods": (HALVES, within_periods(ONE))}


@pytest.mark.parametrize("name", CASES)
def test_diagnostics_are_those_of_the_package(name: str) -> None:
    asked, records = CASES[name]
    silos = split(records, 1 if asked.cluster or asked.folds else 3)  # folds are drawn in each silo
    declared = Declared(asked)
    flow = time_flow(declared, hospitals=len(silos), diagnose=diagnose_time)
    found: Any = run_open(flow, sheets_of(declared, silos), plan_of(declared)).result.details
    finished, _ = finish(asked, {"pooled": records})
    expected = targeted(finished).details
    assert found.at_risk.periods == expected.at_risk.periods
    assert {*sum(found.at_risk.silos, ())} == {len(silos)}
    shown = np.array(expected.at_risk.silos) > 0  # one silo joins the periods in which few leave
    counts = np.array(found.at_risk.counts)
    assert (counts[shown] == np.array(expected.at_risk.counts)[shown]).all()
    assert (counts[:, 0] == np.array(found.arm_counts)).all()
    assert shown.mean() > 0.5
    for new, old in zip(found.at_risk.overlap, expected.at_risk.overlap, strict=True):
        assert (new.of, new.arm) == (old.of, old.arm)
        assert [b.count for b in new.bins] == [b.count for b in old.bins]
    assert (found.balance is None) == (expected.balance is None)
    for line, present in zip(found.balance or (), expected.balance or (), strict=True):
        assert line.covariate.name == present.covariate.name
        width = present.covariate.high - present.covariate.low
        assert line.means == pytest.approx(present.means, abs=1e-4 * width)
        assert line.weighted_means == pytest.approx(present.weighted_means, abs=2e-4 * width)
        assert line.differences == pytest.approx(present.differences, abs=3e-3)
        assert line.weighted_differences == pytest.approx(present.weighted_differences, abs=3e-3)
