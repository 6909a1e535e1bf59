"""A refusal tells the owner which column of a model is behind it, and what to do."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.data import load_all
from fedtmle.errors import RefusedError
from fedtmle.model.leverage import PersonRows, heaviest_combination, largest_leverage
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.subjects import about_answer, about_combination, about_periods
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.solver import embedded_keys
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.attacks import refusals
from tests.attacks.base import Victim
from tests.attacks.honest import run_advised
from tests.attacks.settings import RefusedBySiloError
from tests.attacks.test_attacks import ATTACKS
from tests.declare import declare

NAMES = ("intercept", "age", "smoker", "cost")


def rows(n: int = 80) -> np.ndarray:
    rng = np.random.default_rng(4)
    return np.stack([np.ones(n), rng.normal(50, 10, n), np.arange(n) % 3 == 0, rng.random(n)]).astype(float)


def advice(design: np.ndarray) -> str:
    return about_combination(NAMES, lambda: [PersonRows(design)])


def test_a_rare_column_is_named_and_to_be_merged() -> None:
    design = rows()
    design[2] = np.arange(80) == 7
    said = advice(design)
    assert "'smoker'" in said
    assert "merge" in said
    assert not any(f"'{name}'" in said for name in NAMES if name != "smoker")


def test_a_column_with_one_extreme_value_is_named_and_to_be_transformed() -> None:
    design = rows()
    design[3, 11] = 500.0
    said = advice(design)
    assert "'cost'" in said
    assert "log(cost)" in said


def test_a_period_that_few_leave_is_named_and_to_be_joined_with_others() -> None:
    design = rows()
    design[2] = np.arange(80) == 7
    said = about_periods(NAMES, lambda: [PersonRows(design)])
    assert "'smoker'" in said
    assert "longer periods" in said
    assert "leave products with the period out" in said


def test_columns_that_differ_in_one_person_are_named_together() -> None:
    design = rows()
    design[3] = design[2] + (np.arange(80) == 7) * 1e-3
    said = advice(design)
    assert "'smoker', 'cost'" in said or "'cost', 'smoker'" in said


def test_the_combination_is_the_one_with_the_largest_share() -> None:
    """Against brute force: of many combinations none gives anyone a larger share than the one found."""
    rng = np.random.default_rng(9)
    design = rows() * rng.lognormal(0, 1, 80)
    largest = largest_leverage(lambda: [PersonRows(design)])
    gram = design @ design.T
    person = int(np.argmax(np.einsum("in,ij,jn->n", design, np.linalg.inv(gram), design)))
    a = np.linalg.solve(gram, design[:, person])
    parts, people = heaviest_combination(lambda: [PersonRows(design)])
    expected = np.abs(a) * np.sqrt(np.diag(gram))
    np.testing.assert_allclose(parts, expected / expected.max(), rtol=1e-9)
    assert people.tolist() == np.count_nonzero(design, axis=1).tolist()
    share = (a @ design) ** 2 / ((a @ design) ** 2).sum()
    assert share.max() == pytest.approx(largest, rel=1e-9)


KINDS = [
    ("a 1 % covariate, 5 silos of 100", "rare"),
    ("a 1 % covariate, 10 silos of 100", "rare"),
    ("raw costs, 5 silos of 100", "cost"),
    ("40 covariates, 5 silos of 100", "w"),
]


@pytest.mark.parametrize(("kind", "column"), KINDS, ids=[kind for kind, _ in KINDS])
@pytest.mark.parametrize("is_masked", [False, True], ids=["open", "masked"])
def test_honest_refusals_name_a_column_and_a_remedy(kind: str, column: str, is_masked: bool) -> None:
    numbers = range(4) if kind.startswith(("raw", "a 1 %")) else range(1)
    if "10 silos" in kind and is_masked:
        numbers = range(7, 8)  # the only one of the first that is refused
    said = []
    for number in numbers:
        rng = np.random.default_rng([refusals.SEED, list(refusals.KINDS).index(kind), number])
        plan, data = refusals.KINDS[kind][0](rng)
        plan = refusals.masked(plan) if is_masked else plan
        keys = embedded_keys(data) if is_masked else {}
        silos = [
            Silo(name, plan, own, keeper=Keeper(policy=Policy(), mask_key=keys.get(name)))
            for name, own in data.items()
        ]
        with suppress(RefusedError):
            Session(plan, InProcess(silos)).run()
        said += [silo.advice for silo in silos if silo.refused_by]
    assert said
    for each in said:
        assert f"'{column}" in each
        assert refusals.names_column(each)


def test_a_refused_sum_names_the_column_in_which_the_person_stands_out() -> None:
    """Person 7 was not treated although w is large: the inverse probability is most of a closing sum."""
    rng, data = np.random.default_rng(1), {}
    for m in range(2):
        w, z = rng.normal(size=(2, 60))
        a = (rng.random(60) < 1 / (1 + np.exp(-2 * w))).astype(float)
        if not m:
            w[7], a[7] = 2.0, 0.0
        data[f"silo {m}"] = {"y": np.clip(rng.normal(5 + a, 1.5), 0, 10), "a": a, "w": w, "z": z}
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("a + z"),
        treatment_model=ft.GLM("w + z"),
        variables=declare(y=(0, 10), a="binary", w=(-8, 8), z=(-8, 8)),
    )
    plan = study_plan(study, roster(list(data)))
    ended, key, said = run_advised(plan, dict(load_all(data, schema_of(study))))
    assert (ended, key) == ("refused", "min_people")
    assert all("a sum in this answer" in each and "the column 'w' of a model" in each for each in said)


def test_without_a_fitted_model_a_refused_sum_names_its_answer() -> None:
    said = about_answer("sums of weights")
    assert "sums of weights" in said
    assert "column" not in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TwoRulesOverTime", "Two rules differ in too few people of this silo"),
        ("TwoShifts", "Two rules differ in too few people of this silo"),
        ("TwoCompletions", "lack a value that is imputed, in the model with the columns '1', 'w'"),
        ("TwoModels", "differs from another model of the same response in too few people"),
    ],
)
def test_models_that_differ_in_few_people_have_a_remedy(name: str, expected: str) -> None:
    attack = ATTACKS[name]
    plan, keeper = attack.plan(), attack.keeper(attack.guarded())
    silo = Silo("a", plan, attack.rows(), keeper=keeper)
    with suppress(RefusedBySiloError):
        attack.run(Victim(lambda: silo))
    assert silo.refused_by == "min_people"
    assert expected in silo.advice
