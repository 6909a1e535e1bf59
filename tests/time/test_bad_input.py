"""What is wrong with a study of time to an event, or with its records, is said once and clearly."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from tests.time import law
from tests.time.law import Law, study

RECORDS = Law(1).draw(120, seed=1).assign(t=lambda frame: frame.t.astype(float))
NUMBER = {"kind": "number", "range": (-10, 100)}


VARIABLES = ft.Variables(
    {
        **law.VARIABLES,
        "what": {"kind": "category", "levels": ["none", "first"]},
        "t": NUMBER,
        "begun": NUMBER,
    }
)


def asked(**changes: Any) -> ft.Study:
    return study(ft.Risk, variables=VARIABLES, **changes)


def refused(records: pd.DataFrame, expected: str, **changes: Any) -> None:
    """The message names the silo, the column and the number of rows, and no value of a record."""
    with pytest.raises(ft.FedTMLEError, match=re.escape(expected)) as caught:
        ft.run(asked(**changes), {"north": RECORDS, "south": records})
    message = str(caught.value)
    assert "south" in message
    for value in ("-3.25", "77.125"):
        assert value not in message


def changed(column: str, value: object, rows: int = 4) -> pd.DataFrame:
    records = RECORDS.copy().astype({column: object})
    records.loc[: rows - 1, column] = value
    return records.astype({column: RECORDS[column].dtype}) if column != "what" else records


def test_negative_times() -> None:
    refused(changed("t", -3.25), "column 't' is negative or not finite in 4 row(s)")


def test_times_beyond_the_grid() -> None:
    refused(changed("t", 77.125), "column 't' is beyond the end of the grid, 4, in 4 row(s)")
    truncated = asked(target={"beyond": "truncate"})
    assert ft.run(truncated, {"north": RECORDS, "south": changed("t", 77.125)}).document["converged"]


def test_an_event_before_entry() -> None:
    records = RECORDS.assign(begun=0.0)
    late = records.copy()
    late.loc[:2, "begun"] = 77.125
    with pytest.raises(ft.DataError, match="'t' is before 'begun', the time of entry, in 3 row") as caught:
        ft.run(asked(target={"entry": "begun"}), {"north": records, "south": late})
    assert "south" in str(caught.value)
    assert "77.125" not in str(caught.value)


def test_an_event_without_a_time() -> None:
    refused(changed("t", np.nan), "'t'")


def test_an_event_that_is_no_cause() -> None:
    refused(changed("what", "unheard of"), "'what'")


def test_a_cause_nobody_has() -> None:
    two = study(ft.Risk, 2)
    with pytest.raises(ft.InputError, match="causes: nobody has an event of cause 'second'"):
        ft.run(two, {"north": RECORDS, "south": RECORDS})


def test_a_period_without_people_at_risk() -> None:
    early = RECORDS.assign(t=np.minimum(RECORDS.t, 2.0))
    with pytest.raises(ft.InputError, match="horizons: nobody in arm '0' is at risk in period 4"):
        ft.run(asked(), {"north": early, "south": early})


def test_an_arm_without_records() -> None:
    control = RECORDS.assign(a=0)
    with pytest.raises(ft.InputError, match="treatment: no silo has a record in arm '1'"):
        ft.run(asked(), {"north": control, "south": control})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"periods": 0}, "periods: expected from 1 to 250 periods, not 0"),
        ({"periods": 400}, "periods: expected from 1 to 250"),
        ({"period_length": 0.0}, "period_length: expected a number above 0"),
        ({"periods": 0, "grid": (2.0, 1.0)}, "grid: expected at most 250 rising numbers above 0"),
        ({"grid": (1.0, 2.0)}, "grid: give the ends of the periods, or periods and period_length"),
        ({"horizons": (5,)}, "horizons: expected numbers of periods from 1 to 4, not 5"),
        ({"horizons": (3, 2)}, "horizons: list each once, in rising order"),
        ({"horizons": (1.5,)}, "horizons: expected an integer"),
        ({"causes": ()}, "causes: expected at least one"),
        ({"causes": ("none",)}, "causes: expected at least one, all different, and other than censored"),
        ({"time": "what"}, "'what' is the study's time; name another column"),
        ({"entry": "t"}, "'t' is the study's"),
        ({"time": "period"}, "time: 'period' is the period's name in formulas"),
        ({"beyond": "ignore"}, "beyond: expected 'refuse' or 'truncate'"),
        ({"strata": 3}, "strata: expected the name of a column"),
    ],
)
def test_arguments_of_a_target(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ft.InputError) as caught:
        study(ft.Risk, target=arguments)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"outcome_model": ft.GLM("x")},
            "outcome_model: the models of Risk are hazard_model, treatment_model",
        ),
        ({"missingness_model": ft.GLM("x")}, "missingness_model: the models of Risk are"),
        ({"hazard_model": ft.GLM("t + x")}, "hazard_model: it uses 't', which is the study's time"),
        ({"treatment_model": ft.GLM("period")}, "treatment_model: it uses 'period'"),
        (
            {"hazard_model": ft.Supplied("q")},
            "hazard_model: its predictions cannot be supplied",
        ),
        ({"link": "linear"}, "link: Risk has 'logistic' only; leave it out"),
        ({"clever": "weight"}, "clever: Risk has 'covariate' only; leave it out"),
        ({"variables": None}, "variables:"),
        ({"treatment_model": None}, "treatment_model: give one"),
    ],
)
def test_options_of_a_study(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ft.InputError) as caught:
        study(ft.Risk, **options)
    assert expected in str(caught.value)


def test_a_hazard_model_belongs_to_time() -> None:
    with pytest.raises(ft.InputError, match="hazard_model: the models of ATE are outcome_model"):
        ft.Study(
            target=ft.ATE(outcome="y", treatment="a"),
            outcome_model=ft.GLM("x"),
            treatment_model=ft.GLM("x"),
            hazard_model=ft.GLM("x"),
        )


def test_the_dictionary_has_the_codes_of_the_event() -> None:
    with pytest.raises(ft.InputError, match="causes: with censored they are the levels"):
        study(ft.Risk, target={"causes": ("first", "third")})
