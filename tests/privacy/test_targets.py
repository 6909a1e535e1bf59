"""The audit of problems that targets of other distributions are made of: terms and derivatives of a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.table import Table
from fedtmle.privacy.answers import Submodels, explain
from fedtmle.protocol.query import AnsweredQuery, MomentsQuery
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle.targets.residuals import OnColumns
from fedtmle_core.types import Part
from tests.targets.test_residuals import PROBLEM, table

MEAN = OnColumns(problem=ft.Mean(bounds=(-3.0, 5.0)), columns=("y",))


@pytest.mark.parametrize("kind", ["residuals", "columns"])
def test_the_terms_of_a_row_add_up_to_the_answer_and_move_with_the_outcome(kind: str) -> None:
    rows = table(25)
    problem = PROBLEM if kind == "residuals" else MEAN
    law = PROBLEM.start() if kind == "residuals" else ft.Mean(bounds=(-3.0, 5.0)).start(1.0)
    local = LocalRows("s", rows, rows.n_rows, None)
    eps = np.linspace(0.03, -0.02, problem.dim)
    for query in (
        SumsQuery(problem=problem, law=law, eps=eps, parts=Part.GRADIENT | Part.HESSIAN, n=100),
        MomentsQuery(problem=problem, law=law, n=100),
    ):
        answer = query.answer(local)
        explained = explain(AnsweredQuery(query=query, answer=answer), local, rows, Submodels())
        np.testing.assert_allclose(explained.terms(rows).sum(axis=1), answer.values(), atol=1e-9)

        def moved(by: float, rows: Table = rows, explained: Any = explained) -> np.ndarray:
            return explained.terms(rows.with_numeric("y", rows.numeric["y"] + by))

        slope = (moved(1e-4) - moved(-1e-4)) / 2e-4
        np.testing.assert_allclose(explained.tangents(rows, "y"), slope, rtol=1e-5, atol=1e-6)
        assert np.abs(slope).max() > 1e-3
