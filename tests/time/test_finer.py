"""Parts of periods: a finer grid for hazards, and a second estimate on it beside the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.report.page import render as page
from fedtmle.targets.time.followup import PERIOD, FollowUp, grid_periods
from fedtmle.text.result import render
from tests.time.law import VARIABLES, Law, study
from tests.time.studies import NEWTON, split

RECORDS = Law(1).draw(600, seed=5)
RECORDS = RECORDS.assign(t=RECORDS.t - np.random.default_rng(1).random(len(RECORDS)).round(3))
TIMES = ft.Variables(
    {
        **VARIABLES,
        "t": {"kind": "number", "range": (0, 4)},
        "what": {"kind": "category", "levels": ["none", "first"]},
    }
)
COUNTED: dict[str, Any] = {"hazard_model": None, "censoring_model": None, "treatment_model": ft.GLM("1")}


def asked(kind: type[ft.AbstractTimeEffect] = ft.Risk, **options: Any) -> ft.Study:
    return study(kind, 1, variables=TIMES, **{"horizons": (2, 4), "algorithm": NEWTON, **options})


def estimates(study: ft.Study, records: pd.DataFrame = RECORDS) -> np.ndarray:
    """Return the estimates and their standard errors."""
    rows = ft.run(study, split(records, 2)).document["estimates"]
    return np.array([[row["estimate"], row["std_error"]] for row in rows])


@pytest.mark.parametrize("kind", [ft.Risk, ft.RMST, ft.TimeLost, ft.Survival, ft.RMSTRatio])
@pytest.mark.parametrize("models", [COUNTED, {"hazard_model": ft.GLM("C(a) + x + z + period")}], ids=str)
def test_parts_of_periods_are_periods_of_a_finer_grid(kind: Any, models: dict[str, Any]) -> None:
    """Mean times count whole periods; a line in the period is the same line in its parts."""
    parts = estimates(asked(kind, target={"subperiods": 3}, **models))
    fine = {"periods": 12, "period_length": 1 / 3}
    whole = estimates(asked(kind, target=fine, **{**models, "horizons": (6, 12)}))
    scale = 3.0 if kind in (ft.RMST, ft.TimeLost) else 1.0
    assert parts == pytest.approx(whole / scale, abs=1e-9)
    assert parts != pytest.approx(estimates(asked(kind, **models)), abs=1e-4)


def test_unequal_periods_are_divided_equally() -> None:
    grid = {"periods": 0, "grid": (0.1, 1.0, 4.0), "subperiods": 3}
    target = asked(target=grid, horizons=(3,)).target
    assert isinstance(target, ft.Risk)
    edges = target.follow_up.edges
    assert edges == pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.4, 0.7, 1.0, 2.0, 3.0, 4.0], abs=1e-15)
    assert set(target.edges) <= set(edges)


def test_formulas_see_the_whole_period_as_a_factor_and_the_end_of_a_part_as_a_number() -> None:
    from fedtmle.model.table import Table

    follow_up = FollowUp(
        time="t", event="what", edges=(0.5, 1.0, 1.5, 2.0), causes=("1",), censored="0", subperiods=2
    )
    table = Table(n_rows=2, numeric={}, factors={})
    long, rows = follow_up.long(table, np.array([3, 4]))
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert long.numeric[PERIOD].tolist() == [0.5, 1.0, 1.5, 0.5, 1.0, 1.5, 2.0]
    assert [long.factors[PERIOD].levels[k] for k in long.factors[PERIOD].codes] == list("1121122")
    assert grid_periods(long, 2).tolist() == [1, 2, 3, 1, 2, 3, 4]
    assert [follow_up.name(k) for k in (1, 4)] == ["part 1 of period 1", "part 2 of period 2"]


@pytest.mark.parametrize("kind", [ft.RiskDifference, ft.RMSTDifference, ft.RiskRatio])
@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["Newton", "Coded"])
def test_the_comparison_is_the_study_on_the_finer_grid(kind: Any, algorithm: ft.AbstractAlgorithm) -> None:
    compared = ft.run(asked(kind, target={"compare_subperiods": 4}, algorithm=algorithm), split(RECORDS, 2))
    own, finer = compared.document["estimates"], compared.document["finer_grid"]
    plain = ft.run(asked(kind, algorithm=algorithm), split(RECORDS, 2)).document
    alone = ft.run(asked(kind, target={"subperiods": 4}, algorithm=algorithm), split(RECORDS, 2)).document
    assert (finer["subperiods"], finer["periods"], finer["reason"]) == (4, 16, "")
    for row, other in zip(
        [*own, *finer["estimates"]], [*plain["estimates"], *alone["estimates"]], strict=True
    ):
        assert row["estimate"] == pytest.approx(other["estimate"], abs=1e-7)
        assert row["std_error"] == pytest.approx(other["std_error"], rel=1e-6)
    for row, other in zip(finer["estimates"], own, strict=True):
        there, here, error = row["estimate"], other["estimate"], other["std_error"]
        if kind is ft.RiskRatio:
            there, here, error = np.log(there), np.log(here), error / here
        assert row["difference"] == pytest.approx((there - here) / error, abs=1e-9)
    for key in ("curves", "at_risk", "event_counts", "balance"):
        assert compared.document[key] == plain[key]
    rounds = [sum(document["account"]["rounds"].values()) for document in (compared.document, plain, alone)]
    assert rounds[0] < rounds[1] + rounds[2] - 3  # models are fitted in the same rounds


def test_the_comparison_is_that_of_pooled_data_bit_by_bit() -> None:
    own = asked(ft.RiskDifference, target={"compare_subperiods": 3}, diagnostics=False)
    pooled = ft.run(
        replace(own, algorithm=ft.Central(optimizer=ft.Newton(), tolerance=1e-11)), {"all": RECORDS}
    )
    for seed in range(3):
        result = ft.run(own, split(RECORDS, 3, seed))
        assert result.document["finer_grid"] == pooled.document["finer_grid"]
        assert result.document["estimates"] == pooled.document["estimates"]


def test_a_finer_grid_that_cannot_be_estimated_leaves_the_study_as_it_is() -> None:
    """Nobody is followed to the last part of the last period."""
    early = RECORDS.assign(t=np.minimum(RECORDS.t, 3.2))
    own = asked(target={"compare_subperiods": 4})
    document = ft.run(own, split(early, 2)).document
    finer = document["finer_grid"]
    assert finer["estimates"] == []
    assert "at risk in part 4 of period 4; choose an earlier horizon" in finer["reason"]
    assert document["converged"]
    assert document["estimates"] == ft.run(asked(), split(early, 2)).document["estimates"]
    assert "There is no estimate on a grid of 16 periods, the longest 0.25" in " ".join(
        render(document).split()
    )
    assert "A finer grid" in page(document)


def test_text_and_report_show_both_grids() -> None:
    document = ft.run(asked(ft.RMSTDifference, target={"compare_subperiods": 4}), split(RECORDS, 2)).document
    text = render(document)
    assert "on the finer grid  difference in SE" in text
    largest = max(abs(row["difference"]) for row in document["finer_grid"]["estimates"])
    sentence = f"the estimates differ by at most {largest:.2f} of their standard errors."
    assert sentence in " ".join(text.split())
    assert sentence in page(document)
    divided = ft.run(asked(target={"subperiods": 4}), split(RECORDS, 2)).document
    assert "4 periods to 4, each of 4 parts, the longest 0.25" in render(divided)
    assert divided["finer_grid"] is None
    assert divided["at_risk"]["periods"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"subperiods": 0}, "subperiods: expected at least 1 parts of each period, got 0"),
        ({"subperiods": 2, "compare_subperiods": 2}, "compare_subperiods: expected at least 3 parts"),
        (
            {"compare_subperiods": 63},
            "compare_subperiods: 63 parts of 4 periods are 252; expected at most 250",
        ),
        ({"subperiods": 1.5}, "subperiods: expected an integer"),
    ],
)
def test_wrong_parts_are_refused(target: dict[str, Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        asked(target=target)
