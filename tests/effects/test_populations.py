"""A population knows its own share; the names of levels never decide a number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.targets.effects.components import (
    AbstractPopulation,
    Everyone,
    InArm,
    InStratum,
    OverlapWeighted,
    PooledWeights,
)
from tests.declare import declare
from tests.effects.studies import NEWTON, VARIABLES, Columns, cut, population
from tests.kinds import without_example

HARMLESS = ("b", "c", "d")  # in the same order as the levels they stand for


def silos(levels: tuple[str, ...]) -> dict[str, Columns]:
    """Two silos whose column `corps` has these levels; the records are the same for any names."""
    data = population(240, seed=12)
    corps = (data["w"] > -0.4).astype(int) + (data["w"] > 0.8) if len(levels) == 3 else data["old"]
    data["corps"] = np.array(levels)[corps]
    return cut(data, [np.arange(0, 240, 2), np.arange(1, 240, 2)])


def run(levels: tuple[str, ...], **options: Any) -> ft.StudyResult:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a", strata="corps"),
        outcome_model=ft.GLM("C(a) + w + z"),
        treatment_model=ft.GLM("w"),
        algorithm=NEWTON,
        variables=declare(VARIABLES, corps=list(levels)),
        **options,
    )
    return ft.run(study, silos(levels))


@pytest.mark.parametrize("weights", [None, "weight"])
@pytest.mark.parametrize("levels", [("air", "alps", "army"), ("army", "navy"), ("arm 0", "arm 1")])
def test_the_names_of_strata_change_no_number(levels: tuple[str, ...], weights: str | None) -> None:
    named, harmless = run(levels, weights=weights), run(HARMLESS[: len(levels)], weights=weights)
    assert named.run.psi.tobytes() == harmless.run.psi.tobytes()
    assert named.run.covariance.tobytes() == harmless.run.covariance.tobytes()
    numbers = ["estimate", "std_error", "conf_low", "conf_high", "p_value"]
    assert named.table()[numbers].equals(harmless.table()[numbers])
    assert list(named.table().estimand) == ["ATE", *(f"ATE in {level}" for level in levels)]


def test_a_stratum_without_weight_is_named() -> None:
    data = silos(("army", "navy"))
    for columns in data.values():
        columns["weight"] = np.where(columns["corps"] == "army", 0.0, 1.0)
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a", strata="corps"),
        outcome_model=ft.GLM("C(a) + w + z"),
        treatment_model=ft.GLM("w"),
        algorithm=NEWTON,
        weights="weight",
        variables=declare(VARIABLES, corps=["army", "navy"]),
    )
    with pytest.raises(InputError, match="strata: no record with a positive weight is in army"):
        ft.run(study, data)


WEIGHTS = PooledWeights(total=8.0, by_arm=(5.0, 3.0), by_stratum=(1.0, 2.0, 5.0), overlap=0.5)
SHARES: dict[AbstractPopulation, float] = {
    Everyone(): 1.0,
    InArm(0, "usual"): 5 / 8,
    InArm(1, "new"): 3 / 8,
    InStratum(0, "army"): 1 / 8,
    InStratum(2, "navy"): 5 / 8,
    OverlapWeighted(): 1 / 16,
}


@pytest.mark.parametrize(("group", "share"), SHARES.items(), ids=[repr(group) for group in SHARES])
def test_a_population_has_its_share_of_the_pooled_weight(group: AbstractPopulation, share: float) -> None:
    assert group.share(WEIGHTS) == share


def test_every_population_has_a_case() -> None:
    assert without_example(AbstractPopulation, SHARES) == set()
