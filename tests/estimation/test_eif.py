"""The EIF as terms is the EIF of rows, person by person, at the start and at any other law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.estimation.flow import run_open
from fedtmle.estimation.fluctuated import Law
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.study import PreparedEffect, prepare
from fedtmle.targets.effects.problem import EffectLaw
from fedtmle_core import graph
from fedtmle_core.evaluate import Workspace
from fedtmle_core.terms import Term
from tests.effects.studies import change, finish
from tests.effects.test_pooled import OPTIONS, TARGETS, people, study_of
from tests.estimation.over_questions import plan_of, sheets_of

HISTORY = (0.01, -0.02, 0.03, 0.015, -0.01, 0.02)


def prepared(study: ft.Study, data: dict[str, Any]) -> tuple[PreparedEffect, Workspace]:
    """Return a study before targeting, and the workspace of all its people."""
    declared = Declared(study)
    (sheet,) = sheets_of(declared, {"pooled": data})
    workspace = Workspace(sheet)
    return run_open(prepare(declared, 1), [workspace], plan_of(declared)).result, workspace


def problem_of_rows(study: ft.Study, data: dict[str, Any]) -> tuple[Any, Any]:
    """Return the package's problem over rows, and its table."""
    finished, tables = finish(change(study, diagnostics=False), {"pooled": data})
    outcome: Any = finished.outcome
    return outcome.details.problem, tables["pooled"]


@pytest.mark.parametrize("option", ["plain", "missing", "all"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_eif_is_that_of_rows(name: str, option: str) -> None:
    study = study_of(TARGETS[name], **OPTIONS[option])
    data = people(study, 300, seed=11 + len(name))
    start, workspace = prepared(study, data)
    problem, table = problem_of_rows(study, data)
    eps = np.resize(HISTORY, start.q.dim)
    once = tuple(map(float, eps))
    for history in ((), (once, once)):
        law, of_rows = Law(history=history), EffectLaw(history=history)
        eif = start.q.eif(law)
        u, t, m = (np.stack(workspace.columns(terms)) for terms in (eif.u, eif.t, eif.m))
        psi = m.sum(axis=1) / t.sum(axis=1)
        D = np.stack(workspace.columns(eif.rows(psi.tolist())))
        expected = problem.eif(of_rows, table, psi).T
        np.testing.assert_allclose(start.q.L @ D, expected, rtol=1e-8, atol=1e-8)
        moments = problem.moment_columns(of_rows, problem.rows(table))
        np.testing.assert_allclose(u, moments.u, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(m, moments.m, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", TARGETS)
def test_terms_are_within_their_intervals(name: str) -> None:
    """Nobody's H, Q or EIF leaves the public interval from which the grid of sums follows."""
    study = study_of(TARGETS[name], **OPTIONS["all"])
    start, workspace = prepared(study, people(study, 300, seed=3))
    effect, eif = start.effect, start.q.eif(Law().moved(np.resize(HISTORY, start.q.dim)))
    terms: list[Term] = [*effect.H, *effect.v, *effect.g, *effect.pi, *effect.q, effect.y, *eif.u, *eif.t]
    terms += [term for per_arm in (*effect.H_arm, *effect.d) for term in per_arm]
    intervals = graph.intervals(terms, start.declared.dictionary)
    for term, values in zip(terms, workspace.columns(terms), strict=True):
        low, high = intervals[term]
        assert low <= values.min()
        assert values.max() <= high
    for H, component in zip(effect.H, effect.components, strict=True):
        share = 1.0 if component.population.label == "" else 0.01
        assert intervals[H][0] == 0.0
        assert intervals[H][1] <= 1.001 / (effect.floor * share)


def test_who_is_truncated_is_counted_by_arm() -> None:
    study = change(study_of(TARGETS["ATE"], **OPTIONS["missing"]), g_bounds=0.3)
    data = people(study, 300, seed=4)
    start, workspace = prepared(study, data)
    problem, table = problem_of_rows(study, data)
    counts = [round(column.sum()) for column in workspace.columns(start.effect.truncated)]
    assert counts == problem.rows(table).truncated.sum(axis=1).tolist()
    assert min(counts) > 0
    assert start.overlap.truncated == tuple(counts)
