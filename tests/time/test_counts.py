"""Events and numbers at risk are those of the records, or hidden where they are few."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.report import people
from fedtmle.text.result import render
from tests.time.studies import colon, colon_study, split

FLOOR = 5
MODELS = {"hazard_model": ft.GLM("C(rx) + age + period"), "censoring_model": ft.GLM("1")}


def last_period(records: pd.DataFrame) -> np.ndarray:
    """The period in which a person was seen last, longhand."""
    return np.minimum(np.floor(records.time / 182.625).astype(int) + 1, 10).to_numpy()


def ended(records: pd.DataFrame) -> tuple[int, int]:
    """How many did not die in the study, and how many did."""
    dead = (records.status == 1) & (records.time <= 1826.25)
    return int((~dead).sum()), int(dead.sum())


def arms(records: pd.DataFrame) -> list[pd.DataFrame]:
    return [records[records.rx == arm] for arm in ("Obs", "Lev+5FU")]


def run(silos: dict[str, pd.DataFrame], floor: int, **options: Any) -> ft.StudyResult:
    study = colon_study(horizons=(10,), **(MODELS | options))
    return ft.run(study, silos, policy=replace(UNGUARDED, min_cell=floor))


@pytest.fixture(scope="module")
def silos() -> dict[str, pd.DataFrame]:
    """Three silos; in the last, all but three of the treated are alive and followed to the end."""
    whole = split(colon(), 3, seed=1)
    last = whole["silo2"].copy()
    treated = last.index[last.rx == "Lev+5FU"]
    last.loc[treated, ["time", "status"]] = [3000, 0]
    last.loc[treated[:3], ["time", "status"]] = [600, 1]
    return {**whole, "silo2": last}


def test_without_a_floor_all_counts_are_those_of_the_records(silos: dict[str, pd.DataFrame]) -> None:
    document = run(silos, 1).document
    for place, arm in enumerate(arms(pd.concat(silos.values()))):
        alive, dead = ended(arm)
        assert document["event_counts"][place] == [dead]
        assert document["observed_counts"][place] == dead
        assert document["arm_counts"][place] == alive + dead
        risk = [int((last_period(arm) >= period).sum()) for period in document["at_risk"]["periods"]]
        assert document["at_risk"]["counts"][place] == risk
    assert document["events_hidden_in"] == [0, 0]
    assert document["at_risk"]["hidden_in"] == [[0] * 10] * 2


def test_a_silo_hides_an_arm_with_few_events(silos: dict[str, pd.DataFrame]) -> None:
    result = run(silos, FLOOR)
    document = result.document
    hides = [[any(0 < count < FLOOR for count in ended(arm)) for arm in arms(s)] for s in silos.values()]
    assert not any(hide[0] for hide in hides)
    assert [hide[1] for hide in hides] == [False, False, True]
    assert document["events_hidden_in"] == [0, 1]
    shown = [ended(arms(records)[1]) for name, records in silos.items() if name != "silo2"]
    assert document["event_counts"][1] == [sum(dead for _, dead in shown)]
    shown_text = render(document)
    assert f" {document['observed_counts'][0]} (" in shown_text
    assert f" {document['observed_counts'][1]}+ " in shown_text
    assert "some silos hide how many have the event" in people.participants(document)


def test_numbers_at_risk_are_right_or_at_least_that(silos: dict[str, pd.DataFrame]) -> None:
    """Longhand, by silo: no two numbers that a silo shows differ by fewer than the floor."""
    at_risk = run(silos, FLOOR).document["at_risk"]
    numbers = list(zip(at_risk["counts"], at_risk["hidden_in"], strict=True))
    some = 0
    for (counts, hidden), arm in zip(numbers, arms(pd.concat(silos.values())), strict=True):
        for period, count, less in zip(at_risk["periods"], counts, hidden, strict=True):
            true = int((last_period(arm) >= period).sum())
            assert (count or 0) <= true
            assert less or count == true
            some += less > 0
    assert 0 < some < 20


def test_who_is_alone_changes_no_estimate(silos: dict[str, pd.DataFrame]) -> None:
    told, hidden = run(silos, 1), run(silos, FLOOR)
    assert told.document["estimates"] == hidden.document["estimates"]


@pytest.mark.parametrize("floor", [1, 1000])
def test_nobody_is_censored(floor: int) -> None:
    """Whatever the floor, the silos know together that no model of censoring is needed."""
    records = colon().assign(time=lambda each: np.where(each.status == 1, each.time, 3000))
    silos = split(records, 3, seed=1)
    result = run(silos, floor)  # a model of a response that nobody has would have no fit
    assert result.document["estimates"] == run(silos, 1, censoring_model=None).document["estimates"]
    assert result.document["events_hidden_in"] == ([0, 0] if floor == 1 else [3, 3])
