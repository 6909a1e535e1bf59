"""Masked models with slopes of each silo's own keep the owners' rule, by the rows of all silos."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

import fedtmle as ft
from fedtmle.protocol.plan import Member, Plan
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.attacks.honest import FLOORS
from tests.attacks.refusals import masked
from tests.attacks.truth import truth_of
from tests.narrow import load_all
from tests.premise import Premise

NAMES = tuple(f"silo {m}" for m in range(6))
VARIABLES = ft.Variables(
    {
        "x": {"kind": "number", "range": (-1, 1)},
        **{name: {"kind": "binary"} for name in ("z", "a", "y")},
    }
)
STUDY = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.GLM("a + z + x*C(silo)"),
    treatment_model=ft.GLM("z + x:C(silo)"),
    variables=VARIABLES,
    algorithm=ft.Coded(),
    diagnostics=False,
)


def study(seed: int) -> tuple[Plan, dict[str, Any]]:
    """A masked study of six silos with a covariate that few people have, in some studies very few."""
    rng = np.random.default_rng(seed)
    size, share, data = int(rng.integers(40, 90)), rng.choice([0.003, 0.006, 0.03, 0.2]), {}
    for k, name in enumerate(NAMES):
        n = size + 7 * k
        x, a = rng.uniform(-1, 1, n), rng.permutation(np.arange(n) % 2)
        y = rng.random(n) < 1 / (1 + np.exp(-0.5 * x - 0.3 * a + 0.2 * (k - 2)))
        z = rng.random(n) < share
        data[name] = pd.DataFrame({"x": x, "z": z.astype(int), "a": a, "y": y.astype(int)})
    plan = study_plan(STUDY, tuple(Member(name=name) for name in NAMES))
    return masked(plan), load_all(data, schema_of(STUDY))


def test_no_masked_study_with_own_slopes_finishes_that_violates_the_rule() -> None:
    with (
        Premise("the rows violate the rule", at_least=0.2) as violates,
        Premise("the study finishes", at_least=0.3) as finishes,
    ):
        for seed in range(12):
            truth, (ended, *_) = truth_of(*study(seed))
            violates.holds(truth.violates(FLOORS))
            finishes.holds(ended == "finished")
            assert not (ended == "finished" and truth.violates(FLOORS))
