"""The rows of a silo behind the interface of queries: the models of one round are summed side by side."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.protocol.codes import Parts
from fedtmle.protocol.query import JointQuery, Local
from fedtmle.runtime import rows

NAMES = ("x1", "x2", "x3")


@pytest.mark.parametrize("numbers", [rows.CACHED_NUMBERS, 1])  # two models at a time; one after the other
def test_models_that_are_summed_side_by_side_give_the_answers_that_each_gives_alone(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, rng = 80_000, np.random.default_rng(7)
    x = dict(zip(NAMES, rng.uniform(-1, 1, size=(3, n)), strict=True))
    a = rng.binomial(1, 1 / (1 + np.exp(-x["x1"])))
    y = rng.binomial(1, 1 / (1 + np.exp(-0.5 * a - x["x2"]))).astype(float)
    y[rng.uniform(size=n) < 0.1] = np.nan  # a third model: of missingness
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + x1 + x2 + x3"),
        treatment_model=ft.GLM("x1 + x2 + x3"),
        missingness_model=ft.GLM("a + x1"),
        variables=ft.Variables(
            {
                "y": {"kind": "binary"},
                "a": {"kind": "binary"},
                **{name: {"kind": "number", "range": (-1, 1)} for name in NAMES},
            }
        ),
        diagnostics=False,
    )
    joint, compared = JointQuery.answer, list[int]()

    def answer(query: JointQuery, local: Local) -> Parts:
        together = joint(query, local)
        apart = tuple(member.answer(local) for member in query.members)
        assert query.split(together) == apart
        compared.append(sum(member.derivatives is not None for member in query.members))
        return together

    monkeypatch.setattr(rows, "CACHED_NUMBERS", numbers)
    monkeypatch.setattr(JointQuery, "answer", answer)
    half = n // 2
    parts = {"north": slice(0, half), "south": slice(half, n)}
    ft.run(
        study,
        {name: {"y": y[at], "a": a[at], **{k: v[at] for k, v in x.items()}} for name, at in parts.items()},
    )
    assert max(compared) >= 3
    assert len([models for models in compared if models >= 2]) >= 6
