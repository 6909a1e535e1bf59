"""Every shipped target passes the conformance suite that we ask of others."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from tests.cases import TARGETS, targets


@pytest.mark.parametrize("moved", [False, True], ids=["start", "moved"])
@pytest.mark.parametrize("name", TARGETS)
def test_targets_hold_together(name: str, moved: bool) -> None:
    case = targets()[name]
    law = case.law
    if moved:
        law = case.problem.move(law, np.full(case.problem.dim, 0.003))
    report = ft.check_problem(case.problem, law, case.take(np.arange(200)))
    report.raise_if_failed()
