"""Run a study of an effect over questions, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

import fedtmle as ft
from fedtmle.estimation.flow import Ran, run_open
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.study import effect_flow
from fedtmle.estimation.times import time_flow
from fedtmle.protocol.outcome import Targeted
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.plan import Plan
from fedtmle_core.sheet import Sheet
from tests.narrow import load_all


def plan_of(declared: Declared) -> Plan:
    """Return a plan of the study's dictionary, without members: nothing is sent."""
    return Plan(
        dictionary=declared.dictionary,
        models=(),
        members=(),
        study=b"",
        author="test",
    )


def sheets_of(declared: Declared, silos: Mapping[str, object]) -> list[Sheet]:
    """Return the sheet of each hospital."""
    return [declared.sheet(table) for table in load_all(silos, schema_of(declared.study)).values()]


def run_over_questions(study: ft.Study, silos: Mapping[str, object]) -> Ran[Targeted]:
    """Return the outcome of a study over the totals of some hospitals."""
    declared = Declared(study)
    is_followed = isinstance(study.target, ft.AbstractTimeEffect)
    flow = (time_flow if is_followed else effect_flow)(declared, hospitals=len(silos))
    return run_open(flow, sheets_of(declared, silos), plan_of(declared))


def assert_same(study: ft.Study, silos: Mapping[str, object], share: float) -> None:
    """Assert that estimates and errors differ from those of the package by less than a share of an error."""
    outcome = run_over_questions(study, silos).result
    before = ft.run(replace(study, diagnostics=False), silos).run
    assert before.psi is not None
    assert before.std_error is not None
    assert outcome.status is before.status
    np.testing.assert_allclose(outcome.estimate.psi, before.psi, rtol=0, atol=share * before.std_error.min())
    errors = np.sqrt(np.diag(outcome.estimate.covariance))
    np.testing.assert_allclose(errors, before.std_error, rtol=share)
